// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA avx2
#define MLA_CPU_BF16_PAIRS 0
#define MLA_CPU_TILES 0
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_avx2() { return &avx2::kTable; }
const RowKernels* row_kernels_avx2() { return &avx2::kRowTable; }
}  // namespace mla::cpu

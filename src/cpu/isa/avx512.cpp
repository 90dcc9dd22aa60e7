// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA avx512
#define MLA_CPU_BF16_PAIRS 0
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_avx512() { return &avx512::kTable; }
const RowKernels* row_kernels_avx512() { return &avx512::kRowTable; }
}  // namespace mla::cpu

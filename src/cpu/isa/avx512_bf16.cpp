// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA avx512_bf16
#define MLA_CPU_BF16_PAIRS 1
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_avx512_bf16_pairs() { return &avx512_bf16::kTable; }
const RowKernels* row_kernels_avx512_bf16() { return &avx512_bf16::kRowTable; }
}  // namespace mla::cpu

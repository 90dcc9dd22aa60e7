// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA avx512_bf16
#define MLA_CPU_BF16_PAIRS 1
#define MLA_CPU_TILES 0
#include "cpu/burst-inl.h"
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_avx512_bf16_pairs() { return &avx512_bf16::kTable; }
const RowKernels* row_kernels_avx512_bf16() { return &avx512_bf16::kRowTable; }
double burst_avx512_bf16() {
  return burst(2, [](__m512 sum, __m512 ones) {
    const auto pairs = reinterpret_cast<__m512bh>(ones);
    return _mm512_dpbf16_ps(sum, pairs, pairs);
  });
}
}  // namespace mla::cpu

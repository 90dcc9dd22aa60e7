// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA avx512
#define MLA_CPU_BF16_PAIRS 0
#define MLA_CPU_TILES 0
#include "cpu/burst-inl.h"
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_avx512() { return &avx512::kTable; }
const RowKernels* row_kernels_avx512() { return &avx512::kRowTable; }
double burst_avx512() {
  return burst(1, [](__m512 sum, __m512 ones) { return _mm512_fmadd_ps(ones, ones, sum); });
}
}  // namespace mla::cpu

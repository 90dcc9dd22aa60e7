// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA neon_bf16
#define MLA_CPU_BF16_PAIRS 1
#define MLA_CPU_TILES 0
#include "cpu/burst-inl.h"
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_neon_bf16_pairs() { return &neon_bf16::kTable; }
const RowKernels* row_kernels_neon_bf16() { return &neon_bf16::kRowTable; }
double burst_neon_bf16() {
  return burst(2, [](float32x4_t sum, float32x4_t ones) {
    const bfloat16x8_t pairs = vreinterpretq_bf16_f32(ones);
    return vbfdotq_f32(sum, pairs, pairs);
  });
}
}  // namespace mla::cpu

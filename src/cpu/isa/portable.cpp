// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA portable
#define MLA_CPU_BF16_PAIRS 0
#define MLA_CPU_TILES 0
#if defined(__aarch64__)
#include "cpu/burst-inl.h"
#endif
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_portable() { return &portable::kTable; }
const RowKernels* row_kernels_portable() { return &portable::kRowTable; }
#if defined(__aarch64__)
double burst_portable() {
  return burst(1, [](float32x4_t sum, float32x4_t ones) { return vfmaq_f32(sum, ones, ones); });
}
#endif
}  // namespace mla::cpu

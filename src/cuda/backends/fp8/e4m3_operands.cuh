// SPDX-License-Identifier: Apache-2.0
// These are multiplies of e4m3, whose operands tile/e4m3_pairs.cuh makes of values.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/e4m3_pairs.cuh"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {

/// Computes c += a b, the columns of b times their scales. GPUs with block scales multiply by them always: GeForce
/// takes twice as long for e4m3 without (docs/notebook/2026-11-24-block-scales.md). Others know no scales but 1.
template <bool kScaled = kHasBlockScales>
MLA_DEVICE void multiply_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              ptx::BlockScales scales = ptx::kScalesOfOne) {
  if constexpr (kScaled)
    ptx::mma_mxf8<kScaled>(c, a, b0, b1, ptx::kScalesOfOne, scales);
  else
    ptx::mma_e4m3(c, a, b0, b1);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

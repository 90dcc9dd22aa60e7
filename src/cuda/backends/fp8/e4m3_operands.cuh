// SPDX-License-Identifier: Apache-2.0
// These are multiplies of e4m3 and their operands. ldmatrix moves pairs of e4m3, two channels of a key. Of the
// registers that it gives for 32 keys and 16 channels (ldmatrix_x4_trans; lane i has the address of key i) a lane makes
// the B operands of two tiles of eight columns, one of the even and one of the odd channels, whose k 4 t ... 4 t + 3
// are keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16: the A operand, P, has its keys in the same order. Column g of the
// even tile is channel 2 g, and that of the odd one is channel 2 g + 1.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"

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

/// Makes the B operand of the even (`odd` = 0) or the odd channels.
MLA_DEVICE void channels_of_pairs(uint32_t (&b)[2], const uint32_t (&pairs)[4], int odd) {
  const uint32_t which = odd == 0 ? 0x6420U : 0x7531U;
  b[0] = ptx::permute_bytes(pairs[0], pairs[1], which);
  b[1] = ptx::permute_bytes(pairs[2], pairs[3], which);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

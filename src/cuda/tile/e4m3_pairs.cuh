// SPDX-License-Identifier: Apache-2.0
// ldmatrix moves pairs of e4m3, two channels of a key. Of the registers that it gives for 32 keys and 16 channels
// (ldmatrix_x4_trans; lane i has the address of key i) a lane makes the B operands of two tiles of eight columns, one of
// the even and one of the odd channels, whose k 4 t ... 4 t + 3 are keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16: the A
// operand, P, has its keys in the same order. Column g of the even tile is channel 2 g, and that of the odd one is
// channel 2 g + 1.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Makes the B operand of the even (`odd` = 0) or the odd channels.
MLA_DEVICE void channels_of_pairs(uint32_t (&b)[2], const uint32_t (&pairs)[4], int odd) {
  const uint32_t which = odd == 0 ? 0x6420U : 0x7531U;
  b[0] = ptx::permute_bytes(pairs[0], pairs[1], which);
  b[1] = ptx::permute_bytes(pairs[2], pairs[3], which);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// These functions mask tiles of scores.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/key_range.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns the column of a 16 x 8 accumulator tile where a lane's elements 0 and 2 lie; elements 1 and 3 lie in the
/// next column.
MLA_DEVICE int accumulator_column() { return (ptx::lane() & 3) * 2; }
/// Returns the row of the tile where elements 0 and 1 lie; elements 2 and 3 lie eight rows below.
MLA_DEVICE int accumulator_row() { return ptx::lane() >> 2; }

/// Sets the scores of 16 queries and of 8 * kColTiles keys, from first_key on, to -inf where a query does not see the
/// key. `visible` holds the ranges of the lane's two rows.
template <int kColTiles>
MLA_DEVICE void mask_scores(float (&s)[kColTiles][4], const KeyRange (&visible)[2], int first_key) {
  const int lane_key = first_key + accumulator_column();
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e)
      if (!visible[e / 2].contains(lane_key + n * 8 + e % 2)) s[n][e] = kNoKey;
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE

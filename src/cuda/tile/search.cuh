// SPDX-License-Identifier: Apache-2.0
// This file searches, on the device, for the request that a row of a ragged tensor belongs to.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns the r below n whose range [indptr[r], indptr[r + 1]) holds `value`; -1 if there is none, since rows that pad
/// a captured graph's capacity lie beyond indptr[n]. All lanes of a warp call with the same arguments, and probe 32
/// places at a time.
MLA_DEVICE int32_t find_range(const int32_t* indptr, int32_t n, int64_t value) {
  int32_t low = -1, high = n + 1;  // invariant: indptr[low] <= value < indptr[high], as far as these exist
  while (high - low > 1) {
    const int32_t step = (high - low - 1 + kWarpSize - 1) / kWarpSize;
    const int64_t probe = low + int64_t{step} * (ptx::lane() + 1);
    const bool below = probe < high && indptr[probe] <= value;
    const int32_t passed = std::popcount(ptx::ballot(below));
    const int64_t next = low + int64_t{step} * (passed + 1);
    low += step * passed;
    high = next < high ? static_cast<int32_t>(next) : high;
  }
  return low < n ? low : -1;
}

}  // namespace mla::MLA_CUDA_NAMESPACE

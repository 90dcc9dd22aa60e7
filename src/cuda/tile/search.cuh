// SPDX-License-Identifier: Apache-2.0
// Which request a row of a ragged tensor belongs to, found on the device.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// The range [indptr[r], indptr[r + 1]) of n that holds `value`, or -1: rows that pad a captured graph's capacity lie
/// beyond indptr[n]. Called by all lanes of a warp with the same arguments, which probe 32 places per step.
MLA_DEVICE int32_t find_range(const int32_t* indptr, int32_t n, int64_t value) {
  int32_t low = -1, high = n + 1;  // indptr[low] <= value < indptr[high], as far as these exist
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

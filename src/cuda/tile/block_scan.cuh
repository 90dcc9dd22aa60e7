// SPDX-License-Identifier: Apache-2.0
// These functions compute sums and maxima of 64-bit counts over all threads of a block. Every thread of the block calls
// them. `scratch` is shared memory for one count per warp, and is free again when the call returns.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

MLA_DEVICE int64_t shuffle_up_64(int64_t value, int delta) {
  const auto low = static_cast<uint32_t>(value);
  const auto high = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32);
  return static_cast<int64_t>(uint64_t{ptx::shuffle_up(high, delta)} << 32 | ptx::shuffle_up(low, delta));
}

MLA_DEVICE int64_t shuffle_xor_64(int64_t value, int mask) {
  const auto low = static_cast<uint32_t>(value);
  const auto high = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32);
  return static_cast<int64_t>(uint64_t{ptx::shuffle_xor(high, mask)} << 32 | ptx::shuffle_xor(low, mask));
}

/// Returns the sum of the values of all earlier threads, and sets `total` to the sum of all threads' values.
template <int kThreads>
MLA_DEVICE int64_t exclusive_scan(int64_t value, int64_t* scratch, int64_t& total) {
  static_assert(kThreads % kWarpSize == 0 && kThreads / kWarpSize <= kWarpSize);
  constexpr int kWarps = kThreads / kWarpSize;
  int64_t sum = value;
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int64_t before = shuffle_up_64(sum, delta);
    if (ptx::lane() >= delta) sum += before;
  }
  if (ptx::lane() == kWarpSize - 1) scratch[ptx::warp()] = sum;
  ptx::sync_block();
  int64_t earlier = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < ptx::warp()) earlier += scratch[w];
    total += scratch[w];
  }
  ptx::sync_block();  // all threads have read scratch
  return earlier + sum - value;
}

/// Returns the largest value of all threads, in every thread.
template <int kThreads>
MLA_DEVICE int64_t block_max(int64_t value, int64_t* scratch) {
  constexpr int kWarps = kThreads / kWarpSize;
  for (int mask = 1; mask < kWarpSize; mask *= 2) {
    const int64_t other = shuffle_xor_64(value, mask);
    value = other > value ? other : value;
  }
  if (ptx::lane() == 0) scratch[ptx::warp()] = value;
  ptx::sync_block();
  for (int w = 0; w < kWarps; ++w) value = scratch[w] > value ? scratch[w] : value;
  ptx::sync_block();  // all threads have read scratch
  return value;
}

}  // namespace mla::MLA_CUDA_NAMESPACE

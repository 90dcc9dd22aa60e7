// SPDX-License-Identifier: Apache-2.0
// One warp writes a key into the indexer's cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Quantizes the channels that source(c) gives to e4m3 with one scale. Lane l has channels l, l + 32, ..., so that the
/// loads and stores of a warp are contiguous at any alignment of rows and pages. `slot` must not be negative.
template <class Source>
MLA_DEVICE void write_indexer_key(const core::IndexerPages& cache, int64_t slot, const Source& source,
                                  bool power_of_two_scales) {
  constexpr int kEach = kIndexerLayout.head_dim / kWarpSize;
  const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
  float k[kEach];
  float largest = 0.0F;  // of the finite channels only: infinities and NaN do not affect the scale
  for (int i = 0; i < kEach; ++i) {
    k[i] = source(ptx::lane() + i * kWarpSize);
    if (is_finite(k[i])) largest = std::max(largest, magnitude(k[i]));
  }
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) largest = std::max(largest, ptx::shuffle_xor(largest, mask));
  const float scale = power_of_two_scales ? e4m3_power_of_two_scale(largest) : e4m3_scale(largest);

  auto* const key = reinterpret_cast<uint8_t*>(cache.key(page, offset));
  for (int i = 0; i < kEach; ++i) key[ptx::lane() + i * kWarpSize] = to_e4m3(k[i], scale);
  if (ptx::lane() == 0) store_f32_anywhere(cache.scale(page, offset), scale);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// One warp writes a key into the indexer's cache, in any of its formats.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns the largest that any lane has.
MLA_DEVICE float largest_of_warp(float largest) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) largest = std::max(largest, ptx::shuffle_xor(largest, mask));
  return largest;
}

/// Quantizes the channels that source(c) gives, as the cache's format asks. Lane l has channels l, l + 32, ..., so that
/// the loads and stores of a warp are contiguous at any alignment of rows and pages, and each 32 channels that share a
/// scale of MXFP4 are one of every lane. `slot` must not be negative.
template <class Source>
MLA_DEVICE void write_indexer_key(const core::IndexerPages& cache, int64_t slot, const Source& source,
                                  bool power_of_two_scales) {
  constexpr int kEach = kIndexerLayout.head_dim / kWarpSize;
  const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
  float k[kEach], largest[kEach];  // of the finite channels only: infinities and NaN do not affect a scale
  for (int i = 0; i < kEach; ++i) {
    k[i] = source(ptx::lane() + i * kWarpSize);
    largest[i] = is_finite(k[i]) ? magnitude(k[i]) : 0.0F;
  }
  auto* const key = reinterpret_cast<uint8_t*>(cache.key(page, offset));
  std::byte* const scales = cache.scale(page, offset);
  const Codec codec = cache.layout().codec;
  if (codec.element == DType::kE2M1) {
    for (int i = 0; i < kEach; ++i) {
      const float scale = choose_scale(DType::kE2M1, ScaleType::kUE8M0, true, largest_of_warp(largest[i]));
      const uint32_t code = quantize_e2m1(k[i], scale), odd = ptx::shuffle_xor(code, 1);
      if (ptx::lane() % 2 == 0) key[(ptx::lane() + i * kWarpSize) / 2] = static_cast<uint8_t>(code | odd << 4);
      if (ptx::lane() == 0) store_scale(scales, ScaleType::kUE8M0, i, scale);
    }
    return;
  }
  for (int i = 1; i < kEach; ++i) largest[0] = std::max(largest[0], largest[i]);
  const float amax = largest_of_warp(largest[0]);
  const float scale = power_of_two_scales ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax);
  for (int i = 0; i < kEach; ++i) key[ptx::lane() + i * kWarpSize] = to_e4m3(k[i], scale);
  if (ptx::lane() == 0) store_f32_anywhere(scales, scale);
}

static_assert(indexer_layout(IndexerFormat::kMXFP4).codec.channels_per_scale == kWarpSize);

}  // namespace mla::MLA_CUDA_NAMESPACE

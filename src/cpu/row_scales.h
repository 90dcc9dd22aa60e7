// SPDX-License-Identifier: Apache-2.0
// This file gives the scales of quantized rows as the kernels take them, which is f32, and stores them as rows have
// them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/args.h"
#include "cpu/quantized_row.h"
#include "mla/numeric.h"

namespace mla::cpu {

/// At most this many groups of a row are converted at a time.
inline constexpr int32_t kMostGroups = 32;

/// Holds the values of all e4m3. A row of NVFP4 has 32 such scales, which take 29 ns less from here than computed one
/// by one (AMD EPYC, Zen 4, 2026-11-26; docs/notebook/2026-11-26-cpu-fp4.md).
inline constexpr std::array<float, 256> kE4M3Values = [] {
  std::array<float, 256> values = {};
  for (size_t i = 0; i < values.size(); ++i) values[i] = e4m3_to_f32(static_cast<uint8_t>(i));
  return values;
}();

/// Loads scales first ... first + n - 1 of a token, times the outer scale if there is one. They may lie at any address.
inline void load_scales(const core::Cache& cache, const std::byte* scales, int32_t first, int32_t n, float* to) {
  const std::byte* from = scales + int64_t{first} * size_of(cache.scale_type);
  switch (cache.scale_type) {
    case ScaleType::kUE8M0:
      for (int32_t i = 0; i < n; ++i) to[i] = ue8m0_to_f32(static_cast<uint8_t>(from[i]));
      break;
    case ScaleType::kE4M3:
      for (int32_t i = 0; i < n; ++i) to[i] = kE4M3Values[static_cast<uint8_t>(from[i])];
      break;
    default: std::memcpy(to, from, static_cast<size_t>(n) * sizeof *to);
  }
  if (cache.outer_scale == nullptr) return;
  for (int32_t i = 0; i < n; ++i) to[i] *= *cache.outer_scale;
}

/// Returns scale `i` of a token, as load_scales loads it.
inline float load_scale(const core::Cache& cache, const std::byte* scales, int32_t i) {
  float scale;
  load_scales(cache, scales, i, 1, &scale);
  return scale;
}

/// Calls f(groups, channel) for the latent channels of the row whose elements lie at `ckv`, some groups at a time from
/// the first channel on.
template <class F>
void for_latent_groups(const core::Cache& cache, const std::byte* ckv, const std::byte* scales, const F& f) {
  float loaded[kMostGroups];
  const int32_t group = cache.channels_per_scale;
  const bool in_place = cache.scale_type == ScaleType::kF32 && cache.outer_scale == nullptr &&
                        reinterpret_cast<uintptr_t>(scales) % alignof(float) == 0;
  for (int32_t first = 0; first < cache.num_scales; first += kMostGroups) {
    const int32_t n = std::min(kMostGroups, cache.num_scales - first);
    if (!in_place) load_scales(cache, scales, first, n, loaded);
    f({.element = cache.ckv_dtype,
       .elements = ckv + bytes_of(cache.ckv_dtype, int64_t{first} * group),
       .scales = in_place ? reinterpret_cast<const float*>(scales) + first : loaded,
       .num_groups = n,
       .group = group},
      first * group);
  }
}

/// Returns the scale of the quantized rotary channels of the row whose latent channels lie at `ckv`.
inline float load_kpe_scale(const core::Cache& cache, const void* ckv) {
  if (!cache.writes_kpe_scale()) return *cache.kpe_scale;
  float scale;
  std::memcpy(&scale, static_cast<const std::byte*>(ckv) + cache.kpe_scale_at, sizeof scale);
  return scale;
}

/// Stores n scales at any address.
inline void store_scales(ScaleType type, const float* from, int32_t n, std::byte* to) {
  switch (type) {
    case ScaleType::kUE8M0:
      for (int32_t i = 0; i < n; ++i) to[i] = static_cast<std::byte>(f32_to_ue8m0(from[i]));
      break;
    case ScaleType::kE4M3:
      for (int32_t i = 0; i < n; ++i) to[i] = static_cast<std::byte>(f32_to_e4m3(from[i]));
      break;
    default: std::memcpy(to, from, static_cast<size_t>(n) * sizeof *from);
  }
}

/// Stores scales first ... first + n - 1 of a token, without the outer scale.
inline void store_scales(const core::Cache& cache, const float* from, int32_t first, int32_t n, std::byte* scales) {
  store_scales(cache.scale_type, from, n, scales + int64_t{first} * size_of(cache.scale_type));
}

}  // namespace mla::cpu

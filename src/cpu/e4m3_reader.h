// SPDX-License-Identifier: Apache-2.0
// This file gives the elements and scales of quantized rows as the kernels take them: e4m3 elements and f32 scales.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/args.h"
#include "mla/numeric.h"

namespace mla::cpu {

/// Loads scales first ... first + n - 1 of a token, times the outer scale if there is one. They may lie at any address.
inline void load_scales(const core::Cache& cache, const std::byte* scales, int32_t first, int32_t n, float* to) {
  const std::byte* from = scales + int64_t{first} * size_of(cache.scale_type);
  switch (cache.scale_type) {
    case ScaleType::kUE8M0:
      for (int32_t i = 0; i < n; ++i) to[i] = ue8m0_to_f32(static_cast<uint8_t>(from[i]));
      break;
    case ScaleType::kE4M3:
      for (int32_t i = 0; i < n; ++i) to[i] = e4m3_to_f32(static_cast<uint8_t>(from[i]));
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

/// Returns the scale of the quantized rotary channels of the row whose latent channels lie at `ckv`.
inline float load_kpe_scale(const core::Cache& cache, const void* ckv) {
  if (!cache.writes_kpe_scale()) return *cache.kpe_scale;
  float scale;
  std::memcpy(&scale, static_cast<const std::byte*>(ckv) + cache.kpe_scale_at, sizeof scale);
  return scale;
}

/// Stores scales first ... first + n - 1 of a token, without the outer scale.
inline void store_scales(const core::Cache& cache, const float* from, int32_t first, int32_t n, std::byte* scales) {
  std::byte* to = scales + int64_t{first} * size_of(cache.scale_type);
  switch (cache.scale_type) {
    case ScaleType::kUE8M0:
      for (int32_t i = 0; i < n; ++i) to[i] = static_cast<std::byte>(f32_to_ue8m0(from[i]));
      break;
    case ScaleType::kE4M3:
      for (int32_t i = 0; i < n; ++i) to[i] = static_cast<std::byte>(f32_to_e4m3(from[i]));
      break;
    default: std::memcpy(to, from, static_cast<size_t>(n) * sizeof *from);
  }
}

/// Reads elements of one quantized row as e4m3. Elements of e2m1 are converted by a table, since every value of e2m1 is
/// one of e4m3.
class E4M3Reader {
 public:
  /// One call of read() takes at most this many e2m1 elements.
  static constexpr int32_t kMostElements = 8 * kMostE2M1Group;

  E4M3Reader(DType element, const std::byte* row) : element_(element), row_(row) {}

  /// Returns the elements of channels first ... first + n - 1, which are valid until the next call.
  const uint8_t* read(int64_t first, int32_t n) {
    if (element_ != DType::kE2M1) return reinterpret_cast<const uint8_t*>(row_) + first;
    const std::byte* from = row_ + bytes_of(element_, first);
    for (int32_t i = 0; i < n / 2; ++i)
      std::memcpy(elements_ + 2 * i, kPairs.data() + static_cast<uint8_t>(from[i]), sizeof kPairs[0]);
    return elements_;
  }

 private:
  /// Holds both elements of a byte as e4m3; the even channel is in the low half of the byte.
  static constexpr std::array<std::array<uint8_t, 2>, 256> kPairs = [] {
    std::array<std::array<uint8_t, 2>, 256> pairs = {};
    for (uint32_t byte = 0; byte < 256; ++byte)
      pairs[byte] = {e2m1_to_e4m3(static_cast<uint8_t>(byte & 0xFU)), e2m1_to_e4m3(static_cast<uint8_t>(byte >> 4))};
    return pairs;
  }();

  DType element_;
  const std::byte* row_;
  alignas(64) uint8_t elements_[kMostElements];
};

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// These functions rotate the rotary channels of a token, and write rows that end with them into a cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/share.h"
#include "mla/kv_layout.h"
#include "mla/numeric.h"

namespace mla::cpu {

/// Says how the channels of a token turn.
struct Rotation {
  int32_t channels;
  const float* cos_sin;  // cosines of all pairs, then sines
  bool interleaved;
  bool inverse = false;  // turns by the negative angles
};

inline constexpr int32_t kAngles = 128;  // angles that are rotated at a time

/// Holds angles first ... first + n - 1 of a token as factors of each channel and of its partner, for the channels of n
/// pairs.
struct Angles {
  int32_t first, n;
  alignas(64) float own[2 * kAngles];
  alignas(64) float partner[2 * kAngles];

  Angles(const Rotation& rotation, int32_t first_angle, int32_t count) : first(first_angle), n(count) {
    const float* cos = rotation.cos_sin + first;
    const float* sin = cos + rotation.channels / 2;
    const float sign = rotation.inverse ? -1.0F : 1.0F;
    const int32_t pair_stride = rotation.interleaved ? 2 : 1;
    const int32_t partner_stride = rotation.interleaved ? 1 : n;
    for (int32_t i = 0; i < n; ++i) {
      own[i * pair_stride] = own[i * pair_stride + partner_stride] = cos[i];
      partner[i * pair_stride] = -sign * sin[i];
      partner[i * pair_stride + partner_stride] = sign * sin[i];
    }
  }
};

/// Calls f(angles) for all angles of a rotation, some at a time.
template <class F>
void for_angles(const Rotation& rotation, const F& f) {
  const int32_t num_angles = rotation.channels / 2;
  for (int32_t first = 0; first < num_angles; first += kAngles)
    f(Angles(rotation, first, std::min(kAngles, num_angles - first)));
}

/// Rotates channels by these angles, and calls write(values, first channel, number of channels) with the results.
template <class Write>
void rotate(const KernelSet& set, const void* pe, DType dtype, const Rotation& rotation, const Angles& angles,
            const Write& write) {
  alignas(64) float out[2 * kAngles];
  const int32_t half = rotation.channels / 2;
  const int32_t first = rotation.interleaved ? 2 * angles.first : angles.first;
  const void* x = at(pe, first, dtype);
  set.rows->rotate(x, rotation.interleaved ? nullptr : at(x, half, dtype), dtype, angles.own, angles.partner, angles.n,
                   out);
  if (rotation.interleaved) return write(out, first, 2 * angles.n);
  write(out, first, angles.n);
  write(out + angles.n, half + first, angles.n);
}

/// Rotates all channels and rounds them to bf16, as the formats' own writers do before they quantize.
inline void rotate_rounded(const KernelSet& set, const void* pe, DType dtype, const Rotation& rotation, float* to) {
  for_angles(rotation, [&](const Angles& angles) {
    rotate(set, pe, dtype, rotation, angles, [&](const float* out, int32_t first, int32_t n) {
      for (int32_t i = 0; i < n; ++i) to[first + i] = bf16_to_f32(f32_to_bf16(out[i]));
    });
  });
}

/// Writes rows of plain channels and rotary ones, which it rotates, into a cache.
class RotatedWriter {
 public:
  RotatedWriter(const KernelSet& set, const core::Cache& cache, DType dtype, int64_t bytes)
      : set_(set),
        cache_(cache),
        dtype_(dtype),
        joins_(cache.rotary_in_ckv > 0),
        writer_(set, cache, joins_ ? DType::kF32 : dtype, DType::kF32, bytes) {}

  void write(const void* plain, const void* pe, const Rotation& rotation, int64_t slot) const {
    const int64_t page = slot / cache_.page_size, offset = slot % cache_.page_size;
    alignas(64) float row[kMostJoined];
    if (joins_) {
      set_.floats->convert(plain, dtype_, row, DType::kF32, cache_.d_plain());
      rotate_rounded(set_, pe, dtype_, rotation, row + cache_.d_plain());
      return writer_.write_ckv(row, page, offset);
    }
    writer_.write_ckv(plain, page, offset);
    if (cache_.writes_kpe_scale()) {
      rotate_rounded(set_, pe, dtype_, rotation, row);
      return writer_.write_kpe(row, page, offset, 0, rotation.channels);
    }
    for_angles(rotation, [&](const Angles& angles) {
      rotate(set_, pe, dtype_, rotation, angles,
             [&](const float* out, int32_t first, int32_t n) { writer_.write_kpe(out, page, offset, first, n); });
    });
  }
  void finish() const { writer_.finish(); }

 private:
  /// Channels that get scales of their own are all made before they are quantized: the latent ones of a row that ends
  /// with the rotary ones, or the rotary ones alone.
  static constexpr int32_t kMostJoined = [] {
    int32_t most = 0;
    for (CacheFormat format : kAllCacheFormats) {
      const KvLayout layout = kv_layout(format);
      if (layout.rotary_in_nope > 0) most = std::max(most, layout.nope_dim);
      if (layout.rope_scale_offset > 0) most = std::max(most, layout.rope_dim);
    }
    return most;
  }();

  const KernelSet& set_;
  const core::Cache& cache_;
  DType dtype_;
  bool joins_;  // whether the cache's latent channels end with the rotary ones
  CacheWriter writer_;
};

}  // namespace mla::cpu

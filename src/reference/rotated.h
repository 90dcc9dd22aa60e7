// SPDX-License-Identifier: Apache-2.0
// This file has rotary channels that are turned as they are read, and the packer of rows that end with them.
#pragma once

#include <cstdint>

#include "reference/cache_rows.h"

namespace mla::reference {

/// Gives the channels of a rotary part, which `pe` has, rotated by the angles of its token's position, in f32.
template <class Source>
struct Rotated {
  Source pe;
  int32_t dim;
  const float* cos_sin;  // dim / 2 cosines, then as many sines
  bool interleaved;
  bool inverse = false;  // turns by the negative angles

  /// Returns the product rounded to f32. It is computed in double, where it is exact, so that no compiler fuses it into
  /// the sum.
  static float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }

  float operator()(int32_t c) const {
    const int32_t half = dim / 2;
    const int32_t angle = interleaved ? c / 2 : c % half;
    const float x = pe(interleaved ? 2 * angle : angle), y = pe(interleaved ? 2 * angle + 1 : angle + half);
    const float cos = cos_sin[angle], sin = inverse ? -cos_sin[half + angle] : cos_sin[half + angle];
    const bool is_x = interleaved ? c % 2 == 0 : c < half;
    return is_x ? product(x, cos) - product(y, sin) : product(x, sin) + product(y, cos);
  }
  /// Returns a channel rounded to bf16, as the formats' own writers do before they choose a scale.
  float rounded(int32_t c) const { return bf16_to_f32(f32_to_bf16((*this)(c))); }
};

/// Packs a row of the plain channels, followed by the rotary ones, rotated.
template <class Source>
void write_rotated_row(const CacheRow& row, const Source& plain, const Rotated<Source>& rotated) {
  const int32_t num_plain = row.cache.d_plain();
  const auto rounded = [&](int32_t c) { return rotated.rounded(c); };
  if (row.cache.rotary_in_ckv > 0)
    return write_ckv(row, [&](int32_t c) { return c < num_plain ? plain(c) : rounded(c - num_plain); });
  write_ckv(row, plain);
  if (row.cache.writes_kpe_scale())
    write_kpe(row, rounded);
  else
    write_kpe(row, rotated);
}

}  // namespace mla::reference

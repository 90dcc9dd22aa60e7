// SPDX-License-Identifier: Apache-2.0
// This file has channels that a norm divides as they are read.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "reference/cache_rows.h"

namespace mla::reference {

/// Returns 1 / sqrt(mean of the squares + epsilon) of channels source(0) ... source(n - 1), in f32. Squares of
/// neighbours are summed, neighbours of these sums, and so on, a missing one counting as 0: whoever sums in that order
/// has the same bits.
template <class Source>
float norm_factor(const Source& source, int32_t n, float epsilon) {
  float sums[core::kMaxNormChannels] = {};
  for (int32_t c = 0; c < n; ++c) {
    const float x = source(c);
    sums[c] = x * x;
  }
  for (int32_t width = core::kMaxNormChannels / 2; width > 0; width /= 2)
    for (int32_t i = 0; i < width; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return 1.0F / std::sqrt(sums[0] / static_cast<float>(n) + epsilon);
}

/// Gives channels times the factor and the weights of a norm, or as they are where there is none.
struct Normalized {
  Channels x;
  bool normalizes = false;
  float factor = 1.0F;
  Channels weight = {};  // without data stands for 1

  float operator()(int32_t c) const {
    if (!normalizes) return x(c);
    const float value = weight.data != nullptr ? x(c) * factor * weight(c) : x(c) * factor;
    return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
  }
};

/// Writes channels from memory, as they are where nothing normalizes them.
inline void write_channels(const Normalized& source, int32_t n, DType dtype, int64_t offset, void* out) {
  if (source.normalizes)
    write_channels<Normalized>(source, n, dtype, offset, out);
  else
    write_channels(source.x, n, dtype, offset, out);
}

}  // namespace mla::reference

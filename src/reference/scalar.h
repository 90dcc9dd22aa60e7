// SPDX-License-Identifier: Apache-2.0
// Elements of every float type to and from double: loads are exact, stores round once.
#pragma once

#include <bit>
#include <cstdint>

#include "mla/kv_layout.h"
#include "mla/numeric.h"
#include "mla/types.h"

namespace mla::reference {

/// `value` in f32, the last bit set if anything was lost ("round to odd"): rounding the result to a type with at least
/// two fewer bits is then the same as rounding `value` itself.
inline float to_f32_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  if (back == value || value != value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if ((value < 0 ? -value : value) < (back < 0 ? -back : back)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

/// Elements [0, n) of a row that starts `offset` elements into `data`.
inline void load_row(const void* data, DType dtype, int64_t offset, int32_t n, double* out) {
  if (dtype == DType::kF32) {
    const float* row = static_cast<const float*>(data) + offset;
    for (int32_t i = 0; i < n; ++i) out[i] = static_cast<double>(row[i]);
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(data) + offset;
  if (dtype == DType::kBF16) {
    for (int32_t i = 0; i < n; ++i) out[i] = static_cast<double>(bf16_to_f32(row[i]));
  } else {
    for (int32_t i = 0; i < n; ++i) out[i] = static_cast<double>(f16_to_f32(row[i]));
  }
}

inline void store_row(const double* values, DType dtype, int64_t offset, int32_t n, void* data) {
  if (dtype == DType::kF32) {
    float* row = static_cast<float*>(data) + offset;
    for (int32_t i = 0; i < n; ++i) row[i] = static_cast<float>(values[i]);
    return;
  }
  uint16_t* row = static_cast<uint16_t*>(data) + offset;
  for (int32_t i = 0; i < n; ++i) {
    const float odd = to_f32_odd(values[i]);
    row[i] = dtype == DType::kBF16 ? f32_to_bf16(odd) : f32_to_f16(odd);
  }
}

/// The element type of a cache that is not quantized.
inline DType cache_dtype(CacheFormat format) { return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

}  // namespace mla::reference

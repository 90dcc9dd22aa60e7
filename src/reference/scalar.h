// SPDX-License-Identifier: Apache-2.0
// This file loads and stores elements of every float type, at any address, as float and as double. Loads are exact, and
// stores round once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mla/numeric.h"
#include "mla/types.h"

namespace mla::reference {

template <class T>
T read_as(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <class T>
void write_as(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}

/// Returns element `i`; an e4m3 element without its scale.
inline float load(const void* data, DType dtype, int64_t i) {
  const std::byte* at = static_cast<const std::byte*>(data) + i * static_cast<int64_t>(size_of(dtype));
  switch (dtype) {
    case DType::kBF16: return bf16_to_f32(read_as<uint16_t>(at));
    case DType::kF16: return f16_to_f32(read_as<uint16_t>(at));
    case DType::kE4M3: return e4m3_to_f32(read_as<uint8_t>(at));
    default: return read_as<float>(at);
  }
}

inline void store(float value, DType dtype, int64_t i, void* data) {
  std::byte* at = static_cast<std::byte*>(data) + i * static_cast<int64_t>(size_of(dtype));
  switch (dtype) {
    case DType::kBF16: return write_as(at, f32_to_bf16(value));
    case DType::kF16: return write_as(at, f32_to_f16(value));
    case DType::kE4M3: return write_as(at, f32_to_e4m3(value));
    default: return write_as(at, value);
  }
}

/// Returns `value` in f32 with the last bit set if the conversion is inexact ("round to odd"). Rounding the result to a
/// type with at least two fewer bits then equals rounding `value` itself.
inline float to_f32_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  if (back == value || value != value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if ((value < 0 ? -value : value) < (back < 0 ? -back : back)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

/// Loads elements [0, n) of a row that begins `offset` elements into `data`.
inline void load_row(const void* data, DType dtype, int64_t offset, int32_t n, double* out) {
  const auto load_all = [&](DType type) {
    for (int32_t i = 0; i < n; ++i) out[i] = static_cast<double>(load(data, type, offset + i));
  };
  switch (dtype) {  // a loop for each type
    case DType::kBF16: return load_all(DType::kBF16);
    case DType::kF16: return load_all(DType::kF16);
    case DType::kE4M3: return load_all(DType::kE4M3);
    default: return load_all(DType::kF32);
  }
}

/// Stores a row of `n` elements that begins `offset` elements into `data`.
inline void store_row(const double* values, DType dtype, int64_t offset, int32_t n, void* data) {
  const auto store_all = [&](DType type) {
    for (int32_t i = 0; i < n; ++i)
      store(type == DType::kF32 ? static_cast<float>(values[i]) : to_f32_odd(values[i]), type, offset + i, data);
  };
  switch (dtype) {  // a loop for each type
    case DType::kBF16: return store_all(DType::kBF16);
    case DType::kF16: return store_all(DType::kF16);
    case DType::kE4M3: return store_all(DType::kE4M3);
    default: return store_all(DType::kF32);
  }
}

}  // namespace mla::reference

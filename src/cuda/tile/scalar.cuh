// SPDX-License-Identifier: Apache-2.0
// These functions convert single elements of every float type to f32 and back by mla/numeric.h, so that their bytes
// equal those of the CPU, NaNs included. channels.cuh converts eight channels at a time.
//
// IEEE 754 leaves open which NaN an operation gives. GPUs always give 0x7FFFFFFF; x86 gives the first NaN operand,
// quieted, or 0xFFC00000. Where a NaN can reach memory, the functions here do as x86 does, so that caches written by a
// GPU and by the CPU compare equal.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/ptx/machine.h"
#include "mla/numeric.h"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE {

MLA_DEVICE bool is_nan(float value) { return (std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU) > 0x7F800000U; }
MLA_DEVICE bool is_finite(float value) { return (std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU) < 0x7F800000U; }
MLA_DEVICE float magnitude(float value) { return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU); }

/// Returns `result`, which an operation on a and b gave; if it is NaN, the NaN that x86 gives for these operands.
MLA_DEVICE float settle_nan(float result, float a, float b) {
  if (!is_nan(result)) return result;
  if (is_nan(a)) return std::bit_cast<float>(std::bit_cast<uint32_t>(a) | 0x400000U);
  if (is_nan(b)) return std::bit_cast<float>(std::bit_cast<uint32_t>(b) | 0x400000U);
  return std::bit_cast<float>(0xFFC00000U);
}

/// Does what quantize_e4m3 does, and keeps the sign of a NaN.
MLA_DEVICE uint8_t to_e4m3(float value, float scale) { return f32_to_e4m3(is_nan(value) ? value : value / scale); }

/// Does what dequantize_e4m3 does, also where the element or the scale is NaN.
MLA_DEVICE uint16_t from_e4m3(uint8_t code, float scale) {
  const float value = e4m3_to_f32(code);
  return f32_to_bf16(settle_nan(value * scale, value, scale));
}

/// Returns element `index`; an e4m3 element without its scale.
MLA_DEVICE float load_element(const void* base, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBF16: return bf16_to_f32(static_cast<const uint16_t*>(base)[index]);
    case DType::kF16: return f16_to_f32(static_cast<const uint16_t*>(base)[index]);
    case DType::kE4M3: return e4m3_to_f32(static_cast<const uint8_t*>(base)[index]);
    default: return static_cast<const float*>(base)[index];
  }
}

/// Stores element `index`, rounded once, to nearest even; e4m3 saturates.
MLA_DEVICE void store_element(void* base, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kBF16: static_cast<uint16_t*>(base)[index] = f32_to_bf16(value); break;
    case DType::kF16: static_cast<uint16_t*>(base)[index] = f32_to_f16(value); break;
    case DType::kE4M3: static_cast<uint8_t*>(base)[index] = f32_to_e4m3(value); break;
    default: static_cast<float*>(base)[index] = value; break;
  }
}

/// Stores element `index`: value / scale if the elements are e4m3, else the value.
MLA_DEVICE void store_element(void* base, DType dtype, int64_t index, float value, float scale) {
  if (dtype == DType::kE4M3)
    static_cast<uint8_t*>(base)[index] = to_e4m3(value, scale);
  else
    store_element(base, dtype, index, value);
}

/// Loads an f32 from any address.
MLA_DEVICE float load_f32_anywhere(const std::byte* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(float) == 0) return *reinterpret_cast<const float*>(at);
  uint32_t bits = 0;
  for (int i = 3; i >= 0; --i) bits = bits << 8 | static_cast<uint32_t>(at[i]);
  return std::bit_cast<float>(bits);
}

MLA_DEVICE void store_f32_anywhere(std::byte* at, float value) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(float) == 0) {
    *reinterpret_cast<float*>(at) = value;
    return;
  }
  const auto bits = std::bit_cast<uint32_t>(value);
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(bits >> (8 * i));
}

/// Returns scale `i` of a token, times the outer scale if there is one.
MLA_DEVICE float load_scale(const std::byte* scales, ScaleType type, int32_t i, const float* outer) {
  const float scale = type == ScaleType::kF32     ? load_f32_anywhere(scales + int64_t{4} * i)
                      : type == ScaleType::kUE8M0 ? ue8m0_to_f32(static_cast<uint8_t>(scales[i]))
                                                  : e4m3_to_f32(static_cast<uint8_t>(scales[i]));
  return outer != nullptr ? scale * *outer : scale;
}

MLA_DEVICE void store_scale(std::byte* scales, ScaleType type, int32_t i, float scale) {
  if (type == ScaleType::kF32)
    store_f32_anywhere(scales + int64_t{4} * i, scale);
  else
    scales[i] = static_cast<std::byte>(type == ScaleType::kUE8M0 ? f32_to_ue8m0(scale) : f32_to_e4m3(scale));
}

/// Returns element `c` of a quantized row as e4m3; an e2m1 element is converted, since every value of e2m1 is one of
/// e4m3.
MLA_DEVICE uint8_t load_code(const std::byte* row, DType dtype, int32_t c) {
  if (dtype != DType::kE2M1) return static_cast<uint8_t>(row[c]);
  return e2m1_to_e4m3(static_cast<uint8_t>(static_cast<uint8_t>(row[c / 2]) >> (c % 2 * 4) & 0xFU));
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// This header converts scalars to and from the narrow float types, and chooses the scale factors of quantized caches.
// Conversions round to nearest, ties to even; NaN stays NaN, except in e2m1, which has none.
#pragma once

#include <bit>
#include <cstdint>

#include "mla/kv_layout.h"

namespace mla {

constexpr float bf16_to_f32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

constexpr float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0x1FU) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;  // exact, for zero and subnormals
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

constexpr uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<uint16_t>(sign | 0x7E00U);
  if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);  // rounds to infinity
  if (magnitude < 0x38800000U) {  // subnormal: adding 0.5 aligns 2^-24 units
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000U));
  }
  const uint32_t rounded = magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

/// These convert to bf16 and f16 and saturate what is finite: it becomes the largest finite number where it would round
/// to infinity. Infinities stay infinities.
constexpr uint16_t f32_to_finite_bf16(float value) {
  const uint16_t bits = f32_to_bf16(value);
  const bool overflows = (bits & 0x7FFFU) == 0x7F80U && (std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU) < 0x7F800000U;
  return overflows ? static_cast<uint16_t>(bits - 1U) : bits;
}

constexpr uint16_t f32_to_finite_f16(float value) {
  const uint16_t bits = f32_to_f16(value);
  const bool overflows = (bits & 0x7FFFU) == 0x7C00U && (std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU) < 0x7F800000U;
  return overflows ? static_cast<uint16_t>(bits - 1U) : bits;
}

/// This is the largest magnitude of e4m3 (OCP "E4M3FN": no infinity, 0x7F and 0xFF are NaN).
inline constexpr float kE4M3Max = 448.0F;

constexpr float e4m3_to_f32(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t exponent = (code >> 3) & 0xFU;
  const uint32_t mantissa = code & 0x7U;
  if ((code & 0x7FU) == 0x7FU) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120U) << 23) | (mantissa << 20));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;  // exact, for zero and subnormals
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

/// Converts to e4m3 and saturates: what rounds beyond 448, infinities too, becomes 448.
constexpr uint8_t f32_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<uint8_t>(sign | 0x7FU);
  if (magnitude >= 0x43E00000U) return static_cast<uint8_t>(sign | 0x7EU);
  if (magnitude < 0x3C800000U) {  // below 2^-6, subnormal: adding 2^14 aligns units of 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000U));
  }
  const uint32_t rounded = magnitude - 0x3C000000U + 0x7FFFFU + ((magnitude >> 20) & 1U);
  return static_cast<uint8_t>(sign | (rounded >> 20));
}

/// This is the largest magnitude of e2m1, whose values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
inline constexpr float kE2M1Max = 6.0F;

/// Converts from e2m1, which is in the low half of a byte: a sign, two bits of exponent, one of mantissa.
constexpr float e2m1_to_f32(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8U) << 28;
  const uint32_t magnitude = code & 0x7U;
  if (magnitude < 2) return std::bit_cast<float>(sign | (magnitude == 1 ? 0x3F000000U : 0U));
  return std::bit_cast<float>(sign | ((magnitude << 22) + 0x3F000000U));
}

/// Converts to e2m1 and saturates: what rounds beyond 6, infinities too, becomes 6. A NaN becomes 6 too, as in NVIDIA's
/// conversions.
constexpr uint8_t f32_to_e2m1(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 28) & 0x8U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7U;
  if (magnitude >= 0x40A00001U) return static_cast<uint8_t>(sign | 0x7U);  // above 5
  if (magnitude < 0x3F800000U) {  // below 1, where values are multiples of 0.5: adding 2^22 aligns them
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p22F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x4A800000U));
  }
  const uint32_t rounded = magnitude - 0x3F000000U + 0x1FFFFFU + ((magnitude >> 22) & 1U);
  return static_cast<uint8_t>(sign | (rounded >> 22));
}

/// Returns the same value as e4m3; every value of e2m1 is one of e4m3.
constexpr uint8_t e2m1_to_e4m3(uint8_t code) { return f32_to_e4m3(e2m1_to_f32(code)); }

/// Converts a UE8M0 scale, which is 2^(code - 127); 0 gives 0 and 255 gives NaN.
constexpr float ue8m0_to_f32(uint8_t code) {
  if (code == 0xFFU) return std::bit_cast<float>(0x7FC00000U);
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

/// Returns the scale of a group whose largest finite magnitude is `amax`, where scales may be any f32: amax / 448, but
/// at least 2^-126, the smallest normal number, so that a group of zeros can be divided by its scale.
constexpr float e4m3_scale(float amax) {
  const float scale = amax / kE4M3Max;
  return scale < 0x1p-126F ? 0x1p-126F : scale;
}

/// This is the smallest magnitude for which a power-of-two scale is made; groups of smaller magnitudes get the scale of
/// this one.
inline constexpr float kLeastAmax = 1e-4F;

/// Returns 2^ceil(log2(value)) of a positive, normal value.
constexpr float round_up_to_power_of_two(float value) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0x7FFFFFU) & 0x7F800000U);
}

/// Returns the scale of a group where scales are powers of two: 2^ceil(log2(max(amax, 1e-4) / 448)).
constexpr float e4m3_power_of_two_scale(float amax) {
  return round_up_to_power_of_two(e4m3_scale(amax < kLeastAmax ? kLeastAmax : amax));
}

/// Converts a power of two from 2^-126 to 2^127 to UE8M0.
constexpr uint8_t f32_to_ue8m0(float power_of_two) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(power_of_two) >> 23);
}

/// This is the least positive e4m3, below which no scale of that type goes.
inline constexpr float kLeastE4M3 = 0x1p-9F;

/// Returns the scale of a group of these elements before it is rounded to e4m3: max(amax / outer / largest element,
/// 2^-9). Rounding saturates at 448. An `outer` scale multiplies such scales.
constexpr float unrounded_e4m3_scale(DType element, float amax, float outer) {
  const float wanted = amax / outer / (element == DType::kE2M1 ? kE2M1Max : kE4M3Max);
  return wanted > kLeastE4M3 ? wanted : kLeastE4M3;
}

/// Returns the scale that a quantized cache of these elements holds for a group whose largest finite magnitude is
/// `amax`, as it is read again. `power_of_two` is used for f32 scales only, `outer` for those of e4m3. No scale but
/// those of e4m3 is smaller than `least`, the least_scale of a Codec: where it is a power of two p, powers of two are
/// 2^ceil(log2(max(amax / largest element, p))).
constexpr float choose_scale(DType element, ScaleType type, bool power_of_two, float amax, float outer = 1.0F,
                             float least = 0.0F) {
  if (type == ScaleType::kE4M3) return e4m3_to_f32(f32_to_e4m3(unrounded_e4m3_scale(element, amax, outer)));
  const float largest = element == DType::kE2M1 ? kE2M1Max : kE4M3Max;
  float scale = amax / largest;
  if (type == ScaleType::kUE8M0 || power_of_two)
    scale = round_up_to_power_of_two((amax < kLeastAmax ? kLeastAmax : amax) / largest);
  else if (scale < 0x1p-126F)
    scale = 0x1p-126F;
  return scale < least ? least : scale;
}

/// Returns what a quantized cache holds for `value`. The quotient is rounded to f32 first, as every packer does.
constexpr uint8_t quantize_e4m3(float value, float scale) { return f32_to_e4m3(value / scale); }

/// Returns the value of a quantized element: the product with its scale, rounded to bf16.
constexpr uint16_t dequantize_e4m3(uint8_t code, float scale) { return f32_to_bf16(e4m3_to_f32(code) * scale); }

/// These do the same for e2m1.
constexpr uint8_t quantize_e2m1(float value, float scale) { return f32_to_e2m1(value / scale); }
constexpr uint16_t dequantize_e2m1(uint8_t code, float scale) { return f32_to_bf16(e2m1_to_f32(code) * scale); }

}  // namespace mla

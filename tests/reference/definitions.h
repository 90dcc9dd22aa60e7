// SPDX-License-Identifier: Apache-2.0
// Defines the quantized types as their specification words them, in doubles: mla/numeric.h and the packers are compared
// with this.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace mla::reference {

/// Returns the value of a code with 1 sign bit, 4 exponent bits of bias 7 and 3 mantissa bits; there is no infinity,
/// and NaN, which is all ones, is left to the caller.
inline double e4m3_by_definition(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code < 128 ? magnitude : -magnitude;
}

/// Returns the code of the nearest value, of two the even one; the largest for what lies beyond, NaN for NaN.
inline uint8_t encode_by_definition(float value) {
  static const auto values = [] {
    std::array<double, 127> of_codes = {};
    for (size_t code = 0; code < of_codes.size(); ++code) of_codes[code] = e4m3_by_definition(static_cast<int>(code));
    return of_codes;
  }();
  const int sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return static_cast<uint8_t>(sign | 127);
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
  if (above == values.end()) return static_cast<uint8_t>(sign | 126);
  auto code = static_cast<int>(above - values.begin());
  if (code > 0) {
    const double to_below = magnitude - *(above - 1), to_above = *above - magnitude;
    if (to_below < to_above || (to_below == to_above && code % 2 == 1)) --code;
  }
  return static_cast<uint8_t>(sign | code);
}

/// Returns 2^ceil(log2(max(amax, 1e-4) / 448)), exact.
inline double power_of_two_by_definition(float amax) {
  int exponent = 0;
  const double fraction = std::frexp(static_cast<double>(std::max(amax, 1e-4F)) / 448.0, &exponent);
  return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

/// Returns 2^ceil(log2(max(amax / 448, 1e-4))), as V4.1 has it.
inline double v41_scale_by_definition(float amax) {
  int exponent = 0;
  const double fraction = std::frexp(std::max(static_cast<double>(amax) / 448.0, 1e-4), &exponent);
  return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

inline constexpr double kE2M1ByDefinition[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

inline double e2m1_by_definition(int code) { return kE2M1ByDefinition[code & 7] * (code < 8 ? 1 : -1); }

/// Returns the code of the nearest value of e2m1, of two the even one; the largest for what lies beyond, and for NaN.
inline uint8_t encode_e2m1_by_definition(float value) {
  if (std::isnan(value)) return 7;
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 6.0);
  int best = 0;
  for (int code = 1; code < 8; ++code) {
    const double off = std::fabs(magnitude - kE2M1ByDefinition[code]);
    const double best_off = std::fabs(magnitude - kE2M1ByDefinition[best]);
    if (off < best_off || (off == best_off && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 8 : 0));
}

}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
// Tests e4m3 and UE8M0, code by code, against their definitions in doubles; and the scales that writers choose.
#include "mla/numeric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "definitions.h"

namespace mla {
namespace {

using reference::e4m3_by_definition;
using reference::power_of_two_by_definition;

/// Returns the nearest multiple of the spacing at |value|, ties to even (the default rounding mode), at most 448.
double nearest_e4m3(double value) {
  const int exponent = value == 0 ? -6 : std::max(std::ilogb(value), -6);
  const double spacing = std::ldexp(1, exponent - 3);
  return std::clamp(std::nearbyint(value / spacing) * spacing, -448.0, 448.0);
}

TEST(E4M3, EveryCodeDecodesByDefinition) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    if ((code & 127) == 127) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(static_cast<double>(value), e4m3_by_definition(code)) << code;
    }
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
  }
  EXPECT_EQ(e4m3_to_f32(0x7E), kE4M3Max);
}

TEST(E4M3, EveryCodeSurvivesARoundTrip) {
  for (int code = 0; code < 256; ++code) EXPECT_EQ(f32_to_e4m3(e4m3_to_f32(static_cast<uint8_t>(code))), code);
}

TEST(E4M3, RoundsToTheNearestAndTiesToEven) {
  for (uint8_t code = 0; code < 0x7E; ++code) {
    const float low = e4m3_to_f32(code), high = e4m3_to_f32(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;  // exact
    EXPECT_EQ(f32_to_e4m3(middle), code % 2 == 0 ? code : code + 1) << int{code};
    EXPECT_EQ(f32_to_e4m3(std::nextafter(middle, 0.0F)), code) << int{code};
    EXPECT_EQ(f32_to_e4m3(std::nextafter(middle, INFINITY)), code + 1) << int{code};
    EXPECT_EQ(f32_to_e4m3(-middle), f32_to_e4m3(middle) | 0x80) << int{code};
  }
}

TEST(E4M3, EveryUpperHalfOfAFloatRoundsAsTheDefinition) {
  // All signs, exponents and leading mantissa bits, with tails that lie on, just above and just below what they round.
  for (uint32_t upper = 0; upper <= 0xFFFF; ++upper)
    for (uint32_t tail : {0x0000U, 0x0001U, 0x8000U, 0xFFFFU}) {
      const float value = std::bit_cast<float>((upper << 16) | tail);
      if (!std::isfinite(value)) continue;
      const float rounded = e4m3_to_f32(f32_to_e4m3(value));
      ASSERT_EQ(static_cast<double>(rounded), nearest_e4m3(static_cast<double>(value))) << value;
      ASSERT_EQ(std::signbit(rounded), std::signbit(value)) << value;
    }
}

TEST(E4M3, SaturatesAndKeepsNan) {
  for (float value : {448.0F, 464.0F, 465.0F, 480.0F, 1e30F, std::numeric_limits<float>::max(), INFINITY}) {
    EXPECT_EQ(f32_to_e4m3(value), 0x7E) << value;
    EXPECT_EQ(f32_to_e4m3(-value), 0xFE) << value;
  }
  EXPECT_EQ(f32_to_e4m3(NAN), 0x7F);
  EXPECT_EQ(f32_to_e4m3(-NAN), 0xFF);
  EXPECT_EQ(f32_to_e4m3(std::bit_cast<float>(0x7F800001U)), 0x7F);
}

TEST(E4M3, SmallValuesBecomeSubnormalOrZero) {
  EXPECT_EQ(f32_to_e4m3(0x1p-9F), 0x01);
  EXPECT_EQ(f32_to_e4m3(0x1p-10F), 0x00);  // a tie, to even
  EXPECT_EQ(f32_to_e4m3(std::nextafter(0x1p-10F, 1.0F)), 0x01);
  EXPECT_EQ(f32_to_e4m3(3 * 0x1p-10F), 0x02);
  EXPECT_EQ(f32_to_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
  EXPECT_EQ(f32_to_e4m3(-std::numeric_limits<float>::denorm_min()), 0x80);
  EXPECT_EQ(f32_to_e4m3(-0.0F), 0x80);
}

constexpr float kE2M1Values[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};

TEST(E2M1, EveryCodeDecodesByDefinitionAndAsE4M3) {
  for (uint8_t code = 0; code < 16; ++code) {
    const float value = code < 8 ? kE2M1Values[code] : -kE2M1Values[code - 8];
    EXPECT_EQ(e2m1_to_f32(code), value) << int{code};
    EXPECT_EQ(std::signbit(e2m1_to_f32(code)), code >= 8) << int{code};
    EXPECT_EQ(f32_to_e2m1(value), code == 8 ? 8 : code) << int{code};
    EXPECT_EQ(std::bit_cast<uint32_t>(e4m3_to_f32(e2m1_to_e4m3(code))), std::bit_cast<uint32_t>(e2m1_to_f32(code)));
  }
  EXPECT_EQ(e2m1_to_f32(7), kE2M1Max);
}

TEST(E2M1, RoundsToTheNearestAndTiesToEven) {
  for (uint8_t code = 0; code < 7; ++code) {
    const float middle = (kE2M1Values[code] + kE2M1Values[code + 1]) / 2;  // exact
    EXPECT_EQ(f32_to_e2m1(middle), code % 2 == 0 ? code : code + 1) << int{code};
    EXPECT_EQ(f32_to_e2m1(std::nextafter(middle, 0.0F)), code) << int{code};
    EXPECT_EQ(f32_to_e2m1(std::nextafter(middle, INFINITY)), code + 1) << int{code};
    EXPECT_EQ(f32_to_e2m1(-middle), f32_to_e2m1(middle) | 8) << int{code};
  }
}

TEST(E2M1, EveryUpperHalfOfAFloatRoundsToTheNearest) {
  for (uint32_t upper = 0; upper <= 0xFFFF; ++upper)
    for (uint32_t tail : {0x0000U, 0x0001U, 0xFFFFU}) {
      const float value = std::bit_cast<float>((upper << 16) | tail);
      const uint8_t code = f32_to_e2m1(value);
      if (std::isnan(value)) {
        ASSERT_EQ(code, 7) << upper;
        continue;
      }
      ASSERT_EQ(code >> 3, std::signbit(value)) << value;
      const float magnitude = std::min(std::abs(value), kE2M1Max), kept = kE2M1Values[code & 7];
      for (const float other : kE2M1Values) ASSERT_LE(std::abs(magnitude - kept), std::abs(magnitude - other)) << value;
    }
}

TEST(Scales, OfE2M1AreE4M3OfTheQuotientByTheOuterOne) {
  const auto chosen = [](float amax, float outer) {
    return choose_scale(DType::kE2M1, ScaleType::kE4M3, false, amax, outer);
  };
  EXPECT_EQ(chosen(6.0F, 1.0F), 1.0F);
  EXPECT_EQ(chosen(6.0F * 1.0625F, 1.0F), 1.0F);  // a tie, to even
  EXPECT_EQ(chosen(6.0F * 1.0626F, 1.0F), 1.125F);
  EXPECT_EQ(chosen(6.0F, 0.25F), 4.0F);
  EXPECT_EQ(chosen(0.0F, 1.0F), 0x1p-9F);
  EXPECT_EQ(chosen(1e-9F, 1.0F), 0x1p-9F);
  EXPECT_EQ(chosen(1e30F, 1.0F), 448.0F);
  EXPECT_EQ(chosen(1.0F, 0.0F), 448.0F);
  EXPECT_EQ(chosen(0.0F, 0.0F), 0x1p-9F);  // 0 / 0
}

TEST(UE8M0, EveryCodeIsItsPowerOfTwo) {
  EXPECT_EQ(ue8m0_to_f32(0), 0.0F);
  EXPECT_TRUE(std::isnan(ue8m0_to_f32(255)));
  for (int code = 1; code < 255; ++code) {
    const float value = ue8m0_to_f32(static_cast<uint8_t>(code));
    EXPECT_EQ(value, std::ldexp(1.0F, code - 127)) << code;
    EXPECT_EQ(f32_to_ue8m0(value), code);
  }
}

std::vector<float> many_amax() {
  std::vector<float> amax = {0, 1e-5F, kLeastAmax, std::nextafter(kLeastAmax, 1.0F), std::numeric_limits<float>::max()};
  for (int exponent = -149; exponent <= 127; ++exponent)
    for (float fraction : {1.0F, 1.75F, 1.5F}) {  // 1.75 = 448 / 256: where the power of two steps
      const float value = std::ldexp(fraction, exponent);
      amax.insert(amax.end(), {std::nextafter(value, 0.0F), value, std::nextafter(value, INFINITY)});
    }
  std::mt19937 random(5);
  std::uniform_real_distribution<float> exponents(-14, 20);
  for (int i = 0; i < 200000; ++i) amax.push_back(std::exp2(exponents(random)));
  return amax;
}

TEST(Scales, PowerOfTwoIsTheSmallestThatHoldsTheLargest) {
  for (float amax : many_amax()) {
    const float scale = e4m3_power_of_two_scale(amax);
    ASSERT_EQ(static_cast<double>(scale), power_of_two_by_definition(amax)) << amax;
    ASSERT_LE(static_cast<double>(amax) / static_cast<double>(scale), 448.0) << amax;
    ASSERT_EQ(ue8m0_to_f32(f32_to_ue8m0(scale)), scale) << amax;
  }
}

TEST(Scales, ArbitraryScaleIsTheFloatQuotient) {
  for (float amax : many_amax()) {
    const float scale = e4m3_scale(amax);
    const auto quotient = static_cast<float>(static_cast<double>(amax) / 448.0);
    ASSERT_EQ(scale, std::max(quotient, std::numeric_limits<float>::min())) << amax;
    if (quotient >= std::numeric_limits<float>::min()) {
      ASSERT_EQ(quantize_e4m3(amax, scale), 0x7E) << amax;
    }
  }
}

TEST(Scales, OfLogarithmsInDouble) {
  // The same in the words of the specification; the random values are far enough from powers of two for log2.
  std::mt19937 random(6);
  std::uniform_real_distribution<float> uniform(0.0F, 1000.0F);
  for (int i = 0; i < 100000; ++i) {
    const float amax = uniform(random);
    const double exponent = std::ceil(std::log2(std::max(static_cast<double>(amax), 1e-4) / 448.0));
    ASSERT_EQ(static_cast<double>(e4m3_power_of_two_scale(amax)), std::ldexp(1.0, static_cast<int>(exponent))) << amax;
  }
}

TEST(Quantize, DividesInFloatAndRoundsTheProductToBf16) {
  // A quotient a little below 19 becomes 19 in f32: a tie between 18 and 20, which goes to 20.
  const float scale = std::nextafter(1.0F, 2.0F), value = 19.0F * scale;
  EXPECT_LT(static_cast<double>(value) / static_cast<double>(scale), 19.0);
  EXPECT_EQ(quantize_e4m3(value, scale), f32_to_e4m3(20.0F));
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<uint8_t>(code);
    for (float s : {1.0F, 0x1p-20F, 0.1F, 3.0F}) {
      const uint16_t product = dequantize_e4m3(bits, s);
      if ((code & 127) == 127)
        EXPECT_TRUE(std::isnan(bf16_to_f32(product)));
      else
        EXPECT_EQ(product, f32_to_bf16(static_cast<float>(e4m3_by_definition(code)) * s)) << code << ' ' << s;
    }
  }
  EXPECT_TRUE(std::isnan(bf16_to_f32(dequantize_e4m3(0x38, ue8m0_to_f32(255)))));
  EXPECT_EQ(dequantize_e4m3(0x38, ue8m0_to_f32(0)), 0);
}

TEST(Quantize, WhatWasDequantizedComesBackUnderTheSameScale) {
  for (float scale : {1.0F, 0x1p-12F, 0.1F, 0.0123F, 7.7F})
    for (int code = 0; code < 256; ++code) {
      const auto bits = static_cast<uint8_t>(code);
      EXPECT_EQ(quantize_e4m3(bf16_to_f32(dequantize_e4m3(bits, scale)), scale), code) << scale;
    }
}

}  // namespace
}  // namespace mla

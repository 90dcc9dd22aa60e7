// SPDX-License-Identifier: Apache-2.0
// Tests functions on eight channels at a time against mla/numeric.h, one at a time.
#include "cuda/tile/channels.cuh"

#include <cmath>

#include "cuda/common/memory.h"

namespace mla::writers_test {
namespace {

/// Returns a number beside the middle between two neighbouring e4m3 values, where a quotient that is off by one bit
/// rounds elsewhere.
float near_tie(Random& random, float scale) {
  const auto code = static_cast<uint8_t>(random.integer(0, 125));
  const float middle =
      (e4m3_to_f32(code) + e4m3_to_f32(static_cast<uint8_t>(code + 1))) / 2 * (random.chance(2) ? scale : -scale);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(middle) + static_cast<uint32_t>(random.integer(-3, 3)));
}

TEST(Arithmetic, RoundsEveryStepByItself) {
  // 1 + 2^-12 squared is 1 + 2^-11 + 2^-24: the last term is lost in a product, and kept by a fused multiply-add.
  const float x = 1.0F + 0x1p-12F, rounded = 1.0F + 0x1p-11F;
  EXPECT_EQ(ptx::mul_rn(x, x), rounded);
  EXPECT_EQ(ptx::add_rn(ptx::mul_rn(x, x), -rounded), 0.0F);
  EXPECT_EQ(ptx::fma_rn(x, x, -rounded), 0x1p-24F);
  EXPECT_EQ(ptx::mul_rn(0x1p-100F, 0x1p-40F), 0x1p-140F);  // denormals stay
  EXPECT_EQ(ptx::add_rn(0x1p-126F, -0x1.8p-126F), -0x1p-127F);
}

TEST(Arithmetic, PacksE4M3) {
  Random random(2);
  for (int trial = 0; trial < 10000; ++trial) {
    const float low = random.value() * 100.0F, high = random.value();
    const uint32_t pair = ptx::pack_e4m3x2(low, high);
    const uint32_t unsigned_nan = low != low ? 0x7FU : 0xFFU;  // its sign is left open
    EXPECT_EQ(pair & unsigned_nan, f32_to_e4m3(low) & unsigned_nan) << low;
    EXPECT_EQ(pair >> 8 & 0x7FU, f32_to_e4m3(high) & 0x7FU) << high;
  }
}

TEST(Channels, QuantizeAsDivisionDoes) {
  Random random(3);
  for (int trial = 0; trial < 300000; ++trial) {
    float scale = random.chance(2) ? std::ldexp(1.0F, random.integer(-22, 10))
                                   : std::ldexp(1.0F + std::ldexp(static_cast<float>(random.bits() >> 9), -23),
                                                random.chance(20) ? random.integer(-126, 127) : random.integer(-24, 8));
    float values[kVector];
    for (float& value : values) value = random.chance(3) ? near_tie(random, scale) : random.value();
    if (random.chance(10)) values[0] = std::bit_cast<float>(random.bits());
    const Bits8 codes = quantize8(values, ScaleDivisor(scale));
    for (int i = 0; i < kVector; ++i)
      ASSERT_EQ(byte_of(codes, i), quantize_e4m3(values[i], scale)) << values[i] << " / " << scale;
  }
}

// Every bf16 that is not negative, in both halves, infinity included.
TEST(Channels, RoundBf16ToE2M1) {
  for (uint32_t low = 0; low <= 0x7F80U; ++low) {
    const uint32_t high = 0x7F80U - low, codes = bf16x2_to_e2m1(high << 16 | low);
    ASSERT_EQ(codes & 0xFFFFU, f32_to_e2m1(bf16_to_f32(static_cast<uint16_t>(low)))) << low;
    ASSERT_EQ(codes >> 16, f32_to_e2m1(bf16_to_f32(static_cast<uint16_t>(high)))) << high;
  }
}

// Every scale that is not NaN, every code in every place.
TEST(Channels, ConvertE2M1TimesItsScale) {
  for (int code = 0; code < 256; ++code) {
    for (const float scale : {e4m3_to_f32(static_cast<uint8_t>(code)), ue8m0_to_f32(static_cast<uint8_t>(code))}) {
      if (std::isnan(scale)) continue;
      const uint32_t bits = f32_to_bf16(scale);
      for (const uint32_t codes : {0x76543210U, 0xFEDCBA98U, 0x89ABCDEFU, 0x01234567U}) {
        const ptx::Vec4 values = e2m1x8_to_bf16(codes, bits << 16 | bits);
        for (int i = 0; i < kVector; ++i)
          ASSERT_EQ(static_cast<uint16_t>(values.x[i / 2] >> (16 * (i % 2))),
                    dequantize_e2m1(static_cast<uint8_t>(codes >> (4 * i) & 0xFU), scale))
              << scale << " " << codes << " " << i;
      }
    }
  }
}

TEST(Channels, DequantizeEveryCode) {
  Random random(4);
  for (int trial = 0; trial < 2000; ++trial) {
    // Never NaN: of two, compilers may pass on either.
    const float scale = random.chance(2) ? ue8m0_to_f32(static_cast<uint8_t>(random.integer(0, 254)))
                                         : std::fabs(std::bit_cast<float>(random.bits() & 0xBFFFFFFFU));
    for (uint32_t first = 0; first < 256; first += kVector) {
      const Bits8 codes = {{first * 0x01010101U + 0x03020100U, first * 0x01010101U + 0x07060504U}};
      const Bits8 bits = dequantize8(codes, scale);
      for (int i = 0; i < kVector; ++i)
        ASSERT_EQ(half_of(bits, i), dequantize_e4m3(byte_of(codes, i), scale)) << first + i << " * " << scale;
    }
  }
}

TEST(Channels, DecodeEveryElement) {
  for (uint32_t first = 0; first < 0x10000; first += kVector) {
    Bits8 halves = {}, bytes = {};
    for (uint32_t i = 0; i < kVector; ++i) {
      halves.w[i / 2] |= (first + i) << (16 * (i % 2));
      bytes.w[i / 4] |= ((first + i) & 0xFFU) << (8 * (i % 4));
    }
    float bf16[kVector], f16[kVector], e4m3[kVector];
    decode8(halves, DType::kBF16, bf16);
    decode8(halves, DType::kF16, f16);
    decode8(bytes, DType::kE4M3, e4m3);
    for (int i = 0; i < kVector; ++i) {
      const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
      const auto half = static_cast<uint16_t>(first + static_cast<uint32_t>(i));
      ASSERT_EQ(bits(bf16[i]), bits(bf16_to_f32(half)));
      ASSERT_EQ(bits(f16[i]), bits(f16_to_f32(half))) << half;
      ASSERT_EQ(bits(e4m3[i]), bits(e4m3_to_f32(static_cast<uint8_t>(half)))) << half;
    }
  }
}

TEST(Channels, EncodeAsOneByOne) {
  Random random(5);
  for (int trial = 0; trial < 100000; ++trial) {
    float values[kVector];
    for (float& value : values) value = random.chance(3) ? std::bit_cast<float>(random.bits()) : random.value();
    const Bits8 bf16 = encode8(values, DType::kBF16), f16 = encode8(values, DType::kF16);
    for (int i = 0; i < kVector; ++i) {
      ASSERT_EQ(half_of(bf16, i), f32_to_bf16(values[i])) << values[i];
      ASSERT_EQ(half_of(f16, i), f32_to_f16(values[i])) << values[i];
    }
  }
}

}  // namespace
}  // namespace mla::writers_test

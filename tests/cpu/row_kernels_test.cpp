// SPDX-License-Identifier: Apache-2.0
// Tests row kernels of every instruction set this machine has, against the scalar functions of numeric.h, bit for bit.
#include "cpu/row_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/level_test.h"
#include "mla/backend.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class RowKernelsTest : public LevelTest {
 protected:
  void SetUp() override {
    LevelTest::SetUp();
    kernels_ = set_.rows;
  }

  void dequantize(const uint8_t* codes, float scale, int64_t n, void* dst, DType dtype) const {
    kernels_->dequantize({.element = DType::kE4M3,
                          .elements = codes,
                          .scales = &scale,
                          .num_groups = 1,
                          .group = static_cast<int32_t>(n)},
                         dst, dtype);
  }
  float finite_amax(const void* src, DType dtype, int32_t n) const {
    float amax = -1.0F;
    kernels_->finite_amaxes(src, dtype, 1, n, &amax);
    return amax;
  }

  const RowKernels* kernels_ = nullptr;
  std::mt19937 random_{1};
};

std::vector<uint8_t> all_codes() {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  return codes;
}

/// Returns every UE8M0 scale, scales of many magnitudes, extremes, and what only garbage in a cache can be.
std::vector<float> many_scales() {
  std::vector<float> scales;
  for (int code = 0; code < 256; ++code) scales.push_back(ue8m0_to_f32(static_cast<uint8_t>(code)));
  std::mt19937 random(2);
  std::uniform_int_distribution<uint32_t> bits(1, 0xFFFFFFFF);
  for (int i = 0; i < 4000; ++i) scales.push_back(std::bit_cast<float>(bits(random)));
  std::uniform_real_distribution<float> amax(0.0F, 1000.0F);
  for (int i = 0; i < 2000; ++i) scales.push_back(e4m3_scale(amax(random)));
  return scales;
}

TEST_P(RowKernelsTest, DequantizesEveryCodeWithManyScales) {
  const std::vector<uint8_t> codes = all_codes();
  std::vector<uint16_t> values(codes.size());
  for (float scale : many_scales()) {
    dequantize(codes.data(), scale, 256, values.data(), DType::kBF16);
    for (size_t i = 0; i < codes.size(); ++i)
      ASSERT_EQ(canonical(values[i]), canonical(dequantize_e4m3(codes[i], scale)))
          << "code " << i << " scale " << scale;
  }
}

TEST_P(RowKernelsTest, DequantizesIntoWiderTypes) {
  const std::vector<uint8_t> codes = all_codes();
  std::vector<float> f32(codes.size());
  std::vector<uint16_t> f16(codes.size());
  for (float scale : {1.0F, 0.37F, 1e-3F}) {
    dequantize(codes.data(), scale, 256, f32.data(), DType::kF32);
    dequantize(codes.data(), scale, 256, f16.data(), DType::kF16);
    for (size_t i = 0; i < codes.size(); ++i) {
      const float expected = bf16_to_f32(dequantize_e4m3(codes[i], scale));
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(f32[i]) && std::isnan(f16_to_f32(f16[i])));
        continue;
      }
      EXPECT_EQ(std::bit_cast<uint32_t>(f32[i]), std::bit_cast<uint32_t>(expected));
      EXPECT_EQ(f16[i], f32_to_f16(expected));
    }
  }
}

TEST_P(RowKernelsTest, ReadsAndWritesRowsOfAnyWidthAndNotPast) {
  const std::vector<uint8_t> codes = all_codes();
  for (int64_t n = 0; n < 100; ++n)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      std::vector<uint8_t> source(codes.begin() + 8, codes.begin() + 8 + n);  // no slack behind
      const size_t size = size_of(dtype);
      std::vector<uint8_t> out(static_cast<size_t>(n) * size + 8, 0xAB);
      dequantize(source.data(), 0.5F, n, out.data(), dtype);
      for (size_t i = static_cast<size_t>(n) * size; i < out.size(); ++i) ASSERT_EQ(out[i], 0xAB);
      std::vector<uint8_t> back(static_cast<size_t>(n) + 8, 0xAB);
      const std::vector<uint8_t> values(out.begin(), out.end() - 8);
      kernels_->quantize(values.data(), dtype, 0.5F, n, back.data());
      ASSERT_TRUE(std::equal(source.begin(), source.end(), back.begin())) << n << " " << name(dtype);
      for (size_t i = static_cast<size_t>(n); i < back.size(); ++i) ASSERT_EQ(back[i], 0xAB);
    }
}

TEST_P(RowKernelsTest, QuantizesEveryBF16) {
  std::vector<uint16_t> values(65536);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
  std::vector<uint8_t> codes(values.size());
  std::vector<float> scales = many_scales();
  for (size_t s = 1; s < scales.size(); s += s < 255 ? 1 : 31) {  // scales are above 0
    if (!(scales[s] > 0.0F && scales[s] < kInfinity)) continue;
    kernels_->quantize(values.data(), DType::kBF16, scales[s], 65536, codes.data());
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(codes[i], quantize_e4m3(bf16_to_f32(values[i]), scales[s])) << "bf16 " << i << " scale " << scales[s];
  }
}

TEST_P(RowKernelsTest, RoundsF32AroundEveryTie) {
  std::vector<float> values;
  for (int code = 0; code < 0x7E; ++code) {
    const float low = e4m3_to_f32(static_cast<uint8_t>(code));
    const float high = e4m3_to_f32(static_cast<uint8_t>(code + 1));
    for (float x : {low, (low + high) / 2, high})
      for (float y : {std::nextafter(x, 0.0F), x, std::nextafter(x, kInfinity)}) {
        values.push_back(y);
        values.push_back(-y);
      }
  }
  for (float x : {448.0F, 463.9F, 464.0F, 464.1F, 479.0F, 480.0F, 1e30F, kInfinity, std::nanf("")}) {
    values.push_back(x);
    values.push_back(-x);
  }
  std::vector<uint8_t> codes(values.size());
  kernels_->quantize(values.data(), DType::kF32, 1.0F, static_cast<int64_t>(values.size()), codes.data());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(codes[i], f32_to_e4m3(values[i])) << values[i];
}

TEST_P(RowKernelsTest, FindsTheLargestFiniteMagnitude) {
  std::normal_distribution<float> normal(0.0F, 3.0F);
  for (int64_t n : {1, 7, 64, 100, 128}) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = bf16_to_f32(f32_to_bf16(normal(random_)));
    if (n > 7) {
      values[3] = -kInfinity;
      values[5] = std::nanf("");
      values.back() = -17.5F;
    }
    float expected = 0.0F;
    for (float value : values)
      if (std::isfinite(value)) expected = std::max(expected, std::fabs(value));
    EXPECT_EQ(finite_amax(values.data(), DType::kF32, n), expected);
    std::vector<uint16_t> halves(values.size());
    std::transform(values.begin(), values.end(), halves.begin(), f32_to_bf16);
    EXPECT_EQ(finite_amax(halves.data(), DType::kBF16, n), expected);
  }
  const std::vector<float> none = {kInfinity, std::nanf("")};
  EXPECT_EQ(finite_amax(none.data(), DType::kF32, 2), 0.0F);
}

#if defined(__x86_64__)
TEST_P(RowKernelsTest, CodesDoNotDependOnHowTheProcessorTakesSubnormals) {
  const std::vector<uint8_t> codes = all_codes();
  std::vector<uint16_t> values(65536);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
  std::vector<uint16_t> bf16[2];
  std::vector<uint8_t> quantized[2];
  for (size_t flush = 0; flush < 2; ++flush)
    for (float scale : {1.0F, 0.3F, 0x1p-100F, 1e30F}) {
      bf16[flush].resize(bf16[flush].size() + codes.size());
      quantized[flush].resize(quantized[flush].size() + values.size());
      const unsigned mode = __builtin_ia32_stmxcsr();
      if (flush == 1) __builtin_ia32_ldmxcsr(mode | 0x8040U);  // flush to zero, subnormals are zeros
      dequantize(codes.data(), scale, 256, &bf16[flush].back() - 255, DType::kBF16);
      kernels_->quantize(values.data(), DType::kBF16, scale, 65536, &quantized[flush].back() - 65535);
      __builtin_ia32_ldmxcsr(mode);
    }
  EXPECT_EQ(bf16[0], bf16[1]);
  EXPECT_EQ(quantized[0], quantized[1]);
}
#endif

TEST_P(RowKernelsTest, QuantizesGroupsWithScalesOfTheirOwn) {
  std::normal_distribution<float> normal(0.0F, 1.0F);
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (int32_t group : {32, 64, 128, 37, 1})
      for (bool power_of_two : {false, true})
        for (float spread : {1e-6F, 1.0F, 300.0F}) {
          constexpr int32_t kGroups = 6;
          const auto n = static_cast<size_t>(group) * kGroups;
          std::vector<float> values(n);
          for (size_t i = 0; i < n; ++i)
            values[i] = i / static_cast<size_t>(group) == 1
                            ? 0.0F
                            : std::ldexp(normal(random_) * spread, static_cast<int>(i / static_cast<size_t>(group)));
          if (group > 30) {
            values[2] = kInfinity;
            values[5] = -std::nanf("");
            values[n - 1] = -kInfinity;
          }
          std::vector<std::byte> stored(n * size_of(dtype));
          for (size_t i = 0; i < n; ++i) {
            const uint16_t half = dtype == DType::kBF16 ? f32_to_bf16(values[i]) : f32_to_f16(values[i]);
            if (dtype != DType::kF32) values[i] = dtype == DType::kBF16 ? bf16_to_f32(half) : f16_to_f32(half);
            const void* from = dtype == DType::kF32 ? static_cast<const void*>(&values[i]) : &half;
            std::memcpy(stored.data() + i * size_of(dtype), from, size_of(dtype));
          }
          std::vector<uint8_t> codes(n);
          float scales[kGroups];
          kernels_->quantize_groups(stored.data(), dtype, kGroups, group, power_of_two, 0.0F, scales, codes.data());
          for (size_t g = 0; g < kGroups; ++g) {
            float amax = 0.0F;
            for (size_t i = g * static_cast<size_t>(group); i < (g + 1) * static_cast<size_t>(group); ++i)
              if (std::isfinite(values[i])) amax = std::max(amax, std::fabs(values[i]));
            ASSERT_EQ(scales[g], power_of_two ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax));
          }
          for (size_t i = 0; i < n; ++i)
            ASSERT_EQ(codes[i], quantize_e4m3(values[i], scales[i / static_cast<size_t>(group)])) << values[i];
        }
}

/// The largest finite magnitude of a group is every bf16 in turn; infinities beside it saturate all the same.
TEST_P(RowKernelsTest, ChoosesTheScaleOfEveryBF16) {
  std::vector<uint16_t> values(64);
  std::vector<uint8_t> codes(64);
  for (uint16_t bits = 0; bits < 0x7F80; ++bits) {
    values[bits % 64] = bits;
    for (bool power_of_two : {false, true}) {
      float scale = 0.0F;
      kernels_->quantize_groups(values.data(), DType::kBF16, 1, 64, power_of_two, 0.0F, &scale, codes.data());
      const float amax = bf16_to_f32(bits);
      ASSERT_EQ(scale, power_of_two ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax)) << bits;
      ASSERT_EQ(codes[bits % 64], quantize_e4m3(amax, scale));
      const float least = 0x1p-13F;  // of fp8_dsv41
      kernels_->quantize_groups(values.data(), DType::kBF16, 1, 64, power_of_two, least, &scale, codes.data());
      ASSERT_EQ(scale, std::max(least, power_of_two ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax))) << bits;
      ASSERT_EQ(codes[bits % 64], quantize_e4m3(amax, scale));
      const uint16_t kept = std::exchange(values[(bits + 1) % 64], uint16_t{0xFF80});
      kernels_->quantize_groups(values.data(), DType::kBF16, 1, 64, power_of_two, 0.0F, &scale, codes.data());
      ASSERT_EQ(codes[(bits + 1) % 64], 0xFE) << bits;
      values[(bits + 1) % 64] = kept;
    }
    values[bits % 64] = 0;
  }
}

MLA_FOR_EVERY_LEVEL(RowKernelsTest);

}  // namespace
}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Rows of e4m3 and e2m1 in groups, each with a scale: every instruction set against the scalar functions of numeric.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cpu/level_test.h"
#include "cpu/quantized_row.h"
#include "mla/kv_layout.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

class QuantizedRowsTest : public LevelTest {};

uint16_t expected_value(const QuantizedRow& row, int32_t i) {
  const auto* bytes = static_cast<const uint8_t*>(row.elements);
  const float scale = row.scales[i / row.group];
  if (row.element == DType::kE4M3) return dequantize_e4m3(bytes[i], scale);
  return dequantize_e2m1(static_cast<uint8_t>(bytes[i / 2] >> (i % 2 * 4) & 0xF), scale);
}

/// Returns scales of one kind: what caches have, powers of two, extremes, garbage, or all of them mixed.
std::vector<float> scales_of_kind(int kind, int32_t n, std::mt19937& random) {
  std::uniform_int_distribution<uint32_t> bits;
  std::vector<float> scales;
  for (int32_t i = 0; i < n; ++i) {
    const uint32_t any = bits(random);
    switch (kind == 5 ? static_cast<int>(any % 5) : kind) {
      case 0: scales.push_back(e4m3_to_f32(static_cast<uint8_t>(1 + any % 126))); break;
      case 1: scales.push_back(std::ldexp(1.0F, static_cast<int>(any % 60) - 40)); break;
      case 2: scales.push_back(std::ldexp(1.0F, static_cast<int>(any % 254) - 126)); break;
      case 3: scales.push_back(std::bit_cast<float>(any)); break;
      default: scales.push_back(any % 2 == 0 ? 0.0F : 3e38F);
    }
  }
  return scales;
}

TEST_P(QuantizedRowsTest, EveryElementIsMultipliedByTheScaleOfItsGroup) {
  std::mt19937 random(1);
  for (DType element : {DType::kE4M3, DType::kE2M1})
    for (int32_t group : {2, 16, 32, 48, 64, 128, 512})
      for (int32_t groups : {1, 2, 7, 16, 28, 32})
        for (int kind = 0; kind < 6; ++kind) {
          if (element == DType::kE2M1 && group > kMostE2M1Group) continue;
          const int32_t n = groups * group;
          std::vector<uint8_t> elements(static_cast<size_t>(bytes_of(element, n)));  // no slack behind
          for (uint8_t& byte : elements) byte = static_cast<uint8_t>(random());
          const std::vector<float> scales = scales_of_kind(kind, groups, random);
          const QuantizedRow row{.element = element,
                                 .elements = elements.data(),
                                 .scales = scales.data(),
                                 .num_groups = groups,
                                 .group = group};
          std::vector<uint16_t> decoded(static_cast<size_t>(n) + 8, 0xABCD), dequantized = decoded;
          std::vector<float> wide(decoded.size(), 7.0F);
          set_.pick(DType::kBF16, DType::kBF16).decode_row(row, decoded.data());
          set_.rows->dequantize(row, dequantized.data(), DType::kBF16);
          set_.rows->dequantize(row, wide.data(), DType::kF32);
          for (int32_t i = 0; i < n; ++i) {
            const auto at = static_cast<size_t>(i);
            const uint16_t expected = canonical(expected_value(row, i));
            ASSERT_EQ(canonical(decoded[at]), expected)
                << name(element) << " group " << group << " scale " << scales[at / static_cast<size_t>(group)];
            ASSERT_EQ(canonical(dequantized[at]), expected);
            ASSERT_EQ(canonical(f32_to_bf16(wide[at])), expected);
          }
          for (auto i = static_cast<size_t>(n); i < decoded.size(); ++i) {
            ASSERT_EQ(decoded[i], 0xABCD);
            ASSERT_EQ(dequantized[i], 0xABCD);
            ASSERT_EQ(wide[i], 7.0F);
          }
        }
}

TEST_P(QuantizedRowsTest, QuantizesEveryBF16ToE2M1) {
  std::vector<uint16_t> values(65536);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
  std::mt19937 random(2);
  for (int32_t group : {16, 32, 64}) {
    const auto groups = static_cast<int32_t>(values.size()) / group;
    for (int kind : {0, 1, 2}) {
      const std::vector<float> scales = scales_of_kind(kind, groups, random);
      std::vector<uint8_t> e2m1(values.size() / 2);
      set_.rows->quantize_e2m1(values.data(), DType::kBF16, groups, group, scales.data(), e2m1.data());
      for (size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(e2m1[i / 2] >> (i % 2 * 4) & 0xF,
                  quantize_e2m1(bf16_to_f32(values[i]), scales[i / static_cast<size_t>(group)]))
            << "bf16 " << i << " scale " << scales[i / static_cast<size_t>(group)];
    }
  }
}

TEST_P(QuantizedRowsTest, RoundsF32ToE2M1AroundEveryTie) {
  std::vector<float> values;
  for (uint8_t code = 0; code < 7; ++code) {
    const float low = e2m1_to_f32(code), high = e2m1_to_f32(static_cast<uint8_t>(code + 1));
    for (float x : {low, (low + high) / 2, high, 7.0F, std::numeric_limits<float>::infinity(), std::nanf("")})
      for (float y : {std::nextafter(x, 0.0F), x, std::nextafter(x, 100.0F)}) {
        values.push_back(y);
        values.push_back(-y);
      }
  }
  const float one = 1.0F;
  for (size_t first = 0; first + 10 <= values.size(); first += 10) {  // 10: a width of no vector
    uint8_t e2m1[6] = {0, 0, 0, 0, 0, 0xAB};
    set_.rows->quantize_e2m1(values.data() + first, DType::kF32, 1, 10, &one, e2m1);
    for (size_t i = 0; i < 10; ++i)
      EXPECT_EQ(e2m1[i / 2] >> (i % 2 * 4) & 0xF, f32_to_e2m1(values[first + i])) << values[first + i];
    EXPECT_EQ(e2m1[5], 0xAB);
  }
}

MLA_FOR_EVERY_LEVEL(QuantizedRowsTest);

}  // namespace
}  // namespace mla::cpu

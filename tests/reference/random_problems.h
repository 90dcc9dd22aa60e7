// SPDX-License-Identifier: Apache-2.0
// Makes random tensors of every type and random options, with what the textbook makes of them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "definitions.h"
#include "problems.h"

namespace mla::reference {

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int32_t integer(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(engine_); }
  float normal() { return normal_(engine_); }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[integer(0, static_cast<int32_t>(choices.size()) - 1)];
  }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

/// Holds [rows, width] of any float type, e4m3 without its scale; and a row more, so that there is memory even for
/// none.
struct Tensor {
  DType dtype;
  int64_t width;
  std::vector<uint8_t> bytes;

  Tensor(DType type, int64_t rows, int64_t row_width)
      : dtype(type), width(row_width), bytes(static_cast<size_t>((rows + 1) * row_width) * size_of(type), 0x7F) {}

  void fill(Random& random, float size) {
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size() / size_of(dtype)); ++i) {
      const float value = size * random.normal();
      uint8_t* at = bytes.data() + i * static_cast<int64_t>(size_of(dtype));
      const uint16_t narrow = dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
      if (dtype == DType::kF32)
        std::memcpy(at, &value, 4);
      else if (dtype == DType::kE4M3)
        *at = encode_by_definition(value);
      else
        std::memcpy(at, &narrow, 2);
    }
  }
  double at(int64_t row, int64_t c) const {
    const uint8_t* p = bytes.data() + (row * width + c) * static_cast<int64_t>(size_of(dtype));
    if (dtype == DType::kE4M3) return (*p & 127) == 127 ? std::nan("") : e4m3_by_definition(*p);
    float wide = 0;
    uint16_t narrow = 0;
    std::memcpy(&wide, p, dtype == DType::kF32 ? 4 : 0);
    std::memcpy(&narrow, p, dtype == DType::kF32 ? 0 : 2);
    if (dtype == DType::kBF16) wide = bf16_to_f32(narrow);
    if (dtype == DType::kF16) wide = f16_to_f32(narrow);
    return static_cast<double>(wide);
  }
};

/// Returns by how much rounding to a type of outputs may change a value: half a unit in the last place, and a little
/// more.
inline double tolerance(DType dtype, double value) {
  const double relative = dtype == DType::kF32    ? 0x1p-23
                          : dtype == DType::kF16  ? 0x1p-10
                          : dtype == DType::kBF16 ? 0x1p-7
                                                  : 0x1p-3;
  const double least = dtype == DType::kE4M3 ? 0x1p-9 : dtype == DType::kF16 ? 0x1p-24 : 1e-12;
  return 0.51 * relative * std::fabs(value) + least;
}

struct Options {
  std::vector<float> sinks, slopes;
  core::Options args;

  Options(Random& random, int32_t heads) {
    for (int32_t h = 0; h < heads; ++h) {
      sinks.push_back(random.normal() * 3);
      slopes.push_back(0.1F * random.normal());
    }
    args.attn_sink = random.of({true, false}) ? sinks.data() : nullptr;
    args.alibi_slopes = random.of({true, false}) ? slopes.data() : nullptr;
    args.window_left = random.of({-1, -1, 0, 1, 5, 1000});
    args.logits_soft_cap = random.of({0.0F, 0.0F, 1.5F, 30.0F});
  }
  double score(double scaled, int64_t h, int64_t key_position, int64_t query_position) const {
    const auto head = static_cast<size_t>(h);
    const auto cap = static_cast<double>(args.logits_soft_cap);
    if (cap > 0) scaled = cap * std::tanh(scaled / cap);
    if (args.alibi_slopes != nullptr)
      scaled += static_cast<double>(slopes[head]) * static_cast<double>(key_position - query_position);
    return scaled;
  }
  double sink(int64_t h) const {
    const auto head = static_cast<size_t>(h);
    return args.attn_sink == nullptr ? -std::numeric_limits<double>::infinity() : static_cast<double>(sinks[head]);
  }
};

inline void check_lse(float lse, const Expected& expected) {
  if (expected.weights.empty())
    EXPECT_EQ(lse, kMinusInfinity);
  else
    EXPECT_NEAR(lse, expected.lse, 1e-6 * (1 + std::fabs(expected.lse)));
}

}  // namespace mla::reference

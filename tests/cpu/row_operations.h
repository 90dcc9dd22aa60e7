// SPDX-License-Identifier: Apache-2.0
// Holds what the tests of row operations share: every instruction set this machine has, and random rows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/level_test.h"
#include "cpu/operations.h"
#include "mla/backend.h"
#include "mla/numeric.h"
#include "reference/reference.h"

namespace mla::cpu {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

class RowOperationsTest : public LevelTest {
 protected:
  /// Returns numbers of many magnitudes; with `special` also zeros, infinities and NaN.
  std::vector<std::byte> random_rows(int64_t count, DType dtype, bool special) {
    std::normal_distribution<float> normal(0.0F, 1.0F);
    std::vector<std::byte> stored(static_cast<size_t>(count) * size_of(dtype));
    for (int64_t i = 0; i < count; ++i) {
      float value = normal(random_) * std::exp2(std::floor(normal(random_) * 3.0F));
      if (special && i % 97 == 13) value = kInfinity;
      if (special && i % 89 == 7) value = -kInfinity;
      if (special && i % 83 == 5) value = std::nanf("");
      if (special && i % 7 == 3) value = 0.0F;
      store(value, dtype, i, stored.data());
    }
    return stored;
  }

  static void store(float value, DType dtype, int64_t i, std::byte* to) {
    const uint16_t half = dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
    const uint8_t code = f32_to_e4m3(value);
    const void* from = &half;
    if (dtype == DType::kF32) from = &value;
    if (dtype == DType::kE4M3) from = &code;
    std::memcpy(to + i * static_cast<int64_t>(size_of(dtype)), from, size_of(dtype));
  }

  /// Returns the slots of a cache, in no order, every fifth one -1.
  std::vector<int64_t> random_slots(int64_t num_slots) {
    std::vector<int64_t> slots(static_cast<size_t>(num_slots));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    for (size_t i = 0; i < slots.size(); i += 5) slots[i] = -1;
    return slots;
  }

  core::ThreadPool pool_{2, {}};
  std::mt19937 random_{1};
};

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Holds what the tests of row operations share: every instruction set this machine has, and random rows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
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
    std::vector<std::byte> stored(static_cast<size_t>(count) * size_of(dtype));
    for (int64_t i = 0; i < count; ++i) {
      float value = random_number();
      if (special && i % 97 == 13) value = kInfinity;
      if (special && i % 89 == 7) value = -kInfinity;
      if (special && i % 83 == 5) value = std::nanf("");
      if (special && i % 7 == 3) value = 0.0F;
      store(value, dtype, i, stored.data());
    }
    return stored;
  }

  /// Returns any number from 2^-15 to 2^8, of either sign; three in four are above 2^-7. It is put together of bits,
  /// because tests draw millions of them: logarithms of a normal distribution would take most of their time.
  float random_number() {
    const auto bits = static_cast<uint32_t>(random_());
    const bool is_small = (bits >> 29 & 3) == 0;
    const uint32_t exponent = 127 + (bits >> 23 & 7) - (bits >> 26 & 7) - (is_small ? 8 : 0);
    return std::bit_cast<float>((bits & 0x80000000U) | exponent << 23 | (bits & 0x7FFFFFU));
  }

  static void store(float value, DType dtype, int64_t i, std::byte* to) {
    const auto put = [&](auto element) {
      std::memcpy(to + i * static_cast<int64_t>(sizeof element), &element, sizeof element);
    };
    switch (dtype) {
      case DType::kBF16: return put(f32_to_bf16(value));
      case DType::kF16: return put(f32_to_f16(value));
      case DType::kE4M3: return put(f32_to_e4m3(value));
      default: return put(value);
    }
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

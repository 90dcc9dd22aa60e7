// SPDX-License-Identifier: Apache-2.0
#include "reference/scalar.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace mla::reference {
namespace {

uint16_t stored(double value, DType dtype) {
  std::vector<uint16_t> row(2);
  store_row(&value, dtype, 0, 1, row.data());
  return row[0];
}

double loaded(uint16_t bits, DType dtype) {
  const std::vector<uint16_t> row = {bits, 0};
  double value = 0;
  load_row(row.data(), dtype, 0, 1, &value);
  return value;
}

TEST(Scalar, EveryNarrowValueSurvivesLoadAndStore) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
      const double value = loaded(static_cast<uint16_t>(bits), dtype);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(loaded(stored(value, dtype), dtype))) << bits;
      } else {
        EXPECT_EQ(stored(value, dtype), bits);
      }
    }
  }
}

TEST(Scalar, StoresTheNearestOfTwoNeighbours) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
      const double low = loaded(static_cast<uint16_t>(bits), dtype),
                   high = loaded(static_cast<uint16_t>(bits + 1), dtype);
      const double middle = (low + high) / 2;
      const auto even = static_cast<uint16_t>(bits % 2 == 0 ? bits : bits + 1);
      ASSERT_EQ(stored(middle, dtype), even) << bits;
      ASSERT_EQ(stored(std::nextafter(middle, 0.0), dtype), bits) << bits;
      ASSERT_EQ(stored(std::nextafter(middle, 1e300), dtype), bits + 1) << bits;
      ASSERT_EQ(stored(-std::nextafter(middle, 1e300), dtype), (bits + 1) | 0x8000U) << bits;
    }
  }
}

TEST(Scalar, RoundsOnceNotTwice) {
  // Through f32 this is a tie (2^-40 is lost), and the tie goes down to 1.
  EXPECT_EQ(loaded(stored(1 + 0x1p-8 + 0x1p-40, DType::kBF16), DType::kBF16), 1 + 0x1p-7);
  EXPECT_EQ(loaded(stored(1 + 0x1p-11 + 0x1p-40, DType::kF16), DType::kF16), 1 + 0x1p-10);
}

TEST(Scalar, TooLargeValuesBecomeInfinite) {
  EXPECT_EQ(loaded(stored(1e39, DType::kBF16), DType::kBF16), std::numeric_limits<double>::infinity());
  EXPECT_EQ(loaded(stored(-1e300, DType::kBF16), DType::kBF16), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(loaded(stored(65520, DType::kF16), DType::kF16), std::numeric_limits<double>::infinity());
  EXPECT_EQ(loaded(stored(65519.99, DType::kF16), DType::kF16), 65504);
}

}  // namespace
}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
#include "cuda/tile/fast_divisor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace mla::cuda {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

void expect_quotients_of(int32_t divisor) {
  const FastDivisor prepared(divisor);
  ASSERT_EQ(prepared.value, divisor);
  std::vector<int64_t> dividends = {0, 1, kMax - 1, kMax};
  // Where quotients change, from the first such places to the last.
  for (const int64_t quotient : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{kMax} / divisor / 2,
                                 int64_t{kMax} / divisor - 1, int64_t{kMax} / divisor})
    for (const int64_t behind : {-1, 0, 1}) dividends.push_back(quotient * divisor + behind);
  for (const int64_t dividend : dividends) {
    if (dividend < 0 || dividend > kMax) continue;
    ASSERT_EQ(prepared.divide(static_cast<int32_t>(dividend)), dividend / divisor) << dividend << " / " << divisor;
  }
}

TEST(FastDivisor, DividesAsTheProcessorDoes) {
  for (int32_t divisor = 1; divisor <= 5000; ++divisor) expect_quotients_of(divisor);
  for (int bit = 0; bit < 31; ++bit)
    for (const int64_t divisor : {(int64_t{1} << bit) - 1, int64_t{1} << bit, (int64_t{1} << bit) + 1})
      if (divisor >= 1) expect_quotients_of(static_cast<int32_t>(divisor));
  for (const int32_t divisor : {kMax - 1, kMax}) expect_quotients_of(divisor);
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    const auto divisor = static_cast<int32_t>((random() >> 1) >> random() % 31);
    if (divisor >= 1) expect_quotients_of(divisor);
  }
}

TEST(FastDivisor, CountsAsOneWhereThereIsNothingToDivideBy) {
  for (const int32_t divisor : {0, -1, std::numeric_limits<int32_t>::min()}) {
    EXPECT_EQ(FastDivisor(divisor).value, 1);
    EXPECT_EQ(FastDivisor(divisor).divide(kMax), kMax);
  }
  EXPECT_EQ(FastDivisor().divide(kMax), kMax);
}

}  // namespace
}  // namespace mla::cuda

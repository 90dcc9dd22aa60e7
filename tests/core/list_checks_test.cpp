// SPDX-License-Identifier: Apache-2.0
#include "core/list_checks.h"

#include <gtest/gtest.h>

#include <climits>
#include <random>
#include <vector>

namespace mla::core {
namespace {

TEST(AllBelow, AgreesWithTheDefinitionAtTheEdges) {
  for (int64_t limit :
       {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{INT_MAX}, int64_t{INT_MAX} + 1, int64_t{INT_MAX} * 4})
    for (int32_t value : {INT_MIN, INT_MIN + 1, -2, -1, 0, 1, 2, INT_MAX - 1, INT_MAX})
      EXPECT_EQ(all_below(&value, 1, limit), value >= 0 && value < limit) << value << " below " << limit;
  EXPECT_TRUE(all_below(nullptr, 0, 0));
}

TEST(AllBelow, FindsOneWrongEntryAnywhere) {
  std::mt19937 random(7);
  std::vector<int32_t> values(333);
  for (int32_t& value : values) value = static_cast<int32_t>(random() % 1000);
  ASSERT_TRUE(all_below(values.data(), 333, 1000));
  for (size_t i = 0; i < values.size(); ++i)
    for (int32_t wrong : {-1, 1000, INT_MIN, INT_MAX}) {
      const int32_t kept = values[i];
      values[i] = wrong;
      EXPECT_FALSE(all_below(values.data(), 333, 1000)) << i;
      values[i] = kept;
    }
}

TEST(CheckSlots, AgreesWithTheDefinitionAtTheEdges) {
  for (int64_t slots : {int64_t{0}, int64_t{1}, int64_t{64}, INT64_MAX})
    for (int64_t value :
         {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, INT64_MAX - 1, INT64_MAX}) {
      Checks check(Op::kAppend, Scope::kAll);
      EXPECT_EQ(check_slots(check, "slot_mapping", &value, 1, slots), value < 0 || value < slots)
          << value << " of " << slots;
      EXPECT_EQ(check.ok(), value < 0 || value < slots);
    }
}

TEST(Checks, TheFirstFailureStays) {
  Checks check(Op::kDecode, Scope::kAll);
  EXPECT_FALSE(check.at_least("a", 1, 2));
  EXPECT_FALSE(check.at_most("b", 3, 2));
  EXPECT_FALSE(check.at_least("c", 3, 2));  // would pass, but the checks have failed already
  EXPECT_EQ(check.take().message(), "decode: a: expected at least 2, got 1");
}

}  // namespace
}  // namespace mla::core

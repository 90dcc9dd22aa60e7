// SPDX-License-Identifier: Apache-2.0
// Checks every operation and format on every instruction set that this machine has, against the float64 reference. It
// needs no command line, so that it also runs where another machine is emulated.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/level_test.h"
#include "kit/check.h"
#include "kit/sweep.h"

namespace mla::cpu {
namespace {

class SweepTest : public testing::TestWithParam<std::tuple<Level, Op>> {};

TEST_P(SweepTest, AgreesWithTheReference) {
  const auto& [level, op] = GetParam();
  if (const core::Reason lack = missing(level); !lack.empty()) GTEST_SKIP() << lack.str();
  // Two cases of each format. Those of seed 1 have the tenfold of others' products, which takes an emulator minutes.
  const kit::SweepOptions options = {.op = op,
                                     .backend = std::string(level.row),
                                     .device = "cpu",
                                     .cache = {},
                                     .cases = 2,
                                     .seed = 2,
                                     .num_threads = 2};
  const Result<kit::SweepResult> swept = kit::sweep(options);
  ASSERT_TRUE(swept.ok()) << swept.status().message();
  EXPECT_GT(swept->cases, 0);
  EXPECT_EQ(swept->failed, 0) << "of " << swept->cases;
  for (const kit::Outcome& outcome : swept->failures) ADD_FAILURE() << outcome.line();
}

#ifdef MLA_EMULATED_PROCESSOR
// Otherwise all tests of a level that is not detected would be skipped.
TEST(Levels, AreAllThereOnTheEmulatedProcessor) {
  for (const Level& level : built_levels()) EXPECT_EQ(missing(level).str(), "") << level.name;
}
#endif

std::vector<std::tuple<Level, Op>> operations_of_levels() {
  std::vector<std::tuple<Level, Op>> all;
  for (const Level& level : built_levels())
    for (Op op : kAllOps)
      if (std::ranges::count(backend_names(op), level.row) > 0) all.emplace_back(level, op);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Levels, SweepTest, testing::ValuesIn(operations_of_levels()), [](const auto& test) {
  return std::string(std::get<0>(test.param).name) + "_" + std::string(name(std::get<1>(test.param)));
});

}  // namespace
}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Declares suites that run with the kernels of every instruction set that this machine has.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <ostream>
#include <string>
#include <vector>

#include "cpu/levels.h"

namespace mla::cpu {

class LevelTest : public testing::TestWithParam<Level> {
 protected:
  void SetUp() override {
    if (const core::Reason lack = missing(GetParam()); !lack.empty()) GTEST_SKIP() << lack.str();
    set_ = GetParam().kernels();
  }

  KernelSet set_ = {};
};

inline std::ostream& operator<<(std::ostream& out, const Level& level) { return out << level.name; }

inline std::vector<Level> levels_of_all_operations() {
  std::vector<Level> all;
  std::ranges::copy_if(levels(), std::back_inserter(all), &Level::all_operations);
  return all;
}

#define MLA_FOR_LEVELS_OF_ALL_OPERATIONS(Suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(Levels, Suite, testing::ValuesIn(mla::cpu::levels_of_all_operations()), \
                           [](const auto& test) { return std::string(test.param.name); })

#define MLA_FOR_EVERY_LEVEL(Suite)                                               \
  INSTANTIATE_TEST_SUITE_P(Levels, Suite, testing::ValuesIn(mla::cpu::levels()), \
                           [](const auto& test) { return std::string(test.param.name); })

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Declares suites that run with the kernels of every instruction set of this build that this machine has.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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

/// Returns the bits, or one NaN for all: which operand's NaN a product inherits is not said.
inline uint16_t canonical(uint16_t bf16) { return (bf16 & 0x7FFFU) > 0x7F80U ? uint16_t{0x7FC0} : bf16; }

inline std::ostream& operator<<(std::ostream& out, const Level& level) { return out << level.name; }

/// Returns the levels that this build has: those of another kind of processor are left out.
inline std::vector<Level> built_levels() {
  std::vector<Level> built;
  std::ranges::copy_if(levels(), std::back_inserter(built),
                       [](const Level& level) { return level.kernels != nullptr; });
  return built;
}

inline std::vector<Level> levels_of_all_operations() {
  std::vector<Level> all = built_levels();
  std::erase_if(all, [](const Level& level) { return !level.all_operations; });
  return all;
}

#define MLA_FOR_LEVELS_OF_ALL_OPERATIONS(Suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(Levels, Suite, testing::ValuesIn(mla::cpu::levels_of_all_operations()), \
                           [](const auto& test) { return std::string(test.param.name); })

#define MLA_FOR_EVERY_LEVEL(Suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(Levels, Suite, testing::ValuesIn(mla::cpu::built_levels()), \
                           [](const auto& test) { return std::string(test.param.name); })

}  // namespace mla::cpu

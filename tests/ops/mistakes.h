// SPDX-License-Identifier: Apache-2.0
// Makes mistakes in the arguments of a call: each must be named, and must leave every output byte as it was.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string_view>
#include <vector>

#include "backend_test.h"

namespace mla {

template <class Params>
struct Mistake {
  const char* field;  ///< what the message must name
  std::function<void(Params&)> make;
};

inline constexpr int32_t kDecreasing[] = {0, 2, 1};
inline constexpr int32_t kTooLong[] = {64 * 64, 70};
inline constexpr int32_t kNegative[] = {-1, 70};

inline void expect_names(const Status& status, std::string_view op, const char* field) {
  EXPECT_FALSE(status.ok()) << field;
  EXPECT_TRUE(status.message().starts_with(op)) << field << ": " << status.message();
  EXPECT_NE(status.message().find(field), std::string::npos) << field << ": " << status.message();
}

/// Makes each mistake in a fresh problem of an operation without a plan, and expects an error that names the field.
template <class Case, class Spec, class Params>
void expect_refused(const Context& context, const Spec& spec, const std::vector<Mistake<Params>>& mistakes) {
  for (const Mistake<Params>& mistake : mistakes) {
    const Case problem(spec);
    problem.reset_outputs();
    std::vector<std::vector<std::byte>> before;
    for (const kit::Buffer* buffer : problem.outputs()) before.push_back(bits_of(*buffer));
    Params params = problem.params();
    mistake.make(params);
    expect_names(run(context, params), name(kit::problem_of(spec).op), mistake.field);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(bits_of(*problem.outputs()[i]), before[i]) << mistake.field;
  }
}

/// Does the same for an operation with a plan.
template <class Case, class Spec, class Params>
void expect_planned_refused(const Context& context, const Spec& spec, const std::vector<Mistake<Params>>& mistakes) {
  for (const Mistake<Params>& mistake : mistakes) {
    const Case problem(spec);
    Params params = problem.params();
    mistake.make(params);
    expect_names(planned_run(context, params), name(kit::problem_of(spec).op), mistake.field);
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << mistake.field;
    EXPECT_TRUE(all_bytes_are(problem.lse, kit::kUntouched)) << mistake.field;
  }
}

}  // namespace mla

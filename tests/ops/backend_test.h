// SPDX-License-Identifier: Apache-2.0
// Suites that run once for every row of an operation's table, skipping rows that this machine cannot run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "kit/kit.h"
#include "mla/mla.h"

namespace mla {

inline Problem usual_problem(Op op) {
  switch (op) {
    case Op::kDecode: return kit::problem_of(kit::DecodeSpec{});
    case Op::kPrefill: return kit::problem_of(kit::PrefillSpec{});
    case Op::kMergeStates: return kit::problem_of(kit::MergeSpec{});
    case Op::kAppend: return kit::problem_of(kit::AppendSpec{});
    case Op::kGather: return kit::problem_of(kit::GatherSpec{});
  }
  return {};
}

/// The parameter is the row's name.
template <Op op>
class BackendTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (const BackendVerdict& row : explain(usual_problem(op), "auto").rows)
      if (row.name == GetParam() && !row.usable) GTEST_SKIP() << row.name << ": " << row.reason;
    context_.emplace(make_context(2));
  }

  Context make_context(int32_t num_threads) const {
    Result<Context> made = Context::create({.num_threads = num_threads, .affinity = {}, .backend = GetParam()});
    EXPECT_TRUE(made.ok()) << made.status().message();
    return std::move(made).value();
  }

  const Context& context() const { return *context_; }

  /// Whether this row can run the problem of `spec`.
  template <class Spec>
  bool can_run(const Spec& spec) const {
    for (const BackendVerdict& row : explain(kit::problem_of(spec), "auto").rows)
      if (row.name == GetParam()) return row.usable;
    return false;
  }

  template <class Spec>
  void expect_ok(const Spec& spec) const {
    const kit::Outcome outcome = kit::check(context(), spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
    EXPECT_EQ(outcome.backend, GetParam());
  }

 private:
  std::optional<Context> context_;
};

/// All bytes of a buffer, gaps included.
inline std::vector<std::byte> bits_of(const kit::Buffer& buffer) {
  return {buffer.bytes().begin(), buffer.bytes().end()};
}

inline bool all_bytes_are(const kit::Buffer& buffer, uint8_t value) {
  return std::all_of(buffer.bytes().begin(), buffer.bytes().end(),
                     [value](std::byte byte) { return byte == std::byte{value}; });
}

/// Fails unless the call succeeded.
#define MLA_EXPECT_OK(call)                                     \
  do {                                                          \
    const auto& mla_result_ = (call);                           \
    EXPECT_TRUE(mla::ok(mla_result_)) << mla::why(mla_result_); \
  } while (false)

inline bool ok(const Status& status) { return status.ok(); }
inline std::string why(const Status& status) { return status.message(); }
template <class T>
bool ok(const Result<T>& result) {
  return result.ok();
}
template <class T>
std::string why(const Result<T>& result) {
  return result.status().message();
}

#define MLA_FOR_EVERY_ROW(Suite, op)                                               \
  INSTANTIATE_TEST_SUITE_P(Rows, Suite, testing::ValuesIn(mla::backend_names(op)), \
                           [](const auto& row) { return row.param; })

}  // namespace mla

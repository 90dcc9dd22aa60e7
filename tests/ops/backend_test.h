// SPDX-License-Identifier: Apache-2.0
// Declares suites that run once for every row of an operation's table, skipping rows that this machine cannot run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kit/kit.h"
#include "mla/mla.h"

namespace mla {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

inline Problem usual_problem(Op op) {
  switch (op) {
    case Op::kDecode: return kit::problem_of(kit::DecodeSpec{});
    case Op::kPrefill: return kit::problem_of(kit::PrefillSpec{});
    case Op::kMergeStates: return kit::problem_of(kit::MergeSpec{});
    case Op::kAppend: return kit::problem_of(kit::AppendSpec{});
    case Op::kGather: return kit::problem_of(kit::GatherSpec{});
    case Op::kDecodeSparse: return kit::problem_of(kit::DecodeSparseSpec{});
    case Op::kPrefillSparse: return kit::problem_of(kit::PrefillSparseSpec{});
    case Op::kAppendRope: return kit::problem_of(kit::AppendRopeSpec{});
    case Op::kCopyPages: return kit::problem_of(kit::CopyPagesSpec{});
    case Op::kBlockTableToCsr: return kit::problem_of(kit::BlockTableToCsrSpec{});
    case Op::kPhysicalSlots: return kit::problem_of(kit::PhysicalSlotsSpec{});
    case Op::kAppendIndexer: return kit::problem_of(kit::AppendIndexerSpec{});
    case Op::kIndexerLogits: return kit::problem_of(kit::IndexerLogitsSpec{});
    case Op::kTopK: return kit::problem_of(kit::TopKSpec{});
    case Op::kIndexerTopK: return kit::problem_of(kit::IndexerTopKSpec{});
    case Op::kCompress: return kit::problem_of(kit::CompressSpec{});
    case Op::kFinishOutput: return kit::problem_of(kit::FinishOutputSpec{});
  }
  return {};
}

/// Runs tests with the row that its parameter names.
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

  /// Returns whether this row can run the problem of `spec`.
  template <class Spec>
  bool can_run(const Spec& spec) const {
    for (const BackendVerdict& row : explain(kit::problem_of(spec), "auto").rows)
      if (row.name == GetParam()) return row.usable;
    return false;
  }

  /// Checks a problem that the row may refuse: a random one.
  template <class Spec>
  void expect_ok_if_taken(const Spec& spec) const {
    if (can_run(spec)) expect_ok(spec);
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

/// Returns all bytes of a buffer, gaps included.
inline std::vector<std::byte> bits_of(const kit::Buffer& buffer) {
  return {buffer.bytes().begin(), buffer.bytes().end()};
}

inline bool all_bytes_are(const kit::Buffer& buffer, uint8_t value) {
  return std::all_of(buffer.bytes().begin(), buffer.bytes().end(),
                     [value](std::byte byte) { return byte == std::byte{value}; });
}

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

/// Fails unless the call succeeded.
#define MLA_EXPECT_OK(call)                                     \
  do {                                                          \
    const auto& mla_result_ = (call);                           \
    EXPECT_TRUE(mla::ok(mla_result_)) << mla::why(mla_result_); \
  } while (false)

/// Calls workspace_size, plan and run as a caller would, in a workspace full of `start` bytes, and returns the first
/// status that is not ok.
template <class Params>
Status planned_run(const Context& context, const Params& params, uint8_t start = 0xFF) {
  const Result<size_t> size = workspace_size(context, params);
  if (!size.ok()) return size.status();
  const kit::Buffer workspace(*size);
  workspace.fill(start);
  Result<Plan> made = plan(context, params, workspace.bytes());
  if (!made.ok()) return made.status();
  Status status = run(context, *made, params);
  EXPECT_TRUE(workspace.guards_intact());
  return status;
}

/// Runs the problem whole, then as two partial states, which must merge to the same. `narrow(part, params)` leaves of
/// the whole's params the keys that part 0 or 1 sees. o must be f32.
template <class Case, class Narrow>
void expect_parts_merge(const Context& context, const std::string& row, const Case& problem, const Narrow& narrow) {
  MLA_EXPECT_OK(kit::plan_and_run(context, problem));
  const auto params = problem.params();
  const std::vector<double> whole = kit::to_dense(params.o), lse = kit::to_dense(params.lse);
  const int64_t tokens = params.o.shape[0], heads = params.o.shape[1], d_v = params.o.shape[2];
  const auto rows = static_cast<size_t>(tokens * heads), elements = whole.size();

  std::vector<float> partial_o(2 * elements), partial_lse(2 * rows), merged(elements), merged_lse(rows);
  for (size_t part = 0; part < 2; ++part) {
    auto of_part = params;
    narrow(part, of_part);
    of_part.o = contiguous(&partial_o[part * elements], DType::kF32, {tokens, heads, d_v});
    of_part.lse = contiguous(&partial_lse[part * rows], DType::kF32, {tokens, heads});
    MLA_EXPECT_OK(planned_run(context, of_part));
  }
  MergeStatesParams merge;
  merge.partial_o = contiguous(partial_o.data(), DType::kF32, {2, tokens, heads, d_v});
  merge.partial_lse = contiguous(partial_lse.data(), DType::kF32, {2, tokens, heads});
  merge.lse_base = params.lse_base;
  merge.o = contiguous(merged.data(), DType::kF32, {tokens, heads, d_v});
  merge.lse = contiguous(merged_lse.data(), DType::kF32, {tokens, heads});
  MLA_EXPECT_OK(run(context, merge));

  const kit::Error error = kit::compare(kit::to_dense(merge.o), whole, d_v, kit::to_dense(merge.lse), lse);
  kit::Tolerance tolerance = kit::tolerance_of(problem.spec, kit::numerics_of(row, kit::problem_of(problem.spec)));
  tolerance.max_rel *= 2;  // both sides have their own error
  tolerance.cosine_distance *= 4;
  tolerance.max_lse *= 2;
  EXPECT_EQ(kit::judge(error, tolerance), "");
}

/// Returns the rows of this build that take the host's memory; device_test.h has the others. Levels of the CPU that are
/// for another kind of processor are not in the build.
inline std::vector<std::string> host_rows(Op op) {
  std::vector<std::string> rows = backend_names(op);
  std::erase_if(rows, [](const std::string& row) {
    const auto is_level = [&](const IsaLevel& level) { return row == "cpu_" + level.name && !level.built; };
    return kit::is_gpu_backend(row) || std::ranges::any_of(isa_levels(), is_level);
  });
  return rows;
}

#define MLA_FOR_EVERY_ROW(Suite, op)                                           \
  INSTANTIATE_TEST_SUITE_P(Rows, Suite, testing::ValuesIn(mla::host_rows(op)), \
                           [](const auto& row) { return row.param; })

}  // namespace mla

// SPDX-License-Identifier: Apache-2.0
// Runs one problem through the public API and checks it against the reference.
#pragma once

#include <memory>
#include <string>

#include "kit/cases.h"
#include "kit/compare.h"
#include "kit/device.h"
#include "kit/specs.h"
#include "mla/plan.h"

namespace mla::kit {

struct Outcome {
  bool ok = false;
  std::string op;
  std::string backend;  ///< the row that ran
  std::string spec;     ///< describe(spec): enough to repeat the case
  std::string failure;  ///< empty if ok; else what was wrong: a status, an error too large, a stray write
  Error error;
  Tolerance tolerance;

  /// Returns the outcome as one line: "decode on cpu_avx2: <failure> [<spec>]", or "ok" in place of the failure.
  std::string line() const;
};

/// Makes the problem, sizes and plans it with a workspace full of 0xFF, runs it where the context computes, runs the
/// reference on the host, compares, and looks for writes outside the outputs and the workspace. What moves, packs or
/// indexes must equal the reference byte for byte; indexer_logits, the latents of compress and what finish_output gates
/// are compared within f32's errors, rows of compress are those of its own latents, and indexer_top_k may choose among
/// logits that are that close.
Outcome check(const Context& context, const DecodeSpec& spec);
Outcome check(const Context& context, const DecodeSparseSpec& spec);
Outcome check(const Context& context, const PrefillSpec& spec);
Outcome check(const Context& context, const PrefillSparseSpec& spec);
Outcome check(const Context& context, const MergeSpec& spec);
Outcome check(const Context& context, const AppendSpec& spec);
Outcome check(const Context& context, const AppendRopeSpec& spec);
Outcome check(const Context& context, const GatherSpec& spec);
Outcome check(const Context& context, const CopyPagesSpec& spec);
Outcome check(const Context& context, const BlockTableToCsrSpec& spec);
Outcome check(const Context& context, const PhysicalSlotsSpec& spec);
Outcome check(const Context& context, const AppendIndexerSpec& spec);
Outcome check(const Context& context, const IndexerLogitsSpec& spec);
Outcome check(const Context& context, const TopKSpec& spec);
Outcome check(const Context& context, const IndexerTopKSpec& spec);
Outcome check(const Context& context, const CompressSpec& spec);
Outcome check(const Context& context, const FinishOutputSpec& spec);

/// Holds what the reference computes: dense, row-major, o before it is rounded to a narrow type.
struct Expected {
  std::vector<double> o;           ///< [T, H, d_v]
  std::vector<double> lse;         ///< [T, H]
  std::vector<double> max_logits;  ///< [T, H], of sparse attention
};
Result<Expected> expected_of(const DecodeCase& problem);
Result<Expected> expected_of(const DecodeSparseCase& problem);
Result<Expected> expected_of(const PrefillCase& problem);
Result<Expected> expected_of(const PrefillSparseCase& problem);
Result<Expected> expected_of(const MergeCase& problem);

/// Returns the same of a problem whose compute is another: with kDefault, what kFP8 would give if it rounded nothing.
Result<Expected> expected_of(const DecodeCase& problem, Compute compute);
Result<Expected> expected_of(const DecodeSparseCase& problem, Compute compute);
Result<Expected> expected_of(const PrefillCase& problem, Compute compute);

/// Makes the same checks of a problem that the caller has run: it compares the outputs with the reference, and looks
/// for writes into guard zones and gaps.
Outcome check_outputs(const DecodeCase& problem, const Expected& expected, std::string_view backend);
Outcome check_outputs(const DecodeSparseCase& problem, const Expected& expected, std::string_view backend);
Outcome check_outputs(const PrefillCase& problem, const Expected& expected, std::string_view backend);
Outcome check_outputs(const PrefillSparseCase& problem, const Expected& expected, std::string_view backend);
Outcome check_outputs(const MergeCase& problem, const Expected& expected, std::string_view backend);

/// Makes the same checks for operations without a plan. The reference runs in place of the caller's outputs, which are
/// put back.
Outcome check_outputs(const AppendCase& problem, std::string_view backend);
Outcome check_outputs(const AppendRopeCase& problem, std::string_view backend);
Outcome check_outputs(const GatherCase& problem, std::string_view backend);
Outcome check_outputs(const CopyPagesCase& problem, std::string_view backend);
Outcome check_outputs(const BlockTableToCsrCase& problem, std::string_view backend);
Outcome check_outputs(const PhysicalSlotsCase& problem, std::string_view backend);
Outcome check_outputs(const AppendIndexerCase& problem, std::string_view backend);
Outcome check_outputs(const IndexerLogitsCase& problem, std::string_view backend);
Outcome check_outputs(const TopKCase& problem, std::string_view backend);
Outcome check_outputs(const IndexerTopKCase& problem, std::string_view backend);
Outcome check_outputs(const CompressCase& problem, std::string_view backend);
Outcome check_outputs(const FinishOutputCase& problem, std::string_view backend);

/// Holds what `plan_and_run` leaves, which calls workspace_size, plan and run. The workspace lies between guard zones
/// and starts as 0xFF bytes. On a GPU the problem is copied there, and it and the workspace are copied back, guard
/// zones too.
struct PlannedRun {
  Buffer workspace;
  std::unique_ptr<DeviceImage> image;  ///< of the problem and the workspace, which the plan refers to
  Plan plan;
};
Result<PlannedRun> plan_and_run(const Context& context, const DecodeCase& problem);
Result<PlannedRun> plan_and_run(const Context& context, const DecodeSparseCase& problem);
Result<PlannedRun> plan_and_run(const Context& context, const PrefillCase& problem);
Result<PlannedRun> plan_and_run(const Context& context, const PrefillSparseCase& problem);

}  // namespace mla::kit

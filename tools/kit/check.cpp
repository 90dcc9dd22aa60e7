// SPDX-License-Identifier: Apache-2.0
#include "kit/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "mla/backend.h"

namespace mla::kit {
namespace {

Result<Context> reference_context() {
  return Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
}

std::string row_of(const Context& context, const Problem& problem) {
  return explain(problem, context.backend()).selected;
}

template <class Spec>
Outcome outcome_of(const Spec& spec, std::string_view backend) {
  return {.ok = false,
          .op = std::string(name(problem_of(spec).op)),
          .backend = std::string(backend),
          .spec = describe(spec),
          .failure = {},
          .error = {},
          .tolerance = {}};
}

Outcome failed(Outcome outcome, std::string failure) {
  outcome.ok = false;
  outcome.failure = std::move(failure);
  return outcome;
}

/// A dense f32 output of `shape`, big enough to be a view of `buffer`.
TensorView dense_f32(Buffer& buffer, const TensorView& like) {
  buffer = Buffer(static_cast<size_t>(like.numel()) * sizeof(float));
  TensorView view = contiguous(buffer.data(), DType::kF32, {});
  view.ndim = like.ndim;
  view.shape = like.shape;
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.stride[static_cast<size_t>(i)] = stride;
    stride *= view.shape[static_cast<size_t>(i)];
  }
  return view;
}

void copy_dense(const TensorView& from, const TensorView& to) {
  const std::vector<double> values = to_dense(from);
  std::transform(values.begin(), values.end(), static_cast<float*>(to.data),
                 [](double value) { return static_cast<float>(value); });
}

TensorView dense_lse(Buffer& buffer, const TensorView& o) {
  TensorView shape = o;
  shape.ndim = 2;
  return dense_f32(buffer, shape);
}

template <class Params>
Result<PlannedRun> planned(const Context& context, const Params& params, size_t misalign) {
  Result<size_t> size = workspace_size(context, params);
  if (!size.ok()) return size.status();
  PlannedRun result{.workspace = Buffer(*size, misalign), .plan = {}};
  result.workspace.fill(0xFF);
  Result<Plan> made = plan(context, params, result.workspace.bytes());
  if (!made.ok()) return made.status();
  result.plan = std::move(made).value();
  Status status = run(context, result.plan, params);
  if (!status.ok()) return status;
  return result;
}

template <class Case>
Result<Expected> attention_expected(const Case& problem) {
  Result<Context> context = reference_context();
  if (!context.ok()) return context.status();
  auto params = problem.params();
  Buffer o, lse;
  params.o = dense_f32(o, params.o);
  params.lse = dense_lse(lse, params.o);
  Result<PlannedRun> done = planned(*context, params, 0);
  if (!done.ok()) return done.status();
  return Expected{.o = to_dense(params.o), .lse = to_dense(params.lse)};
}

template <class Case>
std::string stray_writes(const Case& problem) {
  const auto params = problem.params();
  if (!problem.o.guards_intact()) return "wrote outside o";
  if (!problem.lse.guards_intact()) return "wrote outside lse";
  if (!gaps_hold(problem.o, params.o, kUntouched)) return "wrote into the gaps of o";
  if (params.lse.given() && !gaps_hold(problem.lse, params.lse, kUntouched)) return "wrote into the gaps of lse";
  return {};
}

template <class Case>
Outcome compare_outputs(const Case& problem, const Expected& expected, Outcome outcome,
                        std::span<const double> row_scale = {}) {
  const auto params = problem.params();
  const std::vector<double> o = to_dense(params.o);
  const std::vector<double> lse = params.lse.given() ? to_dense(params.lse) : std::vector<double>{};
  outcome.error = compare(o, expected.o, params.o.shape[2], lse,
                          lse.empty() ? std::span<const double>{} : std::span<const double>(expected.lse), row_scale);
  std::string failure = stray_writes(problem);
  if (failure.empty()) failure = judge(outcome.error, outcome.tolerance);
  outcome.ok = failure.empty();
  outcome.failure = std::move(failure);
  return outcome;
}

/// Sum of the states' weights times the largest element of each: what a merged row is made of before it cancels.
std::vector<double> merge_scales(const MergeCase& problem, const Expected& expected) {
  const MergeStatesParams p = problem.params();
  std::vector<std::vector<double>> o = {to_dense(p.partial_o)}, lse = {to_dense(p.partial_lse)};
  if (p.in_place) {
    problem.reset_outputs();
    o.push_back(to_dense(p.o));
    lse.push_back(to_dense(p.lse));
  }
  const double to_natural = p.lse_base == LseBase::kTwo ? std::numbers::ln2 : 1.0;
  const size_t rows = expected.lse.size(), width = static_cast<size_t>(problem.spec.d_v);
  std::vector<double> scales(rows, 0.0);
  for (size_t group = 0; group < o.size(); ++group) {
    for (size_t i = 0; i < lse[group].size(); ++i) {
      const double weight = std::exp((lse[group][i] - expected.lse[i % rows]) * to_natural);
      if (!(weight > 0)) continue;
      double largest = 0;
      for (size_t c = 0; c < width; ++c) largest = std::max(largest, std::abs(o[group][i * width + c]));
      scales[i % rows] += weight * largest;
    }
  }
  return scales;
}

template <class Case, class Spec>
Outcome check_planned(const Context& context, const Spec& spec) {
  const Outcome outcome = outcome_of(spec, row_of(context, problem_of(spec)));
  const Case problem(spec);
  const Result<Expected> expected = expected_of(problem);
  if (!expected.ok()) return failed(outcome, "reference: " + expected.status().message());
  const Result<PlannedRun> done = plan_and_run(context, problem);
  if (!done.ok()) return failed(outcome, done.status().message());
  if (!done->workspace.guards_intact()) return failed(outcome, "wrote outside the workspace");
  return check_outputs(problem, *expected, done->plan.backend());
}

std::vector<std::byte> bytes_of(std::span<const Buffer* const> buffers) {
  std::vector<std::byte> bytes;
  for (const Buffer* buffer : buffers) bytes.insert(bytes.end(), buffer->bytes().begin(), buffer->bytes().end());
  return bytes;
}

/// Runs an operation that moves bytes on the reference and on `context`; all bytes must be equal.
template <class Case, class Spec>
Outcome check_moved(const Context& context, const Spec& spec, const Case& problem,
                    std::span<const Buffer* const> outputs) {
  const Outcome outcome = outcome_of(spec, row_of(context, problem_of(spec)));
  const Result<Context> reference = reference_context();
  if (!reference.ok()) return failed(outcome, "reference: " + reference.status().message());
  if (const Status status = run(*reference, problem.params()); !status.ok())
    return failed(outcome, "reference: " + status.message());
  const std::vector<std::byte> expected = bytes_of(outputs);
  problem.reset_outputs();
  if (const Status status = run(context, problem.params()); !status.ok()) return failed(outcome, status.message());
  for (const Buffer* buffer : outputs)
    if (!buffer->guards_intact()) return failed(outcome, "wrote outside the output");
  const std::vector<std::byte> given = bytes_of(outputs);
  const auto [at, expected_at] = std::mismatch(given.begin(), given.end(), expected.begin());
  if (at != given.end())
    return failed(outcome, "byte " + std::to_string(at - given.begin()) + " of the output is " +
                               std::to_string(std::to_integer<int>(*at)) + ", expected " +
                               std::to_string(std::to_integer<int>(*expected_at)));
  Outcome good = outcome;
  good.ok = true;
  return good;
}

}  // namespace

std::string Outcome::line() const { return op + " on " + backend + ": " + (ok ? "ok" : failure) + " [" + spec + "]"; }

Result<PlannedRun> plan_and_run(const Context& context, const DecodeCase& problem) {
  return planned(context, problem.params(), static_cast<size_t>(problem.spec.workspace_misalign));
}

Result<PlannedRun> plan_and_run(const Context& context, const PrefillCase& problem) {
  return planned(context, problem.params(), static_cast<size_t>(problem.spec.workspace_misalign));
}

Result<Expected> expected_of(const DecodeCase& problem) { return attention_expected(problem); }
Result<Expected> expected_of(const PrefillCase& problem) { return attention_expected(problem); }

Result<Expected> expected_of(const MergeCase& problem) {
  const Result<Context> context = reference_context();
  if (!context.ok()) return context.status();
  problem.reset_outputs();
  MergeStatesParams params = problem.params();
  const TensorView entry_o = params.o, entry_lse = params.lse;
  Buffer o, lse;
  params.o = dense_f32(o, entry_o);
  params.lse = dense_lse(lse, entry_o);
  if (params.in_place) {
    copy_dense(entry_o, params.o);
    copy_dense(entry_lse, params.lse);
  }
  const Status status = run(*context, params);
  if (!status.ok()) return status;
  return Expected{.o = to_dense(params.o), .lse = to_dense(params.lse)};
}

Outcome check_outputs(const DecodeCase& problem, const Expected& expected, std::string_view backend) {
  Outcome outcome = outcome_of(problem.spec, backend);
  outcome.tolerance = tolerance_of(problem.spec, precision_of(backend, problem.spec));
  return compare_outputs(problem, expected, std::move(outcome));
}

Outcome check_outputs(const PrefillCase& problem, const Expected& expected, std::string_view backend) {
  Outcome outcome = outcome_of(problem.spec, backend);
  outcome.tolerance = tolerance_of(problem.spec, precision_of(backend, problem.spec));
  return compare_outputs(problem, expected, std::move(outcome));
}

Outcome check_outputs(const MergeCase& problem, const Expected& expected, std::string_view backend) {
  Outcome outcome = outcome_of(problem.spec, backend);
  outcome.tolerance = tolerance_of(problem.spec);
  MergeSpec fresh = problem.spec;
  const MergeCase untouched(fresh);  // an in-place merge has overwritten one of the states
  const std::vector<double> scales = merge_scales(untouched, expected);
  return compare_outputs(problem, expected, std::move(outcome), scales);
}

Outcome check(const Context& context, const DecodeSpec& spec) { return check_planned<DecodeCase>(context, spec); }
Outcome check(const Context& context, const PrefillSpec& spec) { return check_planned<PrefillCase>(context, spec); }

Outcome check(const Context& context, const MergeSpec& spec) {
  const std::string backend = row_of(context, problem_of(spec));
  const MergeCase problem(spec);
  const Result<Expected> expected = expected_of(problem);
  if (!expected.ok()) return failed(outcome_of(spec, backend), "reference: " + expected.status().message());
  problem.reset_outputs();
  if (const Status status = run(context, problem.params()); !status.ok())
    return failed(outcome_of(spec, backend), status.message());
  return check_outputs(problem, *expected, backend);
}

Outcome check(const Context& context, const AppendSpec& spec) {
  const AppendCase problem(spec);
  const Buffer* outputs[] = {&problem.memory.kv, &problem.memory.ckv, &problem.memory.kpe};
  return check_moved(context, spec, problem, outputs);
}

Outcome check(const Context& context, const GatherSpec& spec) {
  const GatherCase problem(spec);
  const Buffer* outputs[] = {&problem.out_kv, &problem.out_ckv, &problem.out_kpe};
  return check_moved(context, spec, problem, outputs);
}

}  // namespace mla::kit

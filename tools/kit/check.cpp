// SPDX-License-Identifier: Apache-2.0
#include "kit/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "kit/case_buffers.h"
#include "kit/check_finish.h"
#include "kit/check_parts.h"
#include "mla/numeric.h"

namespace mla::kit {
namespace {

/// Allocates `buffer` for a dense f32 tensor of the shape of `like`, and returns a view of it.
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

/// `image` holds the memory of `host_params`; its outputs are not copied back.
template <class Params>
Result<PlannedRun> planned(const Context& context, const Params& host_params, size_t misalign, DeviceImage image) {
  PlannedRun result{.workspace = {}, .image = std::make_unique<DeviceImage>(std::move(image)), .plan = {}};
  const Params params = result.image->there(host_params);
  const Result<size_t> size = workspace_size(context, params);
  if (!size.ok()) return size.status();
  result.workspace = Buffer(*size, misalign);
  result.workspace.fill(0xFF);
  if (Status status = result.image->add(result.workspace); !status.ok()) return status;
  Result<Plan> made = plan(context, params, result.image->there(result.workspace));
  if (!made.ok()) return made.status();
  result.plan = std::move(made).value();
  if (Status status = run(context, result.plan, params); !status.ok()) return status;
  return result;
}

/// Returns [T, H, d_v] for an output of that shape, or of one with groups of heads.
TensorView plain_shape(const TensorView& o, int64_t num_heads) {
  TensorView plain = o;
  plain.ndim = 3;
  plain.shape = {o.shape[0], num_heads, o.shape[static_cast<size_t>(o.ndim) - 1]};
  return plain;
}

template <class Case>
Result<Expected> attention_expected(const Case& problem, Compute compute, int32_t p_run = 0) {
  Result<Context> context = reference_context(p_run);
  if (!context.ok()) return context.status();
  auto params = problem.params();
  params.options.compute = compute;
  if constexpr (requires { params.shared_prefix; }) params.shared_prefix = false;  // every request reads its own keys
  Buffer o, lse, max_logits;
  if constexpr (requires { params.finish; }) {
    if (problem.finish.has_value()) params.o = plain_shape(params.o, problem.spec.num_heads);
    params.finish = {};  // compare_finished knows what becomes of outputs
  }
  params.o = dense_f32(o, params.o);
  if constexpr (requires { params.o_scale; }) params.o_scale = {};
  params.lse = dense_lse(lse, params.o);
  constexpr bool kHasMaxLogits = requires { params.max_logits; };
  if constexpr (kHasMaxLogits) params.max_logits = dense_lse(max_logits, params.o);
  Result<DeviceImage> host = DeviceImage::create("cpu", {});
  if (!host.ok()) return host.status();
  Result<PlannedRun> done = planned(*context, params, 0, std::move(host).value());
  if (!done.ok()) return done.status();
  Expected expected = {.o = to_dense(params.o), .lse = to_dense(params.lse), .max_logits = {}};
  if constexpr (kHasMaxLogits) expected.max_logits = to_dense(params.max_logits);
  return expected;
}

/// Returns the largest |reference| of every row, but not less than least_row_scale; 0 for rows of zeros.
std::vector<double> row_scales(const Expected& expected, int64_t d_v, DType o_dtype) {
  const auto width = static_cast<size_t>(d_v);
  std::vector<double> scales;
  for (size_t row = 0; width != 0 && row < expected.o.size(); row += width) {
    double largest = 0;
    for (size_t c = row; c < row + width; ++c)
      if (std::isfinite(expected.o[c])) largest = std::max(largest, std::abs(expected.o[c]));
    scales.push_back(largest == 0 ? 0 : std::max(largest, least_row_scale(o_dtype)));
  }
  return scales;
}

template <class Case>
std::string stray_writes(const Case& problem) {
  const auto params = problem.params();
  if (!problem.o.guards_intact()) return "wrote outside o";
  if (!problem.lse.guards_intact()) return "wrote outside lse";
  if (!gaps_hold(problem.o, params.o, kUntouched)) return "wrote into the gaps of o";
  if (params.lse.given() && !gaps_hold(problem.lse, params.lse, kUntouched)) return "wrote into the gaps of lse";
  if constexpr (requires { problem.max_logits; }) {
    if (!problem.max_logits.guards_intact()) return "wrote outside max_logits";
    if (params.max_logits.given() && !gaps_hold(problem.max_logits, params.max_logits, kUntouched))
      return "wrote into the gaps of max_logits";
  }
  if constexpr (requires { params.finish; }) {
    if (params.finish.scale.given()) {
      if (!problem.finish->scale.guards_intact()) return "wrote outside scale";
      if (!gaps_hold(problem.finish->scale, params.finish.scale, kUntouched)) return "wrote into the gaps of scale";
    }
  }
  return {};
}

template <class Case>
Outcome compare_outputs(const Case& problem, const Expected& expected, Outcome outcome,
                        std::span<const double> row_scale = {}) {
  const auto params = problem.params();
  const std::vector<double> o = to_dense(params.o);
  const std::vector<double> lse = params.lse.given() ? to_dense(params.lse) : std::vector<double>{};
  outcome.error = compare(o, expected.o, params.o.shape[static_cast<size_t>(params.o.ndim) - 1], lse,
                          lse.empty() ? std::span<const double>{} : std::span<const double>(expected.lse), row_scale);
  if constexpr (requires { params.max_logits; }) {
    if (params.max_logits.given()) {
      const Error of_logits = compare({}, {}, 0, to_dense(params.max_logits), expected.max_logits);
      outcome.error.max_logits = of_logits.max_lse;
      outcome.error.special_equal = outcome.error.special_equal && of_logits.special_equal;
    }
  }
  std::string failure = stray_writes(problem);
  if (failure.empty()) failure = judge(outcome.error, outcome.tolerance);
  outcome.ok = failure.empty();
  outcome.failure = std::move(failure);
  return outcome;
}

/// Compares lse, max_logits and stray writes, where `wrong` says what is wrong with the outputs themselves.
template <class Case>
Outcome compare_rest(const Case& problem, const Expected& expected, Outcome outcome, const std::string& wrong) {
  const double max_rel = std::exchange(outcome.tolerance.max_rel, 1e30);
  const double cosine_distance = std::exchange(outcome.tolerance.cosine_distance, 2);
  const std::vector<double> ones(expected.lse.size(), 1.0);
  Expected same = expected;
  same.o = to_dense(problem.params().o);
  outcome = compare_outputs(problem, same, std::move(outcome), ones);
  outcome.tolerance.max_rel = max_rel;
  outcome.tolerance.cosine_distance = cosine_distance;
  return outcome.ok && !wrong.empty() ? failed(outcome, wrong) : outcome;
}

/// Compares e4m3 outputs by what the tolerance allows their codes to be.
template <class Case>
Outcome compare_codes(const Case& problem, const Expected& expected, Outcome outcome) {
  const auto params = problem.params();
  std::vector<uint8_t> codes;
  for (double value : to_dense(params.o)) codes.push_back(f32_to_e4m3(static_cast<float>(value)));
  const double o_scale = static_cast<double>(*static_cast<const float*>(params.o_scale.data));
  const std::string wrong = judge_codes(codes, expected.o, params.o.shape[2], o_scale, outcome.tolerance.max_rel);
  return compare_rest(problem, expected, std::move(outcome), wrong);
}

/// Compares outputs that were finished, where `expected` are those that were not.
Outcome compare_finished(const DecodeSparseCase& problem, const Expected& expected, Outcome outcome,
                         const Numerics& numerics) {
  DecodeSparseSpec spec = problem.spec;
  spec.o_dtype = DType::kF32;  // judge_finished knows how outputs are rounded
  const bool are_rounded = spec.q_dtype == DType::kBF16 || spec.q_dtype == DType::kE4M3;
  const double error = tolerance_of(spec, numerics).max_rel + (are_rounded ? 0x1p-8 : 0);
  const DecodeSparseParams params = problem.params();
  const FinishedOutputs outputs = {problem.spec.finished_rows(), params.o, params.finish.scale};
  const auto width = static_cast<size_t>(outputs.rows.d_v);
  const std::vector<double> scales = row_scales(expected, outputs.rows.d_v, are_rounded ? DType::kBF16 : DType::kF32);
  std::string wrong;
  for (size_t i = 0; i < expected.lse.size() && wrong.empty(); ++i) {
    const auto row = std::span(expected.o).subspan(i * width, width);
    const ExactRow plain = {.values = {row.begin(), row.end()}, .magnitudes = std::vector<double>(width, scales[i])};
    const auto heads = static_cast<size_t>(spec.num_heads);
    const auto token = static_cast<int64_t>(i / heads), head = static_cast<int64_t>(i % heads);
    wrong = judge_finished(*spec.finish, outputs, plain.finished(*spec.finish, params.finish, token, head), error,
                           token, head);
  }
  return compare_rest(problem, expected, std::move(outcome), wrong);
}

template <class Case>
Outcome check_attention(const Case& problem, const Expected& expected, std::string_view backend,
                        bool of_same_runs = false) {
  const auto& spec = problem.spec;
  Outcome outcome = outcome_of(spec, backend);
  const Numerics numerics = numerics_of(backend, problem_of(spec));
  outcome.tolerance = tolerance_of(spec, numerics);
  if (spec.options.compute == Compute::kFP8 && numerics.p_run != Numerics().p_run && !of_same_runs) {
    const Result<Expected> of_its_runs = attention_expected(problem, Compute::kFP8, numerics.p_run);
    if (!of_its_runs.ok()) return failed(std::move(outcome), of_its_runs.status().message());
    return check_attention(problem, *of_its_runs, backend, true);
  }
  if constexpr (requires { spec.finish; }) {
    if (spec.finish.has_value()) return compare_finished(problem, expected, std::move(outcome), numerics);
  }
  if constexpr (requires { spec.o_scale; }) {
    if (spec.o_dtype == DType::kE4M3) return compare_codes(problem, expected, std::move(outcome));
  }
  const std::vector<double> scales = row_scales(expected, problem.params().o.shape[2], spec.o_dtype);
  return compare_outputs(problem, expected, std::move(outcome), scales);
}

/// Returns for every row the sum over the states of their weight times their largest element: the terms that a merged
/// row is made of, before they cancel.
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
  const Fingerprint inputs(buffers_of(problem), outputs_of(problem));
  const Result<PlannedRun> done = plan_and_run(context, problem);
  if (!done.ok()) return failed(outcome, done.status().message());
  if (!done->workspace.guards_intact()) return failed(outcome, "wrote outside the workspace");
  if (!inputs.holds()) return failed(outcome, "wrote into an input");
  return check_outputs(problem, *expected, done->plan.backend());
}

}  // namespace

std::string Outcome::line() const { return op + " on " + backend + ": " + (ok ? "ok" : failure) + " [" + spec + "]"; }

namespace {

template <class Case>
Result<PlannedRun> plan_and_run_case(const Context& context, const Case& problem) {
  Result<DeviceImage> image = DeviceImage::create(context.device(), buffers_of(problem));
  if (!image.ok()) return image.status();
  Result<PlannedRun> done = planned(context, problem.params(), static_cast<size_t>(problem.spec.workspace_misalign),
                                    std::move(image).value());
  if (!done.ok()) return done;
  if (Status status = done->image->fetch(); !status.ok()) return status;
  return done;
}

}  // namespace

Result<PlannedRun> plan_and_run(const Context& context, const DecodeCase& problem) {
  return plan_and_run_case(context, problem);
}
Result<PlannedRun> plan_and_run(const Context& context, const DecodeSparseCase& problem) {
  return plan_and_run_case(context, problem);
}
Result<PlannedRun> plan_and_run(const Context& context, const PrefillCase& problem) {
  return plan_and_run_case(context, problem);
}
Result<PlannedRun> plan_and_run(const Context& context, const PrefillSparseCase& problem) {
  return plan_and_run_case(context, problem);
}

Result<Expected> expected_of(const DecodeCase& problem, Compute compute) {
  return attention_expected(problem, compute);
}
Result<Expected> expected_of(const DecodeSparseCase& problem, Compute compute) {
  return attention_expected(problem, compute);
}

Result<Expected> expected_of(const PrefillCase& problem, Compute compute) {
  return attention_expected(problem, compute);
}

Result<Expected> expected_of(const DecodeCase& problem) {
  return attention_expected(problem, problem.spec.options.compute);
}
Result<Expected> expected_of(const DecodeSparseCase& problem) {
  return attention_expected(problem, problem.spec.options.compute);
}
Result<Expected> expected_of(const PrefillCase& problem) {
  return attention_expected(problem, problem.spec.options.compute);
}
Result<Expected> expected_of(const PrefillSparseCase& problem) {
  return attention_expected(problem, problem.spec.options.compute);
}

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
  return Expected{.o = to_dense(params.o), .lse = to_dense(params.lse), .max_logits = {}};
}

Outcome check_outputs(const DecodeCase& problem, const Expected& expected, std::string_view backend) {
  return check_attention(problem, expected, backend);
}
Outcome check_outputs(const DecodeSparseCase& problem, const Expected& expected, std::string_view backend) {
  return check_attention(problem, expected, backend);
}
Outcome check_outputs(const PrefillCase& problem, const Expected& expected, std::string_view backend) {
  return check_attention(problem, expected, backend);
}
Outcome check_outputs(const PrefillSparseCase& problem, const Expected& expected, std::string_view backend) {
  return check_attention(problem, expected, backend);
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
Outcome check(const Context& context, const DecodeSparseSpec& spec) {
  return check_planned<DecodeSparseCase>(context, spec);
}
Outcome check(const Context& context, const PrefillSpec& spec) { return check_planned<PrefillCase>(context, spec); }
Outcome check(const Context& context, const PrefillSparseSpec& spec) {
  return check_planned<PrefillSparseCase>(context, spec);
}

Outcome check(const Context& context, const MergeSpec& spec) {
  const std::string backend = row_of(context, problem_of(spec));
  const MergeCase problem(spec);
  const Result<Expected> expected = expected_of(problem);
  if (!expected.ok()) return failed(outcome_of(spec, backend), "reference: " + expected.status().message());
  problem.reset_outputs();
  if (const std::string failure = run_direct(context, problem); !failure.empty())
    return failed(outcome_of(spec, backend), failure);
  return check_outputs(problem, *expected, backend);
}

}  // namespace mla::kit

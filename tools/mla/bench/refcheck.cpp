// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/refcheck.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <type_traits>
#include <utility>

#include "kit/check.h"
#include "kit/compare.h"
#include "mla/text.h"

namespace mla::bench {
namespace {

using cli::UsageError;

// What the reference may spend on one sample: about half a second.
constexpr double kFlopBudget = 2.5e8;
// Problems up to this size are compared as a whole, guard zones included.
constexpr double kWholeFlops = 5e8;
constexpr int64_t kQueriesPerSample = 4;
constexpr int64_t kRowsPerSample = 256;

void require_reference(const Status& status) {
  if (!status.ok()) throw UsageError("reference: {}", status.message());
}

Context reference_context(int32_t p_run = 0) {
  Result<Context> context =
      Context::create({.num_threads = 0, .affinity = {}, .backend = "reference", .device = "cpu", .p_run = p_run});
  require_reference(context.status());
  return std::move(context).value();
}

// Elements start, start + step, ... of one dimension.
TensorView slice(TensorView view, int dim, int64_t start, int64_t count, int64_t step = 1) {
  const auto d = static_cast<size_t>(dim);
  const int64_t bytes = start * view.stride[d] * static_cast<int64_t>(size_of(view.dtype));
  view.data = static_cast<std::byte*>(view.data) + bytes;
  view.shape[d] = count;
  view.stride[d] *= step;
  return view;
}

// `view`, whose last dimension may be stepped, as dense doubles.
std::vector<double> dense(TensorView view) {
  const auto last = static_cast<size_t>(view.ndim++);
  view.shape[last] = view.stride[last] = 1;
  return kit::to_dense(view);
}

// The page table of one request alone; owns what the original has no array for.
struct OneRequest {
  kit::Buffer indptr;
  PageTable pages;

  OneRequest(const PageTable& all, size_t request) {
    const auto* offsets = static_cast<const int32_t*>(all.kv_indptr.data);
    const int32_t count = offsets[request + 1] - offsets[request];
    const int32_t own[] = {0, count};
    indptr = kit::to_buffer(own);
    pages.kv_indptr = contiguous(indptr.data(), DType::kI32, {2});
    pages.kv_indices = slice(all.kv_indices, 0, offsets[request], count);
    pages.kv_len = slice(all.kv_len, 0, static_cast<int64_t>(request), 1);
  }
};

// Longest, shortest and last request.
std::set<size_t> sampled_requests(const std::vector<Request>& requests) {
  const auto shorter = [](const Request& a, const Request& b) { return a.kv_len < b.kv_len; };
  const auto [least, most] = std::minmax_element(requests.begin(), requests.end(), shorter);
  return {static_cast<size_t>(least - requests.begin()), static_cast<size_t>(most - requests.begin()),
          requests.size() - 1};
}

// Evenly spaced heads, as many as the budget allows.
struct HeadSample {
  int64_t count, step;
  HeadSample(int64_t heads, double flops_per_head) {
    count = std::clamp(static_cast<int64_t>(kFlopBudget / std::max(flops_per_head, 1.0)), int64_t{1}, heads);
    step = heads / count;
  }
};

// The sinks (or slopes) of some heads alone; nothing of nothing.
struct PerHead {
  kit::Buffer values;
  TensorView view;

  PerHead(const TensorView& all, int64_t count, int64_t step) : values(static_cast<size_t>(count) * sizeof(float)) {
    if (!all.given()) return;
    for (int64_t i = 0; i < count; ++i) values.as<float>()[i] = static_cast<const float*>(all.data)[i * step];
    view = contiguous(values.data(), DType::kF32, {count});
  }
};

template <class Params>
void run_planned(const Context& context, const Params& params) {
  const Result<size_t> size = workspace_size(context, params);
  require_reference(size.status());
  const kit::Buffer workspace(*size);
  const Result<Plan> planned = plan(context, params, workspace.bytes());
  require_reference(planned.status());
  require_reference(run(context, *planned, params));
}

template <class Params>
void run_reference(const Context& context, const Params& params) {
  if constexpr (requires { run(context, params); })
    require_reference(run(context, params));
  else
    run_planned(context, params);
}

void add(RefcheckResult& result, const kit::Error& error, const kit::Tolerance& tolerance, int64_t rows,
         const std::string& what) {
  result.error = std::max(result.error, error.max_rel);
  result.rows += rows;
  if (const std::string failure = kit::judge(error, tolerance); !failure.empty() && result.failure.empty())
    result.failure = what + ": " + failure;
}

// Runs `params`, whose o and lse are views of the checked outputs, on the reference with outputs of its own.
template <class Params>
void check_attention(const Context& context, Params params, const kit::Tolerance& tolerance, const std::string& what,
                     RefcheckResult& result) {
  const int64_t tokens = params.o.shape[0], heads = params.o.shape[1], d_v = params.o.shape[2];
  const std::vector<double> o = kit::to_dense(params.o), lse = dense(params.lse);
  const kit::Buffer own_o(static_cast<size_t>(tokens * heads * d_v) * 4);
  const kit::Buffer own_lse(static_cast<size_t>(tokens * heads) * 4);
  params.o = contiguous(own_o.data(), DType::kF32, {tokens, heads, d_v});
  params.lse = contiguous(own_lse.data(), DType::kF32, {tokens, heads});
  run_reference(context, params);
  const kit::Error error = kit::compare(o, kit::to_dense(params.o), d_v, lse, kit::to_dense(params.lse));
  add(result, error, tolerance, tokens * heads, what);
  if constexpr (requires { params.options; }) {
    if (params.options.compute != Compute::kFP8) return;
    params.options.compute = Compute::kDefault;
    run_reference(context, params);
    const kit::Error of_method = kit::compare(o, kit::to_dense(params.o), d_v, {}, {});
    result.method_error = std::max(result.method_error.value_or(0.0), of_method.max_rel);
  }
}

void check_decode(const Workload& workload, const kit::DecodeCase& problem, RefcheckResult& result) {
  const Context context = reference_context(workload.numerics().p_run);
  const Case& one = workload.description();
  const kit::Tolerance tolerance =
      kit::tolerance_of(problem.spec, kit::numerics_of(workload.backend(), kit::problem_of(problem.spec)));
  const DecodeParams all = problem.params();
  const auto* offsets = static_cast<const int32_t*>(all.qo_indptr.data);
  for (size_t request : sampled_requests(one.requests)) {
    const OneRequest pages(all.pages, request);
    // A draft tree is one of all of a request's queries.
    const int64_t q_len = one.requests[request].q_len;
    const int64_t queries = one.tree == kit::Tree::kNone ? std::min(kQueriesPerSample, q_len) : q_len;
    const int64_t first = offsets[request + 1] - queries;  // the last queries: their limits count from the end
    const HeadSample heads(one.heads, 2.0 * static_cast<double>(queries * one.requests[request].kv_len) *
                                          static_cast<double>(one.d_qk + one.d_v));
    const auto part = [&](const TensorView& view) {
      return slice(slice(view, 0, first, queries), 1, 0, heads.count, heads.step);
    };
    DecodeParams params = all;
    params.q = part(all.q);
    params.o = part(all.o);
    params.lse = part(all.lse);
    params.qo_indptr = {};
    params.pages = pages.pages;
    if (all.tree_mask.given()) params.tree_mask = slice(all.tree_mask, 0, first, queries);
    if (all.tree_parents.given()) params.tree_parents = slice(all.tree_parents, 0, first, queries);
    const PerHead sinks(all.options.attn_sink, heads.count, heads.step);
    const PerHead slopes(all.options.alibi_slopes, heads.count, heads.step);
    params.options.attn_sink = sinks.view;
    params.options.alibi_slopes = slopes.view;
    check_attention(context, params, tolerance, fmt::format("request {}", request), result);
  }
}

// Query tokens spread over all, a few heads of each.
void check_decode_sparse(const Workload& workload, const kit::DecodeSparseCase& problem, RefcheckResult& result) {
  const Context context = reference_context(workload.numerics().p_run);
  const Case& one = workload.description();
  const kit::Tolerance tolerance =
      kit::tolerance_of(problem.spec, kit::numerics_of(workload.backend(), kit::problem_of(problem.spec)));
  const DecodeSparseParams all = problem.params();
  const int64_t tokens = all.o.shape[0], count = std::min(tokens, kQueriesPerSample);
  const HeadSample heads(one.heads, 2.0 * static_cast<double>(count * (one.topk + one.extra_topk)) *
                                        static_cast<double>(one.d_qk + one.d_v));
  for (int64_t first : std::set<int64_t>{0, (tokens - count) / 2, tokens - count}) {
    const auto rows = [&](const TensorView& view) { return slice(view, 0, first, count); };
    const auto part = [&](const TensorView& view) { return slice(rows(view), 1, 0, heads.count, heads.step); };
    DecodeSparseParams params = all;
    params.q = part(all.q);
    params.o = part(all.o);
    params.lse = part(all.lse);
    params.pool.indices = rows(all.pool.indices);
    if (all.extra_pool.indices.given()) params.extra_pool.indices = rows(all.extra_pool.indices);
    params.qo_indptr = {};
    const PerHead sinks(all.options.attn_sink, heads.count, heads.step);
    params.options.attn_sink = sinks.view;
    check_attention(context, params, tolerance, fmt::format("token {}", first), result);
  }
}

void check_prefill_sparse(const Workload& workload, const kit::PrefillSparseCase& problem, RefcheckResult& result) {
  const Context context = reference_context(workload.numerics().p_run);
  const Case& one = workload.description();
  const kit::Tolerance tolerance =
      kit::tolerance_of(problem.spec, kit::numerics_of(workload.backend(), kit::problem_of(problem.spec)));
  const PrefillSparseParams all = problem.params();
  const int64_t tokens = all.o.shape[0], count = std::min(tokens, kQueriesPerSample);
  const HeadSample heads(one.heads,
                         2.0 * static_cast<double>(count * one.topk) * static_cast<double>(one.d_qk + one.d_v));
  for (int64_t first : std::set<int64_t>{0, (tokens - count) / 2, tokens - count}) {
    const auto rows = [&](const TensorView& view) { return slice(view, 0, first, count); };
    const auto part = [&](const TensorView& view) { return slice(rows(view), 1, 0, heads.count, heads.step); };
    PrefillSparseParams params = all;
    params.q = part(all.q);
    params.o = part(all.o);
    params.lse = part(all.lse);
    params.max_logits = {};
    params.indices = rows(all.indices);
    const PerHead sinks(all.options.attn_sink, heads.count, heads.step);
    params.options.attn_sink = sinks.view;
    check_attention(context, params, tolerance, fmt::format("token {}", first), result);
  }
}

void check_prefill(const Workload& workload, const kit::PrefillCase& problem, RefcheckResult& result) {
  const Context context = reference_context(workload.numerics().p_run);
  const Case& one = workload.description();
  const kit::Tolerance tolerance =
      kit::tolerance_of(problem.spec, kit::numerics_of(workload.backend(), kit::problem_of(problem.spec)));
  const PrefillParams all = problem.params();
  const auto* q_offsets = static_cast<const int32_t*>(all.qo_indptr.data);
  const auto* kv_offsets = static_cast<const int32_t*>(all.kv_indptr.data);
  for (size_t request : sampled_requests(one.requests)) {
    const auto [q_len, kv_len] = one.requests[request];
    const int64_t queries = std::min(kQueriesPerSample, q_len);
    for (int64_t last : std::set<int64_t>{queries, (q_len + queries) / 2, q_len}) {
      // Without the queries behind `last`, a causal problem ends that many keys earlier.
      const int64_t keys = one.causal ? std::max<int64_t>(kv_len - (q_len - last), 0) : kv_len;
      const HeadSample heads(one.heads,
                             2.0 * static_cast<double>(queries * keys) * static_cast<double>(one.d_qk + one.d_v));
      const auto part = [&](const TensorView& view, int64_t first, int64_t count) {
        return slice(slice(view, 0, first, count), 1, 0, heads.count, heads.step);
      };
      const int64_t first = q_offsets[request] + last - queries;
      const int32_t own_q[] = {0, static_cast<int32_t>(queries)}, own_kv[] = {0, static_cast<int32_t>(keys)};
      PrefillParams params = all;
      params.q = part(all.q, first, queries);
      params.o = part(all.o, first, queries);
      params.lse = part(all.lse, first, queries);
      params.k = part(all.k, kv_offsets[request], keys);
      params.v = part(all.v, kv_offsets[request], keys);
      params.qo_indptr = contiguous(own_q, DType::kI32, {2});
      const PerHead sinks(all.options.attn_sink, heads.count, heads.step);
      const PerHead slopes(all.options.alibi_slopes, heads.count, heads.step);
      params.options.attn_sink = sinks.view;
      params.options.alibi_slopes = slopes.view;
      params.kv_indptr = contiguous(own_kv, DType::kI32, {2});
      check_attention(context, params, tolerance, fmt::format("request {}, query {}", request, last - queries), result);
    }
  }
}

void check_merge(const kit::MergeCase& problem, RefcheckResult& result) {
  const Context context = reference_context();
  const MergeStatesParams all = problem.params();
  const int64_t tokens = all.o.shape[0], count = std::min(tokens, kRowsPerSample);
  for (int64_t first : std::set<int64_t>{0, tokens - count}) {
    MergeStatesParams params = all;
    params.partial_o = slice(all.partial_o, 1, first, count);
    params.partial_lse = slice(all.partial_lse, 1, first, count);
    params.o = slice(all.o, 0, first, count);
    params.lse = slice(all.lse, 0, first, count);
    check_attention(context, params, kit::tolerance_of(problem.spec), fmt::format("token {}", first), result);
  }
}

// Everything, by the checks of the kit.
template <class KitCase>
RefcheckResult check_whole(const Workload& workload, const KitCase& problem) {
  const Result<kit::Expected> expected = kit::expected_of(problem);
  require_reference(expected.status());
  const kit::Outcome outcome = kit::check_outputs(problem, *expected, workload.backend());
  const TensorView o = problem.params().o;
  RefcheckResult result = {
      .error = outcome.error.max_rel, .method_error = {}, .failure = outcome.failure, .rows = o.shape[0] * o.shape[1]};
  if constexpr (requires { kit::expected_of(problem, Compute::kDefault); }) {
    if (workload.description().compute != Compute::kFP8) return result;
    const Result<kit::Expected> unrounded = kit::expected_of(problem, Compute::kDefault);
    require_reference(unrounded.status());
    result.method_error = kit::compare(kit::to_dense(o), unrounded->o, o.shape[2], {}, {}).max_rel;
  }
  return result;
}

// What moves, packs or indexes, by the checks of the kit.
template <class KitCase>
RefcheckResult check_direct(const Workload& workload, const KitCase& problem) {
  const kit::Outcome outcome = kit::check_outputs(problem, workload.backend());
  const bool differs = !outcome.failure.empty() && outcome.error.max_rel == 0.0;
  return {.error = differs ? 1.0 : outcome.error.max_rel,
          .method_error = {},
          .failure = outcome.failure,
          .rows = std::max(workload.description().total_queries(), workload.description().total_kv())};
}

}  // namespace

RefcheckResult refcheck(const Workload& workload) {
  const bool whole = workload.work().flops <= kWholeFlops;
  return std::visit(
      [&](const auto& problem) -> RefcheckResult {
        using KitCase = std::decay_t<decltype(problem)>;
        RefcheckResult result;
        if constexpr (std::is_same_v<KitCase, std::monostate>) {
          return result;
        } else if constexpr (std::is_same_v<KitCase, kit::MergeCase>) {
          check_merge(problem, result);
        } else if constexpr (requires { kit::check_outputs(problem, std::string_view()); }) {
          return check_direct(workload, problem);
        } else {
          if (whole) return check_whole(workload, problem);
          if constexpr (std::is_same_v<KitCase, kit::DecodeCase>) check_decode(workload, problem, result);
          if constexpr (std::is_same_v<KitCase, kit::DecodeSparseCase>) check_decode_sparse(workload, problem, result);
          if constexpr (std::is_same_v<KitCase, kit::PrefillCase>) check_prefill(workload, problem, result);
          if constexpr (std::is_same_v<KitCase, kit::PrefillSparseCase>)
            check_prefill_sparse(workload, problem, result);
        }
        return result;
      },
      workload.problem());
}

}  // namespace mla::bench

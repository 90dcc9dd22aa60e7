// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/refcheck.h"

#include <algorithm>
#include <cstring>
#include <set>
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

void require(const Status& status) {
  if (!status.ok()) throw UsageError("reference: {}", status.message());
}

Context reference_context() {
  Result<Context> context = Context::create({.num_threads = 0, .affinity = {}, .backend = "reference"});
  require(context.status());
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

template <class Params>
void run_planned(const Context& context, const Params& params) {
  const Result<size_t> size = workspace_size(context, params);
  require(size.status());
  const kit::Buffer workspace(*size);
  const Result<Plan> planned = plan(context, params, workspace.bytes());
  require(planned.status());
  require(run(context, *planned, params));
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
  if constexpr (requires { run(context, params); })
    require(run(context, params));
  else
    run_planned(context, params);
  const kit::Error error = kit::compare(o, kit::to_dense(params.o), d_v, lse, kit::to_dense(params.lse));
  add(result, error, tolerance, tokens * heads, what);
}

void check_decode(const Workload& workload, const kit::DecodeCase& problem, RefcheckResult& result) {
  const Context context = reference_context();
  const Case& one = workload.description();
  const kit::Tolerance tolerance = kit::tolerance_of(problem.spec, kit::precision_of(workload.backend(), problem.spec));
  const DecodeParams all = problem.params();
  const auto* offsets = static_cast<const int32_t*>(all.qo_indptr.data);
  for (size_t request : sampled_requests(one.requests)) {
    const OneRequest pages(all.pages, request);
    const int64_t queries = std::min(kQueriesPerSample, one.requests[request].q_len);
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
    check_attention(context, params, tolerance, fmt::format("request {}", request), result);
  }
}

void check_prefill(const Workload& workload, const kit::PrefillCase& problem, RefcheckResult& result) {
  const Context context = reference_context();
  const Case& one = workload.description();
  const kit::Tolerance tolerance = kit::tolerance_of(problem.spec, kit::precision_of(workload.backend(), problem.spec));
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

// Rows must be equal bit for bit.
void compare_rows(const TensorView& got, int64_t got_row, const TensorView& expected, int64_t expected_row,
                  const std::string& what, RefcheckResult& result) {
  const auto row = [](const TensorView& view, int64_t index) {
    return static_cast<const std::byte*>(view.data) +
           index * view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
  };
  ++result.rows;
  const size_t bytes = static_cast<size_t>(expected.shape[1]) * size_of(expected.dtype);
  if (std::memcmp(row(got, got_row), row(expected, expected_row), bytes) == 0 || !result.failure.empty()) return;
  result.failure = what + ": the row differs from the reference";
  result.error = 1.0;
}

// First, middle and last places of `count` rows among `total`.
std::set<int64_t> sampled_starts(int64_t total, int64_t count) { return {0, (total - count) / 2, total - count}; }

void check_append(const kit::AppendCase& problem, RefcheckResult& result) {
  const Context context = reference_context();
  const AppendParams all = problem.params();
  const int64_t tokens = all.kv.shape[0], count = std::min(tokens, kRowsPerSample), width = all.kv.shape[1];
  const TensorView& pool = all.cache.kv;
  const auto* slots = problem.slot_mapping.as<int64_t>();
  const TensorView rows = contiguous(pool.data, pool.dtype, {pool.shape[0] * pool.shape[1], width});
  std::vector<int64_t> own_slots;
  for (int64_t i = 0; i < count; ++i) own_slots.push_back(i);
  const kit::Buffer own(static_cast<size_t>(count * width) * size_of(pool.dtype));
  for (int64_t first : sampled_starts(tokens, count)) {
    AppendParams params = all;
    params.kv = slice(all.kv, 0, first, count);
    params.slot_mapping = contiguous(own_slots.data(), DType::kI64, {count});
    params.cache.kv = contiguous(own.data(), pool.dtype, {count, 1, width});
    require(run(context, params));
    const TensorView expected = contiguous(own.data(), pool.dtype, {count, width});
    for (int64_t i = 0; i < count; ++i)
      compare_rows(rows, slots[first + i], expected, i, fmt::format("token {}", first + i), result);
  }
}

void check_gather(const Workload& workload, const kit::GatherCase& problem, RefcheckResult& result) {
  const Context context = reference_context();
  const Case& one = workload.description();
  const GatherParams all = problem.params();
  const auto* offsets = static_cast<const int32_t*>(all.out_indptr.data);
  const int64_t width = all.out_kv.shape[1];
  for (size_t request : sampled_requests(one.requests)) {
    const OneRequest pages(all.pages, request);
    const int64_t kv_len = one.requests[request].kv_len, count = std::min(kv_len, kRowsPerSample);
    const kit::Buffer own(static_cast<size_t>(std::max<int64_t>(count, 1) * width) * size_of(all.out_kv.dtype));
    const TensorView expected = contiguous(own.data(), all.out_kv.dtype, {count, width});
    for (int64_t first : sampled_starts(kv_len, count)) {
      const int32_t own_start[] = {static_cast<int32_t>(first)}, own_indptr[] = {0, static_cast<int32_t>(count)};
      GatherParams params = all;
      params.pages = pages.pages;
      params.token_start = contiguous(own_start, DType::kI32, {1});
      params.out_indptr = contiguous(own_indptr, DType::kI32, {2});
      params.out_kv = expected;
      require(run(context, params));
      for (int64_t i = 0; i < count; ++i)
        compare_rows(all.out_kv, offsets[request] + first + i, expected, i,
                     fmt::format("request {}, token {}", request, first + i), result);
    }
  }
}

// Everything, by the checks of the kit.
template <class KitCase>
RefcheckResult check_whole(const Workload& workload, const KitCase& problem) {
  const Result<kit::Expected> expected = kit::expected_of(problem);
  require(expected.status());
  const kit::Outcome outcome = kit::check_outputs(problem, *expected, workload.backend());
  const TensorView o = problem.params().o;
  return {.error = outcome.error.max_rel, .failure = outcome.failure, .rows = o.shape[0] * o.shape[1]};
}

}  // namespace

RefcheckResult refcheck(const Workload& workload) {
  RefcheckResult result;
  const Workload::Problem& problem = workload.problem();
  const bool whole = workload.work().flops <= kWholeFlops;
  if (const auto* decode = std::get_if<kit::DecodeCase>(&problem)) {
    if (whole) return check_whole(workload, *decode);
    check_decode(workload, *decode, result);
  }
  if (const auto* prefill = std::get_if<kit::PrefillCase>(&problem)) {
    if (whole) return check_whole(workload, *prefill);
    check_prefill(workload, *prefill, result);
  }
  if (const auto* merge = std::get_if<kit::MergeCase>(&problem)) check_merge(*merge, result);
  if (const auto* append = std::get_if<kit::AppendCase>(&problem)) check_append(*append, result);
  if (const auto* gather = std::get_if<kit::GatherCase>(&problem)) check_gather(workload, *gather, result);
  return result;
}

}  // namespace mla::bench

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "kit/case_parts.h"
#include "kit/cases.h"
#include "kit/paged_memory.h"

namespace mla::kit {

std::vector<int32_t> prefix_sums(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> sums = {0};
  for (int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

void fill_heads(const TensorView& view, uint64_t seed, uint64_t stream, float std) {
  for (int64_t i = 0; i < view.shape[0]; ++i)
    for (int64_t h = 0; h < view.shape[1]; ++h)
      fill_normal(view.data, view.dtype, i * view.stride[0] + h * view.stride[1], view.shape[2],
                  mix(seed, stream, static_cast<uint64_t>(i), static_cast<uint64_t>(h)), std);
}

std::vector<int32_t> random_lengths(int64_t count, int32_t most, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> lengths;
  for (int64_t i = 0; i < count; ++i) lengths.push_back(static_cast<int32_t>(random.integer(-1, int64_t{most} + 1)));
  return lengths;
}

Buffer padded_indices(const std::vector<int32_t>& values, int64_t num_tokens, int64_t topk, int64_t row_extra) {
  const std::vector<int32_t> row(static_cast<size_t>(topk + row_extra), 2147483647);
  Buffer buffer = rows_buffer(DType::kI32, num_tokens, topk, row_extra);
  for (int64_t t = 0; t < num_tokens; ++t) {
    int32_t* const to = buffer.as<int32_t>() + t * (topk + row_extra);
    std::copy(row.begin(), row.end(), to);
    std::copy_n(values.begin() + t * topk, topk, to);
  }
  return buffer;
}

void make_options(AttentionMemory& memory, const AttentionSpec& spec) {
  const int32_t heads = spec.num_heads;
  if (spec.options.attn_sink) {
    std::vector<float> sinks(static_cast<size_t>(heads));
    fill_normal(sinks.data(), DType::kF32, 0, heads, mix(spec.seed, kSink), 3.0F);
    Random random(mix(spec.seed, kSink, 1));
    for (float& sink : sinks) {
      const int64_t kind = spec.options.infinite_sinks ? random.integer(0, 2) : 0;
      if (kind != 0) sink = kind == 1 ? INFINITY : -INFINITY;
    }
    memory.attn_sink = to_buffer(sinks);
  }
  if (spec.options.alibi_slopes) {
    std::vector<float> slopes;
    for (int32_t h = 1; h <= heads; ++h)
      slopes.push_back(std::exp2(-8.0F * static_cast<float>(h) / static_cast<float>(heads)));
    memory.alibi_slopes = to_buffer(slopes);
  }
}

AttentionOptions options_of(const AttentionMemory& memory, const AttentionSpec& spec) {
  AttentionOptions options;
  if (spec.options.attn_sink) options.attn_sink = list_view(memory.attn_sink, DType::kF32, spec.num_heads);
  options.window_left = spec.options.window_left;
  options.logits_soft_cap = spec.options.logits_soft_cap;
  options.compute = spec.options.compute;
  if (spec.options.alibi_slopes) options.alibi_slopes = list_view(memory.alibi_slopes, DType::kF32, spec.num_heads);
  return options;
}

void make_outputs(AttentionMemory& memory, const AttentionSpec& spec, int64_t num_tokens, int64_t d_v) {
  memory.o = padded_buffer(spec.o_dtype, num_tokens, spec.num_heads, d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse)
    memory.lse = statistics_buffer(num_tokens, spec.num_heads, spec.lse_head_extra, spec.lse_token_extra);
}

void make_queries(AttentionMemory& memory, const AbsorbedSpec& spec, float sm_scale, int64_t num_tokens,
                  const CacheSpec& cache) {
  float std = query_std(spec, sm_scale, cache.d_qk);
  if (spec.q_dtype == DType::kE4M3) {
    const float scale = spec.q_scale != 0 ? spec.q_scale : std::abs(std) / 16;
    memory.q_scale = to_buffer(std::array{scale});
    std /= scale;
  }
  if (spec.o_dtype == DType::kE4M3) memory.o_scale = to_buffer(std::array{spec.o_scale});
  const auto make = [&](Buffer& buffer, int64_t width) {
    buffer = padded_buffer(spec.q_dtype, num_tokens, spec.num_heads, width, spec.q_head_extra, spec.q_token_extra);
    buffer.fill(kNanByte);
  };
  // The parts are drawn one by one, so that split and joined queries of one seed are equal.
  DecodeParams params;
  if (spec.split_q) {
    make(memory.q_nope, cache.d_ckv());
    if (cache.d_kpe() > 0) make(memory.q_pe, cache.d_kpe());
    set_queries(params, memory, spec, num_tokens, cache);
  } else {
    make(memory.q, cache.d_qk);
    set_queries(params, memory, spec, num_tokens, cache);
    params.q_nope = params.q_pe = params.q;
    params.q_nope.shape[2] = cache.d_ckv();
    params.q_pe.shape[2] = cache.d_kpe();
    params.q_pe.data = memory.q.data() + static_cast<size_t>(cache.d_ckv()) * size_of(spec.q_dtype);
  }
  fill_heads(params.q_nope, spec.seed, kQ, std);
  if (cache.d_kpe() > 0) fill_heads(params.q_pe, spec.seed, kQ + 100, std);
}

namespace {

constexpr int64_t kMaskExtra = 1;  // columns beyond the longest request's drafts

int64_t longest_q(const std::vector<int32_t>& q_len) {
  return q_len.empty() ? 0 : *std::max_element(q_len.begin(), q_len.end());
}

/// Makes parents and masks of every request's drafts; columns that no draft has are set.
void make_tree(DecodeCase& problem, const std::vector<int32_t>& q_len) {
  const DecodeSpec& spec = problem.spec;
  if (spec.tree == Tree::kNone) return;
  const int64_t stride = longest_q(q_len) + kMaskExtra + spec.tree_mask_extra;
  std::vector<int32_t> parents;
  problem.tree_mask = Buffer(static_cast<size_t>(problem.num_tokens * stride));
  problem.tree_mask.fill(0xFF);
  Random random(mix(spec.seed, kTree));
  for (int32_t len : q_len) {
    for (int32_t i = 0; i < len; ++i) {
      auto* const mask = problem.tree_mask.as<uint8_t>() + std::ssize(parents) * stride;
      for (int32_t j = 0; j < len; ++j)
        mask[j] = random.chance(0.5) ? static_cast<uint8_t>(random.integer(1, 255)) : uint8_t{0};
      parents.push_back(static_cast<int32_t>(random.integer(-1, int64_t{i} - 1)));
    }
  }
  problem.tree_parents = to_buffer(parents);
}

}  // namespace

DecodeCase::DecodeCase(const DecodeSpec& decode_spec) : spec(noted(decode_spec)) {
  const std::vector<int32_t> q_len = q_lens(spec), indptr = prefix_sums(q_len);
  num_tokens = indptr.back();
  if (!spec.omit_qo_indptr) qo_indptr = to_buffer(indptr);
  memory = make_paged(spec.cache, spec.kv_len, mix(spec.seed, kCache), spec.context_parallel);
  make_tree(*this, q_len);
  make_options(*this, spec);
  make_queries(*this, spec, spec.effective_sm_scale(), num_tokens, spec.cache);
  make_outputs(*this, spec, num_tokens, spec.cache.d_v);
  reset_outputs();
}

DecodeParams DecodeCase::params() const {
  DecodeParams p;
  set_queries(p, *this, spec, num_tokens, spec.cache);
  set_common(p, *this, spec, num_tokens, spec.cache.d_v);
  p.cache = memory.cache;
  p.pages = memory.pages;
  if (!spec.omit_qo_indptr) p.qo_indptr = list_view(qo_indptr, DType::kI32, spec.batch_size() + 1);
  p.causal = spec.causal;
  if (spec.tree == Tree::kMask)
    p.tree_mask =
        rows_view(tree_mask, DType::kU8, num_tokens, longest_q(q_lens(spec)) + kMaskExtra, spec.tree_mask_extra);
  if (spec.tree == Tree::kParents) p.tree_parents = list_view(tree_parents, DType::kI32, num_tokens);
  p.context_parallel = spec.context_parallel;
  p.shared_prefix = spec.shared_prefix;
  p.sm_scale = spec.effective_sm_scale();
  return p;
}

void DecodeCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
}

namespace {

/// Returns topk_length of every query token, clamped; `given` is what the operation gets.
std::vector<int32_t> lengths_of_tokens(const SparsePoolSpec& spec, const std::vector<int32_t>& q_len,
                                       const std::vector<int32_t>& given) {
  std::vector<int32_t> lengths;
  for (size_t request = 0; request < q_len.size(); ++request)
    for (int32_t i = 0; i < q_len[request]; ++i) {
      int32_t length = spec.topk;
      if (spec.topk_length == LengthForm::kPerRequest) length = given[request];
      if (spec.topk_length == LengthForm::kPerToken) length = given[lengths.size()];
      lengths.push_back(std::clamp(length, 0, spec.topk));
    }
  return lengths;
}

SparseMemory make_sparse(const SparsePoolSpec& spec, const std::vector<int32_t>& q_len, uint64_t seed) {
  SparseMemory made;
  made.memory = make_paged(spec.cache, std::array{spec.num_tokens}, mix(seed, kCache));
  const int64_t num_tokens = std::accumulate(q_len.begin(), q_len.end(), int64_t{0});
  std::vector<int32_t> given;
  if (spec.topk_length != LengthForm::kNone) {
    const bool per_token = spec.topk_length == LengthForm::kPerToken;
    const int64_t count = per_token ? num_tokens : std::ssize(q_len);
    given = random_lengths(count, spec.topk, mix(seed, kLengths));
    for (size_t i = 0; i < given.size() && !spec.lengths.empty(); ++i) given[i] = spec.lengths[i % spec.lengths.size()];
    made.topk_length = to_buffer(given);
  }
  const IndexDraw draw = {.num_tokens = num_tokens,
                          .topk = spec.topk,
                          .num_rows = spec.num_tokens,
                          .num_slots = made.memory.num_pages * spec.cache.page_size,
                          .invalid_share = spec.invalid_share,
                          .duplicate_share = spec.duplicate_share,
                          .empty_share = spec.empty_share};
  const std::vector<int32_t> indices = draw_indices(draw, lengths_of_tokens(spec, q_len, given), mix(seed, kIndices),
                                                    [&](int64_t row) { return made.memory.slot_of(0, row); });
  made.indices = padded_indices(indices, num_tokens, spec.topk, spec.row_extra);
  return made;
}

SparsePool pool_params(const SparsePoolSpec& spec, const SparseMemory& memory, int64_t num_tokens, int64_t batch_size) {
  SparsePool pool;
  pool.cache = memory.memory.cache;
  pool.indices = rows_view(memory.indices, DType::kI32, num_tokens, spec.topk, spec.row_extra);
  if (spec.topk_length == LengthForm::kNone) return pool;
  const bool per_token = spec.topk_length == LengthForm::kPerToken;
  pool.topk_length = list_view(memory.topk_length, DType::kI32, per_token ? num_tokens : batch_size);
  pool.topk_length_per = per_token ? LengthPer::kToken : LengthPer::kRequest;
  return pool;
}

template <class Case, class Spec>
void make_max_logits(Case& problem, const Spec& spec, int64_t num_tokens) {
  if (spec.want_max_logits)
    problem.max_logits =
        statistics_buffer(num_tokens, spec.num_heads, spec.max_logits_head_extra, spec.max_logits_token_extra);
}
template <class Params, class Case, class Spec>
void set_max_logits(Params& params, const Case& problem, const Spec& spec, int64_t num_tokens) {
  if (spec.want_max_logits)
    params.max_logits = statistics_view(problem.max_logits, num_tokens, spec.num_heads, spec.max_logits_head_extra,
                                        spec.max_logits_token_extra);
}

}  // namespace

DecodeSparseCase::DecodeSparseCase(const DecodeSparseSpec& sparse_spec)
    : spec(noted(sparse_spec)), num_tokens(sparse_spec.num_tokens()) {
  qo_indptr = to_buffer(prefix_sums(spec.q_len));
  pool = make_sparse(spec.pool, spec.q_len, spec.seed);
  if (spec.extra_pool.has_value()) extra_pool = make_sparse(*spec.extra_pool, spec.q_len, mix(spec.seed, kExtraPool));
  make_options(*this, spec);
  make_queries(*this, spec, spec.effective_sm_scale(), num_tokens, spec.pool.cache);
  make_outputs(*this, spec, num_tokens, spec.pool.cache.d_v);
  make_max_logits(*this, spec, num_tokens);
  if (spec.finish.has_value()) {
    finish.emplace(*spec.finish, spec.finished_rows(), mix(spec.seed, kFinish));
    o = FinishMemory::output(*spec.finish, spec.finished_rows(), {spec.o_head_extra, spec.o_token_extra});
  }
  reset_outputs();
}

DecodeSparseParams DecodeSparseCase::params() const {
  DecodeSparseParams p;
  set_queries(p, *this, spec, num_tokens, spec.pool.cache);
  set_common(p, *this, spec, num_tokens, spec.pool.cache.d_v);
  p.pool = pool_params(spec.pool, pool, num_tokens, spec.batch_size());
  if (spec.extra_pool.has_value())
    p.extra_pool = pool_params(*spec.extra_pool, *extra_pool, num_tokens, spec.batch_size());
  if (spec.per_request() && !spec.omit_qo_indptr)
    p.qo_indptr = list_view(qo_indptr, DType::kI32, spec.batch_size() + 1);
  p.sm_scale = spec.effective_sm_scale();
  set_max_logits(p, *this, spec, num_tokens);
  if (finish.has_value()) {
    p.finish = finish->params(*spec.finish, spec.finished_rows());
    p.o = FinishMemory::output_view(*spec.finish, spec.finished_rows(), o, {spec.o_head_extra, spec.o_token_extra});
    p.o_scale = {};
  }
  return p;
}

std::vector<const Buffer*> DecodeSparseCase::outputs() const {
  std::vector<const Buffer*> all = {&o, &lse, &max_logits};
  if (finish.has_value()) all.push_back(&finish->scale);
  return all;
}

void DecodeSparseCase::reset_outputs() const { untouched(outputs()); }

PrefillCase::PrefillCase(const PrefillSpec& prefill_spec) : spec(noted(prefill_spec)) {
  const std::vector<int32_t> qo = prefix_sums(q_lens(spec)), kv = prefix_sums(spec.kv_len);
  num_tokens = qo.back();
  num_keys = kv.back();
  qo_indptr = to_buffer(qo);
  kv_indptr = to_buffer(kv);
  const int64_t heads = spec.num_heads;
  q = padded_buffer(spec.dtype, num_tokens, heads, spec.d_qk, spec.q_head_extra, spec.q_token_extra);
  k = padded_buffer(spec.dtype, num_keys, heads, spec.d_qk, spec.k_head_extra, spec.k_token_extra);
  v = padded_buffer(spec.dtype, num_keys, heads, spec.d_v, spec.v_head_extra, spec.v_token_extra);
  if (spec.poison)
    for (const Buffer* buffer : {&q, &k, &v}) buffer->fill(kNanByte);
  make_options(*this, spec);
  make_outputs(*this, spec, num_tokens, spec.d_v);
  if (spec.o_dtype == DType::kE4M3) o_scale = to_buffer(std::array{spec.o_scale});
  const float q_std = query_std(spec, spec.effective_sm_scale(), spec.d_qk);
  const float q_scale_of_e4m3 = spec.q_scale != 0 ? spec.q_scale : std::abs(q_std) / 16;
  const auto scale = [&](Buffer& buffer, float of_e4m3) {
    if (spec.dtype != DType::kE4M3) return 1.0F;
    buffer = to_buffer(std::array{of_e4m3});
    return of_e4m3;
  };
  const float of_q = scale(q_scale, q_scale_of_e4m3), of_k = scale(k_scale, spec.k_scale),
              of_v = scale(v_scale, spec.v_scale);
  const PrefillParams p = params();
  fill_heads(p.q, spec.seed, kQ, q_std / of_q);
  fill_heads(p.k, spec.seed, kK, 1 / of_k);
  fill_heads(p.v, spec.seed, kV, 1 / of_v);
  reset_outputs();
}

PrefillParams PrefillCase::params() const {
  const int64_t heads = spec.num_heads;
  PrefillParams p;
  set_common(p, *this, spec, num_tokens, spec.d_v);
  p.q = padded_view(q, spec.dtype, num_tokens, heads, spec.d_qk, spec.q_head_extra, spec.q_token_extra);
  p.k = padded_view(k, spec.dtype, num_keys, heads, spec.d_qk, spec.k_head_extra, spec.k_token_extra);
  p.v = padded_view(v, spec.dtype, num_keys, heads, spec.d_v, spec.v_head_extra, spec.v_token_extra);
  if (spec.dtype == DType::kE4M3) {
    p.q_scale = list_view(q_scale, DType::kF32, 1);
    p.k_scale = list_view(k_scale, DType::kF32, 1);
    p.v_scale = list_view(v_scale, DType::kF32, 1);
  }
  if (spec.o_dtype == DType::kE4M3) p.o_scale = list_view(o_scale, DType::kF32, 1);
  p.qo_indptr = list_view(qo_indptr, DType::kI32, spec.batch_size() + 1);
  p.kv_indptr = list_view(kv_indptr, DType::kI32, spec.batch_size() + 1);
  p.causal = spec.causal;
  p.sm_scale = spec.effective_sm_scale();
  return p;
}

void PrefillCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
}

PrefillSparseCase::PrefillSparseCase(const PrefillSparseSpec& sparse_spec) : spec(noted(sparse_spec)) {
  constexpr int64_t kPoisonedRows = 3;
  const int64_t heads = spec.num_heads;
  q = padded_buffer(spec.q_dtype, spec.num_tokens, heads, spec.d_qk, spec.q_head_extra, spec.q_token_extra);
  kv = rows_buffer(spec.kv_dtype, spec.num_keys + kPoisonedRows, spec.d_qk, spec.kv_extra);
  q.fill(kNanByte);
  kv.fill(kNanByte);
  std::vector<int32_t> lengths(static_cast<size_t>(spec.num_tokens), spec.topk);
  if (spec.topk_length) {
    lengths = random_lengths(spec.num_tokens, spec.topk, mix(spec.seed, kLengths));
    topk_length = to_buffer(lengths);
  }
  const IndexDraw draw = {.num_tokens = spec.num_tokens,
                          .topk = spec.topk,
                          .num_rows = spec.num_keys,
                          .num_slots = spec.num_keys,
                          .invalid_share = spec.invalid_share,
                          .duplicate_share = spec.duplicate_share,
                          .empty_share = spec.empty_share};
  indices = padded_indices(draw_indices(draw, lengths, mix(spec.seed, kIndices), [](int64_t row) { return row; }),
                           spec.num_tokens, spec.topk, spec.row_extra);
  make_options(*this, spec);
  make_outputs(*this, spec, spec.num_tokens, spec.d_v);
  make_max_logits(*this, spec, spec.num_tokens);
  const PrefillSparseParams p = params();
  fill_heads(p.q, spec.seed, kQ, query_std(spec, p.sm_scale, spec.d_qk));
  for (int64_t row = 0; row < spec.num_keys; ++row)
    fill_normal(kv.data(), spec.kv_dtype, row * p.kv.stride[0], spec.d_qk,
                mix(spec.seed, kK, static_cast<uint64_t>(row)));
  reset_outputs();
}

PrefillSparseParams PrefillSparseCase::params() const {
  const int64_t tokens = spec.num_tokens, heads = spec.num_heads;
  PrefillSparseParams p;
  set_common(p, *this, spec, tokens, spec.d_v);
  p.q = padded_view(q, spec.q_dtype, tokens, heads, spec.d_qk, spec.q_head_extra, spec.q_token_extra);
  p.kv = rows_view(kv, spec.kv_dtype, spec.num_keys, spec.d_qk, spec.kv_extra);
  p.indices = rows_view(indices, DType::kI32, tokens, spec.topk, spec.row_extra);
  if (spec.topk_length) p.topk_length = list_view(topk_length, DType::kI32, tokens);
  p.sm_scale = spec.effective_sm_scale();
  set_max_logits(p, *this, spec, tokens);
  return p;
}

void PrefillSparseCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
  max_logits.fill(kUntouched);
}

}  // namespace mla::kit

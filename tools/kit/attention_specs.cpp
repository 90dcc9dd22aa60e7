// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "kit/spec_line.h"
#include "kit/specs.h"

namespace mla::kit {

std::string text(bool value) { return value ? "1" : "0"; }
std::string text(int32_t value) { return std::to_string(value); }
std::string text(int64_t value) { return std::to_string(value); }
std::string text(uint64_t value) { return std::to_string(value); }
std::string text(DType value) { return std::string(name(value)); }
std::string text(CacheFormat value) { return std::string(name(value)); }
std::string text(IndexerFormat value) { return std::string(name(value)); }
std::string text(LseBase value) { return value == LseBase::kTwo ? "two" : "e"; }
std::string text(Compute value) { return std::string(name(value)); }
std::string text(Tree value) { return value == Tree::kNone ? "none" : value == Tree::kMask ? "mask" : "parents"; }
std::string text(LengthForm value) {
  return value == LengthForm::kNone ? "none" : value == LengthForm::kPerToken ? "per_token" : "per_request";
}
std::string text(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}
std::string text(float value) { return text(static_cast<double>(value)); }
std::string text(const ContextParallel& value) {
  return std::to_string(value.rank) + "/" + std::to_string(value.world) + "/" + std::to_string(value.interleave);
}
std::string text(const std::vector<int32_t>& values) {
  constexpr size_t kShown = 64;
  std::string list = "[";
  for (size_t i = 0; i < std::min(values.size(), kShown); ++i) {
    if (i != 0) list += ',';
    list += std::to_string(values[i]);
  }
  if (values.size() > kShown) list.append(",... ").append(std::to_string(values.size())).append(" in all");
  return list += ']';
}

double total(const std::vector<int32_t>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

namespace {

std::string describe(const OptionsSpec& spec) {
  return Line(spec)
      .knob("attn_sink", &OptionsSpec::attn_sink)
      .knob("infinite_sinks", &OptionsSpec::infinite_sinks)
      .knob("window_left", &OptionsSpec::window_left)
      .knob("logits_soft_cap", &OptionsSpec::logits_soft_cap)
      .knob("alibi_slopes", &OptionsSpec::alibi_slopes)
      .knob("compute", &OptionsSpec::compute)
      .take();
}

/// Describes what all attention operations have in common, beyond the shape.
template <class Spec>
std::string describe_attention(const Spec& spec) {
  return Line(spec)
      .always("o_dtype", &Spec::o_dtype)
      .append(describe(spec.options))
      .knob("want_lse", &Spec::want_lse)
      .knob("lse_base", &Spec::lse_base)
      .knob("lse_inf_without_keys", &Spec::lse_inf_without_keys)
      .knob("batch_invariant", &Spec::batch_invariant)
      .knob("sm_scale", &Spec::sm_scale)
      .knob("score_std", &Spec::score_std)
      .knob("q_head_extra", &Spec::q_head_extra)
      .knob("q_token_extra", &Spec::q_token_extra)
      .knob("o_head_extra", &Spec::o_head_extra)
      .knob("o_token_extra", &Spec::o_token_extra)
      .knob("lse_head_extra", &Spec::lse_head_extra)
      .knob("lse_token_extra", &Spec::lse_token_extra)
      .knob("workspace_misalign", &Spec::workspace_misalign)
      .take();
}

template <class Spec>
std::string describe_absorbed(const Spec& spec) {
  return Line(spec)
      .always("q_dtype", &Spec::q_dtype)
      .append(describe_attention(spec))
      .knob("q_scale", &Spec::q_scale)
      .knob("o_scale", &Spec::o_scale)
      .knob("split_q", &Spec::split_q)
      .knob("omit_qo_indptr", &Spec::omit_qo_indptr)
      .take();
}

std::string describe(const SparsePoolSpec& spec) {
  using Spec = SparsePoolSpec;
  return Line(spec)
      .append(describe(spec.cache))
      .always("num_tokens", &Spec::num_tokens)
      .always("topk", &Spec::topk)
      .knob("topk_length", &Spec::topk_length)
      .knob("lengths", &Spec::lengths)
      .knob("invalid_share", &Spec::invalid_share)
      .knob("duplicate_share", &Spec::duplicate_share)
      .knob("empty_share", &Spec::empty_share)
      .knob("row_extra", &Spec::row_extra)
      .take();
}

/// Returns how many indices of one query token are expected to count and to be valid.
double expected_topk(int32_t topk, bool random_length, double invalid_share, double empty_share) {
  return topk * (random_length ? 0.5 : 1.0) * (1 - invalid_share) * (1 - empty_share);
}

double output_bytes(const AttentionSpec& spec, double rows, double d_v) {
  return rows * (d_v * bytes_of(spec.o_dtype) + (spec.want_lse ? 4 : 0));
}

float usual_sm_scale(float sm_scale, int32_t d_kpe) {
  return sm_scale != 0 ? sm_scale : 1.0F / std::sqrt(static_cast<float>(128 + d_kpe));
}

int64_t listed_keys(const AttentionSpec& spec, int64_t num_tokens, int64_t topk) {
  return spec.batch_invariant ? 0 : num_tokens * topk;
}

/// Returns how many keys requests have in pages of the request before them.
int64_t shared_keys(const DecodeSpec& spec) {
  int64_t keys = 0;
  for (size_t b = 1; b < spec.kv_len.size() && !spec.cache.shared_pages.empty(); ++b) {
    const std::vector<int32_t>& shared = spec.cache.shared_pages;
    const auto local = [&](size_t request) { return local_length(spec.context_parallel, spec.kv_len[request]); };
    const int64_t most = int64_t{shared.size() == 1 ? shared[0] : shared[b]} * spec.cache.page_size;
    keys += std::min({most, local(b - 1), local(b)});
  }
  return keys;
}

}  // namespace

float DecodeSpec::effective_sm_scale() const { return usual_sm_scale(sm_scale, cache.d_kpe()); }
float DecodeSparseSpec::effective_sm_scale() const { return usual_sm_scale(sm_scale, pool.cache.d_kpe()); }
float PrefillSparseSpec::effective_sm_scale() const { return usual_sm_scale(sm_scale, d_qk - d_v); }

float PrefillSpec::effective_sm_scale() const {
  return sm_scale != 0 ? sm_scale : 1.0F / std::sqrt(static_cast<float>(d_qk));
}

int64_t DecodeSparseSpec::num_tokens() const { return std::accumulate(q_len.begin(), q_len.end(), int64_t{0}); }

FinishedRows DecodeSparseSpec::finished_rows() const { return {num_tokens(), num_heads, pool.cache.d_v, o_dtype}; }

bool DecodeSparseSpec::per_request() const {
  return pool.topk_length == LengthForm::kPerRequest ||
         (extra_pool.has_value() && extra_pool->topk_length == LengthForm::kPerRequest);
}

std::string describe(const DecodeSpec& spec) {
  using Spec = DecodeSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("num_heads", &Spec::num_heads)
      .append(describe(spec.cache))
      .append(describe_absorbed(spec))
      .knob("causal", &Spec::causal)
      .knob("tree", &Spec::tree)
      .knob("tree_mask_extra", &Spec::tree_mask_extra)
      .knob("context_parallel", &Spec::context_parallel)
      .knob("shared_prefix", &Spec::shared_prefix)
      .take();
}

std::string describe(const DecodeSparseSpec& spec) {
  using Spec = DecodeSparseSpec;
  Line line(spec);
  line.always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("num_heads", &Spec::num_heads)
      .append(describe(spec.pool));
  if (spec.extra_pool.has_value()) line.append("extra_pool: " + describe(*spec.extra_pool) + ";");
  return line.append(describe_absorbed(spec))
      .knob("want_max_logits", &Spec::want_max_logits)
      .knob("max_logits_head_extra", &Spec::max_logits_head_extra)
      .knob("max_logits_token_extra", &Spec::max_logits_token_extra)
      .append(spec.finish.has_value() ? "finish: " + describe(*spec.finish) + ";" : "")
      .take();
}

std::string describe(const PrefillSpec& spec) {
  using Spec = PrefillSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("num_heads", &Spec::num_heads)
      .always("d_qk", &Spec::d_qk)
      .always("d_v", &Spec::d_v)
      .always("dtype", &Spec::dtype)
      .append(describe_attention(spec))
      .knob("q_scale", &Spec::q_scale)
      .knob("k_scale", &Spec::k_scale)
      .knob("v_scale", &Spec::v_scale)
      .knob("o_scale", &Spec::o_scale)
      .knob("causal", &Spec::causal)
      .knob("k_head_extra", &Spec::k_head_extra)
      .knob("k_token_extra", &Spec::k_token_extra)
      .knob("v_head_extra", &Spec::v_head_extra)
      .knob("v_token_extra", &Spec::v_token_extra)
      .knob("poison", &Spec::poison)
      .take();
}

std::string describe(const PrefillSparseSpec& spec) {
  using Spec = PrefillSparseSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_keys", &Spec::num_keys)
      .always("num_heads", &Spec::num_heads)
      .always("d_qk", &Spec::d_qk)
      .always("d_v", &Spec::d_v)
      .always("q_dtype", &Spec::q_dtype)
      .always("kv_dtype", &Spec::kv_dtype)
      .always("topk", &Spec::topk)
      .append(describe_attention(spec))
      .knob("topk_length", &Spec::topk_length)
      .knob("invalid_share", &Spec::invalid_share)
      .knob("duplicate_share", &Spec::duplicate_share)
      .knob("empty_share", &Spec::empty_share)
      .knob("kv_extra", &Spec::kv_extra)
      .knob("row_extra", &Spec::row_extra)
      .knob("want_max_logits", &Spec::want_max_logits)
      .knob("max_logits_head_extra", &Spec::max_logits_head_extra)
      .knob("max_logits_token_extra", &Spec::max_logits_token_extra)
      .take();
}

Problem problem_of(const DecodeSpec& spec) {
  const int64_t requests = std::max(spec.batch_size(), 1);
  const int64_t q_len = spec.batch_invariant ? 1 : (total_queries(spec) + requests - 1) / requests;
  return {.op = Op::kDecode,
          .device = {},
          .q_dtype = spec.q_dtype,
          .cache = spec.cache.format,
          .num_heads = spec.num_heads,
          .d_qk = spec.cache.d_qk,
          .d_v = spec.cache.d_v,
          .q_len = std::max<int64_t>(q_len, 1),
          .num_requests = spec.batch_invariant ? 0 : spec.batch_size(),
          .compute = spec.options.compute};
}

Problem problem_of(const DecodeSparseSpec& spec) {
  return {.op = Op::kDecodeSparse,
          .device = {},
          .q_dtype = spec.q_dtype,
          .cache = spec.pool.cache.format,
          .num_heads = spec.num_heads,
          .d_qk = spec.pool.cache.d_qk,
          .d_v = spec.pool.cache.d_v,
          .extra_cache = spec.extra_pool ? std::optional(spec.extra_pool->cache.format) : std::nullopt,
          .listed_keys =
              listed_keys(spec, spec.num_tokens(), spec.pool.topk + (spec.extra_pool ? spec.extra_pool->topk : 0)),
          .compute = spec.options.compute};
}

Problem problem_of(const PrefillSpec& spec) {
  return {.op = Op::kPrefill,
          .device = {},
          .q_dtype = spec.dtype,
          .cache = {},
          .num_heads = spec.num_heads,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v,
          .compute = spec.options.compute};
}

Problem problem_of(const PrefillSparseSpec& spec) {
  return {.op = Op::kPrefillSparse,
          .device = {},
          .q_dtype = spec.q_dtype,
          .cache = format_of_elements(spec.kv_dtype).value_or(CacheFormat::kBF16),
          .num_heads = spec.num_heads,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v,
          .listed_keys = listed_keys(spec, spec.num_tokens, spec.topk)};
}

Work work_of(const DecodeSpec& spec) {
  const double rows = static_cast<double>(total_queries(spec)) * spec.num_heads;
  const double d_qk = spec.cache.d_qk, d_v = spec.cache.d_v;
  double keys = 0;
  for (int32_t kv_len : spec.kv_len) keys += static_cast<double>(local_length(spec.context_parallel, kv_len));
  keys -= static_cast<double>(shared_keys(spec));
  const double pairs = visible_pairs(spec, spec.causal, spec.options.window_left, spec.context_parallel);
  return {.flops = 2 * pairs * spec.num_heads * (d_qk + d_v),
          .bytes = keys * cache_row_bytes(spec.cache) + rows * d_qk * bytes_of(spec.q_dtype) +
                   output_bytes(spec, rows, d_v)};
}

Work work_of(const DecodeSparseSpec& spec) {
  const auto tokens = static_cast<double>(spec.num_tokens());
  const double rows = tokens * spec.num_heads, d_qk = spec.pool.cache.d_qk, d_v = spec.pool.cache.d_v;
  Work work = {.flops = 0, .bytes = rows * d_qk * bytes_of(spec.q_dtype) + output_bytes(spec, rows, d_v)};
  const auto add = [&](const SparsePoolSpec& pool) {
    const double keys =
        tokens * expected_topk(pool.topk, pool.topk_length != LengthForm::kNone, pool.invalid_share, pool.empty_share);
    work.flops += 2 * keys * spec.num_heads * (d_qk + d_v);
    work.bytes += std::min<double>(keys, pool.num_tokens) * cache_row_bytes(pool.cache) + tokens * pool.topk * 4;
  };
  add(spec.pool);
  if (spec.extra_pool.has_value()) add(*spec.extra_pool);
  if (spec.finish.has_value()) work.bytes += bytes_beside_rows(*spec.finish, spec.finished_rows());
  return work;
}

Work work_of(const PrefillSpec& spec) {
  const double rows = static_cast<double>(total_queries(spec)) * spec.num_heads;
  const double keys = total(spec.kv_len) * spec.num_heads;
  const double d_qk = spec.d_qk, d_v = spec.d_v;
  return {.flops = 2 * visible_pairs(spec, spec.causal, spec.options.window_left) * spec.num_heads * (d_qk + d_v),
          .bytes = keys * (d_qk + d_v) * bytes_of(spec.dtype) + rows * d_qk * bytes_of(spec.dtype) +
                   output_bytes(spec, rows, d_v)};
}

Work work_of(const PrefillSparseSpec& spec) {
  const double tokens = spec.num_tokens, rows = tokens * spec.num_heads, d_qk = spec.d_qk, d_v = spec.d_v;
  const double keys = tokens * expected_topk(spec.topk, spec.topk_length, spec.invalid_share, spec.empty_share);
  return {.flops = 2 * keys * spec.num_heads * (d_qk + d_v),
          .bytes = std::min<double>(keys, spec.num_keys) * d_qk * bytes_of(spec.kv_dtype) + tokens * spec.topk * 4 +
                   rows * (d_qk * bytes_of(spec.q_dtype) + (spec.want_max_logits ? 4 : 0)) +
                   output_bytes(spec, rows, d_v)};
}

}  // namespace mla::kit

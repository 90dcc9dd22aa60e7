// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <utility>

#include "kit/random_parts.h"

namespace mla::kit {
namespace {

float random_score_std(Random& random) {
  return pick(random, std::array<float, 6>{0.1F, 1.0F, 2.0F, 2.0F, 4.0F, 40.0F});
}

/// Draws each option now and then, in any combination. Windows and slopes need positions.
OptionsSpec random_options(Random& random, bool positions) {
  OptionsSpec options;
  options.attn_sink = random.chance(0.3);
  options.infinite_sinks = options.attn_sink && random.chance(0.3);
  options.logits_soft_cap = random.chance(0.2) ? pick(random, std::array<float, 3>{1.0F, 30.0F, 50.0F}) : 0.0F;
  if (!positions) return options;
  options.window_left = random.chance(0.2) ? pick(random, std::array<int32_t, 6>{0, 1, 17, 64, 127, 1000}) : -1;
  options.alibi_slopes = random.chance(0.2);
  return options;
}

/// Draws the arithmetic now and then where there is a choice; after all else, so that the rest of a seed's problem does
/// not depend on it.
void draw_compute(Random& random, const CacheSpec& cache, const CacheSpec& extra_cache, OptionsSpec& options) {
  const auto quantized = [](const CacheSpec& spec) { return is_quantized(kv_layout(spec.format).nope.element); };
  if (quantized(cache) && quantized(extra_cache) && random.chance(0.06)) options.compute = Compute::kFP8;
}

/// Draws what lse is without keys; after all else, as the arithmetic is.
void draw_lse_without_keys(Random& random, AttentionSpec& spec) { spec.lse_inf_without_keys = random.chance(0.3); }

/// Draws everything of a spec that all attention operations have in common, but heads and dtypes.
void draw_common(Random& random, AttentionSpec& spec, bool positions) {
  spec.options = random_options(random, positions);
  spec.want_lse = random.chance(0.9);
  spec.lse_base = random.chance(0.3) ? LseBase::kTwo : LseBase::kE;
  spec.batch_invariant = random.chance(0.25);
  spec.score_std = random_score_std(random);
  for (int64_t* extra : {&spec.q_head_extra, &spec.q_token_extra, &spec.o_head_extra, &spec.o_token_extra,
                         &spec.lse_head_extra, &spec.lse_token_extra})
    *extra = random_extra(random);
  spec.workspace_misalign = pick(random, std::array<int32_t, 4>{0, 1, 16, 63});
}

/// Draws queries of the cache's type half of the time, else of another one, and outputs that go with them.
void draw_dtypes(Random& random, AbsorbedSpec& spec, CacheFormat format) {
  const DType same = value_dtype(kv_layout(format).nope.element);
  const DType other = same == DType::kF16 ? DType::kBF16 : DType::kF16;
  const double q_type = random.uniform();
  spec.q_dtype = q_type < 0.5 ? same : q_type < 0.7 ? DType::kE4M3 : q_type < 0.85 ? DType::kF32 : other;
  spec.q_scale = random.chance(0.8) ? 0.0F : 0.25F;
  const double o_type = random.uniform();
  spec.o_dtype = o_type < 0.2                   ? DType::kF32
                 : o_type < 0.35                ? DType::kE4M3
                 : spec.q_dtype == DType::kE4M3 ? DType::kBF16
                                                : spec.q_dtype;
  spec.o_scale = pick(random, std::array<float, 3>{0.01F, 0.5F, 0.002F});
  spec.split_q = random.chance(0.5);
}

/// Lets neighbours begin with the same pages, some of them with partly filled ones, and takes the options out that
/// shared_prefix is refused with.
void share_prefixes(Random& random, DecodeSpec& spec) {
  spec.shared_prefix = true;
  spec.batch_invariant = false;
  spec.options = {.logits_soft_cap = spec.options.logits_soft_cap};
  spec.context_parallel = {};
  if (spec.o_dtype == DType::kE4M3) spec.o_dtype = DType::kF32;
  spec.cache.shared_pages.clear();
  for (const int32_t kv_len : spec.kv_len) {
    const int64_t pages = kv_len / spec.cache.page_size;
    spec.cache.shared_pages.push_back(static_cast<int32_t>(random.chance(0.3) ? 0 : random.integer(0, pages + 2)));
  }
}

DType random_o_dtype(Random& random, DType q_dtype) { return random.chance(0.3) ? DType::kF32 : q_dtype; }

SparsePoolSpec random_pool(Random& random, CacheFormat format) {
  SparsePoolSpec pool;
  pool.cache = random_cache(random, format);
  pool.cache.block_table = false;
  pool.num_tokens = static_cast<int32_t>(random.chance(0.05) ? 0 : random.integer(1, 1500));
  pool.topk = random.chance(0.1) ? pick(random, std::array<int32_t, 5>{512, 1024, 1152, 2048, 2176})
                                 : static_cast<int32_t>(random.integer(1, random.chance(0.5) ? 40 : 400));
  pool.topk_length =
      pick(random, std::array<LengthForm, 3>{LengthForm::kNone, LengthForm::kPerToken, LengthForm::kPerRequest});
  pool.invalid_share = pick(random, std::array<double, 4>{0.0, 0.1, 0.5, 0.95});
  pool.duplicate_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  pool.empty_share = pick(random, std::array<double, 3>{0.0, 0.0, 0.3});
  pool.row_extra = random_extra(random);
  return pool;
}

}  // namespace

DecodeSpec random_decode_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0xDEC0DE));
  DecodeSpec spec;
  spec.seed = seed;
  spec.cache = random_cache(random, format);
  spec.num_heads = random_heads(random);
  draw_dtypes(random, spec, format);
  draw_common(random, spec, true);
  spec.causal = random.chance(0.8);
  Batch batch = random_requests(random, spec.num_heads, spec.cache.page_size);
  limit_work(batch.kv_len, batch.q_len, spec.num_heads, spec.cache.d_qk + spec.cache.d_v,
             random.chance(0.15) ? kLargeWork : kUsualWork);
  spec.tree = random.chance(0.2) ? (random.chance(0.5) ? Tree::kMask : Tree::kParents) : Tree::kNone;
  if (spec.tree != Tree::kNone) {
    spec.tree_mask_extra = random_extra(random);
    spec.causal = true;
    for (size_t b = 0; b < batch.kv_len.size(); ++b) batch.kv_len[b] = std::max(batch.kv_len[b], batch.q_len[b]);
  }
  if (random.chance(0.2)) spec.context_parallel = random_context_parallel(random);
  spec.q_len = std::move(batch.q_len);
  spec.kv_len = std::move(batch.kv_len);
  spec.omit_qo_indptr = batch.omit_qo_indptr;
  draw_compute(random, spec.cache, spec.cache, spec.options);
  if (random.chance(0.15)) share_prefixes(random, spec);
  draw_lse_without_keys(random, spec);
  return spec;
}

DecodeSparseSpec random_decode_sparse_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0x59A85E));
  DecodeSparseSpec spec;
  spec.seed = seed;
  spec.num_heads = random_heads(random);
  draw_dtypes(random, spec, format);
  draw_common(random, spec, false);
  spec.pool = random_pool(random, format);
  if (random.chance(0.35)) {
    // Pools share their row widths; packed formats have widths of their own.
    const std::vector<CacheFormat> alike = formats_like(format);
    CacheFormat other = format;
    if (alike.size() > 1 && random.chance(0.5)) other = random.pick(std::span<const CacheFormat>(alike));
    spec.extra_pool = random_pool(random, other);
    spec.extra_pool->cache.d_qk = spec.pool.cache.d_qk;
    spec.extra_pool->cache.d_v = spec.pool.cache.d_v;
  }
  const Batch batch = random_requests(random, spec.num_heads, 64);
  spec.q_len = batch.q_len;
  int64_t topk = spec.pool.topk + (spec.extra_pool.has_value() ? spec.extra_pool->topk : 0);
  const int64_t cost = spec.num_heads * topk * (spec.pool.cache.d_qk + spec.pool.cache.d_v);
  const int64_t most = std::max<int64_t>((random.chance(0.15) ? kLargeWork : kUsualWork) / cost, 1);
  int64_t tokens = 0;
  size_t kept = 0;
  for (; kept < spec.q_len.size() && (kept == 0 || tokens + spec.q_len[kept] <= most); ++kept)
    tokens += spec.q_len[kept];
  spec.q_len.resize(kept);
  // With as many tokens as requests, a length per request is one per token: then each request must have one.
  if (spec.num_tokens() == spec.batch_size()) std::fill(spec.q_len.begin(), spec.q_len.end(), 1);
  const bool uniform =
      std::adjacent_find(spec.q_len.begin(), spec.q_len.end(), std::not_equal_to<>()) == spec.q_len.end();
  spec.omit_qo_indptr = uniform && !spec.q_len.empty() && random.chance(0.4);
  draw_compute(random, spec.pool.cache, spec.extra_pool.value_or(spec.pool).cache, spec.options);
  spec.want_max_logits = random.chance(0.3);
  spec.max_logits_head_extra = random_extra(random);
  spec.max_logits_token_extra = random_extra(random);
  if (random.chance(0.3) && spec.pool.cache.d_v % 128 == 0) {
    if (random.chance(0.5)) spec.o_dtype = DType::kE4M3;
    spec.finish = random_finish(random, spec.finished_rows());
  }
  draw_lse_without_keys(random, spec);
  return spec;
}

PrefillSpec random_prefill_spec(uint64_t seed, DType dtype) {
  Random random(mix(seed, 0x93E));
  PrefillSpec spec;
  spec.seed = seed;
  spec.d_qk = random.chance(0.6) ? 192 : 128;
  spec.d_v = 128;
  spec.dtype = dtype;
  spec.o_dtype = random_o_dtype(random, dtype == DType::kE4M3 ? DType::kBF16 : dtype);
  spec.num_heads = pick(random, std::array<int32_t, 9>{1, 2, 3, 5, 8, 12, 16, 16, 20});
  spec.causal = random.chance(0.7);
  draw_common(random, spec, true);
  for (int64_t* extra : {&spec.k_head_extra, &spec.k_token_extra, &spec.v_head_extra, &spec.v_token_extra})
    *extra = random_extra(random);

  const int32_t batch_size = std::min(random_batch(random), 8);
  spec.q_len.clear();
  spec.kv_len.clear();
  for (int32_t request = 0; request < batch_size; ++request) {
    const double kind = random.uniform();
    const auto q_len = static_cast<int32_t>(kind < 0.1   ? 0
                                            : kind < 0.2 ? 1
                                            : kind < 0.6 ? random.integer(2, 70)
                                                         : random.integer(71, 300));
    const double context = random.uniform();
    const auto kv_len = static_cast<int32_t>(context < 0.5    ? q_len
                                             : context < 0.85 ? q_len + random.integer(1, 300)
                                                              : random.integer(0, q_len));
    spec.q_len.push_back(q_len);
    spec.kv_len.push_back(kv_len);
  }
  limit_work(spec.kv_len, spec.q_len, spec.num_heads, spec.d_qk + spec.d_v,
             random.chance(0.15) ? kLargeWork : kUsualWork);
  if (dtype == DType::kE4M3) {
    if (random.chance(0.2)) spec.o_dtype = DType::kE4M3;
    spec.o_scale = pick(random, std::array<float, 3>{0.01F, 0.5F, 0.002F});
    if (random.chance(0.2)) spec.q_scale = 0.25F;
    spec.k_scale = pick(random, std::array<float, 3>{0.07F, 0.07F, 0.5F});
    spec.v_scale = pick(random, std::array<float, 3>{0.05F, 0.05F, 0.25F});
    if (random.chance(0.3)) spec.options.compute = Compute::kFP8;
  }
  return spec;
}

PrefillSparseSpec random_prefill_sparse_spec(uint64_t seed, DType kv_dtype) {
  Random random(mix(seed, 0x59A93E));
  PrefillSparseSpec spec;
  spec.seed = seed;
  spec.num_heads = random_heads(random);
  spec.kv_dtype = kv_dtype;
  spec.q_dtype = random.chance(0.6) ? kv_dtype : random_float(random);
  spec.o_dtype = random_o_dtype(random, spec.q_dtype);
  draw_common(random, spec, false);
  spec.d_qk = random.chance(0.6) ? 576 : 512;
  spec.num_keys = static_cast<int32_t>(random.chance(0.05) ? 0 : random.integer(1, 2000));
  spec.topk = static_cast<int32_t>(random.chance(0.1) ? 2048 : random.integer(1, 300));
  spec.topk_length = random.chance(0.5);
  spec.invalid_share = pick(random, std::array<double, 4>{0.0, 0.1, 0.5, 0.95});
  spec.duplicate_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  spec.empty_share = pick(random, std::array<double, 3>{0.0, 0.0, 0.3});
  spec.kv_extra = random_extra(random);
  spec.row_extra = random_extra(random);
  spec.want_max_logits = random.chance(0.8);
  spec.max_logits_head_extra = random_extra(random);
  spec.max_logits_token_extra = random_extra(random);
  const int64_t cost = int64_t{spec.num_heads} * spec.topk * (spec.d_qk + spec.d_v);
  const int64_t most = std::max<int64_t>((random.chance(0.15) ? kLargeWork : kUsualWork) / cost, 1);
  spec.num_tokens = static_cast<int32_t>(std::min<int64_t>(random.chance(0.05) ? 0 : random.integer(1, 200), most));
  draw_lse_without_keys(random, spec);
  return spec;
}

}  // namespace mla::kit

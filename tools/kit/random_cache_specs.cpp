// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kit/random_parts.h"

namespace mla::kit {

constexpr int64_t kMaxMerged = 500'000;  // elements of the partial states of one merge

int64_t random_extra(Random& random) {
  return random.chance(0.7) ? 0 : pick(random, std::array<int64_t, 5>{1, 3, 8, 16, 64});
}

int32_t random_heads(Random& random) {
  if (random.chance(0.05)) return pick(random, std::array<int32_t, 4>{129, 256, 512, 1024});
  return pick(random, std::array<int32_t, 20>{1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 16, 17, 20, 31, 32, 33, 64, 96, 128});
}

int32_t random_page_size(Random& random) {
  return pick(random, std::array<int32_t, 13>{1, 2, 3, 7, 16, 16, 32, 48, 64, 64, 64, 128, 256});
}

DType random_float(Random& random) {
  return pick(random, std::array<DType, 3>{DType::kF32, DType::kBF16, DType::kF16});
}

namespace {

/// Returns bytes of padding, an even number, so that rows of packed formats stay where bf16 may stand.
int64_t random_packed_extra(Random& random) {
  return random.chance(0.7) ? 0 : pick(random, std::array<int64_t, 5>{2, 4, 16, 64, 1000});
}

}  // namespace

CacheSpec random_cache(Random& random, CacheFormat format) {
  constexpr std::array<std::array<int32_t, 2>, 5> kDims = {
      {{576, 512}, {576, 512}, {576, 512}, {512, 512}, {320, 256}}};
  CacheSpec cache = usual_cache(format);
  if (!cache.packed()) {
    const auto dims = pick(random, kDims);
    cache.d_qk = dims[0];
    cache.d_v = dims[1];
  }
  cache.page_size = random_page_size(random);
  cache.two_tensors = !cache.packed() && random.chance(0.3);
  cache.block_table = random.chance(0.5);
  if (cache.block_table) cache.table_row_extra = random_extra(random);
  cache.garbage_table_tail = random.chance(0.8);
  cache.shuffled_pages = random.chance(0.8);
  cache.unowned_pages = static_cast<int32_t>(random.integer(0, 3));
  cache.page_stride_extra = cache.packed() ? random_packed_extra(random) : random_extra(random);
  const KvLayout layout = kv_layout(format);
  const bool footer = layout.has_footer(), own_scales = layout.nope.scale_place == ScalePlace::kTensor;
  if (!footer) cache.token_stride_extra = cache.packed() ? random_packed_extra(random) : random_extra(random);
  cache.padded_pages = footer && random.chance(0.5);
  cache.token_scales = own_scales && random.chance(0.4);
  if (cache.token_scales)
    for (int64_t* extra : {&cache.scale_page_extra, &cache.scale_token_extra}) *extra = random_extra(random);
  cache.own_kpe_scale = own_scales && random.chance(0.5);
  if (own_scales) {
    cache.tensor_scale = pick(random, std::array{0.018F, 0.018F, 0x1p-6F, 0x1.4p-6F});
    cache.kpe_scale = pick(random, std::array{0.013F, 0x1p-7F, 0x1.4p-5F});
  }
  if (layout.nope.outer_scale) cache.outer_scale = pick(random, std::array{0.0F, 0.0037F, 0.0037F, 0x1p-8F});
  if (cache.packed() || cache.token_scales) cache.power_of_two_scales = random.chance(0.5);
  return cache;
}

void divide(CacheSpec& cache) {
  if (cache.token_scales || cache.own_kpe_scale) cache.two_tensors = true;
}

ContextParallel random_context_parallel(Random& random) {
  ContextParallel share;
  share.world = pick(random, std::array<int32_t, 4>{2, 3, 4, 8});
  share.rank = static_cast<int32_t>(random.integer(0, int64_t{share.world} - 1));
  share.interleave = pick(random, std::array<int32_t, 5>{1, 1, 2, 16, 64});
  return share;
}

int32_t random_kv_len(Random& random, int32_t page_size) {
  const double kind = random.uniform();
  if (kind < 0.06) return 0;
  if (kind < 0.12) return 1;
  if (kind < 0.35) return static_cast<int32_t>(random.integer(2, 40));
  if (kind < 0.50)  // around a page's edge
    return std::max<int32_t>(
        0, page_size * static_cast<int32_t>(random.integer(1, 5)) + static_cast<int32_t>(random.integer(-1, 1)));
  if (kind < 0.85) return static_cast<int32_t>(random.integer(41, 600));
  if (kind < 0.97) return static_cast<int32_t>(random.integer(601, 3000));
  return static_cast<int32_t>(random.integer(3001, 20000));
}

int32_t random_batch(Random& random) {
  const double kind = random.uniform();
  if (kind < 0.02) return 0;
  if (kind < 0.40) return 1;
  if (kind < 0.90) return static_cast<int32_t>(random.integer(2, 9));
  return static_cast<int32_t>(random.integer(10, 48));
}

void limit_work(std::vector<int32_t>& kv_len, const std::vector<int32_t>& q_len, int64_t heads, int64_t cost,
                int64_t limit) {
  for (size_t request = 0; request < kv_len.size(); ++request) {
    const int64_t share = limit / static_cast<int64_t>(kv_len.size());
    const int64_t per_key = std::max<int64_t>(1, q_len[request]) * heads * cost;
    kv_len[request] = static_cast<int32_t>(std::min<int64_t>(kv_len[request], std::max<int64_t>(share / per_key, 3)));
  }
}

Batch random_requests(Random& random, int32_t num_heads, int32_t page_size) {
  Batch batch;
  const int32_t batch_size = random_batch(random);
  const double raggedness = random.uniform();
  const auto uniform = static_cast<int32_t>(raggedness < 0.5 ? 1 : random.integer(2, 16));
  int64_t rows = 0;
  for (int32_t request = 0; request < batch_size; ++request) {
    const int32_t q_len = raggedness < 0.75 ? uniform : static_cast<int32_t>(random.integer(0, 16));
    rows += static_cast<int64_t>(q_len) * num_heads;
    if (request > 0 && rows > kMaxRows) break;
    batch.q_len.push_back(q_len);
    batch.kv_len.push_back(random_kv_len(random, page_size));
  }
  batch.omit_qo_indptr = raggedness < 0.75 && batch_size > 0 && random.chance(0.4);
  return batch;
}

namespace {

/// Returns the type that rows are rounded from or to: half of the time bf16 if the cache's values are (quantized ones,
/// too); else half of the time f16; else any float.
DType random_row_dtype(Random& random, CacheFormat format) {
  return random.chance(0.5) && value_dtype(kv_layout(format).nope.element) == DType::kBF16 ? DType::kBF16
         : random.chance(0.5)                                                              ? DType::kF16
                                                                                           : random_float(random);
}

}  // namespace

MergeSpec random_merge_spec(uint64_t seed, DType partial_dtype) {
  Random random(mix(seed, 0x3E86E));
  MergeSpec spec;
  spec.seed = seed;
  spec.num_states = pick(random, std::array<int32_t, 8>{1, 2, 2, 2, 3, 4, 9, 33});
  spec.num_tokens = static_cast<int32_t>(random.chance(0.05) ? 0 : random.integer(1, 24));
  spec.num_heads = pick(random, std::array<int32_t, 8>{1, 3, 8, 12, 16, 20, 64, 128});
  spec.d_v = pick(random, std::array<int32_t, 5>{512, 512, 256, 128, 128});
  const int64_t token = int64_t{spec.num_states} * spec.num_heads * spec.d_v;
  spec.num_tokens = static_cast<int32_t>(std::min<int64_t>(spec.num_tokens, std::max<int64_t>(kMaxMerged / token, 1)));
  spec.partial_dtype = partial_dtype;
  spec.o_dtype = pick(random, std::array<DType, 3>{DType::kF32, DType::kBF16, DType::kF16});
  spec.lse_base = random.chance(0.3) ? LseBase::kTwo : LseBase::kE;
  spec.in_place = random.chance(0.4);
  spec.want_lse = spec.in_place || random.chance(0.8);
  spec.empty_share = pick(random, std::array<double, 4>{0.0, 0.2, 0.6, 1.0});
  spec.lse_std = pick(random, std::array<float, 4>{0.0F, 1.0F, 5.0F, 60.0F});
  for (int64_t* extra : {&spec.partial_state_extra, &spec.partial_token_extra, &spec.partial_head_extra,
                         &spec.partial_lse_state_extra, &spec.partial_lse_token_extra, &spec.partial_lse_head_extra,
                         &spec.o_token_extra, &spec.o_head_extra, &spec.lse_token_extra, &spec.lse_head_extra})
    *extra = random_extra(random);
  return spec;
}

AppendSpec random_append_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0xA99E));
  AppendSpec spec;
  spec.seed = seed;
  spec.cache = random_cache(random, format);
  spec.num_pages = static_cast<int32_t>(random.integer(1, std::max(2, 512 / spec.cache.page_size)));
  spec.num_tokens = static_cast<int32_t>(random.integer(0, spec.num_pages * spec.cache.page_size));
  spec.dtype = random_row_dtype(random, format);
  spec.split_rows = random.chance(0.5);
  if (!spec.split_rows) divide(spec.cache);
  spec.skip_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  spec.special_share = pick(random, std::array<double, 3>{0.0, 0.2, 1.0});
  spec.row_extra = random_extra(random);
  return spec;
}

GatherSpec random_gather_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0x6A78E8));
  GatherSpec spec;
  spec.seed = seed;
  spec.cache = random_cache(random, format);
  spec.out_dtype = random_row_dtype(random, format);
  spec.split_out = random.chance(0.5);
  if (!spec.split_out) divide(spec.cache);
  spec.row_extra = random_extra(random);
  spec.omit_token_start = random.chance(0.3);
  const int32_t batch_size = std::min(random_batch(random), 8);
  spec.kv_len.clear();
  spec.token_start.clear();
  spec.count.clear();
  for (int32_t request = 0; request < batch_size; ++request) {
    const int32_t kv_len = std::min(random_kv_len(random, spec.cache.page_size), 1000);
    const auto start = static_cast<int32_t>(spec.omit_token_start ? 0 : random.integer(0, kv_len));
    spec.kv_len.push_back(kv_len);
    spec.token_start.push_back(start);
    spec.count.push_back(static_cast<int32_t>(random.integer(0, kv_len - start)));
  }
  return spec;
}

AppendRopeSpec random_append_rope_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0xA90E));
  AppendRopeSpec spec;
  spec.seed = seed;
  spec.cache = random_cache(random, format);
  spec.num_pages = static_cast<int32_t>(random.integer(1, std::max(2, 256 / spec.cache.page_size)));
  spec.num_tokens = static_cast<int32_t>(random.integer(0, std::min(spec.num_pages * spec.cache.page_size, 100)));
  spec.num_heads = pick(random, std::array<int32_t, 8>{0, 0, 1, 3, 8, 16, 17, 128});
  if (spec.num_heads > 16) spec.num_tokens = std::min(spec.num_tokens, 9);
  spec.q_dtype = random_float(random);
  spec.q_out_dtype = random.chance(0.4) ? DType::kE4M3 : random_float(random);
  spec.q_scale = pick(random, std::array<float, 3>{0.05F, 0.001F, 3.0F});
  spec.dtype = random_row_dtype(random, format);
  spec.interleaved = random.chance(0.5);
  spec.max_positions = pick(random, std::array<int32_t, 4>{1, 17, 500, 1000});
  using Norm = AppendRopeSpec::Norm;
  spec.q_norm = spec.num_heads > 0 && random.chance(0.4);
  spec.q_norm_weight = spec.q_norm && random.chance(0.5);
  spec.norm = pick(random, std::array<Norm, 4>{Norm::kNone, Norm::kNone, Norm::kLatent, Norm::kRow});
  spec.norm_dtype = random_float(random);
  spec.skip_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  spec.special_share = spec.norm != Norm::kNone && random.chance(0.3) ? 0.5 : 0.0;
  for (int64_t* extra : {&spec.q_head_extra, &spec.q_token_extra, &spec.q_out_head_extra, &spec.q_out_token_extra,
                         &spec.row_extra, &spec.cos_sin_extra})
    *extra = random_extra(random);
  return spec;
}

CopyPagesSpec random_copy_pages_spec(uint64_t seed, CacheFormat from) {
  Random random(mix(seed, 0xC09E));
  CopyPagesSpec spec;
  spec.seed = seed;
  spec.from = random_cache(random, from);
  // Packed formats have head dims of their own; the others follow.
  const double kind = random.uniform();
  CacheFormat to = from;
  if (kind > 0.3)
    to = spec.from.packed() ? random.pick(tensor_formats())
                            : random.pick(std::span<const CacheFormat>(kAllCacheFormats));
  spec.to = random_cache(random, to);
  if (spec.from.packed()) {
    if (!spec.to.packed()) {
      spec.to.d_qk = spec.from.d_qk;
      spec.to.d_v = spec.from.d_ckv();
    }
  } else if (spec.to.packed()) {
    spec.from.d_qk = spec.to.d_qk;
    spec.from.d_v = spec.to.d_ckv();
  } else {
    spec.to.d_qk = spec.from.d_qk;
    spec.to.d_v = spec.from.d_v;
  }
  divide(spec.from);
  divide(spec.to);
  constexpr std::array<std::array<int32_t, 2>, 8> kPageSizes = {
      {{256, 64}, {64, 256}, {64, 64}, {128, 2}, {1, 16}, {3, 7}, {48, 32}, {2, 1}}};
  const auto sizes = pick(random, kPageSizes);
  spec.from.page_size = sizes[0];
  spec.to.page_size = sizes[1];
  const int32_t unit = sizes[0] == 3 ? 21 : sizes[0] == 48 ? 96 : std::max(sizes[0], sizes[1]);
  spec.num_tokens = unit * static_cast<int32_t>(random.integer(random.chance(0.1) ? 0 : 1, std::max(2, 300 / unit)));
  return spec;
}

}  // namespace mla::kit

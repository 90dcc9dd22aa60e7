// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <span>

#include "kit/buffer.h"
#include "kit/paged_memory.h"
#include "kit/specs.h"

namespace mla::kit {
namespace {

// Multiply-adds of one case: the reference needs about a second for 10^9.
constexpr int64_t kUsualWork = 10'000'000;
constexpr int64_t kLargeWork = 60'000'000;
constexpr int64_t kMaxMerged = 500'000;  // elements of the partial states of one merge
constexpr int64_t kMaxRows = 4096;       // query rows (tokens times heads) of one decode case

template <class T, size_t N>
T pick(Random& random, const std::array<T, N>& values) {
  return random.pick(std::span<const T>(values));
}

/// 0 more often than not, else a small number of elements, odd ones among them.
int64_t random_extra(Random& random) {
  return random.chance(0.7) ? 0 : pick(random, std::array<int64_t, 5>{1, 3, 8, 16, 64});
}

int32_t random_heads(Random& random) {
  if (random.chance(0.05)) return pick(random, std::array<int32_t, 4>{129, 256, 512, 1024});
  return pick(random, std::array<int32_t, 20>{1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 16, 17, 20, 31, 32, 33, 64, 96, 128});
}

CacheSpec random_cache(Random& random, CacheFormat format) {
  constexpr std::array<std::array<int32_t, 2>, 5> kDims = {
      {{576, 512}, {576, 512}, {576, 512}, {512, 512}, {320, 256}}};
  const auto dims = pick(random, kDims);
  CacheSpec cache;
  cache.format = format;
  cache.d_qk = dims[0];
  cache.d_v = dims[1];
  cache.page_size = pick(random, std::array<int32_t, 13>{1, 2, 3, 7, 16, 16, 32, 48, 64, 64, 64, 128, 256});
  cache.two_tensors = random.chance(0.3);
  cache.block_table = random.chance(0.5);
  cache.garbage_table_tail = random.chance(0.8);
  cache.shuffled_pages = random.chance(0.8);
  cache.unowned_pages = static_cast<int32_t>(random.integer(0, 3));
  cache.page_stride_extra = random_extra(random);
  cache.token_stride_extra = random_extra(random);
  return cache;
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

/// Shortens the longest sequences until the work fits; `cost` per query-key pair and head.
void limit_work(std::vector<int32_t>& kv_len, const std::vector<int32_t>& q_len, int64_t heads, int64_t cost,
                int64_t limit) {
  for (size_t request = 0; request < kv_len.size(); ++request) {
    const int64_t share = limit / static_cast<int64_t>(kv_len.size());
    const int64_t per_key = std::max<int64_t>(1, q_len[request]) * heads * cost;
    kv_len[request] = static_cast<int32_t>(std::min<int64_t>(kv_len[request], std::max<int64_t>(share / per_key, 3)));
  }
}

DType random_o_dtype(Random& random, DType q_dtype) { return random.chance(0.3) ? DType::kF32 : q_dtype; }

float random_score_std(Random& random) {
  return pick(random, std::array<float, 6>{0.1F, 1.0F, 2.0F, 2.0F, 4.0F, 40.0F});
}

}  // namespace

DecodeSpec random_decode_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0xDEC0DE));
  DecodeSpec spec;
  spec.seed = seed;
  spec.cache = random_cache(random, format);
  spec.num_heads = random_heads(random);
  const double q_type = random.uniform();
  const DType same = dtype_of(format);
  spec.q_dtype = q_type < 0.6 ? same : q_type < 0.8 ? DType::kF32 : same == DType::kF16 ? DType::kBF16 : DType::kF16;
  spec.o_dtype = random_o_dtype(random, spec.q_dtype);
  spec.split_q = random.chance(0.5);
  spec.causal = random.chance(0.8);
  spec.want_lse = random.chance(0.9);
  spec.lse_base = random.chance(0.3) ? LseBase::kTwo : LseBase::kE;
  spec.batch_invariant = random.chance(0.25);
  spec.score_std = random_score_std(random);
  spec.q_head_extra = random_extra(random);
  spec.q_token_extra = random_extra(random);
  spec.o_head_extra = random_extra(random);
  spec.o_token_extra = random_extra(random);
  spec.lse_token_extra = random_extra(random);
  spec.workspace_misalign = pick(random, std::array<int32_t, 4>{0, 1, 16, 63});

  const int32_t batch_size = random_batch(random);
  const double raggedness = random.uniform();
  const auto uniform = static_cast<int32_t>(raggedness < 0.5 ? 1 : random.integer(2, 16));
  spec.q_len.clear();
  spec.kv_len.clear();
  int64_t rows = 0;
  for (int32_t request = 0; request < batch_size; ++request) {
    const int32_t q_len = raggedness < 0.75 ? uniform : static_cast<int32_t>(random.integer(0, 16));
    rows += static_cast<int64_t>(q_len) * spec.num_heads;
    if (request > 0 && rows > kMaxRows) break;
    spec.q_len.push_back(q_len);
    spec.kv_len.push_back(random_kv_len(random, spec.cache.page_size));
  }
  spec.omit_qo_indptr = raggedness < 0.75 && batch_size > 0 && random.chance(0.4);
  limit_work(spec.kv_len, spec.q_len, spec.num_heads, spec.cache.d_qk + spec.cache.d_v,
             random.chance(0.15) ? kLargeWork : kUsualWork);
  return spec;
}

PrefillSpec random_prefill_spec(uint64_t seed, DType dtype) {
  Random random(mix(seed, 0x93E));
  PrefillSpec spec;
  spec.seed = seed;
  spec.d_qk = random.chance(0.6) ? 192 : 128;
  spec.d_v = 128;
  spec.dtype = dtype;
  spec.o_dtype = random_o_dtype(random, dtype);
  spec.num_heads = pick(random, std::array<int32_t, 9>{1, 2, 3, 5, 8, 12, 16, 16, 20});
  spec.causal = random.chance(0.7);
  spec.want_lse = random.chance(0.9);
  spec.lse_base = random.chance(0.3) ? LseBase::kTwo : LseBase::kE;
  spec.batch_invariant = random.chance(0.25);
  spec.score_std = random_score_std(random);
  for (int64_t* extra :
       {&spec.q_head_extra, &spec.q_token_extra, &spec.k_head_extra, &spec.k_token_extra, &spec.v_head_extra,
        &spec.v_token_extra, &spec.o_head_extra, &spec.o_token_extra, &spec.lse_token_extra})
    *extra = random_extra(random);
  spec.workspace_misalign = pick(random, std::array<int32_t, 4>{0, 1, 16, 63});

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
  return spec;
}

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
                         &spec.o_token_extra, &spec.o_head_extra})
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
  spec.dtype = random.chance(0.5) ? dtype_of(format)
                                  : pick(random, std::array<DType, 3>{DType::kF32, DType::kBF16, DType::kF16});
  spec.split_rows = random.chance(0.5);
  spec.skip_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  spec.row_extra = random_extra(random);
  return spec;
}

GatherSpec random_gather_spec(uint64_t seed, CacheFormat format) {
  Random random(mix(seed, 0x6A78E8));
  GatherSpec spec;
  spec.seed = seed;
  spec.cache = random_cache(random, format);
  spec.out_dtype = random.chance(0.5) ? dtype_of(format)
                                      : pick(random, std::array<DType, 3>{DType::kF32, DType::kBF16, DType::kF16});
  spec.split_out = random.chance(0.5);
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

}  // namespace mla::kit

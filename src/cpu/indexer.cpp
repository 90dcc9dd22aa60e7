// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention writes keys into its cache, computes the logits of all keys, and selects keys by
// them.
//   logits[t][j] = scale[j] * sum_h weights[t][h] * max(0, q[t][h] . k[j])
// where scale[j] is 1 if groups of a key's channels have scales of their own.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/share.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

constexpr int32_t kHeadDim = kIndexerLayout.head_dim;
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the logit of a key that a token does not see

/// Has keys or logits [begin, end).
struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

/// Returns the keys that a query sees.
Range seen_keys(const core::IndexerLogitsArgs& args, int32_t request, int64_t query) {
  const int64_t kv_len = args.pages.kv_len[request], token = args.queries.begin(request) + query;
  const int64_t later = args.causal ? args.queries.len(request) - 1 - query : 0;
  Range seen = {0, std::max<int64_t>(kv_len - later, 0) / args.ratio};
  if (args.key_end != nullptr) seen.end = std::clamp<int64_t>(args.key_end[token], 0, kv_len / args.ratio);
  if (args.key_begin != nullptr) seen.begin = std::clamp<int64_t>(args.key_begin[token], 0, seen.end);
  return seen;
}

/// Returns which logits are computed for a token that sees these keys; the others are -inf.
Range computed_logits(const core::IndexerLogitsArgs& args, const Range& seen) {
  if (!args.blocks.given()) return seen;
  return {0, seen.count() > 0 ? args.blocks.num_keys() : 0};
}

/// Computes ranges of a token's logits, with the queries of kIndexerHeads heads packed at a time.
class LogitsWorker {
 public:
  LogitsWorker(const RowKernels& kernels, const core::IndexerLogitsArgs& args)
      : kernels_(kernels), args_(args), one_scale_(args.cache.layout().num_scales() == 1) {}

  /// Computes logits [begin, end) of a token that sees these keys, and stores them.
  void run(int32_t request, int64_t token, const Range& seen, int64_t begin, int64_t end) {
    void* const row = row_of(token);
    if (args_.logits_dtype == DType::kF32)
      return compute(request, token, seen, begin, end, static_cast<float*>(row) + begin);
    for (int64_t first = begin; first < end; first += kPiece) {
      const int64_t n = std::min(kPiece, end - first);
      compute(request, token, seen, first, first + n, piece_);
      kernels_.store_logits(piece_, n, at(row, first, args_.logits_dtype), args_.logits_dtype);
    }
  }

  /// Writes -inf to logits [begin, end) of a token.
  void hide(int64_t token, int64_t begin, int64_t end) const {
    void* const from = at(row_of(token), begin, args_.logits_dtype);
    if (args_.logits_dtype == DType::kF32)
      std::fill_n(static_cast<float*>(from), end - begin, kHidden);
    else
      std::fill_n(static_cast<uint16_t*>(from), end - begin,
                  args_.logits_dtype == DType::kF16 ? f32_to_f16(kHidden) : f32_to_bf16(kHidden));
  }

 private:
  /// Logits of 16 bits are computed so many at a time in f32. The queries are packed for each piece again, which costs
  /// less than a thousandth of its products.
  static constexpr int64_t kPiece = 1024;

  void* row_of(int64_t token) const { return at(args_.logits, token * args_.logits_stride_token, args_.logits_dtype); }

  /// Computes logits [begin, end) of a token that sees these keys, the first one to `logits`.
  void compute(int32_t request, int64_t token, const Range& seen, int64_t begin, int64_t end, float* logits) {
    for (int32_t head = 0; head < args_.num_heads; head += kIndexerHeads) {
      const int32_t num_heads = std::min(kIndexerHeads, args_.num_heads - head);
      const int64_t q = token * args_.q_stride_token + head * args_.q_stride_head;
      kernels_.pack_indexer_queries(at(args_.q, q, args_.q_dtype), args_.q_dtype, args_.q_stride_head, num_heads,
                                    queries_);
      const float* weights = args_.weights + token * args_.weights_stride_token + head;
      std::fill(std::copy_n(weights, num_heads, weights_), weights_ + kIndexerHeads, 0.0F);
      const bool last = head + num_heads == args_.num_heads;
      for_each_run(token, seen, begin, end, [&](int64_t at, int64_t key, int32_t n) {
        float* const sums = logits + (at - begin);
        if (key < 0) {
          std::fill_n(sums, n, kHidden);
          return;
        }
        const int64_t page = args_.pages.of(request)[key / args_.pages.page_size], offset = key % args_.pages.page_size;
        const IndexerKeys keys = {.format = args_.cache.format,
                                  .elements = reinterpret_cast<const uint8_t*>(args_.cache.key(page, offset)),
                                  .scales = reinterpret_cast<const uint8_t*>(args_.cache.scale(page, offset))};
        kernels_.indexer_sums(queries_, num_heads, weights_, keys, n, head > 0, sums);
        if (last && one_scale_) apply_scales(keys.scales, n, sums);
      });
    }
  }

  /// Calls f(at, key, n) for runs of n logits from `at` on, which belong to the keys from `key` on. These lie in one
  /// page; if `key` is -1, the token sees none of them.
  template <class F>
  void for_each_run(int64_t token, const Range& seen, int64_t begin, int64_t end, const F& f) const {
    for (int64_t at = begin; at < end;) {
      const auto [key, count] = args_.blocks.given() ? listed_keys(token, seen, at, end) : Run{at, end - at};
      const int64_t in_page = key < 0 ? count : args_.pages.page_size - key % args_.pages.page_size;
      const int64_t n = std::min({count, in_page, int64_t{kIndexerKeys}});
      f(at, key, static_cast<int32_t>(n));
      at += n;
    }
  }

  struct Run {
    int64_t key, count;
  };

  /// Returns the keys of listed logits from `at` on: of one block, and of those behind it that continue it.
  Run listed_keys(int64_t token, const Range& keys, int64_t at, int64_t end) const {
    const core::KeyBlocks& blocks = args_.blocks;
    const int64_t key = blocks.key(token, static_cast<int32_t>(at));
    const bool seen = keys.begin <= key && key < keys.end;
    // Where the token sees none of them, the run ends where the block does, or where it begins to see.
    const int64_t room = std::min(end - at, seen ? keys.end - key : key < keys.begin ? keys.begin - key : end - at);
    int64_t count = std::min<int64_t>(blocks.size - at % blocks.size, room);
    while (seen && count < std::min<int64_t>(room, kIndexerKeys) &&
           blocks.key(token, static_cast<int32_t>(at + count)) == key + count)
      count = std::min<int64_t>(count + blocks.size, room);
    return {seen ? key : -1, count};
  }

  static void apply_scales(const uint8_t* scales, int32_t n, float* logits) {
    for (int32_t j = 0; j < n; ++j) {
      float scale;
      std::memcpy(&scale, scales + j * sizeof scale, sizeof scale);
      logits[j] *= scale;
    }
  }

  const RowKernels& kernels_;
  const core::IndexerLogitsArgs& args_;
  bool one_scale_;  // whether a key has one scale, which its sum is multiplied by
  alignas(64) uint32_t queries_[kIndexerHeads * kHeadDim];
  alignas(64) float weights_[kIndexerHeads];
  alignas(64) float piece_[kPiece];
};

/// Calls f(request, query, token) for all tokens in order.
template <class F>
void for_each_token(const core::IndexerLogitsArgs& args, const F& f) {
  for (int32_t request = 0; request < args.batch_size; ++request)
    for (int32_t i = 0; i < args.queries.len(request); ++i) f(request, i, args.queries.begin(request) + int64_t{i});
}

/// Writes the share [begin, end) of all tokens' rows laid end to end, where a row counts as its computed logits and one
/// more for its rest.
void logits_share(const RowKernels& kernels, const core::IndexerLogitsArgs& args, int64_t begin, int64_t end) {
  LogitsWorker worker(kernels, args);
  if (kernels.begin != nullptr) kernels.begin();
  int64_t row_begin = 0;
  for_each_token(args, [&](int32_t request, int32_t query, int64_t token) {
    const Range seen = seen_keys(args, request, query), computed = computed_logits(args, seen);
    const int64_t first = std::clamp<int64_t>(begin - row_begin, 0, computed.count());
    const int64_t last = std::clamp<int64_t>(end - row_begin, 0, computed.count());
    if (first < last) worker.run(request, token, seen, computed.begin + first, computed.begin + last);
    const int64_t rest = row_begin + computed.count();
    if (begin <= rest && rest < end) {
      worker.hide(token, 0, computed.begin);
      worker.hide(token, computed.end, args.num_logits);
    }
    row_begin = rest + 1;
  });
  if (kernels.end != nullptr) kernels.end();
}

}  // namespace

void run_append_indexer(const KernelSet& set, const core::AppendIndexerArgs& args, core::ThreadPool& pool) {
  const int64_t bytes = args.num_tokens * kHeadDim * static_cast<int64_t>(size_of(args.dtype));
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slot_mapping[token];
      if (slot >= 0)
        write_indexer_key(*set.rows, args.cache, slot, at(args.k, token * args.k_stride_token, args.dtype), args.dtype,
                          args.power_of_two_scales);
    }
  });
}

void run_indexer_logits(const KernelSet& set, const core::IndexerLogitsArgs& args, core::ThreadPool& pool) {
  const bool narrow = args.q_dtype == DType::kE4M3 || args.q_dtype == DType::kBF16;
  const RowKernels& kernels = narrow ? *set.rows : *set.float_rows;
  int64_t work = 0;
  for_each_token(args, [&](int32_t request, int32_t query, int64_t) {
    work += computed_logits(args, seen_keys(args, request, query)).count() + 1;
  });
  // Counts a key once per head, since it costs many more cycles than it has bytes.
  const int64_t key_bytes = int64_t{kHeadDim} * args.num_heads;
  share(pool, work, work * key_bytes, [&](int64_t begin, int64_t end) { logits_share(kernels, args, begin, end); });
}

void run_indexer_top_k(const KernelSet& set, const core::IndexerTopKArgs& args, core::ThreadPool& pool) {
  run_indexer_logits(set, args.indexer, pool);
  int64_t bytes = 0;
  for_each_token(args.indexer, [&](int32_t request, int32_t query, int64_t) {
    bytes += computed_logits(args.indexer, seen_keys(args.indexer, request, query)).count() *
             static_cast<int64_t>(size_of(args.indexer.logits_dtype));
  });
  share(pool, args.num_tokens(), bytes, [&](int64_t begin, int64_t end) {
    for_each_token(args.indexer, [&](int32_t request, int32_t query, int64_t token) {
      if (token < begin || token >= end) return;
      const Range computed = computed_logits(args.indexer, seen_keys(args.indexer, request, query));
      select_top_k(*set.rows, args.top_k, token, computed.begin, computed.end);
    });
  });
  run_physical_slots(set, args.slots, pool);
}

}  // namespace mla::cpu

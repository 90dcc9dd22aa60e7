// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention writes keys into its cache, computes the logits of all keys, and selects keys by
// them.
//   logits[t][j] = scale[j] * sum_h weights[t][h] * max(0, q[t][h] . k[j])
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

constexpr int32_t kHeadDim = kIndexerLayout.head_dim;

int64_t visible_keys(const core::IndexerLogitsArgs& args, int32_t request, int64_t query) {
  const int64_t kv_len = args.pages.kv_len[request];
  return args.causal ? std::clamp<int64_t>(kv_len - args.queries.len(request) + query + 1, 0, kv_len) : kv_len;
}

/// Computes logits of ranges of a token's keys, with the queries of kIndexerHeads heads packed at a time.
class LogitsWorker {
 public:
  LogitsWorker(const RowKernels& kernels, const core::IndexerLogitsArgs& args) : kernels_(kernels), args_(args) {}

  void run(int32_t request, int64_t token, int64_t begin, int64_t end) {
    float* logits = args_.logits + token * args_.logits_stride_token;
    for (int32_t head = 0; head < args_.num_heads; head += kIndexerHeads) {
      const int32_t num_heads = std::min(kIndexerHeads, args_.num_heads - head);
      const int64_t q = token * args_.q_stride_token + head * args_.q_stride_head;
      kernels_.pack_indexer_queries(at(args_.q, q, args_.q_dtype), args_.q_dtype, args_.q_stride_head, num_heads,
                                    queries_);
      const float* weights = args_.weights + token * args_.weights_stride_token + head;
      std::fill(std::copy_n(weights, num_heads, weights_), weights_ + kIndexerHeads, 0.0F);
      const bool last = head + num_heads == args_.num_heads;
      for_each_run(request, begin, end, [&](int64_t key, int64_t page, int64_t offset, int32_t n) {
        const auto* keys = reinterpret_cast<const uint8_t*>(args_.cache.key(page, offset));
        kernels_.indexer_sums(queries_, num_heads, weights_, keys, n, head > 0, logits + key);
        if (last) apply_scales(args_.cache.scale(page, offset), n, logits + key);
      });
    }
  }

 private:
  /// Calls f(key, page, offset, n) for runs of n contiguous keys.
  template <class F>
  void for_each_run(int32_t request, int64_t begin, int64_t end, const F& f) const {
    const int32_t* pages = args_.pages.of(request);
    const int64_t page_size = args_.pages.page_size;
    for (int64_t key = begin; key < end;) {
      const int64_t offset = key % page_size;
      const int64_t n = std::min({end - key, page_size - offset, int64_t{kIndexerKeys}});
      f(key, pages[key / page_size], offset, static_cast<int32_t>(n));
      key += n;
    }
  }

  static void apply_scales(const std::byte* scales, int32_t n, float* logits) {
    for (int32_t j = 0; j < n; ++j) {
      float scale;
      std::memcpy(&scale, scales + j * int64_t{kIndexerLayout.scale_bytes}, sizeof scale);
      logits[j] *= scale;
    }
  }

  const RowKernels& kernels_;
  const core::IndexerLogitsArgs& args_;
  alignas(64) uint32_t queries_[kIndexerHeads * kHeadDim];
  alignas(64) float weights_[kIndexerHeads];
};

/// Calls f(request, query, token) for all tokens in order.
template <class F>
void for_each_token(const core::IndexerLogitsArgs& args, const F& f) {
  for (int32_t request = 0; request < args.batch_size; ++request)
    for (int32_t i = 0; i < args.queries.len(request); ++i) f(request, i, args.queries.begin(request) + int64_t{i});
}

/// Writes the share [begin, end) of all tokens' rows laid end to end, where a row counts as its visible keys and one
/// more for its rest.
void logits_share(const RowKernels& kernels, const core::IndexerLogitsArgs& args, int64_t begin, int64_t end) {
  LogitsWorker worker(kernels, args);
  int64_t row_begin = 0;
  for_each_token(args, [&](int32_t request, int32_t query, int64_t token) {
    const int64_t visible = visible_keys(args, request, query);
    const int64_t first = std::clamp<int64_t>(begin - row_begin, 0, visible);
    const int64_t last = std::clamp<int64_t>(end - row_begin, 0, visible);
    if (first < last) worker.run(request, token, first, last);
    const int64_t rest = row_begin + visible;
    if (begin <= rest && rest < end) {
      float* logits = args.logits + token * args.logits_stride_token;
      std::fill(logits + visible, logits + args.max_kv_len, -std::numeric_limits<float>::infinity());
    }
    row_begin = rest + 1;
  });
}

}  // namespace

void run_append_indexer(const KernelSet& set, const core::AppendIndexerArgs& args, core::ThreadPool& pool) {
  const int64_t bytes = args.num_tokens * kHeadDim * static_cast<int64_t>(size_of(args.dtype));
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t page = slot / args.cache.page_size, offset = slot % args.cache.page_size;
      float scale;
      set.rows->quantize_groups(at(args.k, token * args.k_stride_token, args.dtype), args.dtype, 1, kHeadDim,
                                args.power_of_two_scales, 0.0F, &scale,
                                reinterpret_cast<uint8_t*>(args.cache.key(page, offset)));
      std::memcpy(args.cache.scale(page, offset), &scale, sizeof scale);
    }
  });
}

void run_indexer_logits(const KernelSet& set, const core::IndexerLogitsArgs& args, core::ThreadPool& pool) {
  const bool narrow = args.q_dtype == DType::kE4M3 || args.q_dtype == DType::kBF16;
  const RowKernels& kernels = narrow ? *set.rows : *set.float_rows;
  int64_t work = 0;
  for_each_token(args,
                 [&](int32_t request, int32_t query, int64_t) { work += visible_keys(args, request, query) + 1; });
  // Counts a key once per head, since it costs many more cycles than it has bytes.
  const int64_t key_bytes = int64_t{kHeadDim} * args.num_heads;
  share(pool, work, work * key_bytes, [&](int64_t begin, int64_t end) { logits_share(kernels, args, begin, end); });
}

void run_indexer_top_k(const KernelSet& set, const core::IndexerTopKArgs& args, core::ThreadPool& pool) {
  run_indexer_logits(set, args.indexer, pool);
  int64_t bytes = 0;
  for_each_token(args.indexer, [&](int32_t request, int32_t query, int64_t) {
    bytes += visible_keys(args.indexer, request, query) * static_cast<int64_t>(sizeof(float));
  });
  share(pool, args.num_tokens(), bytes, [&](int64_t begin, int64_t end) {
    for_each_token(args.indexer, [&](int32_t request, int32_t query, int64_t token) {
      if (token < begin || token >= end) return;
      select_top_k(*set.rows, args.indexer.logits + token * args.indexer.logits_stride_token,
                   visible_keys(args.indexer, request, query), args.top_k.k,
                   args.top_k.indices + token * args.top_k.indices_stride_token);
    });
  });
  run_physical_slots(set, args.slots, pool);
}

}  // namespace mla::cpu

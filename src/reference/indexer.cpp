// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention writes keys into its cache, computes the logits of all keys,
//   logit[t][j] = scale[j] * sum_h weight[t][h] * max(0, q[t][h] . k[j])
// and selects keys by them.
#include <algorithm>
#include <array>
#include <limits>

#include "reference/attention.h"
#include "reference/cache_rows.h"
#include "reference/reference.h"
#include "reference/top_k.h"

namespace mla::reference {
namespace {

constexpr int32_t kHeadDim = kIndexerLayout.head_dim;
using Row = std::array<double, kHeadDim>;

/// Returns how many keys query `i` of a request sees.
int64_t visible_keys(const core::IndexerLogitsArgs& args, int32_t request, int64_t i) {
  const int64_t kv_len = args.pages.kv_len[request], q_len = args.queries.len(request);
  return args.causal ? std::clamp<int64_t>(kv_len - q_len + i + 1, 0, kv_len) : kv_len;
}

/// The logits of this many keys are computed together, so that queries are converted once for all of them.
constexpr int64_t kKeysPerRun = 32;

/// Computes the logits of a token for keys [first, first + n) of its request.
void fill_block(const core::IndexerLogitsArgs& args, const int32_t* pages, int64_t token, int64_t first, int64_t n,
                float* logits) {
  std::array<Row, kKeysPerRun> keys;
  std::array<double, kKeysPerRun> scales = {}, sums = {};
  for (int64_t j = 0; j < n; ++j) {
    const int64_t page = pages[(first + j) / args.pages.page_size], offset = (first + j) % args.pages.page_size;
    const auto at = static_cast<size_t>(j);
    load_row(args.cache.key(page, offset), DType::kE4M3, 0, kHeadDim, keys[at].data());
    scales[at] = static_cast<double>(read_as<float>(args.cache.scale(page, offset)));
  }
  for (int64_t head = 0; head < args.num_heads; ++head) {
    Row q;
    load_row(args.q, args.q_dtype, token * args.q_stride_token + head * args.q_stride_head, kHeadDim, q.data());
    const auto weight = static_cast<double>(args.weights[token * args.weights_stride_token + head]);
    for (size_t j = 0; j < static_cast<size_t>(n); ++j) {
      const double score = dot(q.data(), keys[j].data(), kHeadDim);
      sums[j] += weight * (score < 0 ? 0 : score);  // NaN stays NaN
    }
  }
  for (size_t j = 0; j < static_cast<size_t>(n); ++j)
    logits[first + static_cast<int64_t>(j)] = static_cast<float>(scales[j] * sums[j]);
}

}  // namespace

void append_indexer(const core::AppendIndexerArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    write_indexer_key(args.cache, slot, Channels{args.k, args.dtype, token * args.k_stride_token},
                      args.power_of_two_scales);
  }
}

void indexer_logits(const core::IndexerLogitsArgs& args) {
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int32_t* pages = args.pages.of(request);
    for (int64_t i = 0; i < args.queries.len(request); ++i) {
      const int64_t token = args.queries.begin(request) + i, visible = visible_keys(args, request, i);
      float* logits = args.logits + token * args.logits_stride_token;
      for (int64_t first = 0; first < visible; first += kKeysPerRun)
        fill_block(args, pages, token, first, std::min(kKeysPerRun, visible - first), logits);
      std::fill(logits + visible, logits + args.max_kv_len, -std::numeric_limits<float>::infinity());
    }
  }
}

void indexer_top_k(const core::IndexerTopKArgs& args) {
  const core::IndexerLogitsArgs& indexer = args.indexer;
  indexer_logits(indexer);
  for (int32_t request = 0; request < indexer.batch_size; ++request)
    for (int64_t i = 0; i < indexer.queries.len(request); ++i) {
      const int64_t token = indexer.queries.begin(request) + i;
      select_top_k(indexer.logits + token * indexer.logits_stride_token, visible_keys(indexer, request, i),
                   args.top_k.k, args.top_k.indices + token * args.top_k.indices_stride_token);
    }
  physical_slots(args.slots);
}

}  // namespace mla::reference

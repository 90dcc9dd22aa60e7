// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention writes keys into its cache, computes the logits of all keys,
//   logit[t][j] = scale[j] * sum_h weight[t][h] * max(0, q[t][h] . k[j])
// where scale[j] is 1 if groups of a key's channels have scales of their own, which belong to k[j] then; or of those in
// listed blocks, and selects keys by them. Sources of the blocks, and of the choice among them, are those of DeepSeek
// V4.1: select_candidate_blocks() in inference/model.py of its release, as SGLang has it in srt/layers/dsv41. A key
// that stands for several tokens is seen with the last of them: DeepSeek V4's compressed layers (V4's modelling file in
// transformers).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "reference/attention.h"
#include "reference/cache_rows.h"
#include "reference/reference.h"
#include "reference/top_k.h"

namespace mla::reference {
namespace {

constexpr int32_t kHeadDim = kIndexerLayout.head_dim;
constexpr float kHidden = -std::numeric_limits<float>::infinity();
using Row = std::array<double, kHeadDim>;

/// Has keys [begin, end).
struct KeyRange {
  int64_t begin, end;
};

/// Returns the keys that query `i` of a request sees.
KeyRange visible_keys(const core::IndexerLogitsArgs& args, int32_t request, int64_t i) {
  const int64_t kv_len = args.pages.kv_len[request], q_len = args.queries.len(request);
  const int64_t token = args.queries.begin(request) + i;
  const int64_t tokens = args.causal ? std::clamp<int64_t>(kv_len - q_len + i + 1, 0, kv_len) : kv_len;
  KeyRange keys = {0, tokens / args.ratio};
  if (args.key_end != nullptr) keys.end = std::clamp<int64_t>(args.key_end[token], 0, kv_len / args.ratio);
  if (args.key_begin != nullptr) keys.begin = std::clamp<int64_t>(args.key_begin[token], 0, keys.end);
  return keys;
}

/// The logits of this many keys are computed together, so that queries are converted once for all of them.
constexpr int64_t kKeysPerRun = 32;

/// Stores a token's logit j. What is finite in f32 stays finite in types of 16 bits.
void store_logit(const core::IndexerLogitsArgs& args, int64_t token, int64_t j, float logit) {
  const float most = args.logits_dtype == DType::kF16 ? 65504.0F : 0x1.FEp127F;
  if (args.logits_dtype != DType::kF32 && std::isfinite(logit)) logit = std::clamp(logit, -most, most);
  store(logit, args.logits_dtype, token * args.logits_stride_token + j, args.logits);
}

/// Computes a token's logits [at, at + n), which belong to keys from `first` on of its request.
void fill_keys(const core::IndexerLogitsArgs& args, const int32_t* pages, int64_t token, int64_t first, int64_t n,
               int64_t at) {
  std::array<Row, kKeysPerRun> keys;
  std::array<double, kKeysPerRun> scales = {}, sums = {};
  for (int64_t j = 0; j < n; ++j) {
    const int64_t page = pages[(first + j) / args.pages.page_size], offset = (first + j) % args.pages.page_size;
    const Channels key = indexer_key(args.cache, page, offset);
    const bool one_scale = key.scales.channels_each == kHeadDim;
    const auto i = static_cast<size_t>(j);
    for (int32_t c = 0; c < kHeadDim; ++c)
      keys[i][static_cast<size_t>(c)] = static_cast<double>(one_scale ? key.element(c) : key(c));
    scales[i] = one_scale ? static_cast<double>(key.scales[0]) : 1;
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
    store_logit(args, token, at + static_cast<int64_t>(j), static_cast<float>(scales[j] * sums[j]));
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
      const int64_t token = args.queries.begin(request) + i;
      const KeyRange seen = visible_keys(args, request, i);
      for (int64_t j = 0; j < args.num_logits; ++j) store_logit(args, token, j, kHidden);
      for (int64_t first = seen.begin; first < seen.end && !args.blocks.given(); first += kKeysPerRun)
        fill_keys(args, pages, token, first, std::min(kKeysPerRun, seen.end - first), first);
      for (int32_t m = 0; m < args.blocks.count; ++m) {
        const int64_t size = args.blocks.size, block = args.blocks.blocks[token * args.blocks.stride_token + m];
        for (int64_t key = std::max(block * size, seen.begin); key < std::min((block + 1) * size, seen.end); ++key)
          fill_keys(args, pages, token, key, 1, m * size + key % size);
      }
    }
  }
}

void indexer_top_k(const core::IndexerTopKArgs& args) {
  const core::IndexerLogitsArgs& indexer = args.indexer;
  indexer_logits(indexer);
  for (int32_t request = 0; request < indexer.batch_size; ++request)
    for (int64_t i = 0; i < indexer.queries.len(request); ++i) {
      const int64_t token = indexer.queries.begin(request) + i;
      const KeyRange seen = visible_keys(indexer, request, i);
      if (indexer.blocks.given())
        select_top_k(args.top_k, token, 0, seen.begin < seen.end ? indexer.num_logits : 0);
      else
        select_top_k(args.top_k, token, seen.begin, seen.end);
    }
  physical_slots(args.slots);
}

}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
// Makes batches of requests for the planner, and says what each has to do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/common/list_checks.h"

namespace mla::plan_test {

/// Holds a batch of decode: lengths, and the arguments that point to them.
struct DecodeBatch {
  std::vector<int32_t> kv_len;
  std::vector<int32_t> qo_indptr;  // empty: uniform_len
  std::vector<int32_t> kv_indptr;  // empty: a block table
  int32_t uniform_len = 1;
  int64_t padding_tokens = 0;  // behind the last request's
  int32_t page_size = 64;
  int32_t window_left = -1;
  bool causal = true;
  ContextParallel share = {};
  int32_t num_heads = 16;

  int32_t size() const { return static_cast<int32_t>(kv_len.size()); }
  int64_t num_tokens() const {
    return (qo_indptr.empty() ? int64_t{size()} * uniform_len : int64_t{qo_indptr.back()}) + padding_tokens;
  }

  cuda::WorkShape shape(int32_t block_rows, int32_t step_keys, int32_t grid) const {
    return {.max_tokens = num_tokens(),
            .batch = size(),
            .num_heads = num_heads,
            .d_v = 4,
            .block_rows = block_rows,
            .step_keys = step_keys,
            .max_grid_blocks = grid};
  }

  core::DecodeArgs args() const {
    core::DecodeArgs args;
    args.batch_size = size();
    args.num_tokens = num_tokens();
    args.num_heads = num_heads;
    args.pages.page_size = page_size;
    args.pages.batch_size = size();
    args.pages.kv_len = kv_len.data();
    if (!kv_indptr.empty()) args.pages.kv_indptr = kv_indptr.data();
    if (!qo_indptr.empty()) args.queries.indptr = qo_indptr.data();
    args.queries.uniform_len = uniform_len;
    args.causal = causal;
    args.options.window_left = window_left;
    args.context_parallel = share;
    return args;
  }

  std::vector<Expected> expected(int32_t step_keys) const {
    std::vector<Expected> all;
    for (int32_t r = 0; r < size(); ++r) {
      const auto at = static_cast<size_t>(r);
      Expected e{.token_begin = qo_indptr.empty() ? r * uniform_len : qo_indptr[at],
                 .q_len = qo_indptr.empty() ? uniform_len : qo_indptr[at + 1] - qo_indptr[at]};
      if (e.q_len > 0) {
        e.kv_len = kv_len[at];
        const schedule::Sequence sequence{
            .q_len = e.q_len, .kv_len = kv_len[at], .causal = causal, .window_left = window_left, .share = share};
        int32_t begin = INT32_MAX, end = 0;
        for (int32_t q = 0; q < e.q_len; ++q) {
          const schedule::KeyRange keys = schedule::visible_keys(sequence, q);
          begin = std::min(begin, keys.begin);
          end = std::max(end, keys.end);
        }
        e.key_begin = begin / step_keys * step_keys;
        e.key_end = std::max<int64_t>(end, e.key_begin);
      }
      all.push_back(e);
    }
    return all;
  }
};

/// Plans the batch, checks the work list, and returns the row blocks.
inline RowBlocks plan_and_check(const DecodeBatch& batch, const cuda::WorkShape& shape, uint64_t seed = 0) {
  ListMemory memory(shape);
  expect_planned(shape, batch.args(), memory, seed);
  const std::vector<Expected> requests = batch.expected(shape.step_keys);
  return ListChecker(shape, memory.list, requests).check();
}

/// Returns a batch that is mostly ragged, with empty requests, empty caches and queries before the first key in it.
inline DecodeBatch random_batch(std::mt19937& random, int32_t size, int32_t max_kv_len, int32_t max_q_len) {
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  DecodeBatch batch;
  batch.num_heads = 1 << below(8);
  const bool ragged = below(3) != 0;
  if (ragged) batch.qo_indptr.push_back(0);
  batch.uniform_len = 1 + below(max_q_len);
  for (int32_t r = 0; r < size; ++r) {
    const int32_t scale = max_kv_len >> below(8);
    batch.kv_len.push_back(below(10) == 0 ? 0 : below(std::max(scale, 1)));
    if (ragged) batch.qo_indptr.push_back(batch.qo_indptr.back() + (below(10) == 0 ? 0 : 1 + below(max_q_len)));
  }
  if (ragged) batch.padding_tokens = below(5);
  if (below(3) == 0) batch.window_left = below(max_kv_len);
  if (below(3) == 0) batch.share = {.rank = below(3), .world = 3, .interleave = 1 + below(20)};
  batch.causal = below(4) != 0;
  return batch;
}

}  // namespace mla::plan_test

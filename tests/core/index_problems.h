// SPDX-License-Identifier: Apache-2.0
// Holds small valid problems of the index tools and the indexer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "problems.h"

namespace mla::test {

inline constexpr int32_t kSentinel32 = 0x5A5A5A5A;

inline bool untouched_i32(const std::vector<int32_t>& values) {
  return std::count(values.begin(), values.end(), kSentinel32) == static_cast<int64_t>(values.size());
}

struct BlockTableToCsr {
  std::vector<int32_t> block_table = {7, 1, -9, 2, 3, 4}, kv_len = {5, 9};
  std::vector<int32_t> kv_indptr = std::vector<int32_t>(3, kSentinel32),
                       kv_indices = std::vector<int32_t>(5, kSentinel32);
  BlockTableToCsrParams params;

  BlockTableToCsr() {
    params = {.block_table = contiguous(block_table.data(), DType::kI32, {2, 3}),
              .kv_len = of(kv_len),
              .page_size = 4,
              .kv_indptr = of(kv_indptr),
              .kv_indices = of(kv_indices)};
  }
  bool untouched() const { return untouched_i32(kv_indptr) && untouched_i32(kv_indices); }
};

struct PhysicalSlots {
  std::vector<int32_t> indices = {0, 4, -1, 8, 1, 2}, lengths = {9, -1, 0}, qo_indptr = {0, 1, 3};
  std::vector<int32_t> kv_len = {5, 9}, block_table = {0, 1, -9, 2, 3, 4};
  std::vector<int32_t> slots = std::vector<int32_t>(6, kSentinel32), valid = std::vector<int32_t>(3, kSentinel32);
  PhysicalSlotsParams params;

  PhysicalSlots() {
    params = {.indices = contiguous(indices.data(), DType::kI32, {3, 2}),
              .topk_length = of(lengths),
              .qo_indptr = of(qo_indptr),
              .pages = {.block_table = contiguous(block_table.data(), DType::kI32, {2, 3}), .kv_len = of(kv_len)},
              .page_size = 4,
              .slots = contiguous(slots.data(), DType::kI32, {3, 2}),
              .valid_count = of(valid)};
  }
  bool untouched() const { return untouched_i32(slots) && untouched_i32(valid); }
};

/// Holds two requests of 5 and 9 keys, with 1 and 2 queries.
struct IndexerLogits {
  std::vector<uint16_t> q = std::vector<uint16_t>(3 * kHeads * 128, 0);
  std::vector<float> weights = std::vector<float>(3 * kHeads, 1.0F);
  std::vector<uint16_t> keys = std::vector<uint16_t>(8 * 4 * 132 / 2, 0);
  std::vector<int32_t> kv_len = {5, 9}, block_table = {0, 1, -9, 2, 3, 4}, qo_indptr = {0, 1, 3};
  std::vector<uint16_t> logits = std::vector<uint16_t>(3 * 9 * 2, kSentinel);
  IndexerLogitsParams params;

  IndexerLogits() {
    params = {.q = of(q, {3, kHeads, 128}),
              .weights = contiguous(weights.data(), DType::kF32, {3, kHeads}),
              .cache = {.kv = of(keys, {8, 4 * 132}, DType::kU8), .page_size = 4},
              .pages = {.block_table = contiguous(block_table.data(), DType::kI32, {2, 3}), .kv_len = of(kv_len)},
              .qo_indptr = of(qo_indptr),
              .logits = contiguous(logits.data(), DType::kF32, {3, 9})};
  }
  bool untouched() const { return all_sentinels({&logits}); }
};

struct AppendIndexer {
  std::vector<uint16_t> k = std::vector<uint16_t>(3 * 128, 0), keys = std::vector<uint16_t>(8 * 4 * 132 / 2, kSentinel);
  std::vector<int64_t> slots = {0, -1, 31};
  AppendIndexerParams params;

  AppendIndexer() {
    params = {.k = of(k, {3, 128}),
              .slot_mapping = contiguous(slots.data(), DType::kI64, {3}),
              .cache = {.kv = of(keys, {8, 4 * 132}, DType::kU8), .page_size = 4}};
  }
  bool untouched() const { return all_sentinels({&keys}); }
};

struct TopK {
  std::vector<float> logits = std::vector<float>(3 * 5, 0.0F);
  std::vector<int32_t> lengths = {0, 5, 3}, indices = std::vector<int32_t>(3 * 2, kSentinel32);
  TopKParams params;

  TopK() {
    params = {.logits = contiguous(logits.data(), DType::kF32, {3, 5}),
              .lengths = of(lengths),
              .indices = contiguous(indices.data(), DType::kI32, {3, 2})};
  }
  bool untouched() const { return untouched_i32(indices); }
};

struct IndexerTopK {
  IndexerLogits indexer;
  std::vector<int32_t> kv_len = {5, 9}, block_table = {9, 99, 2, 3};
  std::vector<int32_t> slots = std::vector<int32_t>(3 * 4, kSentinel32), valid = std::vector<int32_t>(3, kSentinel32);
  IndexerTopKParams params;

  IndexerTopK() {
    params = {.indexer = indexer.params,
              .pages = {.block_table = contiguous(block_table.data(), DType::kI32, {2, 2}), .kv_len = of(kv_len)},
              .page_size = 8,
              .slots = contiguous(slots.data(), DType::kI32, {3, 4}),
              .valid_count = of(valid)};
  }
  bool untouched() const { return indexer.untouched() && untouched_i32(slots) && untouched_i32(valid); }
};

}  // namespace mla::test

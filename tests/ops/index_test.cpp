// SPDX-License-Identifier: Apache-2.0
// Tests the index tools and the indexer.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "backend_test.h"

namespace mla {
namespace {

class BlockTableToCsrTest : public BackendTest<Op::kBlockTableToCsr> {};
MLA_FOR_EVERY_ROW(BlockTableToCsrTest, Op::kBlockTableToCsr);

TEST_P(BlockTableToCsrTest, LengthsAndPageSizes) {
  for (int32_t page_size : {1, 2, 64, 256}) {
    kit::BlockTableToCsrSpec spec;
    spec.page_size = page_size;
    spec.kv_len = {0, 1, page_size, page_size + 1, 0, 1000, 0};
    expect_ok(spec);
  }
  kit::BlockTableToCsrSpec empty;
  empty.kv_len = {};
  expect_ok(empty);
}

TEST_P(BlockTableToCsrTest, RandomProblems) {
  for (uint64_t seed = 26000; seed < 26040; ++seed) expect_ok(kit::random_block_table_to_csr_spec(seed));
}

class PhysicalSlotsTest : public BackendTest<Op::kPhysicalSlots> {};
MLA_FOR_EVERY_ROW(PhysicalSlotsTest, Op::kPhysicalSlots);

TEST_P(PhysicalSlotsTest, EveryForm) {
  for (int form = 0; form < 64; ++form) {
    kit::PhysicalSlotsSpec spec;
    spec.q_len = {2};
    spec.kv_len = {300, 0, 5, 64};
    spec.topk = 37;
    spec.topk_length = (form & 1) != 0;
    spec.block_table = (form & 2) != 0;
    spec.omit_qo_indptr = (form & 4) != 0;
    spec.compact = (form & 8) != 0;
    spec.in_place = (form & 16) != 0;
    spec.want_valid_count = (form & 32) != 0;
    expect_ok(spec);
    spec.context_parallel = {.rank = 1, .world = 3, .interleave = 4};
    expect_ok(spec);
  }
}

TEST_P(PhysicalSlotsTest, RanksOwnEveryTokenOnce) {
  constexpr int32_t kWorld = 4;
  int64_t owned = 0;
  for (int32_t rank = 0; rank < kWorld; ++rank) {
    kit::PhysicalSlotsSpec spec;
    spec.kv_len = {500};
    spec.topk = 200;
    spec.invalid_share = 0;
    spec.context_parallel = {.rank = rank, .world = kWorld, .interleave = 16};
    const kit::PhysicalSlotsCase problem(spec);
    MLA_EXPECT_OK(run(context(), problem.params()));
    owned += problem.valid_count.as<int32_t>()[0];
  }
  EXPECT_EQ(owned, 200);
}

TEST_P(PhysicalSlotsTest, RandomProblems) {
  for (uint64_t seed = 27000; seed < 27060; ++seed) expect_ok(kit::random_physical_slots_spec(seed));
}

class IndexerLogitsTest : public BackendTest<Op::kIndexerLogits> {};
MLA_FOR_EVERY_ROW(IndexerLogitsTest, Op::kIndexerLogits);

TEST_P(IndexerLogitsTest, TypesHeadsAndPages) {
  for (DType q_dtype : {DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32})
    for (int32_t heads : {1, 3, 32, 64, 65})
      for (int32_t page_size : {1, 64}) {
        kit::IndexerLogitsSpec spec;
        spec.q_dtype = q_dtype;
        spec.num_heads = heads;
        spec.page_size = page_size;
        spec.q_len = {2};
        spec.kv_len = {70, 1, 0, 130};
        expect_ok(spec);
      }
}

TEST_P(IndexerLogitsTest, CausalOrNotAndRagged) {
  for (bool causal : {true, false}) {
    kit::IndexerLogitsSpec spec;
    spec.causal = causal;
    spec.q_len = {3, 0, 1, 16};
    spec.kv_len = {200, 9, 64, 5};
    expect_ok(spec);
  }
}

TEST_P(IndexerLogitsTest, RandomProblems) {
  for (uint64_t seed = 28000; seed < 28040; ++seed) expect_ok(kit::random_indexer_logits_spec(seed));
}

class TopKTest : public BackendTest<Op::kTopK> {};
MLA_FOR_EVERY_ROW(TopKTest, Op::kTopK);

TEST_P(TopKTest, ShapesTiesAndNan) {
  for (int32_t k : {1, 2, 64, 512, 2048, 2176})
    for (int32_t num_logits : {1, 63, 2048, 5000})
      for (int32_t levels : {0, 1, 5})
        for (double nan_share : {0.0, 0.3}) {
          kit::TopKSpec spec;
          spec.num_tokens = 3;
          spec.k = k;
          spec.num_logits = num_logits;
          spec.levels = levels;
          spec.nan_share = nan_share;
          spec.infinite_share = nan_share / 2;
          expect_ok(spec);
        }
}

TEST_P(TopKTest, LowerIndicesWinTies) {
  const std::vector<float> logits = {1, 2, 2, 0, 2, -0.0F, 2, 1};
  std::vector<int32_t> indices(3);
  TopKParams params;
  params.logits = contiguous(logits.data(), DType::kF32, {1, 8});
  params.indices = contiguous(indices.data(), DType::kI32, {1, 3});
  MLA_EXPECT_OK(run(context(), params));
  EXPECT_EQ(indices, (std::vector<int32_t>{1, 2, 4}));
}

TEST_P(TopKTest, NanIsLessThanMinusInfinity) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {std::nanf(""), -kInfinity, -std::nanf(""), -kInfinity, kInfinity};
  std::vector<int32_t> indices(4);
  TopKParams params;
  params.logits = contiguous(logits.data(), DType::kF32, {1, 5});
  params.indices = contiguous(indices.data(), DType::kI32, {1, 4});
  MLA_EXPECT_OK(run(context(), params));
  EXPECT_EQ(indices, (std::vector<int32_t>{0, 1, 3, 4}));
}

TEST_P(TopKTest, RandomProblems) {
  for (uint64_t seed = 29000; seed < 29060; ++seed) expect_ok(kit::random_top_k_spec(seed));
}

class IndexerTopKTest : public BackendTest<Op::kIndexerTopK> {};
MLA_FOR_EVERY_ROW(IndexerTopKTest, Op::kIndexerTopK);

TEST_P(IndexerTopKTest, PagesOfTheLatentCacheAreItsOwn) {
  for (int32_t page_size : {1, 2, 64, 256})
    for (bool block_table : {false, true}) {
      kit::IndexerTopKSpec spec;
      spec.page_size = page_size;
      spec.indexer.block_table = block_table;
      spec.indexer.kv_len = {300, 40, 0, 2};
      spec.indexer.q_len = {3};
      expect_ok(spec);
    }
}

TEST_P(IndexerTopKTest, SlotsServeSparseDecode) {
  // What comes out goes into decode_sparse, which accepts every slot.
  kit::IndexerTopKSpec spec;
  spec.indexer.kv_len = {300, 20};
  spec.topk = 64;
  const kit::IndexerTopKCase problem(spec);
  MLA_EXPECT_OK(run(context(), problem.params()));
  kit::CacheSpec cache;
  const auto* counts = problem.valid_count.as<int32_t>();
  EXPECT_EQ(counts[0], 64);
  EXPECT_EQ(counts[1], 20);
  const auto* slots = problem.slots.as<int32_t>();
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_GE(slots[i], 0);
    EXPECT_LT(slots[i], problem.table.num_pages * cache.page_size);
    EXPECT_EQ(slots[64 + i] == -1, i >= 20);
  }
}

TEST_P(IndexerTopKTest, RandomProblems) {
  for (uint64_t seed = 30000; seed < 30040; ++seed) expect_ok(kit::random_indexer_top_k_spec(seed));
}

}  // namespace
}  // namespace mla

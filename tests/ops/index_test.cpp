// SPDX-License-Identifier: Apache-2.0
// Tests the index tools and the indexer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
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

TEST_P(PhysicalSlotsTest, GroupsOfTokens) {
  for (int32_t ratio : {1, 2, 4, 7, 128})
    for (int form = 0; form < 16; ++form) {
      kit::PhysicalSlotsSpec spec;
      spec.q_len = {3};
      spec.kv_len = {300, 0, 5, 64, 2};
      spec.topk = 37;
      spec.ratio = ratio;
      spec.list_tokens = (form & 1) != 0;
      spec.topk_length = (form & 2) != 0;
      spec.compact = (form & 4) != 0;
      spec.block_table = (form & 8) != 0;
      spec.slots_columns = form % 3 * 50;
      expect_ok(spec);
      if (!spec.list_tokens) continue;
      spec.context_parallel = {.rank = 1, .world = 3, .interleave = 4};
      expect_ok(spec);
    }
}

/// A query that sees 10 of 11 tokens: two whole groups of 4, and two tokens of one that is not complete.
TEST_P(PhysicalSlotsTest, ListsTokensByHand) {
  const std::vector<int32_t> indices = {1, -1, 0, 0, 5, 1}, table = {7, 2, 4}, kv_len = {11};
  std::vector<int32_t> slots(32, 99), count(2, 99);
  PhysicalSlotsParams params;
  params.indices = contiguous(indices.data(), DType::kI32, {2, 3});
  params.pages.block_table = contiguous(table.data(), DType::kI32, {1, 3});
  params.pages.kv_len = contiguous(kv_len.data(), DType::kI32, {1});
  params.page_size = 4;
  params.ratio = 4;
  params.list_tokens = true;
  params.slots = contiguous(slots.data(), DType::kI32, {2, 16});
  params.valid_count = contiguous(count.data(), DType::kI32, {2});
  MLA_EXPECT_OK(run(context(), params));
  EXPECT_EQ(slots, (std::vector<int32_t>{8,  9,  10, 11, -1, -1, -1, -1, 28, 29, 30, 31, 16, 17, -1, -1,  //
                                         28, 29, 30, 31, -1, -1, -1, -1, 8,  9,  10, 11, 16, 17, 18, -1}));
  EXPECT_EQ(count, (std::vector<int32_t>{10, 11}));
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

TEST_P(IndexerLogitsTest, KeysOfGroups) {
  for (int32_t ratio : {2, 4, 128})
    for (bool causal : {true, false}) {
      kit::IndexerLogitsSpec spec;
      spec.ratio = ratio;
      spec.causal = causal;
      spec.q_len = {3, 0, 5, 9, 1};
      spec.kv_len = {400, 9, ratio, 5, 8 * ratio - 1};
      expect_ok(spec);
    }
}

TEST_P(IndexerLogitsTest, RangesOfKeys) {
  for (int form = 1; form < 8; ++form) {
    kit::IndexerLogitsSpec spec;
    spec.key_begin = (form & 1) != 0;
    spec.key_end = (form & 2) != 0;
    if ((form & 4) != 0) spec.num_blocks = 30, spec.block_size = 8;
    spec.q_len = {9, 0, 5, 2, 1};
    spec.kv_len = {1200, 9, 640, 3, 0};
    expect_ok(spec);
    spec.ratio = 3;
    spec.num_heads = 16;
    expect_ok(spec);
  }
}

TEST_P(IndexerLogitsTest, ListedBlocks) {
  for (int32_t block_size : {1, 8, 100})
    for (int32_t num_blocks : {1, 7, 70})
      for (double wild_share : {0.0, 0.3, 1.0}) {
        kit::IndexerLogitsSpec spec;
        spec.block_size = block_size;
        spec.num_blocks = num_blocks;
        spec.wild_share = wild_share;
        spec.q_len = {2};
        spec.kv_len = {500, 0, 5, 1, 8 * block_size + 3};
        spec.logits_columns = num_blocks % 2;
        expect_ok(spec);
        spec.ratio = 2;
        spec.page_size = 3;
        expect_ok(spec);
        spec.format = IndexerFormat::kMXFP4;
        expect_ok(spec);
      }
}

TEST_P(IndexerLogitsTest, Mxfp4) {
  for (DType dtype : {DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32})
    for (int32_t heads : {1, 7, 32, 64, 65})
      for (int32_t page_size : {1, 64}) {
        kit::IndexerLogitsSpec spec;
        spec.format = IndexerFormat::kMXFP4;
        spec.q_dtype = dtype;
        spec.num_heads = heads;
        spec.page_size = page_size;
        spec.q_len = {2, 1, 5};
        spec.kv_len = {130, 0, 77};
        spec.page_stride_extra = page_size == 1 ? 3 : 0;
        expect_ok(spec);
        spec.key_begin = spec.key_end = true;
        spec.block_table = true;
        spec.causal = false;
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
  const std::vector<float> logits = {std::nanf(""), -kInfinity, -std::nanf(""), -kInfinity, kInfinity};
  std::vector<int32_t> indices(4);
  TopKParams params;
  params.logits = contiguous(logits.data(), DType::kF32, {1, 5});
  params.indices = contiguous(indices.data(), DType::kI32, {1, 4});
  MLA_EXPECT_OK(run(context(), params));
  EXPECT_EQ(indices, (std::vector<int32_t>{0, 1, 3, 4}));
}

TEST_P(TopKTest, StartsAreLeftOut) {
  for (int32_t k : {1, 64, 2048})
    for (bool lengths : {false, true})
      for (int32_t num_logits : {1, 100, 5000}) {
        kit::TopKSpec spec;
        spec.k = k;
        spec.num_logits = num_logits;
        spec.starts = true;
        spec.lengths = lengths;
        expect_ok(spec);
      }
}

TEST_P(TopKTest, BlocksByTheirLargestLogits) {
  for (int32_t k : {1, 2, 40, 512, 2048})
    for (int32_t num_logits : {1, 7, 8, 9, 2048, 20001})
      for (int32_t levels : {0, 1, 5}) {
        kit::TopKSpec spec;
        spec.num_tokens = 3;
        spec.k = k;
        spec.num_logits = num_logits;
        spec.block_size = 8;
        spec.levels = levels;
        spec.nan_share = levels == 5 ? 0.6 : 0.0;
        spec.infinite_share = levels == 1 ? 0.2 : 0.0;
        expect_ok(spec);
        spec.lengths = true;
        spec.logits_extra = 1;
        expect_ok(spec);
      }
}

/// The last block is chosen although it has the least logit; of equal blocks, the first one is.
TEST_P(TopKTest, BlocksByHand) {
  const float nan = std::nanf("");
  const std::vector<float> logits = {1, 2, nan, 0, nan, nan, -5, 2, -9, 100};
  const std::vector<int32_t> lengths = {9};
  std::vector<int32_t> indices(3);
  TopKParams params;
  params.logits = contiguous(logits.data(), DType::kF32, {1, 10});
  params.lengths = contiguous(lengths.data(), DType::kI32, {1});
  params.block_size = 2;
  for (const auto& [k, chosen] : {std::pair<int64_t, std::vector<int32_t>>{1, {4}}, {2, {0, 4}}, {3, {0, 3, 4}}}) {
    params.indices = contiguous(indices.data(), DType::kI32, {1, k});
    MLA_EXPECT_OK(run(context(), params));
    EXPECT_EQ(std::vector<int32_t>(indices.begin(), indices.begin() + k), chosen);
  }
}

TEST_P(TopKTest, KeysOfListedBlocks) {
  const std::vector<float> logits = {3, -kInfinity, 5, 4, std::nanf(""), -kInfinity, 7, 7, 9};
  const std::vector<int32_t> blocks = {2, 5, -1, 9};
  std::vector<int32_t> indices(7);
  TopKParams params;
  params.logits = contiguous(logits.data(), DType::kF32, {1, 9});  // the last one belongs to no block
  params.blocks = contiguous(blocks.data(), DType::kI32, {1, 4});
  params.block_size = 2;
  params.indices = contiguous(indices.data(), DType::kI32, {1, 3});
  MLA_EXPECT_OK(run(context(), params));
  EXPECT_EQ(indices, (std::vector<int32_t>{10, 18, 19, 0, 0, 0, 0}));
  params.indices = contiguous(indices.data(), DType::kI32, {1, 7});
  MLA_EXPECT_OK(run(context(), params));
  EXPECT_EQ(indices, (std::vector<int32_t>{4, 10, 11, 18, 19, -1, -1}));
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

/// Lists of all blocks choose what is chosen without a list.
TEST_P(IndexerTopKTest, AllBlocksAreNoChoice) {
  kit::IndexerTopKSpec spec;
  spec.indexer.kv_len = {700, 90, 3};
  spec.indexer.q_len = {3};
  spec.indexer.ratio = 2;
  spec.topk = 40;
  const kit::IndexerTopKCase all(spec);
  spec.indexer.block_size = 8;
  spec.indexer.num_blocks = 350 / 8 + 1;
  const kit::IndexerTopKCase listed(spec);
  MLA_EXPECT_OK(run(context(), all.params()));
  MLA_EXPECT_OK(run(context(), listed.params()));
  for (int64_t i = 0; i < all.indexer.num_tokens * spec.topk; ++i)
    ASSERT_EQ(all.slots.as<int32_t>()[i], listed.slots.as<int32_t>()[i]) << i;
}

TEST_P(IndexerTopKTest, TokensOfGroups) {
  for (const int32_t ratio : {1, 2, 4, 7})
    for (const int32_t columns : {0, 1, 128})
      for (const int32_t world : {1, 3}) {
        kit::IndexerTopKSpec spec;
        spec.indexer.kv_len = {300, 4 * ratio, ratio - 1, 0, 2 * ratio - 1};
        spec.indexer.q_len = {2};
        spec.indexer.ratio = ratio;
        spec.list_tokens = true;
        spec.topk = 20;
        spec.slots_columns = columns;
        spec.context_parallel = {.rank = world - 1, .world = world, .interleave = ratio == 4 ? 3 : 1};
        expect_ok(spec);
      }
}

/// What the ranks list is, together, what is chosen without ranks; some of them have no token.
TEST_P(IndexerTopKTest, RanksShareWhatIsChosen) {
  for (const int32_t interleave : {1, 16}) {
    kit::IndexerTopKSpec spec;
    spec.indexer.kv_len = {300, 17, 3, 1};
    spec.indexer.q_len = {2};
    const kit::IndexerTopKCase whole(spec);
    MLA_EXPECT_OK(run(context(), whole.params()));
    std::vector<std::vector<int64_t>> listed(static_cast<size_t>(whole.indexer.num_tokens));
    spec.context_parallel = {.world = 3, .interleave = interleave};
    for (int32_t& rank = spec.context_parallel.rank; rank < 3; ++rank) {
      expect_ok(spec);
      const kit::IndexerTopKCase part(spec);
      MLA_EXPECT_OK(run(context(), part.params()));
      for (size_t t = 0; t < listed.size(); ++t)
        for (int64_t i = 0; i < part.valid_count.as<int32_t>()[t]; ++i) {
          const int64_t slot = part.slots.as<int32_t>()[static_cast<int64_t>(t) * spec.topk + i];
          const auto& pages = part.table.pages_of[t / 2];
          const auto page = std::find(pages.begin(), pages.end(), slot / spec.page_size) - pages.begin();
          const int64_t local = page * spec.page_size + slot % spec.page_size;
          listed[t].push_back(whole.table.slot_of(t / 2, global_position(spec.context_parallel, local)));
        }
    }
    for (size_t t = 0; t < listed.size(); ++t) {
      const auto* const row = whole.slots.as<int32_t>() + static_cast<int64_t>(t) * spec.topk;
      std::vector<int64_t> chosen(row, row + whole.valid_count.as<int32_t>()[t]);
      std::sort(chosen.begin(), chosen.end());
      std::sort(listed[t].begin(), listed[t].end());
      EXPECT_EQ(listed[t], chosen) << "token " << t;
    }
  }
}

TEST_P(IndexerTopKTest, RangesOfKeys) {
  for (int form = 1; form < 8; ++form) {
    kit::IndexerTopKSpec spec;
    spec.topk = 100;
    spec.indexer.key_begin = (form & 1) != 0;
    spec.indexer.key_end = (form & 2) != 0;
    if ((form & 4) != 0) spec.indexer.num_blocks = 30, spec.indexer.block_size = 8;
    spec.indexer.q_len = {4};
    spec.indexer.kv_len = {600, 90, 0, 2};
    expect_ok(spec);
  }
}

TEST_P(IndexerTopKTest, ListedBlocks) {
  for (int32_t topk : {1, 16, 600})
    for (double wild_share : {0.0, 0.5}) {
      kit::IndexerTopKSpec spec;
      spec.topk = topk;
      spec.indexer.kv_len = {900, 40, 0, 2};
      spec.indexer.q_len = {3};
      spec.indexer.block_size = 8;
      spec.indexer.num_blocks = 60;
      spec.indexer.wild_share = wild_share;
      expect_ok(spec);
    }
}

TEST_P(IndexerTopKTest, RandomProblems) {
  for (uint64_t seed = 30000; seed < 30040; ++seed) expect_ok(kit::random_indexer_top_k_spec(seed));
}

}  // namespace
}  // namespace mla

// SPDX-License-Identifier: Apache-2.0
// Tests how calls of the index tools and the indexer are validated.
#include "core/validate.h"
#include "index_problems.h"

namespace mla::test {
namespace {

TEST(ValidateBlockTableToCsr, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<BlockTableToCsr>>{
      {"no page size", [](BlockTableToCsr& p) { p.params.page_size = 0; },
       "block_table_to_csr: page_size: expected at least 1, got 0"},
      {"no table", [](BlockTableToCsr& p) { p.params.block_table = {}; },
       "block_table_to_csr: block_table: expected block_table, or kv_indptr and kv_indices, got none"},
      {"length beyond the table", [](BlockTableToCsr& p) { p.kv_len[1] = 13; },
       "block_table_to_csr: kv_len: expected at most 12 (3 pages of 4), got 13 for request 1"},
      {"negative length", [](BlockTableToCsr& p) { p.kv_len[0] = -1; },
       "block_table_to_csr: kv_len: expected at least 0, got -1 for request 0"},
      {"too little room", [](BlockTableToCsr& p) { set_extent(p.params.kv_indices, 0, 4); },
       "block_table_to_csr: kv_indices: expected room for 5 pages, got 4"},
      {"indptr of another batch", [](BlockTableToCsr& p) { set_extent(p.params.kv_indptr, 0, 2); },
       "block_table_to_csr: kv_indptr: expected shape [B + 1 = 3], got [2]"},
      {"null output", [](BlockTableToCsr& p) { p.params.kv_indices.data = nullptr; },
       "block_table_to_csr: kv_indices: expected data, got a null pointer"},
  });
}

TEST(ValidateBlockTableToCsr, NoRequestStillHasAnIndptr) {
  BlockTableToCsr p;
  p.params.block_table = contiguous(p.block_table.data(), DType::kI32, {0, 3});
  set_extent(p.params.kv_len, 0, 0);
  set_extent(p.params.kv_indptr, 0, 1);
  ASSERT_EQ(run(reference_context(), p.params).message(), "");
  EXPECT_EQ(p.kv_indptr[0], 0);
  EXPECT_TRUE(untouched_i32(p.kv_indices));
}

TEST(ValidatePhysicalSlots, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<PhysicalSlots>>{
      {"no indices", [](PhysicalSlots& p) { p.params.indices = {}; },
       "physical_slots: indices: expected a tensor, got none"},
      {"topk of 0", [](PhysicalSlots& p) { set_extent(p.params.indices, 1, 0); },
       "physical_slots: topk: expected at least 1, got 0"},
      {"slots of another shape", [](PhysicalSlots& p) { set_extent(p.params.slots, 1, 1); },
       "physical_slots: slots: expected shape [T = 3, topk = 2], got [3, 1]"},
      {"lengths of requests", [](PhysicalSlots& p) { set_extent(p.params.topk_length, 0, 2); },
       "physical_slots: topk_length: expected shape [T = 3], got [2]"},
      {"uneven queries", [](PhysicalSlots& p) { p.params.qo_indptr = {}; },
       "physical_slots: qo_indptr: expected a tensor, since 3 query tokens are not a multiple of 2 requests, got none"},
      {"no page size", [](PhysicalSlots& p) { p.params.page_size = 0; },
       "physical_slots: page_size: expected at least 1, got 0"},
      {"negative page", [](PhysicalSlots& p) { p.block_table[1] = -1; },
       "physical_slots: block_table: expected page numbers from 0 to 536870911, got -1 as page 1 of request 0"},
      {"page beyond what int32 slots can name", [](PhysicalSlots& p) { p.block_table[5] = 1 << 29; },
       "physical_slots: block_table: expected page numbers from 0 to 536870911, got 536870912 as page 2 of request 1"},
      {"rank beyond the world", [](PhysicalSlots& p) { p.params.context_parallel = {.rank = 4, .world = 4}; },
       "physical_slots: context_parallel.rank: expected 0 to 3, got 4"},
      {"counts of other tokens", [](PhysicalSlots& p) { set_extent(p.params.valid_count, 0, 2); },
       "physical_slots: valid_count: expected shape [T = 3], got [2]"},
      {"groups of no token", [](PhysicalSlots& p) { p.params.ratio = 0; },
       "physical_slots: ratio: expected at least 1, got 0"},
      {"rows of a pool on ranks",
       [](PhysicalSlots& p) {
         p.params.ratio = 2;
         p.params.context_parallel = {.rank = 1, .world = 2};
       },
       "physical_slots: ratio: expected 1 where rows belong to ranks, got 2"},
      {"no room for all tokens",
       [](PhysicalSlots& p) {
         p.params.ratio = 4;
         p.params.list_tokens = true;
       },
       "physical_slots: slots: expected rows of at least 11 slots, for 2 groups of 4 tokens and 3 more, got 2"},
      {"length beyond the pool's table",
       [](PhysicalSlots& p) {
         p.params.ratio = 4;
         p.kv_len[0] = 52;
       },
       "physical_slots: kv_len: expected at most 51 (3 pages of 4 groups of 4 tokens), got 52 for request 0"},
      {"length beyond the table", [](PhysicalSlots& p) { p.kv_len[0] = 13; },
       "physical_slots: kv_len: expected at most 12 (3 pages of 4), got 13 for request 0"},
  });
}

TEST(ValidatePhysicalSlots, ARankNeedsItsOwnPagesOnly) {
  PhysicalSlots p;
  p.params.context_parallel = {.rank = 1, .world = 2, .interleave = 1};
  p.kv_len = {24, 8};  // 12 and 4 tokens here
  p.block_table = {5, 6, 7, 2, -1, -1};
  core::PhysicalSlotsArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.context_parallel.world, 2);
}

TEST(ValidateIndexerLogits, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<IndexerLogits>>{
      {"queries of 64 channels", [](IndexerLogits& p) { set_extent(p.params.q, 2, 64); },
       "indexer_logits: q: expected shape [T, H, 128], got [3, 2, 64]"},
      {"byte queries", [](IndexerLogits& p) { p.params.q.dtype = DType::kU8; },
       "indexer_logits: q: expected bf16, f16, f32 or e4m3, got uint8"},
      {"weights in bf16", [](IndexerLogits& p) { p.params.weights.dtype = DType::kBF16; },
       "indexer_logits: weights: expected f32, got bf16"},
      {"weights of other heads", [](IndexerLogits& p) { set_extent(p.params.weights, 1, 1); },
       "indexer_logits: weights: expected shape [T = 3, H = 2], got [3, 1]"},
      {"no page size", [](IndexerLogits& p) { p.params.cache.page_size = 0; },
       "indexer_logits: cache.page_size: expected at least 1, got 0"},
      {"pages without scales", [](IndexerLogits& p) { set_extent(p.params.cache.kv, 1, 4 * 128); },
       "indexer_logits: cache.kv: expected pages of at least 528 bytes (4 tokens), got 512"},
      {"small pages of mxfp4",
       [](IndexerLogits& p) {
         p.params.cache.format = IndexerFormat::kMXFP4;
         set_extent(p.params.cache.kv, 1, 271);
       },
       "indexer_logits: cache.kv: expected pages of at least 272 bytes (4 tokens), got 271"},
      {"unknown keys", [](IndexerLogits& p) { p.params.cache.format = IndexerFormat{2}; },
       "indexer_logits: cache.format: expected a format of the indexer's keys, got unknown value 2"},
      {"stride without scales", [](IndexerLogits& p) { set_stride(p.params.cache.kv, 0, 4 * 128); },
       "indexer_logits: cache.kv: expected a page stride of at least 528 bytes (4 tokens), got 512"},
      {"logits in e4m3", [](IndexerLogits& p) { p.params.logits.dtype = DType::kE4M3; },
       "indexer_logits: logits: expected bf16, f16 or f32, got e4m3"},
      {"logits of integers", [](IndexerLogits& p) { p.params.logits.dtype = DType::kI32; },
       "indexer_logits: logits: expected bf16, f16 or f32, got int32"},
      {"logits too narrow", [](IndexerLogits& p) { set_extent(p.params.logits, 1, 8); },
       "indexer_logits: logits: expected rows of at least kv_len = 9, got 8 for request 1"},
      {"too few logits for groups",
       [](IndexerLogits& p) {
         set_extent(p.params.logits, 1, 3);
         p.params.ratio = 2;
       },
       "indexer_logits: logits: expected rows of at least kv_len / 2 = 4, got 3 for request 1"},
      {"keys of no token", [](IndexerLogits& p) { p.params.ratio = -1; },
       "indexer_logits: ratio: expected at least 1, got -1"},
      {"wild compute", [](IndexerLogits& p) { p.params.compute = static_cast<Compute>(3); },
       "indexer_logits: compute: expected kDefault, kFP8 or kExact, got 3"},
      {"ranges of other tokens",
       [](IndexerLogits& p) { p.params.key_end = contiguous(p.block_table.data(), DType::kI32, {2}); },
       "indexer_logits: key_end: expected shape [T = 3], got [2]"},
      {"blocks of no key", [](IndexerLogits& p) { p.params.block_size = 0; },
       "indexer_logits: block_size: expected at least 1, got 0"},
      {"blocks of other tokens",
       [](IndexerLogits& p) {
         p.params.blocks = contiguous(p.block_table.data(), DType::kI32, {2, 1});
       },
       "indexer_logits: blocks: expected shape [T = 3, M], got [2, 1]"},
      {"too few logits for blocks",
       [](IndexerLogits& p) {
         p.params.blocks = contiguous(p.block_table.data(), DType::kI32, {3, 2});
         p.params.block_size = 8;
       },
       "indexer_logits: logits: expected rows of at least 16 logits, for 2 blocks of 8 keys, got 9"},
      {"page beyond the pool", [](IndexerLogits& p) { p.block_table[4] = 8; },
       "indexer_logits: block_table: expected page numbers from 0 to 7, got 8 as page 1 of request 1"},
      {"uneven queries", [](IndexerLogits& p) { p.params.qo_indptr = {}; },
       "indexer_logits: qo_indptr: expected a tensor, since 3 query tokens are not a multiple of 2 requests, got none"},
  });
}

TEST(ValidateAppendIndexer, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<AppendIndexer>>{
      {"keys of 64 channels", [](AppendIndexer& p) { set_extent(p.params.k, 1, 64); },
       "append_indexer: k: expected shape [T, 128], got [3, 64]"},
      {"e4m3 keys", [](AppendIndexer& p) { p.params.k.dtype = DType::kE4M3; },
       "append_indexer: k: expected bf16, f16 or f32, got e4m3"},
      {"slot beyond the cache", [](AppendIndexer& p) { p.slots[0] = 32; },
       "append_indexer: slot_mapping: expected at most 31 (the last slot of the cache), got 32 for token 0"},
      {"pages without scales", [](AppendIndexer& p) { set_extent(p.params.cache.kv, 1, 4 * 128); },
       "append_indexer: cache.kv: expected pages of at least 528 bytes (4 tokens), got 512"},
      {"scales that mxfp4 has not",
       [](AppendIndexer& p) {
         p.params.cache.format = IndexerFormat::kMXFP4;
         p.params.power_of_two_scales = false;
       },
       "append_indexer: power_of_two_scales: expected powers of two for mxfp4 keys, which have no other scales, "
       "got any numbers"},
      {"unknown keys", [](AppendIndexer& p) { p.params.cache.format = IndexerFormat{255}; },
       "append_indexer: cache.format: expected a format of the indexer's keys, got unknown value 255"},
      {"overlapping pages", [](AppendIndexer& p) { p.params.cache.kv.stride[0] = -528; },
       "append_indexer: cache.kv: expected a page stride of at least 528 bytes (4 tokens), got -528"},
      {"no cache", [](AppendIndexer& p) { p.params.cache.kv = {}; },
       "append_indexer: cache.kv: expected a tensor, got none"},
  });
}

TEST(ValidateTopK, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<TopK>>{
      {"logits in e4m3", [](TopK& p) { p.params.logits.dtype = DType::kE4M3; },
       "top_k: logits: expected bf16, f16 or f32, got e4m3"},
      {"length beyond the row", [](TopK& p) { p.lengths[1] = 6; },
       "top_k: lengths: expected 0 to 5 (the logits of a row), got 6 for token 1"},
      {"negative length", [](TopK& p) { p.lengths[2] = -1; },
       "top_k: lengths: expected 0 to 5 (the logits of a row), got -1 for token 2"},
      {"start behind the length",
       [](TopK& p) {
         p.params.starts = p.params.lengths;
         p.params.lengths = {};
         p.lengths[1] = 6;
       },
       "top_k: starts: expected 0 to 5 (the logits that count), got 6 for token 1"},
      {"starts of blocks",
       [](TopK& p) {
         p.params.starts = p.params.lengths;
         p.params.block_size = 2;
       },
       "top_k: block_size: expected 1, since starts are given, got 2"},
      {"starts of listed keys",
       [](TopK& p) {
         p.params.starts = p.params.lengths;
         p.params.blocks = contiguous(p.lengths.data(), DType::kI32, {3, 1});
       },
       "top_k: blocks: expected none, since starts are given, got a tensor"},
      {"blocks of no logit", [](TopK& p) { p.params.block_size = 0; }, "top_k: block_size: expected at least 1, got 0"},
      {"lists of other tokens",
       [](TopK& p) {
         p.params.blocks = contiguous(p.lengths.data(), DType::kI32, {1, 3});
       },
       "top_k: blocks: expected shape [T = 3, M], got [1, 3]"},
      {"k of 0", [](TopK& p) { set_extent(p.params.indices, 1, 0); }, "top_k: k: expected at least 1, got 0"},
      {"indices of other tokens", [](TopK& p) { set_extent(p.params.indices, 0, 2); },
       "top_k: indices: expected shape [T = 3, k], got [2, 2]"},
      {"overlapping indices", [](TopK& p) { set_stride(p.params.indices, 0, 1); },
       "top_k: indices: expected an output whose elements do not overlap, got shape [3, 2] with stride 1 in "
       "dimension 0"},
  });
}

TEST(ValidateIndexerTopK, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<IndexerTopK>>{
      {"lengths that disagree", [](IndexerTopK& p) { p.kv_len[1] = 8; },
       "indexer_top_k: kv_len: expected 9 as in indexer.kv_len, got 8 for request 1"},
      {"another batch",
       [](IndexerTopK& p) {
         set_extent(p.params.pages.kv_len, 0, 1);
         set_extent(p.params.pages.block_table, 0, 1);
       },
       "indexer_top_k: kv_len: expected 2 requests, as in indexer.kv_len, got 1"},
      {"bad length of the indexer", [](IndexerTopK& p) { p.indexer.kv_len[1] = 13; },
       "indexer_top_k: indexer.kv_len: expected at most 12 (3 pages of 4), got 13 for request 1"},
      {"page beyond the indexer's pool", [](IndexerTopK& p) { p.indexer.block_table[0] = 8; },
       "indexer_top_k: indexer.block_table: expected page numbers from 0 to 7, got 8 as page 0 of request 0"},
      {"unknown keys", [](IndexerTopK& p) { p.params.indexer.cache.format = IndexerFormat{7}; },
       "indexer_top_k: indexer.cache.format: expected a format of the indexer's keys, got unknown value 7"},
      {"small pages of the indexer", [](IndexerTopK& p) { set_extent(p.params.indexer.cache.kv, 1, 512); },
       "indexer_top_k: indexer.cache.kv: expected pages of at least 528 bytes (4 tokens), got 512"},
      {"no scratch", [](IndexerTopK& p) { p.params.indexer.logits = {}; },
       "indexer_top_k: indexer.logits: expected a tensor, got none"},
      {"scratch of bytes", [](IndexerTopK& p) { p.params.indexer.logits.dtype = DType::kU8; },
       "indexer_top_k: indexer.logits: expected bf16, f16 or f32, got uint8"},
      {"page beyond what int32 slots can name", [](IndexerTopK& p) { p.block_table[0] = INT32_MAX; },
       "indexer_top_k: block_table: expected page numbers from 0 to 268435455, got 2147483647 as page 0 of request 0"},
      {"no page size", [](IndexerTopK& p) { p.params.page_size = 0; },
       "indexer_top_k: page_size: expected at least 1, got 0"},
      {"topk of 0", [](IndexerTopK& p) { set_extent(p.params.slots, 1, 0); },
       "indexer_top_k: topk: expected at least 1, got 0"},
      {"more keys than slots", [](IndexerTopK& p) { p.params.topk = 5; },
       "indexer_top_k: topk: expected at most the 4 slots of a row, got 5"},
      {"negative topk", [](IndexerTopK& p) { p.params.topk = -1; }, "indexer_top_k: topk: expected at least 1, got -1"},
      {"ranks of a pool",
       [](IndexerTopK& p) {
         p.params.indexer.ratio = 2;
         p.params.context_parallel.world = 2;
       },
       "indexer_top_k: indexer.ratio: expected 1 where rows belong to ranks, got 2"},
      {"rank that is none", [](IndexerTopK& p) { p.params.context_parallel.rank = 1; },
       "indexer_top_k: context_parallel.rank: expected 0 to 0, got 1"},
      {"no room for listed tokens",
       [](IndexerTopK& p) {
         p.params.indexer.ratio = 2;
         p.params.list_tokens = true;
         p.params.topk = 2;
       },
       "indexer_top_k: slots: expected rows of at least 5 slots, for 2 groups of 2 tokens and 1 more, got 4"},
      {"slots of other tokens", [](IndexerTopK& p) { set_extent(p.params.slots, 0, 2); },
       "indexer_top_k: slots: expected shape [T = 3, topk], got [2, 4]"},
  });
}

/// Three slots hold the tokens of one group of two, and one of an open group.
TEST(ValidateIndexerTopK, RowsSayHowManyKeysAreSelected) {
  IndexerTopK p;
  core::IndexerTopKArgs args;
  Device device;
  p.params.indexer.ratio = 2;
  p.params.list_tokens = true;
  p.params.context_parallel = {.rank = 1, .world = 2, .interleave = 1};
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.top_k.k, 1);
  EXPECT_EQ(args.top_k.indices, p.slots.data() + 3);
  EXPECT_EQ(args.slots.indices, p.slots.data() + 3);
  EXPECT_EQ(args.slots.slots, p.slots.data());
  EXPECT_EQ(args.slots.topk, 1);
  EXPECT_EQ(args.slots.num_slots, 4);
  EXPECT_EQ(args.slots.context_parallel.rank, 1);
  EXPECT_TRUE(args.slots.list_tokens && args.slots.compact);
}

TEST(ValidateIndexerTopK, ThreeStepsShareTheirTensors) {
  IndexerTopK p;
  core::IndexerTopKArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.top_k.logits, args.indexer.logits);
  EXPECT_EQ(args.top_k.num_logits, 9);
  EXPECT_EQ(args.top_k.logits_dtype, DType::kF32);
  EXPECT_EQ(args.top_k.k, 4);
  EXPECT_EQ(args.top_k.indices, p.slots.data());
  EXPECT_EQ(args.slots.indices, p.slots.data());
  EXPECT_EQ(args.slots.slots, p.slots.data());
  EXPECT_EQ(args.slots.pages.page_size, 8);
  EXPECT_EQ(args.slots.queries.len(1), 2);
  EXPECT_EQ(args.slots.valid_count, p.valid.data());
  p.params.indexer.logits.dtype = DType::kBF16;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.indexer.logits_dtype, DType::kBF16);
  EXPECT_EQ(args.top_k.logits_dtype, DType::kBF16);
}

}  // namespace
}  // namespace mla::test

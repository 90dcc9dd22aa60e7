// SPDX-License-Identifier: Apache-2.0
// Tests the device plan, on an emulated GPU.
#include <gmock/gmock.h>

#include <random>

#include "cuda/common/batches.h"
#include "trace.h"

namespace mla::plan_test {
namespace {

int32_t largest_num_pieces(const RowBlocks& blocks) {
  size_t most = 0;
  for (const auto& [at, pieces] : blocks) most = std::max(most, pieces.size());
  return static_cast<int32_t>(most);
}

TEST(Plan, CoversRandomBatches) {
  std::mt19937 random(1);
  const int32_t sizes[] = {1, 2, 3, 7, 33, 128};
  for (int i = 0; i < 60; ++i) {
    const int32_t size = sizes[i % 6];
    const DecodeBatch batch = random_batch(random, size, i % 2 == 0 ? 131072 : 3000, i % 3 == 0 ? 16 : 2);
    const int32_t block_rows = 16 << random() % 3;
    const int32_t step_keys = 32 << random() % 2;
    const auto grid = static_cast<int32_t>(1 + random() % 200);
    cuda::WorkShape shape = batch.shape(block_rows, step_keys, grid);
    shape.batch_invariant = i % 5 == 4;
    MLA_TRACE(testing::Message() << "batch " << i << " of " << size << " requests, " << batch.num_heads
                                 << " heads, grid " << grid << ", rows " << block_rows);
    plan_and_check(batch, shape, random());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Plan, CoversLargeBatches) {
  std::mt19937 random(2);
  for (const int32_t size : {512, 1024, 1025, 3000}) {
    const DecodeBatch batch = random_batch(random, size, 8192, 2);
    MLA_TRACE(size);
    plan_and_check(batch, batch.shape(64, 64, 132));
    cuda::WorkShape invariant = batch.shape(64, 64, 132);
    invariant.batch_invariant = true;
    plan_and_check(batch, invariant);
  }
}

TEST(Plan, DependsOnLengthsAlone) {
  std::mt19937 random(3);
  const DecodeBatch batch = random_batch(random, 40, 20000, 4);
  const cuda::WorkShape shape = batch.shape(32, 64, 60);
  ListMemory first(shape);
  expect_planned(shape, batch.args(), first, 1);
  for (const uint64_t seed : {2, 3, 4}) {
    ListMemory again(shape);
    expect_planned(shape, batch.args(), again, seed);
    EXPECT_TRUE(first.same_bytes(again)) << "seed " << seed;
  }
}

TEST(Plan, ReplaysWithOtherLengths) {
  // One captured graph: the shape stays, lengths change, requests and tokens become padding.
  DecodeBatch batch;
  batch.kv_len = {5000, 70, 12345, 1};
  batch.qo_indptr = {0, 1, 3, 4, 8};
  const cuda::WorkShape shape = batch.shape(16, 64, 24);
  ListMemory memory(shape);
  const auto replan = [&](const std::vector<int32_t>& kv_len, const std::vector<int32_t>& qo_indptr) {
    batch.kv_len = kv_len;
    batch.qo_indptr = qo_indptr;
    core::DecodeArgs args = batch.args();
    args.num_tokens = shape.max_tokens;
    expect_planned(shape, args, memory);
    return ListChecker(shape, memory.list, batch.expected(shape.step_keys)).check();
  };
  replan({5000, 70, 12345, 1}, {0, 1, 3, 4, 8});
  EXPECT_EQ(replan({300, 0, 0, 0}, {0, 1, 1, 1, 1}).size(), 1U);
  EXPECT_EQ(replan({9, 9, 9, 9}, {0, 0, 0, 0, 0}).size(), 0U);
  EXPECT_EQ(memory.list.header->num_workers, 0);
  replan({131072, 131072, 131072, 131072}, {0, 2, 4, 6, 8});
}

TEST(Plan, SplitsOneLongRequestOverTheGrid) {
  DecodeBatch batch;
  batch.kv_len = {131072};
  const cuda::WorkShape shape = batch.shape(16, 64, 132);
  const int32_t pieces = largest_num_pieces(plan_and_check(batch, shape));
  EXPECT_GE(pieces, 120);
  EXPECT_LE(pieces, 132);
}

TEST(Plan, CutsIntoSingleStepsWhereWorkersWouldIdle) {
  const auto pieces = [](const std::vector<int32_t>& steps, int32_t grid) {
    DecodeBatch batch;
    for (const int32_t n : steps) batch.kv_len.push_back(n * 32);
    return largest_num_pieces(plan_and_check(batch, batch.shape(16, 32, grid)));
  };
  EXPECT_EQ(pieces({20}, 132), 20);
  EXPECT_EQ(pieces({64}, 132), 64);
  EXPECT_EQ(pieces({64}, 86), 64);   // a fourth of the workers has nothing to do
  EXPECT_LE(pieces({64}, 84), 32);   // fewer than a fourth would have
  EXPECT_LE(pieces({65}, 132), 33);  // too many partial states of a unit
  EXPECT_EQ(pieces({20, 20, 20}, 132), 20);
  EXPECT_LE(pieces({40, 40, 40}, 132), 20);
}

TEST(Plan, LeavesShortRequestsWhole) {
  DecodeBatch batch;
  for (const int32_t kv_len : {1, 64, 128, 256}) {
    batch.kv_len = {kv_len};
    EXPECT_EQ(largest_num_pieces(plan_and_check(batch, batch.shape(16, 64, 132))), 1) << kv_len;
  }
  // As many equal requests as nearly fill the grid: what splitting gains is less than what merging costs.
  batch.kv_len.assign(128, 4096);
  EXPECT_EQ(largest_num_pieces(plan_and_check(batch, batch.shape(16, 64, 132))), 1);
}

TEST(Plan, CutsEqualRequestsEvenly) {
  DecodeBatch batch;
  batch.kv_len.assign(64, 4096);
  const cuda::WorkShape shape = batch.shape(16, 64, 264);
  for (const auto& [at, pieces] : plan_and_check(batch, shape)) {
    EXPECT_EQ(pieces.size(), 4U);
    for (const Piece& piece : pieces) EXPECT_EQ(piece.key_end - piece.key_begin, 1024);
  }
  ListMemory memory(shape);
  expect_planned(shape, batch.args(), memory);
  EXPECT_EQ(memory.list.header->num_workers, 256);  // none has parts of two requests
}

TEST(Plan, GivesRowBlocksOfARequestToNeighbours) {
  DecodeBatch batch;
  batch.num_heads = 128;
  batch.kv_len = {1000, 2000, 30000};
  const cuda::WorkShape shape = batch.shape(64, 64, 132);
  ListMemory memory(shape);
  expect_planned(shape, batch.args(), memory);
  EXPECT_EQ(memory.list.header->row_lanes, 2);
  ListChecker(shape, memory.list, batch.expected(shape.step_keys)).check();

  batch.qo_indptr = {0, 1, 3, 4};  // no longer the same number of row blocks
  const cuda::WorkShape ragged = batch.shape(64, 64, 132);
  ListMemory other(ragged);
  expect_planned(ragged, batch.args(), other);
  EXPECT_EQ(other.list.header->row_lanes, 1);
  ListChecker(ragged, other.list, batch.expected(ragged.step_keys)).check();
}

TEST(Plan, NoVisibleKeyIsStillASegment) {
  DecodeBatch batch;
  batch.kv_len = {0, 0, 100};
  batch.qo_indptr = {0, 1, 1, 2};
  const RowBlocks blocks = plan_and_check(batch, batch.shape(16, 64, 8));
  ASSERT_EQ(blocks.size(), 2U);
  EXPECT_THAT(blocks.at({0, 0}), testing::ElementsAre(Piece{0, 0, -1}));
  batch.share = {.rank = 1, .world = 2, .interleave = 100};  // the other rank has all keys
  EXPECT_THAT(plan_and_check(batch, batch.shape(16, 64, 8)).at({2, 0}), testing::ElementsAre(Piece{0, 0, -1}));
}

TEST(Plan, BatchInvariantCutsByTheRequestAlone) {
  std::mt19937 random(4);
  for (int i = 0; i < 8; ++i) {
    const DecodeBatch batch = random_batch(random, 20, 100000, 3);
    cuda::WorkShape shape = batch.shape(32, 64, 100);
    shape.batch_invariant = true;
    const RowBlocks together = plan_and_check(batch, shape);
    for (int32_t r = 0; r < batch.size(); r += 7) {
      DecodeBatch alone = batch;
      const Expected request = batch.expected(shape.step_keys)[static_cast<size_t>(r)];
      alone.kv_len = {batch.kv_len[static_cast<size_t>(r)]};
      if (!batch.qo_indptr.empty()) alone.qo_indptr = {0, request.q_len};
      cuda::WorkShape other = alone.shape(32, 64, 17);
      other.batch_invariant = true;
      const auto ranges = [](const std::vector<Piece>& pieces) {
        std::vector<std::pair<int32_t, int32_t>> keys;
        for (const Piece& piece : pieces) keys.emplace_back(piece.key_begin, piece.key_end);
        return keys;
      };
      for (const auto& [at, pieces] : plan_and_check(alone, other))
        EXPECT_EQ(ranges(pieces), ranges(together.at({r, at.second}))) << "request " << r << " row " << at.second;
    }
  }
}

TEST(Plan, BatchInvariantBoundsPortions) {
  DecodeBatch batch;
  batch.kv_len = {1 << 20, 1024, 1025};
  cuda::WorkShape shape = batch.shape(16, 64, 132);
  shape.batch_invariant = true;
  const RowBlocks blocks = plan_and_check(batch, shape);
  EXPECT_EQ(blocks.at({0, 0}).size(), size_t{cuda::kMaxInvariantPortions});
  EXPECT_EQ(blocks.at({1, 0}).size(), 1U);
  EXPECT_EQ(blocks.at({2, 0}).size(), 2U);
  shape.max_keys = 4096;  // a smaller cache needs fewer partial states, even for a request that is too long for it
  EXPECT_LE(plan_and_check(batch, shape).at({0, 0}).size(), 4U);
  shape.max_keys = 1000;
  EXPECT_EQ(largest_num_pieces(plan_and_check(batch, shape)), 1);
}

TEST(Plan, BoundsKeysByThePagesOfTheRequest) {
  DecodeBatch batch;
  batch.kv_len = {INT32_MAX, 200, -5, 70};
  batch.kv_indptr = {0, 2, 5, 6, 6};
  const cuda::WorkShape shape = batch.shape(16, 64, 16);
  ListMemory memory(shape);
  expect_planned(shape, batch.args(), memory);
  const int64_t held[] = {128, 192, 0, 0};
  std::vector<Expected> requests = batch.expected(shape.step_keys);
  for (size_t r = 0; r < requests.size(); ++r) {
    requests[r].key_begin = 0;
    requests[r].key_end = held[r];
    requests[r].kv_len = std::max(requests[r].kv_len, 0);
  }
  ListChecker(shape, memory.list, requests).check();
}

TEST(Plan, SurvivesGarbage) {
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    DecodeBatch batch = random_batch(random, 24, 131072, 4);
    cuda::WorkShape shape = batch.shape(16, 64, 32);
    shape.batch_invariant = i % 2 != 0;
    for (int32_t& length : batch.kv_len) length = static_cast<int32_t>(random());
    for (int32_t& begin : batch.qo_indptr)
      begin = i % 4 < 2 ? static_cast<int32_t>(random()) : static_cast<int32_t>(random() % 60);
    core::DecodeArgs args = batch.args();
    args.num_tokens = shape.max_tokens;
    ListMemory memory(shape);
    expect_planned(shape, args, memory);
    const cuda::WorkList& list = memory.list;
    ASSERT_LE(int64_t{list.header->num_workers} * list.header->row_lanes, shape.max_grid_blocks);
    ASSERT_LE(list.header->merges.num_merges, list.max_merges);
    for (int32_t w = 0; w < list.header->num_workers; ++w)
      for (int32_t s = list.shares[w * list.header->row_lanes].begin; s < list.shares[w * list.header->row_lanes].end;
           ++s) {
        const cuda::Segment& segment = list.segments[s];
        ASSERT_LE(segment.partial_slot < 0 ? 0 : segment.partial_slot + list.header->row_lanes, list.max_slots);
        ASSERT_LE(segment.token_begin + segment.q_len, shape.max_tokens);
        ASSERT_LE(0, segment.key_begin);
        ASSERT_LE(segment.key_begin, segment.key_end);
      }
  }
}

TEST(PlanSparse, PoolsLieOneBehindTheOther) {
  std::mt19937 random(6);
  constexpr int32_t kTokens = 50;
  constexpr int32_t kTopk[2] = {2048, 640};
  for (const int32_t num_pools : {1, 2})
    for (const bool with_lengths : {false, true}) {
      std::vector<int32_t> lengths[2];
      core::DecodeSparseArgs args;
      args.num_tokens = kTokens;
      args.num_heads = 128;
      args.num_pools = num_pools;
      for (int32_t p = 0; p < num_pools; ++p) {
        for (int32_t t = 0; t < kTokens; ++t) lengths[p].push_back(static_cast<int32_t>(random() % 3000) - 200);
        args.pools[p].topk = kTopk[p];
        if (with_lengths) args.pools[p].topk_length = lengths[p].data();
      }
      const cuda::WorkShape shape{.max_tokens = kTokens,
                                  .batch = kTokens,
                                  .num_heads = 128,
                                  .d_v = 4,
                                  .block_rows = 64,
                                  .step_keys = 64,
                                  .max_grid_blocks = 132};
      std::vector<Expected> requests;
      for (int32_t t = 0; t < kTokens; ++t) {
        const auto entries = [&](int32_t p) {
          return p < num_pools ? args.topk_length(p, t) : 0;  // the reference's reading of it
        };
        const int64_t first = ceil_div(entries(0), 64) * 64;
        requests.push_back({.token_begin = t,
                            .q_len = 1,
                            .kv_len = entries(0),
                            .key_end = entries(1) > 0 ? first + entries(1) : entries(0)});
      }
      ListMemory memory(shape);
      expect_planned(shape, args, memory);
      ListChecker(shape, memory.list, requests).check();
    }
}

TEST(PlanSparse, LengthsOfRequests) {
  const std::vector<int32_t> lengths = {100, 0, 300};
  const std::vector<int32_t> qo_indptr = {0, 2, 2, 5};
  core::DecodeSparseArgs args;
  args.num_tokens = 7;  // two are padding
  args.num_heads = 16;
  args.batch_size = 3;
  args.queries.indptr = qo_indptr.data();
  args.pools[0] = {.topk = 256, .topk_length = lengths.data(), .length_per_request = true};
  const cuda::WorkShape shape{
      .max_tokens = 7, .batch = 7, .num_heads = 16, .d_v = 4, .block_rows = 16, .step_keys = 32, .max_grid_blocks = 40};
  std::vector<Expected> requests;
  for (int32_t t = 0; t < 7; ++t) {
    const int32_t entries = t < 2 ? 100 : 256;
    requests.push_back(t < 5 ? Expected{.token_begin = t, .q_len = 1, .kv_len = entries, .key_end = entries}
                             : Expected{.token_begin = t});
  }
  ListMemory memory(shape);
  expect_planned(shape, args, memory);
  EXPECT_EQ(ListChecker(shape, memory.list, requests).check().size(), 5U);
}

TEST(PlanSparse, PrefillOfManyTokens) {
  core::DecodeSparseArgs args;
  args.num_tokens = 5000;
  args.num_heads = 64;
  args.pools[0].topk = 512;
  const cuda::WorkShape shape{.max_tokens = 5000,
                              .batch = 5000,
                              .num_heads = 64,
                              .d_v = 4,
                              .block_rows = 32,
                              .step_keys = 64,
                              .max_grid_blocks = 132};
  std::vector<Expected> requests;
  for (int32_t t = 0; t < 5000; ++t) requests.push_back({.token_begin = t, .q_len = 1, .kv_len = 512, .key_end = 512});
  ListMemory memory(shape);
  expect_planned(shape, args, memory);
  ListChecker(shape, memory.list, requests).check();
}

}  // namespace
}  // namespace mla::plan_test

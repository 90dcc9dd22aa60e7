// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vector>

#include "reference/reference.h"

namespace mla::reference {
namespace {

constexpr int32_t kGarbage = 2147483647;

TEST(ReferenceBlockTableToCsr, TakesThePagesThatLengthsNeed) {
  const std::vector<int32_t> table = {7, 3, kGarbage, kGarbage, kGarbage, kGarbage, 5, 1, 9}, kv_len = {8, 0, 9};
  std::vector<int32_t> indptr(4, -5), indices(6, -5);
  block_table_to_csr({.batch_size = 3,
                      .page_size = 4,
                      .block_table = table.data(),
                      .block_table_stride_request = 3,
                      .kv_len = kv_len.data(),
                      .kv_indptr = indptr.data(),
                      .kv_indices = indices.data()});
  EXPECT_EQ(indptr, (std::vector<int32_t>{0, 2, 2, 5}));
  EXPECT_EQ(indices, (std::vector<int32_t>{7, 3, 5, 1, 9, -5}));
}

TEST(ReferenceBlockTableToCsr, EmptyBatch) {
  int32_t indptr = -5;
  block_table_to_csr({.batch_size = 0, .page_size = 4, .kv_indptr = &indptr});
  EXPECT_EQ(indptr, 0);
}

/// Holds two requests of 2 and 1 queries, pages of 4: request 0 has 6 tokens in pages 5, 2, request 1 has 3 in page 0.
struct Slots {
  std::vector<int32_t> indices = {5, -1, 0, 6, 4, 3, 2, 1, 2, 3, 0, kGarbage};  // [3, 4]
  std::vector<int32_t> slots = std::vector<int32_t>(12, -5), valid_count = std::vector<int32_t>(3, -5);
  std::vector<int32_t> table = {5, 2, kGarbage, 0, kGarbage, kGarbage}, kv_len = {6, 3}, qo_indptr = {0, 2, 3};

  core::PhysicalSlotsArgs args() {
    core::PhysicalSlotsArgs args;
    args.num_tokens = 3;
    args.topk = args.num_slots = 4;
    args.indices = indices.data();
    args.indices_stride_token = args.slots_stride_token = 4;
    args.queries.indptr = qo_indptr.data();
    args.pages = {
        .page_size = 4, .batch_size = 2, .table = table.data(), .table_stride_request = 3, .kv_len = kv_len.data()};
    args.slots = slots.data();
    args.valid_count = valid_count.data();
    return args;
  }
};

TEST(ReferencePhysicalSlots, LooksUpPagesAndKeepsHoles) {
  Slots problem;
  physical_slots(problem.args());
  EXPECT_EQ(problem.slots, (std::vector<int32_t>{9, -1, 20, -1, 8, 23, 22, 21, 2, -1, 0, -1}));
  EXPECT_EQ(problem.valid_count, (std::vector<int32_t>{2, 4, 2}));
}

TEST(ReferencePhysicalSlots, Compacts) {
  Slots problem;
  core::PhysicalSlotsArgs args = problem.args();
  args.compact = true;
  physical_slots(args);
  const std::vector<int32_t> expected = {9, 20, -1, -1, 8, 23, 22, 21, 2, 0, -1, -1};
  EXPECT_EQ(problem.slots, expected);
  EXPECT_EQ(problem.valid_count, (std::vector<int32_t>{2, 4, 2}));
  args.slots = problem.indices.data();  // in place
  physical_slots(args);
  EXPECT_EQ(problem.indices, expected);
}

TEST(ReferencePhysicalSlots, LengthsCut) {
  Slots problem;
  const std::vector<int32_t> lengths = {2, -3, 9};
  core::PhysicalSlotsArgs args = problem.args();
  args.topk_length = lengths.data();
  physical_slots(args);
  EXPECT_EQ(problem.slots, (std::vector<int32_t>{9, -1, -1, -1, -1, -1, -1, -1, 2, -1, 0, -1}));
  EXPECT_EQ(problem.valid_count, (std::vector<int32_t>{1, 0, 2}));
}

TEST(ReferencePhysicalSlots, UniformQueriesAndNoCount) {
  Slots problem;
  problem.indices = {0, 1, 0, 1};
  core::PhysicalSlotsArgs args = problem.args();
  args.num_tokens = 2;
  args.topk = args.num_slots = 2;
  args.indices_stride_token = args.slots_stride_token = 2;
  args.queries = {.indptr = nullptr, .uniform_len = 1};
  args.valid_count = nullptr;
  physical_slots(args);
  EXPECT_EQ(std::vector<int32_t>(problem.slots.begin(), problem.slots.begin() + 4),
            (std::vector<int32_t>{20, 21, 0, 1}));
}

TEST(ReferencePhysicalSlots, RanksKeepTheirOwnTokensAtLocalSlots) {
  // Runs of 2 over 2 ranks. Rank 1 holds tokens 2, 3 of request 0 (local 0, 1) and 2 of request 1.
  Slots problem;
  core::PhysicalSlotsArgs args = problem.args();
  args.context_parallel = {.rank = 1, .world = 2, .interleave = 2};
  physical_slots(args);
  EXPECT_EQ(problem.slots, (std::vector<int32_t>{-1, -1, -1, -1, -1, 21, 20, -1, 0, -1, -1, -1}));
  args.context_parallel.rank = 0;  // tokens 0, 1, 4, 5: local 0 ... 3
  physical_slots(args);
  EXPECT_EQ(problem.slots, (std::vector<int32_t>{23, -1, 20, -1, 22, -1, -1, 21, -1, -1, 0, -1}));
}

TEST(ContextParallelShare, EveryTokenLivesOnOneRankAtOnePlace) {
  for (int32_t world : {1, 2, 3, 5})
    for (int32_t interleave : {1, 2, 7})
      for (int64_t length = 0; length < 60; ++length) {
        int64_t total = 0;
        for (int32_t rank = 0; rank < world; ++rank) {
          const ContextParallel share = {.rank = rank, .world = world, .interleave = interleave};
          int64_t local = 0;
          for (int64_t token = 0; token < length; ++token) {
            if (!owns(share, token)) continue;
            ASSERT_EQ(global_position(share, local), token);
            ++local;
          }
          ASSERT_EQ(local_length(share, length), local);
          total += local;
        }
        ASSERT_EQ(total, length);
      }
}

}  // namespace
}  // namespace mla::reference

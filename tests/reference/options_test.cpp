// SPDX-License-Identifier: Apache-2.0
// Tests options of attention, draft trees and context parallelism in problems solved by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "problems.h"

namespace mla::reference {
namespace {

TEST(ReferenceOptions, SoftCapBoundsScaledScores) {
  // Scores 0 and 0.5 * 8 = 4 become 0 and 2 tanh(2).
  SmallDecode problem{.q = {8}, .cache = {0, 1}, .sm_scale = 0.5F};
  problem.run([](core::DecodeArgs& args) { args.options.logits_soft_cap = 2; });
  const double weight = std::exp(2 * std::tanh(2.0));
  EXPECT_FLOAT_EQ(problem.o[0], static_cast<float>(weight / (1 + weight)));
  EXPECT_FLOAT_EQ(problem.lse[0], static_cast<float>(std::log(1 + weight)));
}

TEST(ReferenceOptions, AlibiWeighsByDistanceOfPositions) {
  // Query at position 1: key 0 gets -ln 3, key 1 nothing. A query at position 0 of a non-causal call: 0 and + ln 3.
  const float slope = kLn3;
  const auto set = [&](core::DecodeArgs& args) { args.options.alibi_slopes = &slope; };
  SmallDecode problem{.q = {0}, .cache = {4, 8}};
  problem.run(set);
  EXPECT_FLOAT_EQ(problem.o[0], (4.0F / 3 + 8) / (1.0F / 3 + 1));
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(4.0F / 3));
  SmallDecode other{.q_len = 2, .q = {0, 0}, .cache = {4, 8}, .causal = false};
  other.run(set);
  EXPECT_FLOAT_EQ(other.o[0], (4.0F + 3 * 8) / 4);
  EXPECT_FLOAT_EQ(other.lse[0], std::log(4.0F));
}

TEST(ReferenceOptions, AlibiIsAddedAfterTheCap) {
  const float slope = -10;
  SmallDecode problem{.q = {100}, .cache = {1, 0}};
  problem.run([&](core::DecodeArgs& args) {
    args.options.alibi_slopes = &slope;
    args.options.logits_soft_cap = 1;
  });
  const double score = std::tanh(100.0) + 10;  // key 0, one position before the query; 0 for key 1
  EXPECT_FLOAT_EQ(problem.lse[0], static_cast<float>(std::log(std::exp(score) + 1)));
}

TEST(ReferenceOptions, WindowCountsFromTheQuery) {
  // Queries at positions 2 and 3 with one key before each: keys {1, 2} and {2, 3}. Key 0 is never read.
  SmallDecode problem{.page_size = 4, .q_len = 2, .kv_len = 4, .q = {0, 0}, .cache = {NAN, 2, 4, 8}};
  problem.run([](core::DecodeArgs& args) { args.options.window_left = 1; });
  EXPECT_EQ(problem.o, (std::vector<float>{3, 6}));
  problem.run([](core::DecodeArgs& args) { args.options.window_left = 0; });
  EXPECT_EQ(problem.o, (std::vector<float>{4, 8}));
  EXPECT_EQ(problem.lse, (std::vector<float>{0, 0}));
}

TEST(ReferenceOptions, WindowWithoutCausalityHasNoUpperLimit) {
  SmallDecode problem{.page_size = 4, .q_len = 2, .kv_len = 4, .q = {0, 0}, .cache = {NAN, 3, 6, 12}, .causal = false};
  problem.run([](core::DecodeArgs& args) { args.options.window_left = 1; });
  EXPECT_EQ(problem.o, (std::vector<float>{7, 9}));  // {1, 2, 3} and {2, 3}
}

TEST(ReferenceOptions, WindowBeforeTheFirstKey) {
  // 3 queries, 1 key: the first two stand before it and see nothing.
  SmallDecode problem{.q_len = 3, .kv_len = 1, .q = {0, 0, 0}, .cache = {5, NAN}};
  problem.run([](core::DecodeArgs& args) { args.options.window_left = 2147483647; });
  EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 5}));
}

TEST(ReferenceOptions, SinkTakesItsShareOfTheOutputOnly) {
  // Weights 1 and 3, sink 4: o is halved, lse stays log 4.
  float sink = std::log(4.0F);
  const auto set = [&](core::DecodeArgs& args) { args.options.attn_sink = &sink; };
  SmallDecode problem{.q = {kLn3}, .cache = {0, 1}};
  problem.run(set);
  EXPECT_FLOAT_EQ(problem.o[0], 0.375F);
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(4.0F));
  problem.lse_base = LseBase::kTwo;  // of lse: the sink stays a natural logit
  problem.run(set);
  EXPECT_FLOAT_EQ(problem.o[0], 0.375F);
  EXPECT_FLOAT_EQ(problem.lse[0], 2.0F);
  sink = -INFINITY;
  problem.run(set);
  EXPECT_FLOAT_EQ(problem.o[0], 0.75F);
  sink = INFINITY;
  problem.run(set);
  EXPECT_EQ(problem.o[0], 0.0F);
  EXPECT_FLOAT_EQ(problem.lse[0], 2.0F);
}

TEST(ReferenceOptions, SinkBelongsToItsHead) {
  const float q[] = {0, 0}, sinks[] = {INFINITY, 0};
  std::vector<uint16_t> kv = bf16({6, 6});
  std::vector<float> o(2, NAN), lse(2, NAN);
  const int32_t kv_len = 2, table = 0;
  core::DecodeArgs args = decode_args(q, 2, 1, CacheFormat::kBF16, kv, 2, 1, 0);
  args.num_tokens = 1;
  args.num_heads = 2;
  args.pages.table = &table;
  args.pages.kv_len = &kv_len;
  args.sm_scale = 1;
  args.options.attn_sink = sinks;
  set_outputs(args, o, lse);
  run_in_workspace(args, decode);
  EXPECT_EQ(o[0], 0.0F);
  EXPECT_FLOAT_EQ(o[1], 4.0F);  // two keys and one sink of equal weight
}

TEST(ReferenceOptions, NoKeyAndAnySinkIsZeroAndMinusInfinity) {
  for (float sink : {-INFINITY, 0.0F, INFINITY}) {
    SmallDecode problem{.kv_len = 0, .q = {1}, .cache = {NAN, NAN}};
    problem.run([&](core::DecodeArgs& args) { args.options.attn_sink = &sink; });
    EXPECT_EQ(problem.o[0], 0.0F) << sink;
    EXPECT_EQ(problem.lse[0], kMinusInfinity) << sink;
  }
}

TEST(ReferenceOptions, SinkOfHugeScoresDoesNotOverflow) {
  float sink = 3030000;
  SmallDecode problem{.q = {30000}, .cache = {100, 101}};
  problem.run([&](core::DecodeArgs& args) { args.options.attn_sink = &sink; });
  EXPECT_FLOAT_EQ(problem.o[0], 50.5F);
}

TEST(ReferenceTree, MaskNamesTheDrafts) {
  // One earlier key (1) and drafts 2, 4, 8, 16: query 1 sees draft 3 beyond itself, query 2 none, not even its own.
  SmallDecode problem{
      .page_size = 8, .q_len = 4, .kv_len = 5, .q = {0, 0, 0, 0}, .cache = {1, 2, 4, 8, 16, NAN, NAN, NAN}};
  const std::vector<uint8_t> mask = {1, 0, 0, 0, 9, 0, 1, 0, 255, 9,
                                     0, 0, 0, 0, 9, 1, 0, 1, 1,   9};  // rows of 4 and a gap
  problem.run([&](core::DecodeArgs& args) {
    args.tree_mask = mask.data();
    args.tree_mask_stride_token = 5;
  });
  EXPECT_EQ(problem.o, (std::vector<float>{1.5F, (1 + 4 + 16) / 3.0F, 1, (1 + 2 + 8 + 16) / 4.0F}));
}

TEST(ReferenceTree, ParentsMakeAncestorsVisible) {
  // 0 and 2 are roots, 1 and 3 their children, 4 a child of 1. Draft 3 holds infinity: only its own query sees it.
  SmallDecode problem{
      .page_size = 8, .q_len = 5, .kv_len = 6, .q = {0, 0, 0, 0, 0}, .cache = {0, 6, 12, 24, NAN, 3, 0, 0}};
  const std::vector<int32_t> parents = {-1, 0, -1, 2, 1};
  problem.run([&](core::DecodeArgs& args) { args.tree_parents = parents.data(); });
  EXPECT_EQ(problem.o[0], 3.0F);
  EXPECT_EQ(problem.o[1], 6.0F);
  EXPECT_EQ(problem.o[2], 12.0F);
  EXPECT_TRUE(std::isnan(problem.o[3]));
  EXPECT_EQ(problem.o[4], (0 + 6 + 12 + 3) / 4.0F);
}

TEST(ReferenceTree, WindowLimitsDraftsAndEarlierKeys) {
  // Query 1 at position 2 with one key before it: keys 1 (draft 0) and 2 (draft 1), not 0.
  SmallDecode problem{.page_size = 4, .q_len = 2, .kv_len = 3, .q = {0, 0}, .cache = {2, 4, 8, NAN}};
  const std::vector<uint8_t> mask = {1, 0, 1, 1};
  problem.run([&](core::DecodeArgs& args) {
    args.tree_mask = mask.data();
    args.tree_mask_stride_token = 2;
    args.options.window_left = 1;
  });
  EXPECT_EQ(problem.o, (std::vector<float>{3, 6}));
}

TEST(ReferenceTree, FewerKeysThanQueries) {
  // kv_len 1 of 2 queries: the key is draft 1.
  SmallDecode problem{.q_len = 2, .kv_len = 1, .q = {0, 0}, .cache = {5, NAN}};
  const std::vector<int32_t> parents = {-1, 0};
  problem.run([&](core::DecodeArgs& args) { args.tree_parents = parents.data(); });
  EXPECT_EQ(problem.o, (std::vector<float>{0, 5}));
  EXPECT_EQ(problem.lse[0], kMinusInfinity);
}

TEST(ReferenceContextParallel, RankSeesItsShareAtGlobalPositions) {
  // Tokens 0 ... 4 in runs of 2 over 2 ranks: rank 0 holds 0, 1, 4; rank 1 holds 2, 3. Queries stand at 3 and 4.
  SmallDecode problem{.page_size = 4, .q_len = 2, .kv_len = 5, .q = {0, 0}, .cache = {0, 1, 4, NAN}};
  problem.run([](core::DecodeArgs& args) { args.context_parallel = {.rank = 0, .world = 2, .interleave = 2}; });
  EXPECT_EQ(problem.o[0], 0.5F);
  EXPECT_FLOAT_EQ(problem.o[1], 5 / 3.0F);
  problem.cache = {2, 3, NAN, NAN};
  problem.run([](core::DecodeArgs& args) { args.context_parallel = {.rank = 1, .world = 2, .interleave = 2}; });
  EXPECT_EQ(problem.o, (std::vector<float>{2.5F, 2.5F}));
  // The window of query 3 is {2, 3}, of query 4 {3, 4}.
  problem.run([](core::DecodeArgs& args) {
    args.context_parallel = {.rank = 1, .world = 2, .interleave = 2};
    args.options.window_left = 1;
  });
  EXPECT_EQ(problem.o, (std::vector<float>{2.5F, 3}));
}

TEST(ReferenceContextParallel, RankWithoutTokens) {
  SmallDecode problem{.kv_len = 2, .q = {0}, .cache = {NAN, NAN}};
  problem.table = {2147483647};
  problem.run([](core::DecodeArgs& args) { args.context_parallel = {.rank = 2, .world = 3, .interleave = 1}; });
  EXPECT_EQ(problem.o[0], 0.0F);
  EXPECT_EQ(problem.lse[0], kMinusInfinity);
}

}  // namespace
}  // namespace mla::reference

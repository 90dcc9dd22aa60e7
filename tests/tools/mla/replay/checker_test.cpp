// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/checker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <vector>

namespace mla::cli::replay {
namespace {

Context make_context(const char* backend) {
  ContextOptions options;
  options.num_threads = 1;
  options.backend = backend;
  return std::move(Context::create(options)).value();
}

// Checks ten tokens in a cache, the last one computed by prefill: first right, then with one wrong value.
TEST(Checker, AcceptsWhatIsRightAndNamesWhatIsWrong) {
  ModelConfig model;
  model.num_attention_heads = 2;
  model.kv_lora_rank = 256;
  model.qk_nope_head_dim = 128;
  model.qk_rope_head_dim = 64;
  model.v_head_dim = 128;
  constexpr int32_t kTokens = 10;
  const DType dtype = Projector::activation_dtype();
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  const Context context = make_context(""), reference = make_context("reference");
  const Generator generator(model, 1, dtype);
  Team team(1);
  Projector projector(model, generator.weights(), dtype, team);
  const std::atomic<bool> stop = false;
  LayerOptions options;
  options.model = model;
  options.page_size = 4;
  options.num_pages = 3;
  options.chunk = 4;
  options.max_positions = kTokens;
  options.dtype = dtype;
  Operations operations(context), oracle(reference);
  Layer layer(options, generator, operations, projector, stop);
  Checker checker(layer, generator, operations, oracle, projector);

  std::vector<std::byte> latents(static_cast<size_t>(kTokens * model.d_qk() * bytes));
  for (int32_t t = 0; t < kTokens; ++t)
    generator.projected_latent(static_cast<uint64_t>(t) * 71, t, latents.data() + t * model.d_qk() * bytes);
  std::vector<int64_t> slots(kTokens);
  std::iota(slots.begin(), slots.end(), 0);
  const NewTokens tokens = {.latents = latents.data(), .slots = slots, .positions = slots};
  ASSERT_TRUE(layer.append(tokens, {}, Phase::kPrefillPrologue, nullptr).ok());

  const int64_t d_qk = model.prefill_d_qk();
  std::vector<std::byte> q(static_cast<size_t>(2 * d_qk * bytes));
  std::byte* q_pe = q.data() + model.qk_nope_head_dim * bytes;
  generator.query(5, kTokens - 1,
                  {.q_nope = q.data(), .q_nope_stride_head = d_qk, .q_pe = q_pe, .q_pe_stride_head = d_qk});
  const std::vector<int32_t> pages = {0, 1, 2};
  const TokenRange token{.pages = pages, .start = kTokens - 1, .count = 1};
  std::vector<float> out(2 * 128), lse(2);
  ASSERT_TRUE(layer
                  .prefill(contiguous(q.data(), dtype, {1, 2, d_qk}), std::span(&token, 1), {.begin = 0, .count = 2},
                           contiguous(out.data(), DType::kF32, {1, 2, 128}),
                           contiguous(lse.data(), DType::kF32, {1, 2}), nullptr)
                  .ok());
  const Checker::Sample sample{.what = "line 1, token 9",
                               .token = token,
                               .q_nope = q.data(),
                               .q_nope_stride_head = d_qk,
                               .q_pe = q_pe,
                               .q_pe_stride_head = d_qk,
                               .out = out.data()};
  ASSERT_TRUE(checker.check_prefill(sample).ok());
  EXPECT_FALSE(checker.log().failed()) << checker.log().failures[0];
  EXPECT_GT(checker.log().worst_other_way, 0.0);
  EXPECT_LT(checker.log().worst_reference, kTolerance);

  out[130] += 1.0F;
  ASSERT_TRUE(checker.check_prefill(sample).ok());
  ASSERT_EQ(checker.log().failures.size(), 1U);
  EXPECT_EQ(checker.log().failures[0].find("line 1, token 9, head 1, prefill: expected an error of at most 0.0156"),
            0U);
  EXPECT_GT(checker.log().worst_other_way, kTolerance);
  EXPECT_EQ(checker.log().num_checks, 2);
}

/// Computes the last of ten tokens by decode, and checks it. Where it is wrong, queries or rows are turned by the
/// angles of `query_shift` or `row_shift` positions too many.
CheckLog check_decoded(int32_t query_shift, int32_t row_shift) {
  const ModelConfig model = *load_model("deepseek-v2-lite");
  constexpr int32_t kTokens = 10;
  const DType dtype = Projector::activation_dtype();
  const auto bytes = static_cast<int64_t>(size_of(dtype)), heads = int64_t{model.num_attention_heads};
  const int64_t nope = model.qk_nope_head_dim, rope = model.qk_rope_head_dim, rank = model.kv_lora_rank;
  const Context context = make_context(""), reference = make_context("reference");
  const Generator generator(model, 1, dtype);
  Team team(1);
  Projector projector(model, generator.weights(), dtype, team);
  const std::atomic<bool> stop = false;
  LayerOptions options;
  options.model = model;
  options.page_size = 4;
  options.num_pages = 3;
  options.chunk = kTokens;
  options.max_positions = 2 * kTokens;
  options.dtype = dtype;
  Operations operations(context), oracle(reference);
  Layer layer(options, generator, operations, projector, stop);
  Checker checker(layer, generator, operations, oracle, projector);
  const auto buffer = [&](int64_t values) {
    return std::vector<std::byte>(static_cast<size_t>(Projector::padded_rows(1) * values * bytes));
  };

  const std::vector<int32_t> pages = {2, 0, 1};
  const auto seed_of = [](int32_t position) { return static_cast<uint64_t>(position) * 71 + 3; };
  std::vector<std::byte> row = buffer(model.d_qk()), q_nope = buffer(heads * nope), q_pe = buffer(heads * rope),
                         absorbed = buffer(heads * rank), q = buffer(heads * model.d_qk()), o = buffer(heads * rank);
  for (int32_t t = 0; t < kTokens; ++t) {
    const bool last = t == kTokens - 1;
    const int64_t slot = pages[static_cast<size_t>(t / 4)] * 4 + t % 4, position = t + row_shift,
                  query_position = t + query_shift;
    generator.projected_latent(seed_of(t), t, row.data());
    const auto one = [](const int64_t& value) { return std::span(&value, 1); };
    const NewTokens token = {.latents = row.data(), .slots = one(slot), .positions = one(position)};
    EXPECT_TRUE(layer.append(token, {}, Phase::kPrefillPrologue, nullptr).ok());
    if (!last) continue;
    generator.projected_query(
        seed_of(t),
        {.q_nope = q_nope.data(), .q_nope_stride_head = nope, .q_pe = q_pe.data(), .q_pe_stride_head = rope});
    projector.absorb(q_nope.data(), 1, absorbed.data());
    const int64_t nowhere = -1;
    EXPECT_TRUE(layer
                    .append({.latents = row.data(), .slots = one(nowhere), .positions = one(query_position)},
                            {.q_nope = contiguous(absorbed.data(), dtype, {1, heads, rank}),
                             .q_pe = contiguous(q_pe.data(), dtype, {1, heads, rope}),
                             .out = contiguous(q.data(), dtype, {1, heads, model.d_qk()})},
                            Phase::kDecodePrologue, nullptr)
                    .ok());
  }
  const TokenRange token{.pages = pages, .start = kTokens - 1, .count = 1};
  const TensorView queries = contiguous(q.data(), dtype, {1, heads, model.d_qk()});
  EXPECT_TRUE(layer
                  .decode(operations, slice(queries, 2, 0, rank), slice(queries, 2, rank, rope), std::span(&token, 1),
                          contiguous(o.data(), dtype, {1, heads, rank}), nullptr)
                  .ok());
  std::vector<float> out(static_cast<size_t>(Projector::padded_rows(1) * heads * model.v_head_dim));
  projector.output(o.data(), 1, out.data());
  EXPECT_TRUE(checker
                  .check_decode({.what = "line 1, token 9",
                                 .token = token,
                                 .q_nope = q_nope.data(),
                                 .q_nope_stride_head = nope,
                                 .q_pe = q.data() + rank * bytes,
                                 .q_pe_stride_head = model.d_qk(),
                                 .out = out.data(),
                                 .seed = seed_of(kTokens - 1),
                                 .seed_of = seed_of},
                                {.absorbed = absorbed.data(), .q = q.data(), .o = o.data()})
                  .ok());
  return checker.log();
}

TEST(Checker, QueriesAndRowsAreWhatTheActivationsComeTo) {
  const CheckLog right = check_decoded(0, 0);
  EXPECT_FALSE(right.failed()) << right.failures[0];
  EXPECT_EQ(right.num_queries, 2 * 16) << "the latent part and the rotary one of every head";
  EXPECT_EQ(right.num_rows, 10);
  const CheckLog query = check_decoded(1, 0);
  ASSERT_TRUE(query.failed());
  EXPECT_EQ(query.failures.size(), 1U) << "one for the token, not for each of its heads";
  EXPECT_NE(query.failures[0].find(": expected at most 0.0040 from what its activations come to"), std::string::npos)
      << query.failures[0];
  EXPECT_EQ(query.failures[0].find("line 1, token 9, query of head "), 0U) << query.failures[0];
  EXPECT_GT(query.worst_query, 1.0);
  EXPECT_LE(query.worst_row, 1.0);
  const CheckLog row = check_decoded(0, 1);
  ASSERT_TRUE(row.failed());
  EXPECT_EQ(row.failures[0].find("line 1, token 9, row 0: expected at most 0.0078 from what its activations"), 0U)
      << row.failures[0];
  EXPECT_LE(row.worst_query, 1.0);
}

TEST(Selection, AcceptsTheLargestAndNamesWhatIsWrong) {
  const std::vector<float> logits = {0.5F, -1.0F, 3.0F, 2.0F, 2.0F, -7.0F};
  const auto judge = [&](std::vector<int32_t> positions, int32_t topk) {
    return judge_selection(logits, positions, topk);
  };
  EXPECT_EQ(judge({2, 3}, 2), "");
  EXPECT_EQ(judge({2, 4}, 2), "") << "equal logits may change places";
  EXPECT_EQ(judge({0, 1, 2, 3, 4, 5}, 10), "");
  EXPECT_EQ(judge_selection({}, {}, 4), "");
  EXPECT_NE(judge({2, 0}, 2).find("key 0 was selected, whose logit 0.5"), std::string::npos);
  EXPECT_NE(judge({2, 2}, 2).find("twice"), std::string::npos);
  EXPECT_NE(judge({2}, 2).find("expected 2 selected keys of 6, got 1"), std::string::npos);
  EXPECT_NE(judge({2, -1}, 2).find("none of the request's"), std::string::npos);
  EXPECT_NE(judge({2, 6}, 2).find("none of the request's"), std::string::npos);
}

TEST(Selection, KeysMustLieInTheCandidateBlocks) {
  const std::vector<float> logits = {9.0F, 8.0F, 1.0F, 2.0F, 7.0F, 3.0F, 4.0F};
  const std::vector<int32_t> blocks = {1, 3, -1};  // keys 2, 3 and 6
  const auto judge = [&](std::vector<int32_t> positions, int32_t topk) {
    return judge_selection(logits, positions, topk, KeyBlocks{.blocks = blocks, .block_size = 2});
  };
  EXPECT_EQ(judge({3, 6}, 2), "");
  EXPECT_EQ(judge({2, 3, 6}, 5), "");
  EXPECT_EQ(judge({0, 6}, 2), "key 0 was selected, which is in none of the candidate blocks");
  EXPECT_NE(judge({2, 6}, 2).find("key 2 was selected, whose logit 1 is below"), std::string::npos);
  EXPECT_EQ(judge({3, 6}, 3), "expected 3 selected keys of 3, got 2");
}

TEST(Selection, CandidateBlocksAreTheBestAndTheNewest) {
  const std::vector<float> logits = {1.0F, 5.0F, 7.0F, 0.0F, 6.0F, 2.0F, -9.0F};  // blocks of 2: 5, 7, 6 and the newest
  const auto judge = [&](std::vector<int32_t> blocks, int32_t count) {
    return judge_blocks(logits, {.blocks = blocks, .block_size = 2}, count);
  };
  EXPECT_EQ(judge({1, 2, 3}, 3), "");
  EXPECT_EQ(judge({0, 1, 2, 3, -1, -1}, 6), "");
  EXPECT_EQ(judge_blocks({}, {.blocks = {}, .block_size = 2}, 3), "");
  EXPECT_EQ(judge({0, 1, 3}, 3), "block 0 is a candidate, whose largest logit 5 is below that of the last, 6");
  EXPECT_EQ(judge({1, 3, 3}, 3), "block 3 is a candidate twice");
  EXPECT_EQ(judge({1, 2, -1}, 3), "expected 3 candidate blocks of 4, got 2");
  EXPECT_EQ(judge({1, 2, 4}, 3), "a candidate block is none of the request's");
  const std::vector<float> equal(8, 1.0F);
  EXPECT_EQ(judge_blocks(equal, {.blocks = std::vector<int32_t>{0, 3}, .block_size = 2}, 2), "");
  EXPECT_EQ(judge_blocks(equal, {.blocks = std::vector<int32_t>{0, 1}, .block_size = 2}, 2),
            "the block of the newest key is no candidate");
}

TEST(Selection, FindsThePositionsOfSlots) {
  const std::vector<int32_t> pages = {7, 2}, slots = {28, 31, 9, 4, -1, 30};
  EXPECT_EQ(positions_of(slots, pages, 4), (std::vector<int32_t>{0, 3, 5, -1}));
}

// Tests caches whose ranks, drafts and formats the layer has to keep apart: decode of every kind must agree with what a
// plain bf16 cache on one rank gives.
TEST(Layer, RanksAgreeWithOne) {
  ModelConfig model;
  model.num_attention_heads = 2;
  model.kv_lora_rank = 256;
  model.qk_nope_head_dim = 128;
  model.qk_rope_head_dim = 64;
  model.v_head_dim = 128;
  constexpr int32_t kTokens = 41, kQueries = 3;
  const DType dtype = Projector::activation_dtype();
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  const Context context = make_context("");
  const Generator generator(model, 1, dtype);
  Team team(1);
  Projector projector(model, generator.weights(), dtype, team);
  const std::atomic<bool> stop = false;
  std::vector<std::byte> latents(static_cast<size_t>(kTokens * model.d_qk() * bytes));
  for (int32_t t = 0; t < kTokens; ++t)
    generator.projected_latent(static_cast<uint64_t>(t) * 71, t, latents.data() + t * model.d_qk() * bytes);
  std::vector<std::byte> q(static_cast<size_t>(kQueries * 2 * model.d_qk() * bytes));
  for (int32_t t = 0; t < kQueries * 2; ++t)
    generator.latent(static_cast<uint64_t>(t) * 93 + 5, t + 1, q.data() + t * model.d_qk() * bytes);
  TensorView q_nope = contiguous(q.data(), dtype, {kQueries, 2, model.d_qk()}), q_pe = q_nope;
  q_nope.shape[2] = model.kv_lora_rank;
  q_pe.shape[2] = model.qk_rope_head_dim;
  q_pe.data = q.data() + model.kv_lora_rank * bytes;

  std::vector<float> expected, rows_of_one;
  for (int32_t world : {1, 2, 5}) {
    LayerOptions options;
    options.model = model;
    options.page_size = 4;
    options.num_pages = 20;
    options.chunk = 50;
    options.max_positions = kTokens;
    options.dtype = dtype;
    options.world = world;
    Operations operations(context);
    Layer layer(options, generator, operations, projector, stop);
    std::vector<int32_t> pages;
    for (int32_t page = 0; page * options.page_tokens() < kTokens; ++page) pages.push_back(19 - page);
    std::vector<int64_t> slots;
    for (int32_t t = 0; t < kTokens; ++t)
      slots.push_back(int64_t{pages[static_cast<size_t>(t / options.page_tokens())]} * options.page_tokens() +
                      t % options.page_tokens());
    std::vector<int64_t> positions(kTokens);
    std::iota(positions.begin(), positions.end(), 0);
    const NewTokens tokens = {.latents = latents.data(), .slots = slots, .positions = positions};
    ASSERT_TRUE(layer.append(tokens, {}, Phase::kPrefillPrologue, nullptr).ok());
    // Rows lie where their ranks keep them.
    const std::vector<int32_t> some = {40, 3, 17};
    const auto rows = layer.rows(operations, pages, some);
    ASSERT_TRUE(rows.ok());
    if (world == 1) rows_of_one = *rows;
    EXPECT_EQ(*rows, rows_of_one) << world;
    const TokenRange last{.pages = pages, .start = kTokens - kQueries, .count = kQueries};
    std::vector<float> o(kQueries * 2 * 256);
    const Status status = layer.decode(operations, q_nope, q_pe, std::span(&last, 1),
                                       contiguous(o.data(), DType::kF32, {kQueries, 2, 256}), nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    if (expected.empty()) expected = o;
    EXPECT_LT(relative_error(o.data(), expected.data(), std::ssize(o)), kTolerance) << world;
  }
}

}  // namespace
}  // namespace mla::cli::replay

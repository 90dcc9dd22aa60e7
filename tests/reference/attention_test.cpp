// SPDX-License-Identifier: Apache-2.0
// Tests decode and prefill of the oracle by problems solved by hand, and by a second, independent writing of the
// formula.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "problems.h"

namespace mla::reference {
namespace {

TEST(ReferenceDecode, TwoKeysByHand) {
  // scores 0 and ln 3: weights 1/4 and 3/4
  SmallDecode problem{.q = {kLn3}, .cache = {0, 1}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 0.75F);
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(4.0F));
}

TEST(ReferenceDecode, ScaleMultipliesScores) {
  SmallDecode problem{.q = {2 * kLn3}, .cache = {0, 1}, .sm_scale = 0.5F};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 0.75F);
}

TEST(ReferenceDecode, RotaryPartScoresButIsNoValue) {
  // [ckv | kpe]: equal latents score equally, kpe decides; the values are 4 and 8
  SmallDecode problem{.d_kpe = 1, .q = {0, kLn3}, .cache = {4, 0, 8, 1}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 4 * 0.25F + 8 * 0.75F);
}

TEST(ReferenceDecode, LseInBaseTwo) {
  SmallDecode problem{.q = {kLn3}, .cache = {0, 1}, .lse_base = LseBase::kTwo};
  problem.run();
  EXPECT_FLOAT_EQ(problem.lse[0], 2.0F);
}

TEST(ReferenceDecode, CausalMaskIsAlignedToTheLastKey) {
  SmallDecode problem{.page_size = 4, .q_len = 2, .kv_len = 3, .q = {0, 0}, .cache = {3, 6, 12, kNan}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 4.5F);  // keys 0, 1
  EXPECT_FLOAT_EQ(problem.o[1], 7.0F);  // all three
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(2.0F));
  problem.causal = false;
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 7.0F);
}

TEST(ReferenceDecode, RowsWithoutVisibleKey) {
  SmallDecode problem{.q_len = 3, .kv_len = 1, .q = {0, 0, 0}, .cache = {5, kNan}};
  problem.run();
  EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 5}));
  EXPECT_EQ(problem.lse, (std::vector<float>{kMinusInfinity, kMinusInfinity, 0}));
  const auto asking_for_inf = [](core::DecodeArgs& args) { args.lse_form.inf_without_keys = true; };
  problem.run(asking_for_inf);
  EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 5}));
  EXPECT_EQ(problem.lse, (std::vector<float>{-kMinusInfinity, -kMinusInfinity, 0}));
  problem.kv_len = 0;
  for (bool causal : {true, false}) {
    problem.causal = causal;
    problem.run();
    EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(problem.lse, (std::vector<float>(3, kMinusInfinity)));
    problem.run(asking_for_inf);
    EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(problem.lse, (std::vector<float>(3, -kMinusInfinity)));
  }
}

TEST(ReferenceDecode, PagesInTableOrderAndNothingBeyondKvLen) {
  // pages 2, 0 hold 3 tokens; page 1 and the last slot hold NaN, the table's tail is garbage
  SmallDecode problem{.kv_len = 3, .q = {kLn3}, .cache = {1, kNan, kNan, kNan, 0, 2}};
  problem.table = {2, 0, 2147483647};
  problem.run();
  const double sum = 1 + 9 + 3;  // scores 0, 2 ln 3, ln 3 of the values 0, 2, 1
  EXPECT_FLOAT_EQ(problem.o[0], static_cast<float>((2 * 9 + 1 * 3) / sum));
  EXPECT_FLOAT_EQ(problem.lse[0], static_cast<float>(std::log(sum)));
}

TEST(ReferenceDecode, NanOfAVisibleKeyIsNotHidden) {
  SmallDecode problem{.q = {1}, .cache = {0, kNan}};
  problem.run();
  EXPECT_TRUE(std::isnan(problem.o[0]));
  EXPECT_TRUE(std::isnan(problem.lse[0]));
}

TEST(ReferenceDecode, HugeScoresDoNotOverflow) {
  SmallDecode problem{.q = {30000}, .cache = {100, 101}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 101);
  EXPECT_FLOAT_EQ(problem.lse[0], 3030000);
}

TEST(ReferencePrefill, EqualsTheTextbookFormula) {
  std::mt19937 random(7);
  const std::vector<int32_t> qo_indptr = {0, 3, 3, 8, 10}, kv_indptr = {0, 5, 6, 11, 12};  // the last: 2 queries, 1 key
  const int64_t heads = 3, d_qk = 11, d_v = 5;
  Rows q(10, heads, d_qk, 2, random), k(12, heads, d_qk, 0, random), v(12, heads, d_v, 4, random);
  for (bool causal : {true, false}) {
    std::vector<float> o(10 * heads * d_v, kNan), lse(10 * heads, kNan);
    core::PrefillArgs args = prefill_args(q, k, v, qo_indptr, kv_indptr);
    args.causal = causal;
    args.sm_scale = 0.25F;
    set_outputs(args, o, lse);
    run_in_workspace(args, prefill);

    for (size_t b = 0; b < 4; ++b) {
      const int64_t q_len = qo_indptr[b + 1] - qo_indptr[b], kv_len = kv_indptr[b + 1] - kv_indptr[b];
      for (int64_t i = 0; i < q_len; ++i) {
        int64_t visible = 0;
        for (int64_t j = 0; j < kv_len; ++j) visible += !causal || j <= kv_len - q_len + i ? 1 : 0;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t token = qo_indptr[b] + i;
          std::vector<double> scores;
          for (int64_t j = 0; j < visible; ++j) {
            double sum = 0;
            for (int64_t e = 0; e < d_qk; ++e) sum += q.at(token, h, e) * k.at(kv_indptr[b] + j, h, e);
            scores.push_back(0.25 * sum);
          }
          const Expected expected(scores);
          const auto row = static_cast<size_t>(token * heads + h);
          for (int64_t c = 0; c < d_v; ++c)
            EXPECT_NEAR(o[row * d_v + static_cast<size_t>(c)],
                        expected.o([&](size_t j) { return v.at(kv_indptr[b] + static_cast<int64_t>(j), h, c); }), 1e-6)
                << b << ' ' << i << ' ' << h;
          if (visible == 0)
            EXPECT_EQ(lse[row], kMinusInfinity);
          else
            EXPECT_NEAR(lse[row], expected.lse, 1e-6);
        }
      }
    }
  }
}

TEST(ReferenceDecode, EqualsPrefillOfTheSameKeysForEveryHead) {
  // Decode of 70 heads (more than one block of rows) over shuffled pages = prefill whose keys are the cache's rows
  // repeated for each head.
  std::mt19937 random(11);
  constexpr int32_t kHeads = 70, kDckv = 6, kDkpe = 3, kDqk = kDckv + kDkpe, kPage = 4, kQ = 2;
  const int32_t kv_len = 9;
  const std::vector<int32_t> pages = {3, 0, 1}, qo_indptr = {0, kQ}, kv_indptr = {0, kv_len};
  Rows q(kQ, kHeads, kDqk, 1, random);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> cache(4 * kPage * kDqk, 0xFFFF);
  std::vector<float> k, v;
  for (int32_t j = 0; j < kv_len; ++j) {
    uint16_t* row = &cache[static_cast<size_t>((pages[static_cast<size_t>(j / kPage)] * kPage + j % kPage) * kDqk)];
    for (int32_t c = 0; c < kDqk; ++c) row[c] = f32_to_f16(normal(random));
    for (int32_t h = 0; h < kHeads; ++h)
      for (int32_t c = 0; c < kDqk; ++c) {
        k.push_back(f16_to_f32(row[c]));
        if (c < kDckv) v.push_back(f16_to_f32(row[c]));
      }
  }
  std::vector<float> o(kQ * kHeads * kDckv), lse(kQ * kHeads), expected_o(o), expected_lse(lse);

  core::DecodeArgs args =
      decode_args(q.values.data(), q.stride_token(), q.stride_head(), CacheFormat::kF16, cache, kPage, kDckv, kDkpe);
  args.num_tokens = kQ;
  args.num_heads = kHeads;
  const int32_t pages_indptr[] = {0, 3};
  args.pages.table = pages.data();
  args.pages.kv_indptr = pages_indptr;
  args.pages.kv_len = &kv_len;
  args.queries.indptr = qo_indptr.data();
  args.sm_scale = 0.5F;
  set_outputs(args, o, lse);
  run_in_workspace(args, decode);

  const Rows keys(kHeads, kDqk, k), values(kHeads, kDckv, v);
  core::PrefillArgs other = prefill_args(q, keys, values, qo_indptr, kv_indptr);
  other.sm_scale = 0.5F;
  set_outputs(other, expected_o, expected_lse);
  run_in_workspace(other, prefill);
  EXPECT_EQ(o, expected_o);
  EXPECT_EQ(lse, expected_lse);
}

TEST(ReferencePrefill, RoundsTheOutputOnce) {
  // The mean of 1 + 2^-8 and 1 + 2^-8 + 2^-23 needs 25 bits; through f32 it would become a tie and round down to 1.
  const Rows q(1, 1, {0}), k(1, 1, {0, 0}), v(1, 1, {1 + 0x1p-8F, 1 + 0x1p-8F + 0x1p-23F});
  const std::vector<int32_t> qo_indptr = {0, 1}, kv_indptr = {0, 2};
  uint16_t o = 0;
  core::PrefillArgs args = prefill_args(q, k, v, qo_indptr, kv_indptr);
  args.sm_scale = 1;
  args.o_dtype = DType::kBF16;
  args.o_stride_token = args.o_stride_head = 1;
  args.o = &o;
  run_in_workspace(args, prefill);
  EXPECT_EQ(bf16_to_f32(o), 1 + 0x1p-7F);
}

}  // namespace
}  // namespace mla::reference

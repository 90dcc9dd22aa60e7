// SPDX-License-Identifier: Apache-2.0
// Tests the end of a row: its lse, its maximum and the factor of its outputs, or its partial state.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "cuda/attention/absorbed_results.cuh"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

struct Config {
  static constexpr int kRows = 16;
};

/// Holds a unit of two query tokens with three heads each, which are rows 0 ... 5.
struct Problem {
  static constexpr int kHeads = 3;
  std::vector<float> lse = std::vector<float>(2 * kHeads, -7), max_logits = lse, sink = {-INFINITY, 0.5F, INFINITY};
  std::vector<float> partial_max = std::vector<float>(3 * Config::kRows, -7), partial_sum = partial_max;
  cuda::AbsorbedArgs args;
  AbsorbedUnit unit;

  Problem() {
    args.num_heads = cuda::FastDivisor(kHeads);
    args.lse = lse.data();
    args.max_logits = max_logits.data();
    args.lse_stride_token = args.max_logits_stride_token = kHeads;
    args.lse_stride_head = args.max_logits_stride_head = 1;
    args.list.partial_max = partial_max.data();
    args.list.partial_sum = partial_sum.data();
    unit.rows = {.row_begin = 0, .num_rows = 2 * kHeads, .token_begin = 0};
    unit.slot = -1;
  }
};

constexpr float kMax = 3.0F, kSum = 5.0F;

TEST(RowEnd, WritesLseAndMaximumOfTheRow) {
  Problem problem;
  const RowEnd<Config> end(problem.args, problem.unit, 4, ScoreState{kMax, kSum});
  EXPECT_NEAR(end.output_factor(), 1.0F / kSum, 1e-6F);
  end.store_stats(problem.args);
  EXPECT_NEAR(problem.lse[4], (kMax + std::log2(kSum)) * std::numbers::ln2_v<float>, 1e-6F);
  EXPECT_NEAR(problem.max_logits[4], kMax * std::numbers::ln2_v<float>, 1e-6F);
  for (size_t i = 0; i < problem.lse.size(); ++i) {
    if (i != 4) {
      EXPECT_EQ(problem.lse[i], -7.0F);
    }
  }
}

TEST(RowEnd, TheBaseOfTheLogarithmIsAsAsked) {
  Problem problem;
  problem.args.lse_form.base = LseBase::kTwo;
  RowEnd<Config>(problem.args, problem.unit, 0, ScoreState{kMax, kSum}).store_stats(problem.args);
  EXPECT_NEAR(problem.lse[0], kMax + std::log2(kSum), 1e-6F);
}

TEST(RowEnd, ASinkShrinksOutputsAndNotTheLse) {
  Problem problem;
  problem.args.options.attn_sink = problem.sink.data();
  const auto factor = [&](int r) {
    return RowEnd<Config>(problem.args, problem.unit, r, ScoreState{kMax, kSum}).output_factor();
  };
  EXPECT_NEAR(factor(0), 1.0F / kSum, 1e-6F);
  const float lse = (kMax + std::log2(kSum)) * std::numbers::ln2_v<float>;
  EXPECT_NEAR(factor(1), 1.0F / kSum / (1.0F + std::exp(0.5F - lse)), 1e-6F);
  EXPECT_EQ(factor(2), 0.0F);
  RowEnd<Config>(problem.args, problem.unit, 1, ScoreState{kMax, kSum}).store_stats(problem.args);
  EXPECT_NEAR(problem.lse[1], lse, 1e-6F);
}

TEST(RowEnd, ARowWithoutKeysIsZeroAndInfinite) {
  Problem problem;
  problem.args.options.attn_sink = problem.sink.data();
  for (const bool inf_without_keys : {false, true})
    for (int r = 0; r < 3; ++r) {
      problem.args.lse_form.inf_without_keys = inf_without_keys;
      const RowEnd<Config> end(problem.args, problem.unit, r, ScoreState{});
      EXPECT_EQ(end.output_factor(), 0.0F);
      end.store_stats(problem.args);
      EXPECT_EQ(problem.lse[static_cast<size_t>(r)], inf_without_keys ? -kNoKey : kNoKey);
      EXPECT_EQ(problem.max_logits[static_cast<size_t>(r)], kNoKey);
    }
}

TEST(RowEnd, APartialStateIsLeftAsItIs) {
  Problem problem;
  problem.unit.slot = 2;
  const RowEnd<Config> end(problem.args, problem.unit, 5, ScoreState{kMax, kSum});
  EXPECT_EQ(end.output_factor(), 1.0F);
  end.store_stats(problem.args);
  EXPECT_EQ(problem.partial_max[2 * Config::kRows + 5], kMax);
  EXPECT_EQ(problem.partial_sum[2 * Config::kRows + 5], kSum);
  EXPECT_EQ(problem.lse[5], -7.0F);
}

TEST(RowEnd, RowsThatTheRequestDoesNotHaveWriteNothing) {
  Problem problem;
  RowEnd<Config>(problem.args, problem.unit, 6, ScoreState{kMax, kSum}).store_stats(problem.args);
  for (const float lse : problem.lse) EXPECT_EQ(lse, -7.0F);
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE

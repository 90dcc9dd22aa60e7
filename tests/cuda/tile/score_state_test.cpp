// SPDX-License-Identifier: Apache-2.0
#include "cuda/tile/score_state.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Takes one step of a row: its probabilities join the sum, its values the output.
void take(ScoreState& state, float& output, const std::vector<float>& logits, float headroom) {
  float largest = kNoKey;
  for (const float logit : logits) largest = std::fmax(largest, logit);
  if (state.is_outgrown_by(largest, headroom)) output *= state.raise(largest);
  for (const float logit : logits) {
    const float p = ptx::exp2_approx(logit - state.base());
    state.sum += p;
    output += p * logit;  // any value will do
  }
}

TEST(ScoreState, StepsGiveTheSoftmaxOfTheWholeRow) {
  std::mt19937 random(3);
  for (const float headroom : {0.0F, kHeadroom}) {
    for (const float first : {-1000.0F, -3.0F, 0.0F, 500.0F}) {
      std::normal_distribution<float> normal(first, 20.0F);
      ScoreState state;
      float output = 0.0F;
      std::vector<float> all;
      for (int step = 0; step < 12; ++step) {
        std::vector<float> logits(5);
        for (float& logit : logits) logit = normal(random) + 3.0F * static_cast<float>(step);
        all.insert(all.end(), logits.begin(), logits.end());
        take(state, output, logits, headroom);
      }
      double largest = -INFINITY, sum = 0, expected = 0;
      for (const float logit : all) largest = std::max(largest, static_cast<double>(logit));
      for (const float logit : all) sum += std::exp2(logit - largest);
      for (const float logit : all) expected += std::exp2(logit - largest) * logit / sum;
      EXPECT_NEAR(static_cast<double>(output) / static_cast<double>(state.sum), expected, std::abs(expected) * 1e-5);
      EXPECT_NEAR(static_cast<double>(state.base()) + std::log2(static_cast<double>(state.sum)),
                  largest + std::log2(sum), 1e-4 + std::abs(largest) * 1e-6);
      EXPECT_LE(static_cast<double>(state.max), largest);
      EXPECT_GE(static_cast<double>(state.max + headroom), largest);
    }
  }
}

TEST(ScoreState, NothingIsRescaledWithinTheHeadroom) {
  ScoreState state{.max = 10.0F, .sum = 2.0F};
  EXPECT_FALSE(state.is_outgrown_by(18.0F, kHeadroom));
  EXPECT_TRUE(state.is_outgrown_by(18.5F, kHeadroom));
  EXPECT_FALSE(state.is_outgrown_by(10.0F, 0.0F));
  EXPECT_TRUE(state.is_outgrown_by(10.5F, 0.0F));
  EXPECT_EQ(state.raise(12.0F), 0.25F);
  EXPECT_EQ(state.max, 12.0F);
  EXPECT_EQ(state.sum, 0.5F);
}

/// Outputs before the first key may hold anything finite, and the largest logit may lie far below 0.
TEST(ScoreState, TheFirstKeyRescalesByZero) {
  ScoreState state;
  EXPECT_TRUE(state.is_outgrown_by(-1e30F, kHeadroom));
  EXPECT_EQ(state.raise(-1e30F), 0.0F);
  EXPECT_EQ(state.base(), -1e30F);
}

TEST(ScoreState, RowsWithoutKeysKeepTheirState) {
  const ScoreState state;
  EXPECT_FALSE(state.is_outgrown_by(kNoKey, 0.0F));
  EXPECT_FALSE(state.is_outgrown_by(kNoKey, kHeadroom));
  EXPECT_EQ(state.base(), 0.0F);
  EXPECT_EQ(ptx::exp2_approx(kNoKey - state.base()), 0.0F);
}

TEST(ScoreState, AnInfiniteLogitGivesInfiniteProbabilitiesAndNotNan) {
  ScoreState state{.max = 3.0F, .sum = 1.0F};
  ASSERT_TRUE(state.is_outgrown_by(kInfinity, kHeadroom));
  EXPECT_EQ(state.raise(kInfinity), 8.0F);  // from 3 to what infinity is taken for, 0
  EXPECT_EQ(ptx::exp2_approx(kInfinity - state.base()), kInfinity);
  EXPECT_EQ(ptx::exp2_approx(kNoKey - state.base()), 0.0F);
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE

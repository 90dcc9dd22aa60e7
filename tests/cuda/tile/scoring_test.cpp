// SPDX-License-Identifier: Apache-2.0
#include "cuda/tile/scoring.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

TEST(Scoring, OnlyACapAndSlopesNeedMoreThanTheScale) {
  const float values[1] = {};
  EXPECT_TRUE(needs_only_scale({}));
  EXPECT_TRUE(needs_only_scale({.attn_sink = values, .window_left = 5}));  // both act elsewhere
  EXPECT_FALSE(needs_only_scale({.logits_soft_cap = 30.0F}));
  EXPECT_FALSE(needs_only_scale({.alibi_slopes = values}));
}

TEST(Scoring, SoftCapIsTheTangent) {
  for (const float cap : {0.5F, 15.0F, 50.0F, 1e4F})
    for (float logit = -8 * cap; logit <= 8 * cap; logit += cap / 7) {
      const double expected =
          static_cast<double>(cap) * std::tanh(static_cast<double>(logit) / static_cast<double>(cap));
      EXPECT_NEAR(static_cast<double>(soft_capped(logit / cap * kSoftCapExponent, cap)), expected,
                  static_cast<double>(cap) * 1e-6)
          << cap << ' ' << logit;
    }
}

TEST(Scoring, SoftCapSaturatesAndKeepsNan) {
  constexpr auto kLargest = std::numeric_limits<float>::infinity();
  EXPECT_EQ(soft_capped(kLargest / 20.0F * kSoftCapExponent, 20.0F), 20.0F);
  EXPECT_EQ(soft_capped(-kLargest / 20.0F * kSoftCapExponent, 20.0F), -20.0F);
  EXPECT_EQ(soft_capped(1e30F / 20.0F * kSoftCapExponent, 20.0F), 20.0F);
  EXPECT_TRUE(std::isnan(soft_capped(NAN / 20.0F * kSoftCapExponent, 20.0F)));
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE

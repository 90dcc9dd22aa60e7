// SPDX-License-Identifier: Apache-2.0
// Tests the row kernels that pool tokens into latents, of every instruction set this machine has, against doubles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "row_operations.h"

namespace mla::cpu {
namespace {

constexpr int32_t kWidths[] = {1, 7, 15, 16, 17, 128, 130};
constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

/// Returns element `i` of a stored row.
float stored(const std::vector<std::byte>& row, DType dtype, int64_t i) {
  const std::byte* from = row.data() + i * static_cast<int64_t>(size_of(dtype));
  float wide = 0;
  uint16_t half = 0;
  std::memcpy(&wide, from, dtype == DType::kF32 ? 4 : 0);
  std::memcpy(&half, from, dtype == DType::kF32 ? 0 : 2);
  if (dtype == DType::kF32) return wide;
  return dtype == DType::kBF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

/// Holds a token whose rows end where their memory does.
struct Token {
  std::vector<std::byte> kv, score;
  std::vector<float> bias;  // or none
  DType dtype;

  PooledToken view() const {
    return {.kv = kv.data(), .score = score.data(), .dtype = dtype, .bias = bias.empty() ? nullptr : bias.data()};
  }
  float value(int64_t c) const { return stored(kv, dtype, c); }
  float sum(int64_t c) const { return stored(score, dtype, c) + (bias.empty() ? 0.0F : bias[static_cast<size_t>(c)]); }
};

class PoolKernelsTest : public RowOperationsTest {
 protected:
  /// Returns random tokens; scores are score(token, channel) if it is given.
  template <class Score>
  std::vector<Token> tokens(int32_t count, int32_t n, DType dtype, bool biased, const Score& score) {
    std::vector<Token> all;
    std::normal_distribution<float> normal;
    for (int32_t t = 0; t < count; ++t) {
      Token token = {.kv = random_rows(n, dtype, false), .score = {}, .bias = {}, .dtype = dtype};
      token.score.resize(token.kv.size());
      for (int32_t c = 0; c < n; ++c) store(score(t, c), dtype, c, token.score.data());
      for (int32_t c = 0; biased && c < n; ++c) token.bias.push_back(normal(random_));
      all.push_back(std::move(token));
    }
    return all;
  }

  /// Pools the tokens, at most `step` at a time.
  std::vector<float> pooled(const std::vector<Token>& tokens, int32_t n, size_t step) const {
    const auto pool = std::make_unique<Pool>();
    std::memset(pool.get(), 0xFF, sizeof *pool);  // NaN: what the first tokens must not read
    for (size_t begin = 0; begin < tokens.size(); begin += step) {
      std::vector<PooledToken> some;
      for (size_t t = begin; t < std::min(begin + step, tokens.size()); ++t) some.push_back(tokens[t].view());
      set_.rows->pool(some.data(), static_cast<int32_t>(some.size()), n, begin == 0, pool.get());
    }
    std::vector<float> latent(kMaxLatent);  // whole vectors are written
    set_.rows->finish_pool(*pool, n, latent.data());
    latent.resize(static_cast<size_t>(n));
    return latent;
  }

  /// Expects the latent of the definition. With V the largest value, n tokens and k calls, the result is off by at most
  /// (8 k + 5 n + 2) V 2^-24:
  /// - A weight e^-d is a product of k powers of two, each within 2^-22, of arguments of which differences, products
  ///   and log2(e) are each rounded to within 2^-24: it is within 4 k 2^-24 + 3 d 2^-24 of itself. Among weights of a
  ///   sum of at least 1, d e^-d is at most 0.37, so that all of them are off by (4 k + 1.2 n) 2^-24 of the sum; a mean
  ///   moves by at most twice that times V.
  /// - n additions to either sum are each within 2^-24, and so are the quotient and what the test adds.
  void expect_mean(const std::vector<Token>& tokens, int32_t n, size_t step) const {
    const std::vector<float> actual = pooled(tokens, n, step);
    const auto count = static_cast<double>(tokens.size());
    const double calls = std::ceil(count / static_cast<double>(step));
    for (int32_t c = 0; c < n; ++c) {
      double max = -INFINITY, sum = 0, weighted = 0, largest = 0;
      for (const Token& token : tokens) max = std::max(max, static_cast<double>(token.sum(c)));
      for (const Token& token : tokens) {
        const double weight = std::exp(static_cast<double>(token.sum(c)) - max);
        sum += weight;
        weighted += weight * static_cast<double>(token.value(c));
        largest = std::max(largest, std::fabs(static_cast<double>(token.value(c))));
      }
      ASSERT_NEAR(static_cast<double>(actual[static_cast<size_t>(c)]), weighted / sum,
                  (8 * calls + 5 * count + 2) * largest * 0x1p-24)
          << "channel " << c << " of " << n << ", " << name(tokens[0].dtype) << ", " << tokens.size() << " tokens by "
          << step;
    }
  }
};

TEST_P(PoolKernelsTest, PoolsAnyNumberOfChannelsAndTokens) {
  std::normal_distribution<float> normal(0.0F, 3.0F);
  for (int32_t n : kWidths)
    for (DType dtype : kTypes)
      for (bool biased : {false, true})
        for (int32_t count : {1, 2, 3, 8, 9, 24, 128}) {
          const auto all = tokens(count, n, dtype, biased, [&](int32_t, int32_t) { return normal(random_); });
          expect_mean(all, n, kPooledTokens);
          if (count > 1) expect_mean(all, n, 3);
        }
}

TEST_P(PoolKernelsTest, TokensOfDifferentTypesPoolTogether) {
  // As those of a call and of the state do.
  std::normal_distribution<float> normal(0.0F, 3.0F);
  std::vector<Token> all;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF32})
    all.push_back(tokens(1, 17, dtype, dtype != DType::kF32, [&](int32_t, int32_t) { return normal(random_); })[0]);
  for (size_t step : {1, 3, 8}) expect_mean(all, 17, step);
}

TEST_P(PoolKernelsTest, TokensOfScoreMinusInfinityWeighNothing) {
  std::normal_distribution<float> normal;
  for (int32_t n : {1, 17, 130})
    for (DType dtype : kTypes) {
      // Every third token; the first 8, which are all of a call; all but the last one.
      const auto third = tokens(12, n, dtype, true,
                                [&](int32_t t, int32_t c) { return (t + c) % 3 == 0 ? -kInfinity : normal(random_); });
      const auto first =
          tokens(20, n, dtype, true, [&](int32_t t, int32_t) { return t < 8 ? -kInfinity : normal(random_); });
      const auto last = tokens(17, n, dtype, false, [&](int32_t t, int32_t) { return t < 16 ? -kInfinity : -1000.0F; });
      for (size_t step : {1, 8}) {
        for (const auto* all : {&third, &first, &last}) expect_mean(*all, n, step);
        const std::vector<float> alone = pooled(last, n, step);
        for (int32_t c = 0; c < n; ++c) ASSERT_EQ(alone[static_cast<size_t>(c)], last.back().value(c));
        // And those behind the first one.
        std::vector<Token> reversed(last.rbegin(), last.rend());
        ASSERT_EQ(pooled(reversed, n, step), alone);
      }
    }
}

TEST_P(PoolKernelsTest, LargeScoresAreFinite) {
  const float most = std::numeric_limits<float>::max();
  for (DType dtype : kTypes) {
    const float large = dtype == DType::kF16 ? 65504.0F : dtype == DType::kBF16 ? 0x1.FEp127F : most;
    for (float score : {0.0F, 1000.0F, -1000.0F, large, -large})
      for (int32_t count : {2, 8, 12})
        for (size_t step : {1, 8})
          expect_mean(tokens(count, 17, dtype, false, [&](int32_t, int32_t) { return score; }), 17, step);
    // The largest scores beside the lowest ones: the others weigh nothing.
    for (bool up : {false, true})
      expect_mean(tokens(12, 17, dtype, false, [&](int32_t t, int32_t) { return (t >= 6) == up ? large : -large; }), 17,
                  8);
  }
  // A token without any rival is itself, whatever its score.
  for (float score : {most, -most, 1e30F, -1e30F}) {
    const auto one = tokens(1, 17, DType::kF32, false, [&](int32_t, int32_t) { return score; });
    const std::vector<float> latent = pooled(one, 17, 8);
    for (int32_t c = 0; c < 17; ++c) ASSERT_EQ(latent[static_cast<size_t>(c)], one[0].value(c));
  }
}

/// Tests what a division of a prompt into calls rests on: nothing depends on where the tokens of a pool come from.
TEST_P(PoolKernelsTest, StatesPoolAsTheTokensTheyKeep) {
  std::normal_distribution<float> normal;
  for (DType dtype : kTypes) {
    const auto fresh = tokens(8, 130, dtype, true, [&](int32_t, int32_t) { return normal(random_); });
    std::vector<Token> kept = fresh;
    for (size_t t = 0; t < 8; t += 2) {
      Token& token = kept[t];
      token = {.kv = std::vector<std::byte>(130 * 4),
               .score = std::vector<std::byte>(130 * 4),
               .bias = {},
               .dtype = DType::kF32};
      for (int32_t c = 0; c < 130; ++c) {
        store(fresh[t].value(c), DType::kF32, c, token.kv.data());
        store(fresh[t].sum(c), DType::kF32, c, token.score.data());
      }
    }
    EXPECT_EQ(pooled(kept, 130, 8), pooled(fresh, 130, 8)) << name(dtype);
  }
}

/// A sum of n squares is within n 2^-24 of itself, its quotient, sum with epsilon, root and inverse within 2^-24 each,
/// and so are the two products: together within (n / 2 + 6) 2^-24. The rounding to the target comes on top.
TEST_P(PoolKernelsTest, Normalizes) {
  for (int32_t n : {1, 7, 15, 16, 17, 130, 512})
    for (DType dtype : kTypes)
      for (float epsilon : {0.0F, 1e-6F, 0.5F}) {
        const auto rows = random_rows(n, DType::kF32, false), weights = random_rows(n, DType::kF32, false);
        const std::vector<std::byte> sentinel(16, std::byte{0xA5});
        std::vector<std::byte> out(static_cast<size_t>(n) * size_of(dtype));
        out.insert(out.end(), sentinel.begin(), sentinel.end());
        std::vector<float> x(static_cast<size_t>(n)), weight(static_cast<size_t>(n));
        std::memcpy(x.data(), rows.data(), rows.size());
        std::memcpy(weight.data(), weights.data(), weights.size());
        double squares = 0;
        for (float value : x) squares += static_cast<double>(value) * static_cast<double>(value);
        const float factor = set_.rows->norm_factor(x.data(), n, epsilon);
        set_.rows->scale_channels(x.data(), n, factor, weight.data(), out.data(), dtype);
        for (int32_t c = 0; c < n; ++c) {
          const auto i = static_cast<size_t>(c);
          const double expected = static_cast<double>(x[i]) / std::sqrt(squares / n + static_cast<double>(epsilon)) *
                                  static_cast<double>(weight[i]);
          // Half of a last place: of 8 bits, of 11 down to 2^-14, of 24.
          const double magnitude = std::fabs(expected);
          const double rounding = dtype == DType::kBF16  ? magnitude * 0x1p-8
                                  : dtype == DType::kF16 ? std::max(magnitude * 0x1p-11, 0x1p-25)
                                                         : magnitude * 0x1p-24;
          ASSERT_NEAR(static_cast<double>(stored(out, dtype, c)), expected,
                      rounding + magnitude * (n / 2 + 6) * 0x1p-24)
              << "channel " << c << " of " << n << ", " << name(dtype) << ", epsilon " << epsilon;
        }
        ASSERT_TRUE(std::equal(sentinel.begin(), sentinel.end(), out.end() - 16)) << n << " " << name(dtype);

        // Without a factor and a weight the row is stored, and rounded at most.
        set_.rows->scale_channels(x.data(), n, 1.0F, nullptr, out.data(), dtype);
        std::vector<std::byte> same(static_cast<size_t>(n) * size_of(dtype));
        for (int32_t c = 0; c < n; ++c) store(x[static_cast<size_t>(c)], dtype, c, same.data());
        ASSERT_TRUE(std::equal(same.begin(), same.end(), out.begin())) << n << " " << name(dtype);
        ASSERT_TRUE(std::equal(sentinel.begin(), sentinel.end(), out.end() - 16)) << n << " " << name(dtype);
      }
}

MLA_FOR_EVERY_LEVEL(PoolKernelsTest);

}  // namespace
}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Tests the kernels whose scores have keys in their lanes.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cpu/tile_kernels_fixture.h"

namespace mla::cpu {
namespace {

/// Tests KeyLaneKernels beside the kernels of the same table, which the tests above compare with the definition.
class KeyLanesTest : public TileKernelsTest {
 protected:
  static constexpr int32_t kRows = 16;
  static constexpr int64_t kStride = 112;  // of scores
};

TEST_P(KeyLanesTest, ScoresAreDotProducts) {
  constexpr int32_t kWidth = 64;
  for (int32_t groups : {1, 2})
    for (int32_t num_keys : {16, 32, 48, 96}) {
      const auto q = random_values(static_cast<size_t>(groups * kRows * kWidth));
      const auto k = random_values(static_cast<size_t>(num_keys * kWidth));
      const auto q_bytes = stored(q), k_bytes = stored(k);
      const auto lines = [](const std::vector<std::byte>& bytes, int32_t count) {
        std::vector<const void*> rows(static_cast<size_t>(count));
        for (size_t i = 0; i < rows.size(); ++i) rows[i] = &bytes[i * kWidth * 2];
        return rows;
      };
      auto queries = lines(q_bytes, groups * kRows);
      const auto keys = lines(k_bytes, num_keys);
      queries[static_cast<size_t>(groups * kRows - 1)] = nullptr;
      std::vector<uint32_t> packed_q(static_cast<size_t>(groups * kRows * kWidth / 2));
      std::vector<uint32_t> packed_k(static_cast<size_t>(num_keys * kWidth / 2));
      for (int32_t group = 0; group < groups; ++group)
        kernels_->key_lanes->pack_queries(&queries[static_cast<size_t>(group * kRows)], kWidth,
                                          &packed_q[static_cast<size_t>(group * kRows * kWidth / 2)]);
      kernels_->key_lanes->pack_keys(keys.data(), num_keys, kWidth / 2, packed_k.data());
      std::vector<float> s(static_cast<size_t>(groups * kRows * kStride), 7.0F);
      kernels_->key_lanes->scores(packed_q.data(), groups, kWidth / 2, packed_k.data(), num_keys, s.data(), kStride,
                                  {.rows = {keys.data()}, .lines = {2}, .num_rows = 16});
      for (int32_t row = 0; row < groups * kRows; ++row)
        for (int32_t key = 0; key < kStride; ++key) {
          double expected = key < num_keys ? 0.0 : 7.0;  // what lies behind the keys is untouched
          for (int32_t c = 0; c < kWidth && key < num_keys && row < groups * kRows - 1; ++c)
            expected +=
                double{q[static_cast<size_t>(row * kWidth + c)]} * double{k[static_cast<size_t>(key * kWidth + c)]};
          ASSERT_NEAR(s[static_cast<size_t>(row * kStride + key)], expected, 1e-4) << row << ' ' << key;
        }
    }
}

constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// Holds what a softmax knows of 16 rows.
struct RowState {
  std::vector<float> max = std::vector<float>(16, kLowest), base = std::vector<float>(16, kLowest);
  std::vector<float> sum = std::vector<float>(16, 0.0F), alpha = std::vector<float>(16, 0.0F);
  std::vector<uint32_t> p;
};

TEST_P(KeyLanesTest, SoftmaxIsThatOfTheOtherKernels) {
  for (int32_t keys : {32, 64, 96, 10, 50})
    for (bool masked : {false, true}) {
      RowState own, other;
      for (int block = 0; block < 6; ++block) {
        // Most blocks leave the base where it was, some move that of a few rows or of all.
        const auto s = random_values(static_cast<size_t>(keys * kRows), block == 2 || block == 4 ? 200.0F : 5.0F);
        std::vector<float> rows(static_cast<size_t>(kRows * kStride), std::numeric_limits<float>::quiet_NaN());
        for (int32_t key = 0; key < keys; ++key)
          for (int32_t row = 0; row < kRows; ++row)
            rows[static_cast<size_t>(row * kStride + key)] = s[static_cast<size_t>(key * kRows + row)];
        std::vector<int32_t> limit(kRows);
        for (int32_t& end : limit) end = static_cast<int32_t>(random_() % static_cast<uint32_t>(keys + 4)) - 2;
        if (block < 2) limit[0] = -5;  // a row that sees no key for two blocks
        const auto describe = [&](const std::vector<float>& scores, RowState& state) {
          state.p.assign(static_cast<size_t>(padded_steps(keys) * kRows), 0xFFFFFFFFU);
          return SoftmaxBlock{.s = scores.data(),
                              .num_keys = keys,
                              .limit = masked ? limit.data() : nullptr,
                              .s_stride = kStride,
                              .scale_log2 = 0.3F,
                              .max = state.max.data(),
                              .base = state.base.data(),
                              .sum = state.sum.data(),
                              .alpha = state.alpha.data(),
                              .p = state.p.data()};
        };
        kernels_->key_lanes->softmax(describe(rows, own));
        kernels_->softmax(describe(s, other));
        ASSERT_EQ(own.max, other.max) << keys << ' ' << masked << ' ' << block;
        ASSERT_EQ(own.base, other.base) << keys << ' ' << masked << ' ' << block;
        ASSERT_EQ(own.alpha, other.alpha) << keys << ' ' << masked << ' ' << block;
        ASSERT_EQ(own.p, other.p) << keys << ' ' << masked << ' ' << block;
        for (size_t row = 0; row < kRows; ++row) ASSERT_NEAR(own.sum[row], other.sum[row], 2e-6F * other.sum[row]);
      }
    }
}

TEST_P(KeyLanesTest, ScoresTakeTheShapeOfTheOtherKernels) {
  constexpr int32_t kKeys = 40;
  std::vector<float> slope(kRows);
  std::vector<int32_t> query_position(kRows), key_position(48);
  for (int32_t row = 0; row < kRows; ++row) {
    slope[static_cast<size_t>(row)] = 0.01F * static_cast<float>(row);
    query_position[static_cast<size_t>(row)] = 1000000000 - row;
  }
  for (int32_t key = 0; key < 48; ++key) key_position[static_cast<size_t>(key)] = 999999000 + 7 * key;
  for (float cap : {0.0F, 30.0F})
    for (const float* slopes : {static_cast<const float*>(nullptr), static_cast<const float*>(slope.data())}) {
      auto s = random_values(kKeys * kRows, 200.0F);
      std::vector<float> rows(static_cast<size_t>(kRows * kStride));
      for (int32_t key = 0; key < kKeys; ++key)
        for (int32_t row = 0; row < kRows; ++row)
          rows[static_cast<size_t>(row * kStride + key)] = s[static_cast<size_t>(key * kRows + row)];
      kernels_->shape_scores(s.data(), kKeys, 0.25F, cap, slopes, query_position.data(), key_position.data());
      kernels_->key_lanes->shape_scores(rows.data(), kStride, kKeys, 0.25F, cap, slopes, query_position.data(),
                                        key_position.data());
      for (int32_t key = 0; key < kKeys; ++key)
        for (int32_t row = 0; row < kRows; ++row)
          ASSERT_EQ(rows[static_cast<size_t>(row * kStride + key)], s[static_cast<size_t>(key * kRows + row)])
              << row << ' ' << key;
    }
}

std::vector<Level> levels_of_tiles() {
  std::vector<Level> tiles = built_levels();
  std::erase_if(tiles, [](const Level& level) { return level.registers != Registers::kTiles; });
  return tiles;
}

INSTANTIATE_TEST_SUITE_P(Levels, KeyLanesTest, testing::ValuesIn(levels_of_tiles()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace mla::cpu

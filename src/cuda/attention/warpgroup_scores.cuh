// SPDX-License-Identifier: Apache-2.0
// What score roles have in common: a warpgroup has the products of 64 query rows with 64 keys as wgmma leaves them. A
// warp has 16 query rows. A lane has two of them, lane / 4 and the row eight below, and of a step's keys 8 j + 2 (lane
// % 4) and the next one, for each j.
#pragma once

#include "cuda/attention/absorbed_results.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// `Block` is the base of all roles of the kernel. It has valid(n), the marks poison(n), and score_warp(), the number
/// of the warp in its warpgroup.
template <class Config, class Block>
class WarpgroupScores : protected Block {
 public:
  using Block::Block;

 protected:
  using Block::args_, Block::unit;
  static constexpr int kScores = Config::kKeys / 2;  // scores of a lane: [j][row of the lane][key of the pair]
  static constexpr int kLaneRowStep = 8;             // from the first to the second row of a lane
  static constexpr int kWarpRows = 16;

  /// Returns the lane's first row in the block, and its first key in a step.
  MLA_DEVICE static int lane_row() {
    return Block::score_warp() * kWarpRows + (ptx::lane<Config::kReadsIndexAnew>() >> 2);
  }
  MLA_DEVICE static int lane_column() { return (ptx::lane<Config::kReadsIndexAnew>() & 3) * 2; }

  /// Returns which of the lane's two rows score i is of, and which of the row's four chains takes it.
  static constexpr int row_of(int i) { return i >> 1 & 1; }
  static constexpr int chain_of(int i) { return (i >> 1 & 2) | (i & 1); }

  /// Finds the largest score of each row among the lane's keys.
  MLA_DEVICE static void find_lane_largest(const float (&s)[kScores], float (&largest)[2]) {
    float of_chain[2][4];
    MLA_UNROLL
    for (int i = 0; i < kScores; ++i)
      of_chain[row_of(i)][chain_of(i)] = i < 8 ? s[i] : std::fmax(of_chain[row_of(i)][chain_of(i)], s[i]);
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float(&of)[4] = of_chain[r];
      largest[r] = std::fmax(std::fmax(of[0], of[1]), std::fmax(of[2], of[3]));
    }
  }

  /// Finds the largest logit of each row.
  MLA_DEVICE static void find_largest(const float (&s)[kScores], float scale, float (&largest)[2]) {
    find_lane_largest(s, largest);
    MLA_UNROLL
    for (int mask = 1; mask <= 2; mask *= 2) {
      const float others[2] = {ptx::shuffle_xor(largest[0], mask), ptx::shuffle_xor(largest[1], mask)};
      MLA_UNROLL
      for (int r = 0; r < 2; ++r) largest[r] = std::fmax(largest[r], others[r]);
    }
    MLA_UNROLL
    for (float& logit : largest) logit *= scale;
  }

  /// Sets the scores of keys that have no row to -inf.
  MLA_DEVICE void hide_invalid(float (&s)[kScores], uint32_t n) const {
    const auto* words = reinterpret_cast<const uint32_t*>(Block::valid(n));
    MLA_UNROLL
    for (int word = 0; word < 2; ++word) {  // a word has the bits of 32 keys
      if (words[word] == ~0U) continue;
      const uint32_t valid = words[word] >> lane_column();
      MLA_UNROLL
      for (int i = 0; i < kScores / 2; ++i)
        if ((valid >> (i / 4 * 8 + i % 2) & 1U) == 0) s[word * kScores / 2 + i] = kNoKey;
    }
  }

  /// Returns which keys of step n are valid and visible to a row, a bit for each, from the lane's first key on.
  MLA_DEVICE uint64_t visible_keys(const RowScores& row, uint32_t n) const {
    constexpr uint64_t kLaneKeyBits = 0x0303030303030303;
    const auto* valid = reinterpret_cast<const uint64_t*>(Block::valid(n));
    return row.visible_keys(unit().template first_key<Config>(n) + lane_column(),
                            *valid >> lane_column() & kLaneKeyBits);
  }

  /// Returns the base-2 logit of a key, the number `column` of step n, in a step that is not unmasked: -inf if the row
  /// does not see it. `product` is the score. With `only_scale` a logit is the score times the scale; it is left as it
  /// is.
  MLA_DEVICE float logit_of(const RowScores& row, bool sees, float product, uint32_t n, int column,
                            bool only_scale) const {
    if (sees) return only_scale ? product : row.logit(product, unit().template first_key<Config>(n) + column);
    if (!is_finite(product)) Block::poison(n).mark(column);
    return kNoKey;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

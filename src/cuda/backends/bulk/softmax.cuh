// SPDX-License-Identifier: Apache-2.0
// The weight warps: they turn scores into weights. Each has the query rows of a band; where there is only one, a
// quarter of them: scores lie in rows, and eight lanes share a row.
#pragma once

#include "cuda/attention/absorbed_results.cuh"
#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class SoftmaxRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit SoftmaxRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    MLA_UNROLL
    for (ScoreState& state : states_) state = {};
    Block::find_unmasked_steps();
    const StepRange known = unit().unmasked;
    MLA_NO_UNROLL
    for (const uint32_t end = unit().steps.end; next_ < end; ++next_) {
      const StepRange unmasked = kInRows ? known : unit().unmasked;  // with 64 rows registers are short
      weigh(next_, unmasked.contains(next_));
    }
    finish();
    Block::leave_unit();
  }

 private:
  static constexpr bool kInRows = Config::kScoresInRows;  // or as products come, rows and columns of an m16n8 tile
  static constexpr int kTileRows = kInRows ? 1 : 2;       // of the lane, of 16
  static constexpr int kLaneRows = kTileRows * Config::kBandTiles;
  static constexpr int kRowLanes = kInRows ? 8 : 4, kLaneKeys = Config::kKeys / kRowLanes;

  MLA_DEVICE static int softmax_warp() { return ptx::warp() - Config::kFirstSoftmaxWarp; }
  MLA_DEVICE static int band() { return kInRows ? 0 : softmax_warp(); }
  /// Of the lane's rows: its tile, which half of that, and its number in the unit.
  MLA_DEVICE static int tile_of(int row) { return row / kTileRows; }
  MLA_DEVICE static int half_of(int row) { return row % 2; }
  MLA_DEVICE static int row_of_unit(int row) {
    if constexpr (kInRows) return softmax_warp() * 4 + ptx::lane() / kRowLanes;
    return band() * Config::kBandRows + tile_of(row) * 16 + half_of(row) * 8 + (ptx::lane() >> 2);
  }
  /// Of the step's keys: the lane has this one, the next, and those 8, 16, 24 on; or four neighbours, and those 32 on.
  MLA_DEVICE static int first_column() { return kInRows ? ptx::lane() % kRowLanes * 4 : (ptx::lane() & 3) * 2; }
  MLA_DEVICE static constexpr int behind_first(int i) { return kInRows ? i / 4 * 32 + i % 4 : i / 2 * 8 + i % 2; }
  MLA_DEVICE static int column_of(int i) { return first_column() + behind_first(i); }
  /// Where the sum over a part of the channels stands, for the lane's key i.
  MLA_DEVICE ptx::SharedAddress score_of(int part, int row, int i) const {
    if constexpr (kInRows) return Block::score_row(part, row_of_unit(row)) + static_cast<uint32_t>(column_of(i) * 4);
    return Block::scores(band(), part, tile_of(row), i / 2) + static_cast<uint32_t>((half_of(row) * 2 + i % 2) * 4);
  }

  /// Step n. `unmasked`: as AbsorbedUnit has it.
  MLA_DEVICE void weigh(uint32_t n, bool unmasked) {
    ptx::mbarrier_wait(Block::s_full(band()), Block::s_parity(n));
    // The place of these weights is free once the values of two steps ago are added.
    if (n >= 2) ptx::mbarrier_wait(Block::kv_empty(n - 2), Block::kv_parity(n - 2));
    const bool only_valid = args_.sparse() && needs_only_scale(args_.options);
    const bool direct = unmasked || only_valid;
    if (!direct) [[unlikely]]
      replace_scores(n);
    const float scale = direct ? score_scale(args_) * std::numbers::log2e_v<float> : 1.0F;
    const ValidKeys valid = only_valid ? valid_keys(n) : ValidKeys{~0U, ~0U};
    bool rescaled = false;
    MLA_UNROLL
    for (int m = 0; m < Config::kBandTiles; ++m) {
      float s[kTileRows][kLaneKeys];
      take_logits(s, m, scale, valid);
      if (m == Config::kBandTiles - 1) {
        ptx::sync_warp();
        if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::s_empty(band()));
      }
      MLA_UNROLL
      for (int r = 0; r < kTileRows; ++r) rescaled |= weigh_row(s[r], n, m * kTileRows + r);
    }
    if constexpr (Config::kQuantized) {
      const bool event = ptx::any(rescaled) || !direct;
      if (ptx::lane() == 0)
        ptx::store_shared(Block::events(n) + static_cast<uint32_t>(softmax_warp()), static_cast<uint8_t>(event));
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::p_full(n));
  }

  /// Which of the lane's keys have rows.
  struct ValidKeys {
    uint32_t from_first, behind;  // bits of the keys from its first on, and of those 32 on

    MLA_DEVICE bool has(int i) const {
      return ((behind_first(i) < 32 ? from_first : behind) >> behind_first(i) % 32 & 1U) != 0;
    }
  };
  MLA_DEVICE ValidKeys valid_keys(uint32_t n) const {
    ValidKeys valid = {Block::valid_from(n, first_column()), 0U};
    if constexpr (Config::kKeys > 32) valid.behind = Block::valid_from(n, first_column() + 32);
    return valid;
  }

  /// Base-2 logits out of the sums over all parts of the channels, of the lane's keys and rows of a tile; -inf for keys
  /// that are not valid.
  MLA_DEVICE void take_logits(float (&s)[kTileRows][kLaneKeys], int m, float scale, const ValidKeys& valid) const {
    float sum[kTileRows][kLaneKeys] = {};
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; i += kInRows ? 4 : 2) MLA_UNROLL
    for (int part = 0; part < Config::kParts; ++part) {
      const auto four = ptx::load_shared<ptx::Vec4>(score_of(part, m * kTileRows, i));
      MLA_UNROLL
      for (int k = 0; k < 4; ++k) (kInRows ? sum[0][i + k] : sum[k / 2][i + k % 2]) += std::bit_cast<float>(four.x[k]);
    }
    MLA_UNROLL
    for (int r = 0; r < kTileRows; ++r) MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) s[r][i] = valid.has(i) ? sum[r][i] * scale : kNoKey;
  }

  /// One of the lane's rows. Whether its outputs so far are to be rescaled.
  MLA_DEVICE bool weigh_row(const float (&s)[kLaneKeys], uint32_t n, int row) {
    const float factor = raise_max(s, row), base = states_[row].base() - kPShift<Config>;
    uint32_t weights[kLaneKeys / 2];
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; i += 2) {
      const float low = ptx::exp2_approx(s[i] - base), high = ptx::exp2_approx(s[i + 1] - base);
      states_[row].sum += low + high;
      weights[i / 2] = pack<Config::kType>(low, high);
    }
    const ptx::SharedAddress to =
        Block::p(n) + static_cast<uint32_t>(row_of_unit(row) * Config::kPPitch + first_column() * 2);
    if constexpr (kInRows) {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; i += 4)
        ptx::store_shared(to + static_cast<uint32_t>(behind_first(i) * 2),
                          uint64_t{weights[i / 2 + 1]} << 32 | weights[i / 2]);
    } else {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys / 2; ++i) ptx::store_shared(to + static_cast<uint32_t>(i * 16), weights[i]);
    }
    if (ptx::lane() % kRowLanes == 0) Block::factors(n)[row_of_unit(row)] = factor;
    return factor != 1.0F;
  }

  /// Returns what outputs so far are to be multiplied by.
  MLA_DEVICE float raise_max(const float (&s)[kLaneKeys], int row) {
    float largest = kNoKey;
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) largest = ptx::max_number(largest, s[i]);
    MLA_UNROLL
    for (int mask = 1; mask < kRowLanes; mask *= 2) largest = ptx::max_number(largest, ptx::shuffle_xor(largest, mask));
    const float headroom = args_.max_logits != nullptr ? 0.0F : kHeadroom;  // who is asked for the maximum keeps to it
    return states_[row].is_outgrown_by(largest, headroom) ? states_[row].raise(largest) : 1.0F;
  }

  /// The long way: the lane's scores become base-2 logits in place, -inf where a row does not see the key.
  MLA_DEVICE void replace_scores(uint32_t n) const {
    const int32_t key = unit().template first_key<Config>(n);
    MLA_NO_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      const RowScores scores(args_, unit().segment, unit().rows.row(args_, row_of_unit(row)));
      MLA_NO_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) {
        float product = 0.0F;
        for (int part = 0; part < Config::kParts; ++part) {
          const ptx::SharedAddress of_part = score_of(part, row, i);
          product += ptx::load_shared<float>(of_part);
          ptx::store_shared(of_part, 0.0F);
        }
        ptx::store_shared(score_of(0, row, i), logit_of(scores, product, n, column_of(i), key + column_of(i)));
      }
    }
  }

  MLA_DEVICE float logit_of(const RowScores& row, float product, uint32_t n, int column, int32_t key) const {
    if ((Block::valid_from(n, column) & 1U) != 0 && row.sees(key)) return row.logit(product, key);
    if (!is_finite(product)) Block::poison(n).mark(column);
    return kNoKey;
  }

  // The end of a segment.

  /// Writes the statistics of the lane's rows, and what their outputs are to be multiplied by.
  MLA_DEVICE void finish() const {
    const int number = Block::unit_number();
    if (number > 0)
      ptx::mbarrier_wait(Block::unit_empty(number - 1), Block::unit_parity(number - 1));  // whose factors lie there
    const bool first_of_row = ptx::lane() % kRowLanes == 0;
    RowEnd<Config> ends[kLaneRows];
    MLA_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      float sum = states_[row].sum * ptx::exp2_approx(-kPShift<Config>);
      MLA_UNROLL
      for (int mask = 1; mask < kRowLanes; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
      const int r = row_of_unit(row);
      ends[row] = {args_, unit(), r, ScoreState{states_[row].max, sum}};
      if (first_of_row) Block::output_factors()[r] = ends[row].output_factor();
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::stats_full());
    if (!first_of_row) return;
    MLA_UNROLL
    for (int row = 0; row < kLaneRows; ++row) ends[row].store_stats(args_);
  }

  uint32_t next_ = 0;             // number of the next step
  ScoreState states_[kLaneRows];  // sums are over the lane's keys
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

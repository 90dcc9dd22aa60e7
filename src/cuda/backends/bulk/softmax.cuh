// SPDX-License-Identifier: Apache-2.0
// The softmax warps turn scores into P. Each has the query rows of one band. Where there is only one band (16 or 32
// rows), four warps have a quarter of each tile of 16 rows; scores then lie in rows, and eight lanes share a row.
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
      const StepRange unmasked = kInRows ? known : unit().unmasked;  // read again: with 64 rows registers are short
      step(next_, unmasked.contains(next_));
    }
    finish();
    Block::leave_unit();
  }

 private:
  // If true, the lane has keys of one row of each tile; if false, it has the rows and keys of the accumulators of m16n8
  // tiles.
  static constexpr bool kInRows = Config::kScoresInRows;
  static constexpr int kTileRows = kInRows ? 1 : 2;  // rows of the lane in a tile of 16
  static constexpr int kRowsPerLane = kTileRows * Config::kBandTiles;
  static constexpr int kLanesPerRow = kInRows ? 8 : 4, kKeysPerLane = Config::kKeys / kLanesPerRow;

  MLA_DEVICE static int softmax_warp() { return ptx::warp() - Config::kFirstSoftmaxWarp; }
  MLA_DEVICE static int band() { return kInRows ? 0 : softmax_warp(); }
  /// These return, for one of the lane's rows: its tile of 16 rows, the half of the tile, and its number in the unit.
  MLA_DEVICE static int tile_of(int row) { return row / kTileRows; }
  MLA_DEVICE static int half_of(int row) { return row % 2; }
  MLA_DEVICE static int row_of_unit(int row) {
    if constexpr (kInRows) return tile_of(row) * 16 + softmax_warp() * 4 + ptx::lane() / kLanesPerRow;
    return band() * Config::kBandRows + tile_of(row) * 16 + half_of(row) * 8 + (ptx::lane() >> 2);
  }
  /// Columns are the keys of a step. The lane's i-th key is column first_column() + column_offset(i): four neighbours
  /// and the four 32 columns further (kInRows), or two neighbours and those 8, 16 and 24 columns further.
  MLA_DEVICE static int first_column() { return kInRows ? ptx::lane() % kLanesPerRow * 4 : (ptx::lane() & 3) * 2; }
  MLA_DEVICE static constexpr int column_offset(int i) { return kInRows ? i / 4 * 32 + i % 4 : i / 2 * 8 + i % 2; }
  MLA_DEVICE static int column_of(int i) { return first_column() + column_offset(i); }
  /// Returns the address of the score over one K slice, for one of the lane's rows and its i-th key.
  MLA_DEVICE ptx::SharedAddress score_of(int slice, int row, int i) const {
    if constexpr (kInRows) return Block::score_row(slice, row_of_unit(row)) + static_cast<uint32_t>(column_of(i) * 4);
    return Block::scores(band(), slice, tile_of(row), i / 2) + static_cast<uint32_t>((half_of(row) * 2 + i % 2) * 4);
  }

  /// Computes P of step n, which may be unmasked.
  MLA_DEVICE void step(uint32_t n, bool unmasked) {
    ptx::mbarrier_wait(Block::s_full(band()), Block::s_parity(n));
    // P n takes the place of P n - 2, which is free once the values of that step are added.
    if (n >= 2) ptx::mbarrier_wait(Block::kv_empty(n - 2), Block::kv_parity(n - 2));
    if (!unmasked) [[unlikely]]
      mask_scores(n);
    const float scale = unmasked ? score_scale(args_) * std::numbers::log2e_v<float> : 1.0F;
    const ValidKeys valid = unmasked ? valid_keys(n) : ValidKeys{~0U, ~0U};
    bool rescaled = false;
    MLA_UNROLL
    for (int m = 0; m < Config::kBandTiles; ++m) {
      float s[kTileRows][kKeysPerLane];
      load_logits(s, m, scale, valid);
      if (m == Config::kBandTiles - 1) {
        ptx::sync_warp();
        if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::s_empty(band()));
      }
      MLA_UNROLL
      for (int r = 0; r < kTileRows; ++r) rescaled |= compute_p(s[r], n, m * kTileRows + r);
    }
    if constexpr (Config::kQuantized) {
      const bool event = ptx::any(rescaled) || !unmasked;
      if (ptx::lane() == 0)
        ptx::store_shared(Block::events(n) + static_cast<uint32_t>(softmax_warp()), static_cast<uint8_t>(event));
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::p_full(n));
  }

  /// Returns bits of the lane's columns, from its first one on.
  static constexpr uint64_t column_bits() {
    uint64_t bits = 0;
    for (int i = 0; i < kKeysPerLane; ++i) bits |= uint64_t{1} << column_offset(i);
    return bits;
  }

  /// Tells which of the lane's keys have rows in the cache.
  struct ValidKeys {
    uint32_t low, high;  // bits of the columns from the lane's first on, and from 32 columns further on

    MLA_DEVICE bool has(int i) const {
      return ((column_offset(i) < 32 ? low : high) >> column_offset(i) % 32 & 1U) != 0;
    }
  };
  MLA_DEVICE ValidKeys valid_keys(uint32_t n) const {
    ValidKeys valid = {Block::valid_from(n, first_column()), 0U};
    if constexpr (Config::kKeys > 32) valid.high = Block::valid_from(n, first_column() + 32);
    return valid;
  }

  /// Loads the base-2 logits of the lane's keys and its rows of tile m: the sums over all K slices times `scale`, -inf
  /// for keys that are not valid.
  MLA_DEVICE void load_logits(float (&s)[kTileRows][kKeysPerLane], int m, float scale, const ValidKeys& valid) const {
    float sum[kTileRows][kKeysPerLane] = {};
    MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; i += kInRows ? 4 : 2) MLA_UNROLL
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      const auto four = ptx::load_shared<ptx::Vec4>(score_of(slice, m * kTileRows, i));
      MLA_UNROLL
      for (int k = 0; k < 4; ++k) (kInRows ? sum[0][i + k] : sum[k / 2][i + k % 2]) += std::bit_cast<float>(four.x[k]);
    }
    MLA_UNROLL
    for (int r = 0; r < kTileRows; ++r) MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) s[r][i] = valid.has(i) ? sum[r][i] * scale : kNoKey;
  }

  /// Computes and stores P of one of the lane's rows. Returns whether the accumulators of the row must be rescaled.
  MLA_DEVICE bool compute_p(const float (&s)[kKeysPerLane], uint32_t n, int row) {
    const float factor = raise_max(s, row), base = states_[row].base() - kPShift<Config>;
    uint32_t packed[kKeysPerLane / 2];
    MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; i += 2) {
      const float low = ptx::exp2_approx(s[i] - base), high = ptx::exp2_approx(s[i + 1] - base);
      states_[row].sum += low + high;
      packed[i / 2] = pack<Config::kType>(low, high);
    }
    const ptx::SharedAddress to =
        Block::p(n) + static_cast<uint32_t>(row_of_unit(row) * Config::kPPitch + first_column() * 2);
    if constexpr (kInRows) {
      MLA_UNROLL
      for (int i = 0; i < kKeysPerLane; i += 4)
        ptx::store_shared(to + static_cast<uint32_t>(column_offset(i) * 2),
                          uint64_t{packed[i / 2 + 1]} << 32 | packed[i / 2]);
    } else {
      MLA_UNROLL
      for (int i = 0; i < kKeysPerLane / 2; ++i) ptx::store_shared(to + static_cast<uint32_t>(i * 16), packed[i]);
    }
    if (ptx::lane() % kLanesPerRow == 0) Block::factors(n)[row_of_unit(row)] = factor;
    return factor != 1.0F;
  }

  /// Raises the maximum of a row if logits have outgrown it. Returns the factor for the accumulators of the row.
  MLA_DEVICE float raise_max(const float (&s)[kKeysPerLane], int row) {
    float largest = kNoKey;
    MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) largest = ptx::max_number(largest, s[i]);
    MLA_UNROLL
    for (int mask = 1; mask < kLanesPerRow; mask *= 2)
      largest = ptx::max_number(largest, ptx::shuffle_xor(largest, mask));
    const float headroom = args_.max_logits != nullptr ? 0.0F : kHeadroom;  // max_logits are exact maxima
    return states_[row].is_outgrown_by(largest, headroom) ? states_[row].raise(largest) : 1.0F;
  }

  /// Replaces the lane's scores in shared memory by base-2 logits with all options applied, -inf where a row does not
  /// see the key. step() calls it where the scale and ValidKeys are not enough; load_logits() then reads the results.
  MLA_DEVICE void mask_scores(uint32_t n) const {
    const int32_t key = unit().template first_key<Config>(n) + first_column();
    const ValidKeys valid = valid_keys(n);
    MLA_NO_UNROLL
    for (int row = 0; row < kRowsPerLane; ++row) {
      const RowScores scores(args_, unit().segment, unit().rows.row(args_, row_of_unit(row)));
      const uint64_t visible = scores.visible_keys(key, (uint64_t{valid.high} << 32 | valid.low) & column_bits());
      MLA_NO_UNROLL
      for (int i = 0; i < kKeysPerLane; ++i) {
        float score = 0.0F;
        for (int slice = 0; slice < Config::kSlices; ++slice) {
          const ptx::SharedAddress of_slice = score_of(slice, row, i);
          score += ptx::load_shared<float>(of_slice);
          ptx::store_shared(of_slice, 0.0F);
        }
        float logit = kNoKey;
        if ((visible >> column_offset(i) & 1) != 0)
          logit = scores.logit(score, key + column_offset(i));
        else if (!is_finite(score))
          Block::poison(n).mark(column_of(i));
        ptx::store_shared(score_of(0, row, i), logit);
      }
    }
  }

  // The end of a segment.

  /// Writes the output factors of the lane's rows, and their lse and max_logits, or maximum and sum of the partial
  /// state.
  MLA_DEVICE void finish() const {
    const int number = Block::unit_number();
    // The output factors of the last unit lie in the same place, until value warps have read them.
    if (number > 0) ptx::mbarrier_wait(Block::unit_empty(number - 1), Block::unit_parity(number - 1));
    const bool first_of_row = ptx::lane() % kLanesPerRow == 0;
    RowEnd<Config> ends[kRowsPerLane];
    MLA_UNROLL
    for (int row = 0; row < kRowsPerLane; ++row) {
      float sum = states_[row].sum * ptx::exp2_approx(-kPShift<Config>);
      MLA_UNROLL
      for (int mask = 1; mask < kLanesPerRow; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
      const int r = row_of_unit(row);
      ends[row] = {args_, unit(), r, ScoreState{states_[row].max, sum}};
      if (first_of_row) Block::output_factors()[r] = ends[row].output_factor();
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::stats_full());
    if (!first_of_row) return;
    MLA_UNROLL
    for (int row = 0; row < kRowsPerLane; ++row) ends[row].store_stats(args_);
  }

  uint32_t next_ = 0;                // number of the next step
  ScoreState states_[kRowsPerLane];  // their sums are over the lane's keys only
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

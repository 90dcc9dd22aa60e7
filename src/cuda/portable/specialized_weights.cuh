// SPDX-License-Identifier: Apache-2.0
// The weight warps: they turn scores into weights. Each has the query rows of a band; where there is only one, half of
// each of its tiles.
#pragma once

#include "cuda/portable/specialized_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class WeightRole : SpecializedBlock<Config> {
  using Block = SpecializedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit WeightRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    MLA_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      max_[row] = kNoKey;
      sum_[row] = 0.0F;
    }
    int32_t key = unit().segment.key_begin;
    MLA_NO_UNROLL
    for (const uint32_t end = unit().step_end; next_ < end; ++next_, key += Config::kKeys) weigh(next_, key);
    finish();
    Block::leave_unit();
  }

 private:
  static constexpr int kTileRows = 2 * Config::kBands / Config::kWeightWarps;  // of the lane, in a tile of 16
  static constexpr int kLaneRows = kTileRows * Config::kBandTiles;

  MLA_DEVICE static int weight_warp() { return ptx::warp() - Config::kFirstWeightWarp; }
  MLA_DEVICE static int band() { return kTileRows == 2 ? weight_warp() : 0; }
  /// Of the lane's rows: its tile, which half of that, and its number in the unit.
  MLA_DEVICE static int tile_of(int row) { return row / kTileRows; }
  MLA_DEVICE static int half_of(int row) { return kTileRows == 2 ? row % 2 : weight_warp(); }
  MLA_DEVICE static int row_of_unit(int row) {
    return band() * Config::kBandRows + tile_of(row) * 16 + half_of(row) * 8 + (ptx::lane() >> 2);
  }
  /// Of the step's keys: the lane has this one, the next, and those 8, 16, 24 on.
  MLA_DEVICE static int first_column() { return (ptx::lane() & 3) * 2; }

  /// Step n, whose first key is `key`.
  MLA_DEVICE void weigh(uint32_t n, int32_t key) {
    ptx::mbarrier_wait(Block::scored(band()), Block::score_parity(n));
    // The place of these weights is free once the values of two steps ago are added.
    if (n >= 2) ptx::mbarrier_wait(Block::free(n - 2), Block::stage_parity(n - 2));
    const bool plain = key >= unit().plain.begin && key + Config::kKeys <= unit().plain.end;
    const bool only_valid = args_.sparse() && args_.options.logits_soft_cap == 0.0F;
    const bool direct = plain || only_valid;
    if (!direct) [[unlikely]]
      replace_scores(n, key);
    const float scale = direct ? score_scale(args_) * std::numbers::log2e_v<float> : 1.0F;
    const uint32_t valid = only_valid ? *Block::valid(n) >> first_column() : ~0U;
    MLA_UNROLL
    for (int m = 0; m < Config::kBandTiles; ++m) {
      float s[4][2 * kTileRows];
      take_logits(s, m, scale, valid);
      if (m == Config::kBandTiles - 1) {
        ptx::sync_warp();
        if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::taken(band()));
      }
      MLA_UNROLL
      for (int r = 0; r < kTileRows; ++r) weigh_row(s, n, m, r);
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::ready(n));
  }

  /// Base-2 logits out of the sums over all parts of the channels, of two keys and the lane's rows of a tile; -inf for
  /// keys that are not valid.
  MLA_DEVICE void take_logits(float (&s)[4][2 * kTileRows], int m, float scale, uint32_t valid) const {
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      float sum[2 * kTileRows] = {};
      MLA_UNROLL
      for (int part = 0; part < Config::kParts; ++part) {
        const ptx::SharedAddress from = Block::scores(band(), part, m, j);
        if constexpr (kTileRows == 2) {
          const auto four = ptx::load_shared<ptx::Vec4>(from);
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) sum[i] += std::bit_cast<float>(four.x[i]);
        } else {
          const auto two = ptx::load_shared<uint64_t>(from + static_cast<uint32_t>(half_of(0) * 8));
          sum[0] += std::bit_cast<float>(static_cast<uint32_t>(two));
          sum[1] += std::bit_cast<float>(static_cast<uint32_t>(two >> 32));
        }
      }
      MLA_UNROLL
      for (int i = 0; i < 2 * kTileRows; ++i)
        s[j][i] = (valid >> (8 * j + (i & 1)) & 1U) != 0 ? sum[i] * scale : kNoKey;
    }
  }

  /// Row `r` of the lane's rows of tile `m`.
  MLA_DEVICE void weigh_row(const float (&s)[4][2 * kTileRows], uint32_t n, int m, int r) {
    const int row = m * kTileRows + r;
    const float factor = raise_max(s, row, r), base = finite_or_zero(max_[row]);
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float low = ptx::exp2_approx(s[j][2 * r] - base), high = ptx::exp2_approx(s[j][2 * r + 1] - base);
      sum_[row] += low + high;
      ptx::store_shared(Block::weights(n) + static_cast<uint32_t>(row_of_unit(row) * Config::kWeightPitch +
                                                                  (first_column() + 8 * j) * 2),
                        pack<Config::kType>(low, high));
    }
    if ((ptx::lane() & 3) == 0) Block::factors(n)[row_of_unit(row)] = factor;
  }

  /// Raises what the exponents of a row are relative to, if they would become too large, and returns what outputs and
  /// sums so far are to be multiplied by. Rescaling 64 rows for the sake of one is dear, and weights up to 2^8 as
  /// exact as those up to 1.
  MLA_DEVICE float raise_max(const float (&s)[4][2 * kTileRows], int row, int r) {
    float largest = kNoKey;
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) largest = std::max(largest, std::max(s[j][2 * r], s[j][2 * r + 1]));
    largest = std::max(largest, ptx::shuffle_xor(largest, 1));
    largest = std::max(largest, ptx::shuffle_xor(largest, 2));
    const float headroom = args_.max_logits != nullptr ? 0.0F : 8.0F;  // who is asked for the maximum keeps to it
    if (!(largest > max_[row] + headroom)) return 1.0F;
    // Before the first key there is nothing to rescale, however far below 0 the maximum is now.
    const float factor =
        max_[row] == kNoKey ? 0.0F : ptx::exp2_approx(finite_or_zero(max_[row]) - finite_or_zero(largest));
    max_[row] = largest;
    sum_[row] *= factor;
    return factor;
  }

  /// The long way: the lane's scores become base-2 logits in place, -inf where a row does not see the key.
  MLA_DEVICE void replace_scores(uint32_t n, int32_t key) const {
    MLA_NO_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      const RowScores scores(args_, unit().segment, unit().rows.row(row_of_unit(row)));
      MLA_NO_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int column = first_column() + i / 2 * 8 + i % 2;
        const auto in_four = static_cast<uint32_t>((half_of(row) * 2 + i % 2) * 4);
        float product = 0.0F;
        for (int part = 0; part < Config::kParts; ++part) {
          const ptx::SharedAddress of_part = Block::scores(band(), part, tile_of(row), i / 2) + in_four;
          product += ptx::load_shared<float>(of_part);
          ptx::store_shared(of_part, 0.0F);
        }
        ptx::store_shared(Block::scores(band(), 0, tile_of(row), i / 2) + in_four,
                          logit_of(scores, product, n, column, key + column));
      }
    }
  }

  MLA_DEVICE float logit_of(const RowScores& row, float product, uint32_t n, int column, int32_t key) const {
    if ((*Block::valid(n) >> column & 1U) != 0 && row.sees(key)) return row.logit(product, key);
    if (!is_finite(product)) Block::poison(n)[column] = Block::poison(n)[Config::kKeys] = 1;
    return kNoKey;
  }

  // The end of a segment.

  /// Writes the statistics of the lane's rows, and what their outputs are to be multiplied by.
  MLA_DEVICE void finish() const {
    const int number = Block::unit_number();
    if (number > 0)
      ptx::mbarrier_wait(Block::left(number - 1), Block::unit_parity(number - 1));  // whose factors lie there
    MLA_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      float sum = sum_[row];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if ((ptx::lane() & 3) == 0) finish_row_of_lane(row_of_unit(row), max_[row], sum);
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::weighed());
  }

  MLA_DEVICE void finish_row_of_lane(int r, float max, float sum) const {
    const QueryRow row = unit().rows.row(r);
    if (row.token < 0) return;
    float& factor = Block::output_factors()[r];
    const int64_t slot = unit().slot;
    if (slot >= 0) {
      args_.list.partial_max[slot * Config::kRows + r] = max;
      args_.list.partial_sum[slot * Config::kRows + r] = sum;
      factor = 1.0F;
      return;
    }
    const FinishedRow finished =
        finish_row(max, sum, load_sink(args_.options, row.head), inverse_o_scale(args_.o_scale), args_.lse_base);
    factor = finished.o_factor;
    if (args_.lse != nullptr)
      args_.lse[int64_t{row.token} * args_.lse_stride_token + row.head * args_.lse_stride_head] = finished.lse;
    if (args_.max_logits != nullptr)
      args_.max_logits[int64_t{row.token} * args_.max_logits_stride_token + row.head * args_.max_logits_stride_head] =
          natural_logit(max);
  }

  uint32_t next_ = 0;     // number of the next step
  float max_[kLaneRows];  // what exponents are relative to
  float sum_[kLaneRows];  // over the lane's keys
};

}  // namespace mla::MLA_CUDA_NAMESPACE

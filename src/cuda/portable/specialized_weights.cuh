// SPDX-License-Identifier: Apache-2.0
// The weight warps: they turn scores into weights. Each has the 32 query rows of a pair of score warps.
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
    const int num_steps = Block::num_steps();
    MLA_NO_UNROLL
    for (int step = 0; step < num_steps; ++step) weigh(step);
    first_ += num_steps;
    // The last factors take the place of those of two steps ago.
    if (first_ >= 2) ptx::mbarrier_wait(Block::free(first_ - 2), Block::stage_parity(first_ - 2));
    finish();
    Block::end_segment();
  }

 private:
  static constexpr int kLaneRows = 4;

  MLA_DEVICE static int pair() { return ptx::warp() - Config::kFirstWeightWarp; }
  /// Of the lane's rows, as numbers of the unit's.
  MLA_DEVICE static int row_of_unit(int row) { return pair() * 32 + row * 8 + (ptx::lane() >> 2); }
  /// Of the step's keys: the lane has this one, the next, and those 8, 16, 24 on.
  MLA_DEVICE static int first_column() { return (ptx::lane() & 3) * 2; }

  MLA_DEVICE void weigh(int step) {
    const int n = first_ + step;
    ptx::mbarrier_wait(Block::scored(pair()), Block::score_parity(n));
    // The place of these weights is free once the values of two steps ago are added.
    if (n >= 2) ptx::mbarrier_wait(Block::free(n - 2), Block::stage_parity(n - 2));
    const int32_t key = unit().segment.key_begin + step * Config::kKeys;
    const bool plain = key >= unit().plain.begin && key + Config::kKeys <= unit().plain.end;
    const bool only_valid = args_.sparse() && args_.options.logits_soft_cap == 0.0F;
    const bool direct = plain || only_valid;
    if (!direct) [[unlikely]]
      replace_scores(n, key);
    const float scale = direct ? score_scale(args_) * std::numbers::log2e_v<float> : 1.0F;
    const uint32_t valid = only_valid ? Block::valid_bits(n) >> first_column() : ~0U;
    MLA_UNROLL
    for (int m = 0; m < 2; ++m) {
      float s[4][4];
      take_logits(s, m, scale, valid);
      if (m == 1) {
        ptx::sync_warp();
        if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::taken(pair()));
      }
      weigh_row(s, n, 2 * m);
      weigh_row(s, n, 2 * m + 1);
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::ready(n));
  }

  /// Base-2 logits out of the sums over both halves of the channels; -inf for keys that are not valid.
  MLA_DEVICE void take_logits(float (&s)[4][4], int m, float scale, uint32_t valid) const {
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const auto first = ptx::load_shared<ptx::Vec4>(Block::scores(pair(), 0, m, j));
      const auto second = ptx::load_shared<ptx::Vec4>(Block::scores(pair(), 1, m, j));
      MLA_UNROLL
      for (int i = 0; i < 4; ++i)
        s[j][i] = (valid >> (8 * j + (i & 1)) & 1U) != 0
                      ? (std::bit_cast<float>(first.x[i]) + std::bit_cast<float>(second.x[i])) * scale
                      : kNoKey;
    }
  }

  MLA_DEVICE void weigh_row(const float (&s)[4][4], int n, int row) {
    const int r = row % 2;
    const float factor = raise_max(s, row), base = finite_or_zero(max_[row]);
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
  MLA_DEVICE float raise_max(const float (&s)[4][4], int row) {
    const int r = row % 2;
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
  MLA_DEVICE void replace_scores(int n, int32_t key) const {
    MLA_NO_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      const RowScores scores(args_, unit().segment, unit().rows.row(row_of_unit(row)));
      MLA_NO_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int column = first_column() + i / 2 * 8 + i % 2;
        const auto in_four = static_cast<uint32_t>((row % 2 * 2 + i % 2) * 4);
        const ptx::SharedAddress first = Block::scores(pair(), 0, row / 2, i / 2) + in_four;
        const ptx::SharedAddress second = Block::scores(pair(), 1, row / 2, i / 2) + in_four;
        const float product = ptx::load_shared<float>(first) + ptx::load_shared<float>(second);
        ptx::store_shared(first, logit_of(scores, product, n, column, key + column));
        ptx::store_shared(second, 0.0F);
      }
    }
  }

  MLA_DEVICE float logit_of(const RowScores& row, float product, int n, int column, int32_t key) const {
    if ((Block::valid_bits(n) >> column & 1U) != 0 && row.sees(key)) return row.logit(product, key);
    if (!is_finite(product)) Block::poison(n)[column] = Block::poison(n)[Config::kKeys] = 1;
    return kNoKey;
  }

  // The end of a segment.

  /// Writes the statistics of the lane's rows, and into their factors what the outputs are to be multiplied by.
  MLA_DEVICE void finish() const {
    MLA_UNROLL
    for (int row = 0; row < kLaneRows; ++row) {
      float sum = sum_[row];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if ((ptx::lane() & 3) == 0) finish_row_of_lane(row_of_unit(row), max_[row], sum);
    }
  }

  MLA_DEVICE void finish_row_of_lane(int r, float max, float sum) const {
    const QueryRow row = unit().rows.row(r);
    if (row.token < 0) return;
    float& factor = Block::factors(first_)[r];
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

  int first_ = 0;         // number of the segment's first step
  float max_[kLaneRows];  // what exponents are relative to
  float sum_[kLaneRows];  // over the lane's keys
};

}  // namespace mla::MLA_CUDA_NAMESPACE

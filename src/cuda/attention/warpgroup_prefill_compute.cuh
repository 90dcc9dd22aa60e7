// SPDX-License-Identifier: Apache-2.0
// This is the base of the computing role of prefill by wgmma, a warpgroup with 64 query rows, of which each warp has
// 16: which rows and keys the group has, when it may issue products, and what it waits for.
#pragma once

#include <cstdint>
#include <numbers>

#include "cuda/attention/warpgroup_prefill.cuh"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/softmax.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns accumulators of 8-column tiles as the flat array that wgmma takes.
template <int kTiles>
MLA_DEVICE float (&flat(float (&tiles)[1][kTiles][4]))[kTiles * 4] {
  return reinterpret_cast<float(&)[kTiles * 4]>(tiles);
}

template <class Config>
class WarpgroupPrefillCompute : public WarpgroupPrefill<Config> {
 public:
  MLA_DEVICE WarpgroupPrefillCompute(const WarpgroupPrefillParams& params, int group)
      : WarpgroupPrefill<Config>(params),
        group_(group),
        warp_row_(ptx::shuffle(ptx::warp(), 0) % WarpgroupPrefillCompute::kGroupWarps * 16),
        by_boxes_(params.by_boxes),
        raw_scores_(needs_only_scale(params.args.options)) {}

 protected:
  const int group_;
  const int warp_row_;     // first row of the warp in its group
  const bool by_boxes_;    // whether tiles come by tensor copies
  const bool raw_scores_;  // whether scores need only the scale
  int unit_ = 0;           // number of the unit being computed
  int tile_ = 0;           // number of its next tile
  int place_ = 0;          // which of two places of flags any_warp() used last

  /// Returns how many rows of a unit are this group's; 0 or less: none.
  MLA_DEVICE int rows_of(const PrefillUnit& unit) const {
    const int rows = unit.rows - group_ * Config::kGroupRows;
    return rows < Config::kGroupRows ? rows : Config::kGroupRows;
  }
  /// Returns the position of the group's first row, and of the lane's first row, in the request.
  MLA_DEVICE int position_of(const PrefillUnit& unit) const { return unit.position + group_ * Config::kGroupRows; }
  MLA_DEVICE int lane_position(const PrefillUnit& unit) const {
    return position_of(unit) + warp_row_ + accumulator_row();
  }

  /// Returns the keys that all of the group's rows see, and those that any of them sees.
  MLA_DEVICE KeyRange visible_to_all(const PrefillUnit& unit) const {
    const int first = position_of(unit), last = first + rows_of(unit) - 1;
    if (last < first) return {};
    return {this->visible(unit, last).begin, this->visible(unit, first).end};
  }
  MLA_DEVICE KeyRange visible_to_any(const PrefillUnit& unit) const {
    const int first = position_of(unit), last = first + rows_of(unit) - 1;
    if (last < first) return {};
    return {this->visible(unit, first).begin, this->visible(unit, last).end};
  }
  /// Goes through the block's units: compute(o, rows) adds the unit's keys to accumulators and states that are empty,
  /// and store(o, rows, unit) is called when the next unit's queries are on their way.
  template <int kOutTiles, class Compute, class Store>
  MLA_DEVICE void for_each_unit(const Compute& compute, const Store& store) {
    if (Config::kTakesTurns && group_ == 1) pass_turn();  // group 0 takes the first turn
    this->wait_for_unit(0);
    load_q();
    MLA_NO_UNROLL
    while (this->unit(unit_).rows > 0) {
      float o[1][kOutTiles][4] = {};
      SoftmaxRows rows[1];
      compute(o, rows);
      ++unit_;
      this->wait_for_unit(unit_);
      sync_group();  // no warp multiplies the old queries any more
      load_q();
      store(o, rows[0], this->unit(unit_ - 1));
      this->leave_unit(unit_ - 1);
    }
    if (Config::kTakesTurns && group_ == 0) wait_for_turn();  // takes the turn that group 1 passed last
  }
  /// Goes through the tiles of the unit being computed of which the group's rows see a key: compute(tile, end, whole)
  /// computes one or more of those before `end`, and leaves `tile` and `tile_` behind them. Of tiles in `whole` all
  /// rows see all keys.
  template <class Compute>
  MLA_DEVICE void for_each_tile(const Compute& compute) {
    const PrefillUnit unit = this->unit(unit_);
    const KeyRange any = visible_to_any(unit), all = visible_to_all(unit);
    int tile = any.empty() ? unit.end_tile : any.begin / Config::kKeys;
    const int end = any.empty() ? unit.end_tile : (any.end - 1) / Config::kKeys + 1;
    const KeyRange whole = {(all.begin + Config::kKeys - 1) / Config::kKeys, all.end / Config::kKeys};
    skip_tiles(tile - unit.first_tile);
    MLA_NO_UNROLL
    while (tile < end) compute(tile, end, whole);
    skip_tiles(unit.end_tile - end);
  }
  MLA_DEVICE void skip_tiles(int count) {
    MLA_NO_UNROLL
    for (; count > 0; --count, ++tile_) {
      wait_for_k(tile_);
      wait_for_turn();
      pass_turn();
      wait_for_v(tile_);
      ptx::sync_warp();
      release_k(tile_);
      release_v(tile_);
    }
  }

  MLA_DEVICE void sync_group() const { ptx::sync_threads(Config::kGroupBarrier + group_, Config::kGroupThreads); }

  // The groups take turns in issuing products. Each takes a turn for every tile of a unit, whatever it does with the
  // tile, so that the two never count differently.
  MLA_DEVICE void wait_for_turn() const {
    if constexpr (Config::kTakesTurns)
      ptx::sync_threads(Config::kTurnBarrier + group_, Config::kGroups * Config::kGroupThreads);
  }
  MLA_DEVICE void pass_turn() const {
    if constexpr (Config::kTakesTurns)
      ptx::arrive_threads(Config::kTurnBarrier + (group_ ^ 1), Config::kGroups * Config::kGroupThreads);
  }

  /// Lets wgmma see what cp.async or stores of other threads have written. Tensor copies need no fence.
  MLA_DEVICE void fence_copies() const {
    if (!by_boxes_) ptx::fence_async_proxy();
  }
  MLA_DEVICE void wait_for_k(int n) const {
    ptx::mbarrier_wait(this->k_full(n), this->tile_parity(n));
    fence_copies();
  }
  MLA_DEVICE void wait_for_v(int n) const {
    ptx::mbarrier_wait(this->v_full(n), this->v_parity(n));
    fence_copies();
  }
  MLA_DEVICE void release_k(int n) const {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(this->k_empty(n));
  }
  MLA_DEVICE void release_v(int n) const {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(this->v_empty(n));
  }

  MLA_DEVICE void load_q() const {
    const core::PrefillArgs& args = this->args_;
    const PrefillUnit unit = this->unit(unit_);
    this->template load_tile<Config::kGroupRows, Config::kQRowBytes>(
        this->q_tile(group_), args.q,
        (unit.first_token + group_ * Config::kGroupRows) * args.q_stride_token + unit.head * args.q_stride_head,
        args.q_stride_token, rows_of(unit));
    ptx::cp_async_commit();
  }
  MLA_DEVICE void wait_for_q() const {
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    sync_group();
  }

  /// Returns whether `found` is true in any lane of the group, all of whose warps call it.
  MLA_DEVICE bool any_warp(bool found) {
    found = ptx::any(found);
    // The two places are used by turns: before a place is written again, all warps have read it, because they met at
    // the barrier for the other place in between.
    place_ ^= 1;
    const ptx::SharedAddress place =
        this->shared_ + static_cast<uint32_t>(Config::kFlagsBegin + (group_ * 2 + place_) * Config::kFlagBytes);
    if (ptx::lane() == 0) ptx::store_shared(place + static_cast<uint32_t>(warp_row_ / 16 * 4), found ? 1U : 0U);
    sync_group();
    const auto flags = ptx::load_shared<ptx::Vec4>(place);
    return (flags.x[0] | flags.x[1] | flags.x[2] | flags.x[3]) != 0;
  }

  /// Makes logits of products where they need more than a factor (transform()), and hides keys that rows do not see.
  template <int kColTiles>
  MLA_DEVICE void shape(float (&s)[kColTiles][4], int tile, bool masked, float scale) const {
    if (!raw_scores_) transform(s, tile * Config::kKeys, scale);
    if (masked) mask(s, tile * Config::kKeys);
  }
  template <int kColTiles>
  MLA_DEVICE void mask(float (&s)[kColTiles][4], int first_key) const {
    const PrefillUnit unit = this->unit(unit_);
    const int position = lane_position(unit);
    mask_scores(s, {this->visible(unit, position), this->visible(unit, position + 8)}, first_key);
  }
  /// Applies soft cap and ALiBi to products that mean `scale` times as much; scores become natural logits.
  template <int kColTiles>
  MLA_DEVICE void transform(float (&s)[kColTiles][4], int first_key, float scale) const {
    const core::Options& options = this->args_.options;
    const PrefillUnit unit = this->unit(unit_);
    const float slope = options.alibi_slopes != nullptr ? options.alibi_slopes[unit.head] : 0.0F;
    if (options.logits_soft_cap != 0.0F) cap_scores(s, scale, options.logits_soft_cap);
    add_slope(s, options.logits_soft_cap == 0.0F ? scale : 1.0F, slope,
              first_key + accumulator_column() - lane_position(unit));
  }

  /// Returns what the rows of a lane are multiplied by when they are finished, whose outputs mean `scale` times as
  /// much, and stores their lse.
  MLA_DEVICE void finish(const SoftmaxRows& state, const PrefillUnit& unit, float scale, float (&factors)[2]) const {
    const core::PrefillArgs& args = this->args_;
    const float sink = load_sink(args.options, unit.head);
    const int first_token = unit.first_token + group_ * Config::kGroupRows + warp_row_;
    const int num_rows = rows_of(unit) - warp_row_;
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const FinishedRow finished = finish_row(state.of[i].max, quad_sum(state.of[i].sum), sink, scale, args.lse_form);
      factors[i] = finished.o_factor;
      const int row = accumulator_row() + i * 8;
      if (args.lse != nullptr && row < num_rows && (ptx::lane() & 3) == 0)
        args.lse[(first_token + row) * args.lse_stride_token + unit.head * args.lse_stride_head] = finished.lse;
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

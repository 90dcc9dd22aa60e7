// SPDX-License-Identifier: Apache-2.0
// This is the base of the load role of prefill by wgmma, one warpgroup: it describes units, and loads tiles of their
// keys.
#pragma once

#include <cstdint>

#include "cuda/attention/warpgroup_prefill.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class WarpgroupPrefillLoad : public WarpgroupPrefill<Config> {
 public:
  using WarpgroupPrefill<Config>::WarpgroupPrefill;

 protected:
  /// Calls load_tiles(unit, n) for the block's units, of which n is the number of the first tile.
  template <class LoadTiles>
  MLA_DEVICE void for_each_unit(LoadTiles&& load_tiles) const {
    MLA_NO_UNROLL
    for (int u = 0, n = 0;; ++u) {
      if (ptx::thread_index() == 0) describe(u);
      ptx::sync_warp();
      this->wait_for_unit(u);
      const PrefillUnit unit = this->unit(u);
      this->leave_unit(u);
      if (unit.rows == 0) return;
      load_tiles(unit, n);
      n += unit.num_tiles();
    }
  }

  /// Starts to load a tile of K, of which all threads of the load role, or by boxes one thread, wait for the stage.
  MLA_DEVICE void load_k(const PrefillUnit& unit, int tile, int n) const {
    const core::PrefillArgs& args = this->args_;
    load<Config::kKRowBytes>(unit, tile, this->params_.k_map, args.k, args.k_stride_token, args.k_stride_head,
                             this->k_tile(n), this->k_empty(n), this->k_full(n), this->tile_parity(n));
  }
  /// Loads a tile of V to `to`.
  MLA_DEVICE void load_v(const PrefillUnit& unit, int tile, int n, ptx::SharedAddress to, ptx::SharedAddress empty,
                         ptx::SharedAddress full) const {
    const core::PrefillArgs& args = this->args_;
    load<Config::kVRowBytes>(unit, tile, this->params_.v_map, args.v, args.v_stride_token, args.v_stride_head, to,
                             empty, full, this->v_parity(n));
  }

 private:
  struct UnitPlace {
    int slot, head;
  };

  /// Finds the block's next unit and describes it, while the tiles of the last one are still being computed.
  MLA_DEVICE void describe(int u) const {
    const WarpgroupPrefillParams& params = this->params_;
    uint32_t number = 0;
    UnitPlace place = {};
    QueryBlock block = {};
    do {
      number = next_number(u);
      if (number >= params.num_units) break;
      place = place_of(number);
      block = find_query_block(this->args_, Config::kRows, place.slot);
    } while (block.rows <= 0 && params.next_unit != nullptr);
    PrefillUnit unit = {};
    if (number < params.num_units && block.rows > 0) {
      unit = {.first_token = block.first_token,
              .first_key = block.first_key,
              .rows = block.rows,
              .position = block.position,
              .kv_len = block.kv_len,
              .head = place.head,
              .first_tile = 0,
              .end_tile = 0};
      const KeyRange keys = {this->visible(unit, unit.position).begin,
                             this->visible(unit, unit.position + unit.rows - 1).end};
      unit.first_tile = keys.begin / Config::kKeys;
      unit.end_tile = keys.empty() ? unit.first_tile : (keys.end - 1) / Config::kKeys + 1;
    }
    ptx::mbarrier_wait(this->unit_empty(u), this->unit_parity(u) ^ 1U);
    const auto bits = [](int value) { return static_cast<uint32_t>(value); };
    ptx::store_shared(this->unit_place(u),
                      ptx::Vec4{{bits(unit.first_token), bits(unit.first_key), bits(unit.rows), bits(unit.position)}});
    ptx::store_shared(this->unit_place(u) + 16,
                      ptx::Vec4{{bits(unit.kv_len), bits(unit.head), bits(unit.first_tile), bits(unit.end_tile)}});
    ptx::mbarrier_arrive(this->unit_full(u));
  }

  /// Returns the place of a unit. The last slot of some heads comes first, then the slot before it of the same heads:
  /// longer units stand before shorter ones, so that blocks end together, and blocks that run at a time share keys.
  /// Where heads do not divide into such groups, the smaller one comes first.
  MLA_DEVICE UnitPlace place_of(uint32_t number) const {
    const WarpgroupPrefillParams& params = this->params_;
    const auto num_heads = static_cast<uint32_t>(this->args_.num_heads);
    const uint32_t from_end = params.num_units - 1 - number;
    const uint32_t first_head = from_end / (params.num_slots * params.heads_together) * params.heads_together;
    const uint32_t heads =
        num_heads - first_head < params.heads_together ? num_heads - first_head : params.heads_together;
    const uint32_t of_group = from_end - first_head * params.num_slots;
    return {.slot = static_cast<int>(of_group / heads), .head = static_cast<int>(first_head + of_group % heads)};
  }

  /// Returns the number of the block's next unit; num_units or more stands for none. Every block asks until there is
  /// none, and the block that asks last resets the counter for the next launch.
  MLA_DEVICE uint32_t next_number(int u) const {
    const WarpgroupPrefillParams& params = this->params_;
    const auto blocks = static_cast<uint32_t>(ptx::grid_size_x());
    if (params.next_unit == nullptr) return u == 0 ? static_cast<uint32_t>(ptx::block_index_x()) : params.num_units;
    const uint32_t number = ptx::atomic_add(params.next_unit, 1U);
    if (number == params.num_units + blocks - 1) *params.next_unit = 0;
    return number;
  }

  /// Loads a tile of rows of kRowBytes once `empty` has ended the phase before the tile's. By boxes, rows behind the
  /// request's end are those of the next request, which masks hide as they hide other keys; otherwise they become zero.
  template <int kRowBytes>
  MLA_DEVICE void load(const PrefillUnit& unit, int tile, const cuda::TensorMap& map, const void* from,
                       int64_t stride_token, int64_t stride_head, ptx::SharedAddress to, ptx::SharedAddress empty,
                       ptx::SharedAddress full, uint32_t parity) const {
    const int first = (unit.first_tile + tile) * Config::kKeys;
    if (this->params_.by_boxes) {
      constexpr int kSegmentsOfRow = Config::segments(kRowBytes), kBoxBytes = Config::kKeys * kSegmentBytes;
      if (ptx::thread_index() != 0) return;
      ptx::mbarrier_wait(empty, parity ^ 1U);
      ptx::mbarrier_arrive_expect_bytes(full, kSegmentsOfRow * kBoxBytes);
      MLA_UNROLL
      for (int segment = 0; segment < kSegmentsOfRow; ++segment)
        ptx::tensor_copy(to + static_cast<uint32_t>(segment * kBoxBytes), &map, segment * cuda::kBoxChannels,
                         unit.first_key + first, unit.head, full);
      return;
    }
    ptx::mbarrier_wait(empty, parity ^ 1U);
    this->template load_tile<Config::kKeys, kRowBytes>(
        to, from, (unit.first_key + first) * stride_token + unit.head * stride_head, stride_token, unit.kv_len - first);
    if (this->params_.rows_aligned)
      ptx::mbarrier_arrive_after_copies(full);
    else
      ptx::mbarrier_arrive(full);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

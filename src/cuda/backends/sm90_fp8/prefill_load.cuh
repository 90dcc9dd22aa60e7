// SPDX-License-Identifier: Apache-2.0
// The load role of prefill is one warpgroup: it describes units, loads their K and V, and transposes V, because wgmma
// takes e4m3 only along k. A tile's values are transposed when K and V of the next are on their way.
#pragma once

#include <cstdint>

#include "cuda/attention/warpgroup_prefill_load.cuh"
#include "cuda/backends/sm90_fp8/prefill_block.cuh"
#include "cuda/tile/e4m3_pairs.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

template <class Config>
class PrefillLoadRole : WarpgroupPrefillLoad<Config> {
  using Base = WarpgroupPrefillLoad<Config>;

 public:
  using Base::Base;

  /// Initializes the barriers. All threads call it once, at the kernel's start.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      this->init_barriers(this->kGroupWarps, this->kGroupWarps);
      for (int n = 0; n < Config::kVStages; ++n) {
        ptx::mbarrier_init(loaded_full(n), this->copying_threads());
        ptx::mbarrier_init(loaded_empty(n), this->kGroupWarps);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
  }

  MLA_DEVICE void run() const {
    this->for_each_unit([&](const PrefillUnit& unit, int first) {
      const int count = unit.num_tiles();
      MLA_NO_UNROLL
      for (int tile = 0; tile <= count; ++tile) {
        const int n = first + tile;
        if (tile < count) {
          this->load_k(unit, tile, n);
          this->load_v(unit, tile, n, loaded(n), loaded_empty(n), loaded_full(n));
        }
        if (tile > 0) transpose(n - 1);
      }
    });
  }

 private:
  // Barriers of loaded values: a phase of loaded_full ends when the tile has come, one of loaded_empty when it has been
  // transposed.
  MLA_DEVICE ptx::SharedAddress loaded_full(int n) const {
    return this->barrier(Config::kLoadedFull + this->v_stage(n));
  }
  MLA_DEVICE ptx::SharedAddress loaded_empty(int n) const {
    return this->barrier(Config::kLoadedEmpty + this->v_stage(n));
  }
  MLA_DEVICE ptx::SharedAddress loaded(int n) const {
    return this->shared_ + static_cast<uint32_t>(Config::kLoadedBegin + this->v_stage(n) * Config::kLoadedBytes);
  }

  /// Transposes the values of tile n. Each warp does it for 32 keys and 16 channels at a time.
  MLA_DEVICE void transpose(int n) const {
    ptx::mbarrier_wait(loaded_full(n), this->v_parity(n));
    ptx::mbarrier_wait(this->v_empty(n), this->v_parity(n) ^ 1U);
    ptx::sync_warp();
    const int warp = ptx::warp(), g = ptx::lane() / 4, t = ptx::lane() % 4;
    MLA_UNROLL
    for (int i = 0; i < Config::kDV / 16; i += this->kGroupWarps) {
      const int group = i + warp;  // of 16 channels
      const ptx::SharedAddress segment =
          loaded(n) + static_cast<uint32_t>(group / kChunksPerSegment * Config::kKeys * kSegmentBytes);
      const TileLane<kSegmentBytes> lane(segment, ptx::lane(), 0);
      MLA_UNROLL
      for (int half = 0; half < Config::kKeys / 32; ++half) {
        uint32_t pairs[4];
        ptx::ldmatrix_x4_trans(pairs, lane.at(half * 32, group % kChunksPerSegment));
        MLA_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          uint32_t keys[2];
          channels_of_pairs(keys, pairs, odd);
          MLA_UNROLL
          for (int j = 0; j < 2; ++j)
            ptx::store_shared(this->v_tile(n) + Config::values_place(group * 16 + odd * 8 + g, half * 2 + j) +
                                  static_cast<uint32_t>(t * 4),
                              keys[j]);
        }
      }
    }
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane() == 0) {
      ptx::mbarrier_arrive(this->v_full(n));
      ptx::mbarrier_arrive(loaded_empty(n));
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

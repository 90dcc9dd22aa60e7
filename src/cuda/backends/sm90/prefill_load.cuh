// SPDX-License-Identifier: Apache-2.0
// The load role of prefill is one warpgroup: it describes units and loads their K and V in the order in which they are
// multiplied: K(0), K(1), V(0), K(2), V(1), ...
#pragma once

#include "cuda/attention/warpgroup_prefill_load.cuh"
#include "cuda/backends/sm90/prefill_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config>
class PrefillLoadRole : WarpgroupPrefillLoad<Config> {
 public:
  using WarpgroupPrefillLoad<Config>::WarpgroupPrefillLoad;

  /// Initializes the barriers. All threads call it once, at the kernel's start.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      this->init_barriers(this->copying_threads(), this->params_.by_boxes ? 1 : this->kGroupWarps);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
  }

  MLA_DEVICE void run() const {
    if (this->params_.by_boxes && ptx::warp() > 0) return;  // one thread issues all copies
    this->for_each_unit([&](const PrefillUnit& unit, int n) {
      const int count = unit.num_tiles();
      MLA_NO_UNROLL
      for (int tile = 0; tile <= count; ++tile) {
        if (tile < count) this->load_k(unit, tile, n + tile);
        if (tile > 0) load_v(unit, tile - 1, n + tile - 1);
      }
    });
  }

 private:
  MLA_DEVICE void load_v(const PrefillUnit& unit, int tile, int n) const {
    WarpgroupPrefillLoad<Config>::load_v(unit, tile, n, this->v_tile(n), this->v_empty(n), this->v_full(n));
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

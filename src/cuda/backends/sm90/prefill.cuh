// SPDX-License-Identifier: Apache-2.0
// Up-projected prefill of bf16 and f16 by warpgroups:
//   S = Q K^T, softmax over the keys that each row sees, O = P V, all on wgmma.
// Grid: persistent. A unit of work is 128 query rows of a head; its number is head * slots + slot, where the T / 128 +
// B slots are for query blocks (a unit finds its request by bisection, surplus ones are skipped), longest rows of a
// request first. Blocks take units from a counter.
//   warpgroup 0     describes units, fetches tiles of K and V (cp.async; zeros beyond the request's end)
//   warpgroups 1, 2 have 64 rows each: S, softmax, O; in turns, so that one multiplies while the other exponentiates
// Shared memory: Q [2][64, d_qk] | K [stages][keys, d_qk] | V [stages][keys, d_v], 2 bytes each, swizzled | outputs on
// their way, 16 KB | units, barriers:
//   fetch    unit_empty(u - 2) -> describe u -> unit_full(u); kv_empty(n - stages) -> copy n -> kv_full(n), of K and of
//   V attend   unit_full(u); full K(n) -> S(n) -> free K(n); full V(n - 1) -> O(n - 1) -> free V(n - 1); unit_empty(u)
// docs/kernels/cuda_sm90_prefill.md
#pragma once

#include "cuda/backends/sm90/prefill_attend.cuh"
#include "cuda/backends/sm90/prefill_load.cuh"
#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <DType kType, int kDQk, int kDV, PrefillTiling kTiling>
struct PrefillKernel {
  using Config = PrefillConfig<kType, kDQk, kDV, kTiling>;
  using Params = PrefillParams;
  static constexpr const char* kName = "sm90_prefill";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& params) {
    PrefillBlock<Config>(params).init();
    const int group = ptx::shuffle(ptx::warp(), 0) * kWarpSize / Config::kGroupThreads;
    if (group == 0) {
      ptx::give_registers<Config::kLoadRegisters>();
      PrefillFetch<Config>(params).run();
    } else {
      ptx::take_registers<Config::kAttendRegisters>();
      PrefillAttend<Config>(params, group - 1).run();
    }
  }
};

/// Before the first launch that shares units out by a counter.
struct PrefillPlanKernel {
  using Params = uint32_t*;
  static constexpr const char* kName = "sm90_prefill_plan";
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& next_unit) {
    if (ptx::thread_index() == 0) *next_unit = 0;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

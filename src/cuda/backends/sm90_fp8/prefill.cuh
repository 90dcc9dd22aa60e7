// SPDX-License-Identifier: Apache-2.0
// This kernel computes up-projected prefill of e4m3 by wgmma: S = Q K^T, softmax over the keys that each row sees, O =
// P V, where P of a run of 64 keys becomes e4m3 with a scale for each row. params.h defines the arithmetic
// (AttentionOptions::compute).
//
// Grid: persistent, units of 128 query rows of a head, as in cuda_sm90's prefill.
//   warpgroup 0     load: describes units, loads tiles of K and V (tensor copies, or cp.async where there are none),
//                   transposes V
//   warpgroups 1, 2 compute: S, softmax and O of 64 rows each; they take turns, so that one multiplies while the other
//                   exponentiates
// Shared memory, 1 byte an element: Q [2][64, d_qk] | K [stages][64 keys, d_qk] | V transposed [stages][d_v, 64 keys] |
// V as it came [stages][64 keys, d_v] | units, flags, barriers. What each role waits for, does, and arrives at, for
// unit u and tile n:
//   load     unit_empty(u - 2) -> describe u -> unit_full(u)
//            k_empty(n - stages) -> K(n) -> k_full(n);  loaded_empty(n - stages) -> V(n) -> loaded_full(n)
//            loaded_full(n), v_empty(n - stages) -> transpose V(n) -> v_full(n), loaded_empty(n)
//   compute  unit_full(u);  k_full(n) -> S(n) -> k_empty(n);  v_full(n - 1) -> P(n - 1) V -> v_empty(n - 1)
//            at the end of the unit: unit_empty(u)
// docs/kernels/cuda_sm90_fp8_prefill.md describes the kernel.
#pragma once

#include "cuda/backends/sm90_fp8/prefill_compute.cuh"
#include "cuda/backends/sm90_fp8/prefill_load.cuh"
#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

template <int kDQk, int kDV>
struct PrefillKernel {
  using Config = PrefillConfig<kDQk, kDV>;
  using Params = WarpgroupPrefillParams;
  static constexpr const char* kName = "sm90_fp8_prefill";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& params) {
    PrefillLoadRole<Config>(params).init();
    const int group = ptx::shuffle(ptx::warp(), 0) * kWarpSize / Config::kGroupThreads;
    if (group == 0) {
      ptx::give_registers<Config::kLoadRegisters>();
      PrefillLoadRole<Config>(params).run();
    } else {
      ptx::take_registers<Config::kComputeRegisters>();
      PrefillComputeRole<Config>(params, group - 1).run();
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

// SPDX-License-Identifier: Apache-2.0
// This kernel computes up-projected prefill of bf16 and f16 by wgmma: S = Q K^T, softmax over the keys that each row
// sees, O = P V.
//
// Grid: persistent. A unit of work is 128 query rows of a head. Each head has T / 128 + B slots for query blocks, since
// a unit finds its request by bisection and surplus slots are skipped. Blocks take units from a counter, those of a few
// heads in turns, of which the longest rows of a request come first (WarpgroupPrefillLoad::place_of()).
//   warpgroup 0     load: describes units, loads tiles of K and V (tensor copies, or cp.async where there are none)
//   warpgroups 1, 2 compute: S, softmax and O of 64 rows each; they take turns, so that one multiplies while the other
//                   exponentiates
// Shared memory: Q [2][64, d_qk] | K [stages][keys, d_qk] | V [stages][keys, d_v], 2 bytes each, swizzled | outputs on
// their way | units, barriers. What each role waits for, does, and arrives at, for unit u and tile n:
//   load     unit_empty(u - 2) -> describe u -> unit_full(u)
//            k_empty(n - stages) -> K(n) -> k_full(n);  v_empty(n - stages) -> V(n) -> v_full(n)
//   compute  unit_full(u);  k_full(n) -> S(n) -> k_empty(n);  v_full(n - 1) -> O += P(n - 1) V -> v_empty(n - 1)
//            at the end of the unit: unit_empty(u)
// docs/kernels/cuda_sm90_prefill.md describes the kernel.
#pragma once

#include "cuda/attention/warpgroup_prefill_launch.cuh"
#include "cuda/backends/sm90/prefill_compute.cuh"
#include "cuda/backends/sm90/prefill_load.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <DType kType, int kDQk, int kDV, PrefillTiling kTiling>
struct PrefillKernel
    : WarpgroupPrefillKernel<PrefillConfig<kType, kDQk, kDV, kTiling>, PrefillLoadRole, PrefillComputeRole> {
  static constexpr const char* kName = "sm90_prefill";
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

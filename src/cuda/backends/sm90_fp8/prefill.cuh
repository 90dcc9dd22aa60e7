// SPDX-License-Identifier: Apache-2.0
// This kernel computes up-projected prefill of e4m3 by wgmma: S = Q K^T, softmax over the keys that each row sees, O =
// P V, where P of a tile, which is a run of keys, becomes e4m3 with a scale for each row. params.h defines the
// arithmetic (AttentionOptions::compute).
//
// Grid: persistent, units of 128 query rows of a head, as in cuda_sm90's prefill.
//   warpgroup 0     load: describes units, loads tiles of K and V (tensor copies, or cp.async where there are none),
//                   transposes V
//   warpgroups 1, 2 compute: S, softmax and O of 64 rows each; they take turns, so that one multiplies while the other
//                   exponentiates
// Shared memory, 1 byte an element: Q [2][64, d_qk] | K [stages][keys, d_qk] | V transposed [stages][keys / 64][d_v, 64
// keys] | V as it came [stages][keys, d_v] | units, flags, barriers. What each role waits for, does, and arrives at,
// for unit u and tile n:
//   load     unit_empty(u - 2) -> describe u -> unit_full(u)
//            k_empty(n - stages) -> K(n) -> k_full(n);  loaded_empty(n - stages) -> V(n) -> loaded_full(n)
//            loaded_full(n), v_empty(n - stages) -> transpose V(n) -> v_full(n), loaded_empty(n)
//   compute  unit_full(u);  k_full(n) -> S(n) -> k_empty(n);  v_full(n - 1) -> P(n - 1) V -> v_empty(n - 1)
//            at the end of the unit: unit_empty(u)
// docs/kernels/cuda_sm90_fp8_prefill.md describes the kernel.
#pragma once

#include "cuda/attention/warpgroup_prefill_launch.cuh"
#include "cuda/backends/sm90_fp8/prefill_compute.cuh"
#include "cuda/backends/sm90_fp8/prefill_load.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

template <int kDQk, int kDV>
struct PrefillKernel : WarpgroupPrefillKernel<PrefillConfig<kDQk, kDV>, PrefillLoadRole, PrefillComputeRole> {
  static constexpr const char* kName = "sm90_fp8_prefill";
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by wgmma: 64 query rows against rows of a latent cache, which are key and
// value at once.
//
// Grid: persistent; a block computes the segments of its worker (work_list.h), 64 keys a step. Its three warpgroups:
//   load   one: a thread describes units; queries come by tensor copies or by cp.async; rows of pages by tensor
//          copies, a piece of 64 channels at a time, rows that are found by slots by cp.async. Quantized rows are
//          decoded: each of the two blocks of a cluster, which have the same lists, decodes half of a step's keys for
//          both
//   math   two: each has the scores and P of every second step, and the values of half of the channels of all steps,
//          accumulators in registers
// Shared memory: [queries][two stages of 64 rows][barriers, maxima, factors, ...]; paired_config.cuh has the numbers.
// What each role waits for, does, and arrives at, for unit u and step n:
//   load   unit_empty(u - 2) -> describe u -> unit_full(u);  q_empty(u - 1) -> queries -> q_full(u);
//          kv_empty(n - 2, half), in a cluster of both blocks -> pieces -> kv_full(n, piece)
//   math   unit_full(u), q_full(u);  for its own steps n; behind the last scores -> q_empty(u):
//          kv_full(n, piece) -> half of S(n);  p_full(n - 1) -> O += P(n - 1) V -> kv_empty(n - 1, its half);
//          kv_full(n, piece) -> S(n) -> P(n) -> p_full(n);  O += P(n) V, P in registers -> kv_empty(n, its half)
// docs/kernels/cuda_sm90_paired.md describes the kernel.
#pragma once

#include "cuda/backends/sm90/paired_decode.cuh"
#include "cuda/backends/sm90/paired_math.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config_>
struct PairedKernel {
  using Config = Config_;
  using Params = PairedArgs;
  static constexpr const char* kName = "sm90_paired";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;
  static constexpr int kCluster = Config::kCluster;

  static MLA_DEVICE void run(const Params& params) {
    ptx::wait_for_previous_grid();  // waits for the plan
    ptx::allow_next_grid();
    const cuda::Share share = params.args.list.shares[ptx::block_index_x()];
    ptx::warm_parameters<kThreads / kWarpSize>(params);
    PairedBlock<Config>(params.args).init(params.copies_boxes_of_queries);
    if (ptx::any(share.begin < share.end)) compute_all(params, share);
    // The other block may still tell this one that it has room, and its copies to that one have been read here.
    if constexpr (kCluster > 1) ptx::sync_cluster();
  }

 private:
  static MLA_DEVICE void compute_all(const Params& params, const cuda::Share& share) {
    ptx::SharedAddress to_other = 0;
    if constexpr (kCluster > 1) {
      const ptx::SharedAddress here = ptx::shared_address(ptx::shared_memory());
      to_other = ptx::map_shared(here, ptx::cluster_rank() ^ 1) - here;
    }
    const int warp = ptx::shuffle(ptx::warp(), 0);  // the compiler takes it for the same in the whole warp
    if (warp < Config::kFirstMathWarp) {
      ptx::give_registers<Config::kLoadRegisters>();
      if constexpr (Config::kQuantized)
        compute(PairedDecodeRole<Config>(params, share, to_other));
      else
        compute(PairedLoadRole<Config>(params, share));
    } else {
      ptx::take_registers<Config::kMathRegisters>();
      compute(PairedMathRole<Config>(params, to_other));
    }
  }

  template <class Role>
  static MLA_DEVICE void compute(Role role) {
    while (ptx::any(role.next_unit())) role.compute();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

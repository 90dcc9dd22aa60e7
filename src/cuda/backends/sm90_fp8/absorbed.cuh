// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by wgmma on e4m3: 64 query rows against paged or indexed rows of e4m3, which
// are operands as they lie. params.h defines the arithmetic (AttentionOptions::compute).
//
// Grid: persistent; a block computes the segments of its worker (work_list.h), 64 keys a step. Its three warpgroups:
//   load   one: describes units; issues cp.async of rows, 16 bytes at a time, to their swizzled places
//   math   two: each has the scores and P of every second step, and the values of half of the channels of all steps,
//          accumulators in registers
// Shared memory: [queries][four stages of 64 rows][P][scales of keys][scales of P][factors, maxima, barriers, ...];
// config.cuh has the numbers. What each role waits for, does, and arrives at, for unit u and step n:
//   load   unit_empty(u - 2) -> describe u -> unit_full(u);  kv_empty(n - 4) -> rows, scales -> kv_full(n)
//   math   unit_full(u) -> queries;  then, the scores of its own steps ahead of the values by up to one step:
//          scores of n: kv_full(n) -> S;  kv_empty(n - 2), max_full(n - 1) -> maxima -> max_full(n);  P -> p_full(n)
//          values of n: p_full(n) -> O += P V -> kv_empty(n)
// docs/kernels/cuda_sm90_fp8.md describes the kernel.
#pragma once

#include "cuda/backends/sm90_fp8/load.cuh"
#include "cuda/backends/sm90_fp8/math.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

template <bool kTensorScale>
struct AbsorbedKernel {
  using Config = AbsorbedConfig;
  using Params = cuda::AbsorbedArgs;
  static constexpr const char* kName = "sm90_fp8_absorbed";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;
  static constexpr int kCluster = Config::kCluster;
  static constexpr bool kStartsEarly = false;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // waits for the plan
    ptx::allow_next_grid();
    const cuda::Share share = args.list.shares[ptx::block_index_x()];
    AbsorbedBlock(args).init();
    if (share.begin >= share.end) return;
    if (ptx::warp() < Config::kFirstMathWarp) {
      ptx::give_registers<Config::kLoadRegisters>();
      compute(LoadRole<kTensorScale>(args, share));
    } else {
      ptx::take_registers<Config::kMathRegisters>();
      compute(MathRole<kTensorScale>(args));
    }
  }

 private:
  template <class Role>
  static MLA_DEVICE void compute(Role role) {
    while (role.next_unit()) role.compute();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

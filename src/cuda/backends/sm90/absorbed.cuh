// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by wgmma: 64 query rows against paged or indexed rows of a latent cache,
// which are key and value at once.
//
// Grid: persistent; a block computes the segments of its worker (work_list.h), 64 keys a step. Its four warpgroups:
//   load     one: describes units; issues cp.async of rows, 16 bytes at a time, to their swizzled places. Rows of a
//            quantized cache land elsewhere in their stage and are decoded to bf16 from there. Two blocks of a cluster
//            that compute other rows of the same segments decode half of each step's keys each, for both
//   scores   one: S = Q K^T (64 x 64 x d_qk), softmax, P rounded to 16 bits
//   values   two: O += P V (64 x 64 x d_v / 2 each), accumulators in registers
// Shared memory: [queries][two stages of 64 rows][barriers, units, ...]; absorbed_config.cuh has the numbers.
// What each role waits for, does, and arrives at, for unit u and step n:
//   load     unit_empty(u - 2) -> describe u -> unit_full(u)
//            kv_empty(n - 2, half) -> rows of that half -> kv_full(n)
//   scores   unit_full(u), kv_full(n) -> S(n) -> P(n), where the rotary channels were -> p_full(n)
//            at the end of the unit: stats_full(u)
//   values   p_full(n) -> O += P(n) V -> kv_empty(n, half)
//            at the end of the unit: stats_full(u) -> outputs
// A block of a cluster that changes rows which it copies to the other block waits for received_by_other(n) first.
// So the tensor cores have the values of step n and the scores of step n + 1 to multiply at the same time.
// docs/kernels/cuda_sm90.md describes the kernel.
#pragma once

#include "cuda/backends/sm90/absorbed_decode.cuh"
#include "cuda/backends/sm90/absorbed_scores.cuh"
#include "cuda/backends/sm90/absorbed_values.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config_>
struct AbsorbedKernel {
  using Config = Config_;
  using Params = cuda::AbsorbedArgs;
  static constexpr const char* kName = "sm90_absorbed";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;
  static constexpr int kCluster = Config::kCluster;
  static constexpr bool kStartsEarly = false;

  /// Twelve batches, six of them ragged, take 1.6 % less time in the mean than with 2 and 3 where requests have more
  /// than 64 rows (mostly in the paired kernel), 0.8 % with fewer, 1.4 % if rows are quantized: of 128 heads 32 ragged
  /// requests take 68.7 instead of 73.8 us, 64 of them 114.2 instead of 119.9 (H200, 2026-11-30).
  /// Of lists of quantized rows 48 problems take 1.1 % less time in the mean than with 2 and 2: 512 keys of 48 tokens
  /// of 64 heads 26.6 instead of 34.1 us, 64 tokens 28.9 instead of 34.0; a second pool of 128 keys, 96 tokens of 128
  /// heads, 62.2 instead of 59.3 (H200, 2026-11-30).
  static cuda::SplitCosts split_costs(const cuda::AbsorbedArgs& args, cuda::SplitCosts usual) {
    if (args.sparse()) return Config::kQuantized ? cuda::SplitCosts{.segment = 3, .split = 1} : usual;
    if (Config::kQuantized) return {.segment = 2, .split = 2};
    const bool one_block = args.num_tokens * args.num_heads.value <= int64_t{Config::kRows} * args.batch_size;
    return {.segment = one_block ? 3 : 4, .split = 2};
  }

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // waits for the plan
    ptx::allow_next_grid();
    const cuda::Share share = args.list.shares[ptx::block_index_x()];
    ptx::warm_parameters<kThreads / kWarpSize>(args);
    AbsorbedBlock<Config>(args).init();
    if (share.begin < share.end) compute_all(args, share, AbsorbedBlock<Config>::shares_keys(args));
    if constexpr (kCluster > 1) ptx::sync_cluster();  // the other block may still copy rows to this one
  }

 private:
  static MLA_DEVICE void compute_all(const Params& args, const cuda::Share& share, bool shares_keys) {
    if (ptx::warp() < Config::kFirstScoreWarp) {
      ptx::give_registers<Config::kLoadRegisters>();
      if constexpr (!Config::kQuantized)
        compute(LoadRole<Config>(args, share));
      else if (shares_keys)
        compute(DecodeRole<Config, true>(args, share));
      else
        compute(DecodeRole<Config, false>(args, share));
    } else if (ptx::warp() < Config::kFirstValueWarp) {
      ptx::give_registers<Config::kScoreRegisters>();
      compute(ScoreRole<Config>(args));
    } else {
      ptx::take_registers<Config::kValueRegisters>();
      compute(ValueRole<Config>(args));
    }
  }

  template <class Role>
  static MLA_DEVICE void compute(Role role) {
    while (role.next_unit()) role.compute();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

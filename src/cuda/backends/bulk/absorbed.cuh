// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by warps of four or five roles: 16, 32 or 64 query rows against paged or
// indexed rows of a latent cache, which are key and value at once. It needs bulk copies and 227 KB of shared memory.
//
// The grid is persistent: a block walks the segments of its worker (work_list.h) in steps of 32 keys, or of 64 keys of
// quantized caches.
//   load warps     describe units, and issue bulk copies of keys up to kStages steps ahead
//   score warps    compute S = Q K
//   softmax warps  turn S into P, rounded to 16 bits
//   value warps    compute O += P V, each for all rows and its share of the channels, in registers
//   scale warp     prepares the scales of a step's values (quantized caches only)
// Quantized rows stay in their stage as they were copied: score and value warps convert elements as they load them
// (e4m3_rows.cuh, e2m1_rows.cuh).
// Shared memory: [barriers, units][P of two steps][scores][queries][stages: the rows of a step each];
//                config.cuh has the numbers.
// Each line says what a role waits for, what it does, and on which barriers it arrives:
//   load     unit_empty(u - 2) -> unit u -> unit_full(u); kv_empty(n - stages) -> copies of n -> kv_full(n)
//   scores   unit_full(u), kv_full(n), s_empty(n - 1) -> scores n -> s_full(n)
//   softmax  s_full(n), kv_empty(n - 2) -> P n -> s_empty(n), p_full(n); at the unit's end -> stats_full(u)
//   scale    kv_full(n), kv_empty(n - 2) -> scales n -> p_full(n)
//   values   p_full(n) -> values n -> kv_empty(n); at the unit's end stats_full(u) -> outputs
// So the tensor cores work on values n and scores n + 1 at the same time, and the next unit's keys are loaded and
// scored while the outputs of the last unit are stored. docs/kernels/cuda_bulk.md has the measurements.
#pragma once

#include "cuda/backends/bulk/e2m1_scores.cuh"
#include "cuda/backends/bulk/e2m1_values.cuh"
#include "cuda/backends/bulk/e4m3_scores.cuh"
#include "cuda/backends/bulk/e4m3_values.cuh"
#include "cuda/backends/bulk/first_rows.cuh"
#include "cuda/backends/bulk/load.cuh"
#include "cuda/backends/bulk/scales.cuh"
#include "cuda/backends/bulk/scores.cuh"
#include "cuda/backends/bulk/softmax.cuh"
#include "cuda/backends/bulk/values.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config_>
struct AbsorbedKernel {
  using Config = Config_;
  using Params = cuda::AbsorbedArgs;
  static constexpr const char* kName = "bulk_absorbed";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;
  static constexpr int kCluster = 1;
  /// Says whether blocks begin before the kernel in front of them has ended. With 16 rows, bf16, this gained 0.7 us at
  /// batch 64, kv 4k, and what FirstRows gains; blocks of 64 rows, which take all registers, were 0.7 to 1.8 us slower
  /// (H200, 2026-11-22). With 32 rows 32 heads, batch 16 and 64, kv 4k, take 30.5 and 84.2 instead of 32.0 and 85.4 us
  /// (2026-12-01).
  static constexpr bool kStartsEarly = Config::kRows <= 32;

  /// With 16 rows twelve batches, six of them ragged, take 1.4 % less time in the mean than with 2 and 3: 100 requests
  /// of 2,047 keys 66.5 instead of 72.2 us, 64 ragged ones 68.8 instead of 72.9; of e4m3 0.8 % (H200, 2026-11-30). With
  /// 32 rows 100 requests of 2,047 keys take 74 us, with 5 and 2 or 2 and 2 80, and ten other batches 0 to 1 % less.
  static cuda::SplitCosts split_costs(const cuda::AbsorbedArgs& args, cuda::SplitCosts usual) {
    return Config::kRows <= 32 && !args.sparse() ? cuda::SplitCosts{.segment = 3, .split = 1} : usual;
  }

  static MLA_DEVICE void run(const Params& args) {
    if constexpr (kStartsEarly) {
      AbsorbedBlock<Config>(args).init();
      // The value warps have nothing else to do yet, so that the other roles lose no time by this.
      if (ptx::warp() >= Config::kFirstValueWarp)
        FirstRows<Config>(args).prefetch(ptx::warp() - Config::kFirstValueWarp);
    }
    ptx::wait_for_previous_grid();  // the plan
    ptx::allow_next_grid();
    const cuda::Share share = args.list.shares[ptx::block_index_x()];
    if constexpr (!kStartsEarly) AbsorbedBlock<Config>(args).init();
    if (share.begin == share.end) return;
    if (ptx::warp() < Config::kFirstScoreWarp) {
      set_registers<Config::kSoftmaxRegisters>();
      if (ptx::warp() < Config::kFirstLoadWarp) {
        compute(SoftmaxRole<Config>(args));
      } else if (ptx::warp() < Config::kFirstScaleWarp) {
        compute(LoadRole<Config>(args, share));
      } else {
        if constexpr (Config::kE2m1)
          compute(E2m1ScaleRole<Config>(args));
        else if constexpr (Config::kQuantized)
          compute(ScaleRole<Config>(args));
      }
    } else if (ptx::warp() < Config::kFirstValueWarp) {
      set_registers<Config::kScoreRegisters>();
      if constexpr (Config::kE2m1)
        compute(E2m1ScoreRole<Config>(args));
      else if constexpr (Config::kQuantized)
        compute(E4m3ScoreRole<Config>(args));
      else
        compute(ScoreRole<Config>(args));
    } else {
      set_registers<Config::kValueRegisters>();
      if constexpr (Config::kE2m1)
        compute(E2m1ValueRole<Config>(args));
      else if constexpr (Config::kQuantized)
        compute(E4m3ValueRole<Config>(args));
      else
        compute(ValueRole<Config>(args));
    }
  }

 private:
  /// Changes the number of the thread's registers from that of the launch to kRegisters.
  template <int kRegisters>
  static MLA_DEVICE void set_registers() {
    if constexpr (Config::kMovesRegisters && kRegisters < Config::kFirstRegisters) ptx::give_registers<kRegisters>();
    if constexpr (Config::kMovesRegisters && kRegisters > Config::kFirstRegisters) ptx::take_registers<kRegisters>();
  }

  template <class Role>
  static MLA_DEVICE void compute(Role role) {
    while (role.next_unit()) role.compute();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

// SPDX-License-Identifier: Apache-2.0
// Absorbed attention with warps of four or five roles: 16 or 64 query rows against paged or indexed rows of a latent
// cache, which are key and value at once. Needs bulk copies and 227 KB of shared memory.
//
// Grid: persistent; a block walks the segments of its worker (work_list.h), 32 keys a step, 64 of quantized caches.
//   fetch warps    describe units; bulk copies of keys, some steps on
//   score warps    queries x keys
//   weight warps   softmax: scores -> weights, rounded to 16 bits
//   value warps    weights x values, accumulators in registers: all rows, each warp its share of the channels
//   scale warp     of quantized caches: the scales of a step's values
// Quantized rows stay as they land: score and value warps convert codes as they load them (e4m3_rows.cuh).
// Shared memory: [barriers, units][weights of two steps][scores][queries][stages: a step's rows as they land];
//                config.cuh has the numbers.
//   fetch    unit_empty(u - 2) -> unit u -> unit_full(u); kv_empty(n - stages) -> copies of n -> kv_full(n)
//   scores   unit_full(u), kv_full(n), s_empty(n - 1) -> scores n -> s_full(n)
//   weights  s_full(n), kv_empty(n - 2) -> weights n -> s_empty(n), p_full(n); in the end stats_full(u)
//   scale    kv_full(n), kv_empty(n - 2) -> scales n -> p_full(n)
//   values   p_full(n) -> values n -> kv_empty(n); in the end stats_full(u) -> outputs
// So the tensor cores have values n and scores n + 1 to do at the same time, and the next unit's keys and scores come
// while the last one's outputs go. docs/kernels/cuda_bulk.md.
#pragma once

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
  /// Whether blocks begin while the kernel in front of them still ends. With 64 rows it costs more than it gains.
  static constexpr int kCluster = 1;
  static constexpr bool kStartsEarly = Config::kRows == 16;

  static MLA_DEVICE void run(const Params& args) {
    if constexpr (kStartsEarly) {
      AbsorbedBlock<Config>(args).init();
      // By warps that have nothing to do yet; if there is no time left before the wait, nobody loses any.
      if (ptx::warp() >= Config::kFirstValueWarp)
        FirstRows<Config>(args).prefetch(ptx::warp() - Config::kFirstValueWarp);
    }
    ptx::wait_for_previous_grid();  // the plan
    ptx::allow_next_grid();
    const cuda::Share share = args.list.shares[ptx::block_index_x()];
    if constexpr (!kStartsEarly) AbsorbedBlock<Config>(args).init();
    if (share.begin == share.end) return;
    if (ptx::warp() < Config::kFirstScoreWarp) {
      keep_registers<Config::kSoftmaxRegisters>();
      if (ptx::warp() < Config::kFirstLoadWarp) {
        compute(SoftmaxRole<Config>(args));
      } else if (ptx::warp() < Config::kFirstScaleWarp) {
        compute(LoadRole<Config>(args, share));
      } else {
        if constexpr (Config::kQuantized) compute(ScaleRole<Config>(args));
      }
    } else if (ptx::warp() < Config::kFirstValueWarp) {
      keep_registers<Config::kScoreRegisters>();
      if constexpr (Config::kQuantized)
        compute(E4m3ScoreRole<Config>(args));
      else
        compute(ScoreRole<Config>(args));
    } else {
      keep_registers<Config::kValueRegisters>();
      if constexpr (Config::kQuantized)
        compute(E4m3ValueRole<Config>(args));
      else
        compute(ValueRole<Config>(args));
    }
  }

 private:
  template <int kRegisters>
  static MLA_DEVICE void keep_registers() {
    if constexpr (Config::kMovesRegisters && kRegisters < Config::kFirstRegisters) ptx::give_registers<kRegisters>();
    if constexpr (Config::kMovesRegisters && kRegisters > Config::kFirstRegisters) ptx::take_registers<kRegisters>();
  }

  template <class Role>
  static MLA_DEVICE void compute(Role role) {
    while (role.next_unit()) role.compute();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

// SPDX-License-Identifier: Apache-2.0
// Absorbed attention for many query rows, with warps of four roles: 64 rows against paged or indexed 16-bit rows of a
// latent cache, which are key and value at once. Needs bulk copies and 227 KB of shared memory.
//
// Grid: persistent; a block walks the segments of its worker (work_list.h), 32 keys a step.
//   fetch warps (2)    bulk copies of keys, up to four steps on
//   score warps (4)    queries x keys
//   weight warps (2)   softmax: scores -> weights, rounded to 16 bits
//   value warps (8)    weights x values, accumulators in registers: all rows, each warp its share of the channels
// Shared memory: [barriers, unit][weights: 2 x 64 x 32 x 2 B][scores of both halves of the channels][queries that
//                registers do not hold][stages: 4 x 32 rows x (latent + 64) x 2 B]; specialized_config.cuh.
//   fetch    free(n - 4) -> copy n -> full(n)
//   scores   full(n), taken(n - 1) -> scores n -> scored(n)
//   weights  scored(n), free(n - 2) -> weights n -> taken(n), ready(n)
//   values   ready(n) -> values n -> free(n)
// So the tensor cores have values n and scores n + 1 to do at the same time. docs/kernels/portable.md.
#pragma once

#include "cuda/launch.h"
#include "cuda/portable/specialized_fetch.cuh"
#include "cuda/portable/specialized_scores.cuh"
#include "cuda/portable/specialized_values.cuh"
#include "cuda/portable/specialized_weights.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config_>
struct SpecializedKernel {
  using Config = Config_;
  using Params = cuda::AbsorbedArgs;
  static constexpr const char* kName = "absorbed_attention_specialized";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // the plan
    ptx::allow_next_grid();
    const cuda::WorkList& list = args.list;
    const int32_t lanes = list.header->lanes;
    const int32_t worker = ptx::block_index_x() / lanes;
    if (worker >= list.header->num_workers) return;
    SpecializedBlock<Config>(args).init(list.segment_begin[worker], list.segment_end[worker],
                                        ptx::block_index_x() - worker * lanes);
    if (ptx::warp() < Config::kFirstScoreWarp) {
      ptx::give_registers<Config::kWeightRegisters>();
      if (ptx::warp() < Config::kFirstFetchWarp)
        compute<WeightRole<Config>>(args);
      else
        compute<FetchRole<Config>>(args);
    } else if (ptx::warp() < Config::kFirstValueWarp) {
      ptx::give_registers<Config::kScoreRegisters>();
      compute<ScoreRole<Config>>(args);
    } else {
      ptx::take_registers<Config::kValueRegisters>();
      compute<ValueRole<Config>>(args);
    }
  }

 private:
  template <class Role>
  static MLA_DEVICE void compute(const Params& args) {
    Role role(args);
    while (role.next_unit()) role.compute();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

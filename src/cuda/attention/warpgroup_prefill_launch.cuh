// SPDX-License-Identifier: Apache-2.0
// This is what kernels of up-projected prefill by wgmma have in common beside their roles: how a block takes these, and
// the host side. Their workspace is one counter, of the units that blocks have taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "cuda/attention/prefill_launch.h"
#include "cuda/attention/warpgroup_prefill.cuh"
#include "cuda/border/launch.h"
#include "cuda/border/operations.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Clears the counter of units. The plan launches it, and afterwards every launch of the kernel leaves the counter at
/// 0.
struct WarpgroupPrefillPlanKernel {
  using Params = uint32_t*;
  static constexpr const char* kName = "warpgroup_prefill_plan";
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& next_unit) {
    if (ptx::thread_index() == 0) *next_unit = 0;
  }
};

/// Is the kernel of a block whose first warpgroup loads and whose others compute. Kernels add their names.
template <class Config_, template <class> class LoadRole, template <class> class ComputeRole>
struct WarpgroupPrefillKernel {
  using Config = Config_;
  using Params = WarpgroupPrefillParams;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& params) {
    LoadRole<Config>(params).init();
    const int group = ptx::shuffle(ptx::warp(), 0) * kWarpSize / Config::kGroupThreads;
    if (group == 0) {
      ptx::give_registers<Config::kLoadRegisters>();
      LoadRole<Config>(params).run();
    } else {
      ptx::take_registers<Config::kComputeRegisters>();
      ComputeRole<Config>(params, group - 1).run();
    }
  }
};

/// Describes k or v, whose elements a tensor map counts in units of 16 bits. With one head its stride may be anything.
inline cuda::RowTensor prefill_rows(const core::PrefillArgs& args, const void* base, int64_t channels,
                                    int64_t stride_token, int64_t stride_head, int32_t box_rows) {
  const auto size = static_cast<int64_t>(size_of(args.dtype));
  return {.base = base,
          .channels = channels * size / 2,
          .rows = args.num_keys,
          .heads = args.num_heads,
          .row_stride = stride_token * size,
          .head_stride = (args.num_heads == 1 ? stride_token : stride_head) * size,
          .box_rows = box_rows};
}

/// Runs a kernel, whose lanes store `lane_elements` of o together.
template <class Kernel>
Status run_warpgroup_prefill(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace,
                             int64_t lane_elements) {
  using Config = typename Kernel::Config;
  const auto num_slots = static_cast<uint32_t>(num_query_blocks(args.num_tokens, args.batch_size, Config::kRows));
  const uint32_t num_units = num_slots * static_cast<uint32_t>(args.num_heads);
  const auto num_blocks = std::min(num_units, static_cast<uint32_t>(queue.device().num_sms));
  WarpgroupPrefillParams params = {.args = args,
                                   .num_slots = num_slots,
                                   .num_units = num_units,
                                   .heads_together = 1U << heads_log2(args, queue.device()),
                                   .next_unit = reinterpret_cast<uint32_t*>(workspace.data()),
                                   .by_boxes = false,
                                   .rows_aligned = inputs_are_aligned(args),
                                   .o_lane_aligned = outputs_are_aligned(args, lane_elements),
                                   .o_rows_aligned = outputs_are_aligned(args, 8),
                                   .k_map = {},
                                   .v_map = {}};
  params.by_boxes = queue.make_tensor_map(prefill_rows(args, args.k, Config::kDQk, args.k_stride_token,
                                                       args.k_stride_head, Config::kKeys),
                                          params.k_map) &&
                    queue.make_tensor_map(
                        prefill_rows(args, args.v, Config::kDV, args.v_stride_token, args.v_stride_head, Config::kKeys),
                        params.v_map);
  return launch<Kernel>(queue, {.grid_x = static_cast<int32_t>(num_blocks), .shared_bytes = Config::kSharedBytes},
                        params);
}

inline bool is_empty(const core::PrefillArgs& args) {
  return args.num_tokens == 0 || args.num_heads == 0 || args.batch_size == 0;
}

/// Returns the operation, of which kRun(args, queue, workspace) chooses the kernel where there is anything to do.
template <Status (*kRun)(const core::PrefillArgs&, cuda::Queue&, std::span<std::byte>)>
cuda::PlannedOperation<core::PrefillArgs> warpgroup_prefill() {
  return {.workspace_size = [](const core::PrefillArgs& args,
                               const cuda::DeviceProperties&) { return is_empty(args) ? size_t{0} : sizeof(uint32_t); },
          .plan = [](const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) -> Status {
            if (is_empty(args)) return {};
            return launch<WarpgroupPrefillPlanKernel>(queue, {}, reinterpret_cast<uint32_t*>(workspace.data()));
          },
          .run = [](const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) -> Status {
            return is_empty(args) ? Status() : kRun(args, queue, workspace);
          }};
}

}  // namespace mla::MLA_CUDA_NAMESPACE

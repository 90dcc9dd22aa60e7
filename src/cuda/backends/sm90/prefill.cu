// SPDX-License-Identifier: Apache-2.0
// The host side of prefill by wgmma chooses the kernel and its grid.
#include "cuda/backends/sm90/prefill.cuh"

#include <algorithm>
#include <cstdint>

#include "cuda/attention/prefill_launch.h"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

// This tiling reached 647 TFLOP/s for causal 192/128, 128 heads, 8k tokens (H200, 2026-11-21). On the same day four and
// eight steps of Q in registers gave 608 and 597, no turns 521, and tiles of 64 keys in four stages 469.
constexpr PrefillTiling kTiling = {.keys = 128, .stages = 2, .q_steps = 0, .takes_turns = true};

/// Describes k or v. With one head its stride may be anything.
cuda::RowTensor row_tensor(const core::PrefillArgs& args, const void* base, int64_t channels, int64_t stride_token,
                           int64_t stride_head) {
  const auto size = static_cast<int64_t>(size_of(args.dtype));
  return {.base = base,
          .channels = channels,
          .rows = args.num_keys,
          .heads = args.num_heads,
          .row_stride = stride_token * size,
          .head_stride = (args.num_heads == 1 ? stride_token : stride_head) * size,
          .box_rows = kTiling.keys};
}

template <DType kType, int kDQk>
Status run_of(const core::PrefillArgs& args, cuda::Queue& queue, uint32_t* next_unit) {
  using Kernel = PrefillKernel<kType, kDQk, 128, kTiling>;
  using Config = typename Kernel::Config;
  const auto num_slots = static_cast<uint32_t>(num_query_blocks(args.num_tokens, args.batch_size, Config::kRows));
  const uint32_t num_units = num_slots * static_cast<uint32_t>(args.num_heads);
  const auto num_blocks = std::min(num_units, static_cast<uint32_t>(queue.device().num_sms));
  PrefillParams params = {.args = args,
                          .num_slots = num_slots,
                          .num_units = num_units,
                          .next_unit = next_unit,
                          .by_boxes = false,
                          .rows_aligned = inputs_are_aligned(args),
                          .o_pairs_aligned = outputs_are_aligned(args, 2),
                          .o_rows_aligned = outputs_are_aligned(args, 8),
                          .k_map = {},
                          .v_map = {}};
  params.by_boxes =
      queue.make_tensor_map(row_tensor(args, args.k, kDQk, args.k_stride_token, args.k_stride_head), params.k_map) &&
      queue.make_tensor_map(row_tensor(args, args.v, Config::kDV, args.v_stride_token, args.v_stride_head),
                            params.v_map);
  return launch<Kernel>(queue, {.grid_x = static_cast<int32_t>(num_blocks), .shared_bytes = Config::kSharedBytes},
                        params);
}

template <DType kType>
Status run_type(const core::PrefillArgs& args, cuda::Queue& queue, uint32_t* next_unit) {
  return args.d_qk == 192 ? run_of<kType, 192>(args, queue, next_unit) : run_of<kType, 128>(args, queue, next_unit);
}

bool empty(const core::PrefillArgs& args) {
  return args.num_tokens == 0 || args.num_heads == 0 || args.batch_size == 0;
}

/// The workspace is one counter, of the units that blocks have taken.
size_t workspace_size(const core::PrefillArgs& args, const cuda::DeviceProperties&) {
  return empty(args) ? 0 : sizeof(uint32_t);
}

Status plan(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  if (empty(args)) return {};
  return launch<PrefillPlanKernel>(queue, {}, reinterpret_cast<uint32_t*>(workspace.data()));
}

/// Computes d_qk of 192 or 128 with d_v of 128, in bf16 and f16; the backend's refusal keeps all else away.
Status run(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  if (empty(args)) return {};
  auto* next_unit = reinterpret_cast<uint32_t*>(workspace.data());
  return args.dtype == DType::kBF16 ? run_type<DType::kBF16>(args, queue, next_unit)
                                    : run_type<DType::kF16>(args, queue, next_unit);
}

}  // namespace

cuda::PlannedOperation<core::PrefillArgs> prefill() {
  return {.workspace_size = workspace_size, .plan = plan, .run = run};
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

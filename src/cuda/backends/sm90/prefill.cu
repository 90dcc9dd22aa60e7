// SPDX-License-Identifier: Apache-2.0
// The host side of prefill by wgmma chooses the kernel.
#include "cuda/backends/sm90/prefill.cuh"

#include <cstdint>

#include "cuda/attention/warpgroup_prefill_launch.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

// This tiling reached 647 TFLOP/s for causal 192/128, 128 heads, 8k tokens (H200, 2026-11-21). On the same day four and
// eight steps of Q in registers gave 608 and 597, no turns 521, and tiles of 64 keys in four stages 469.
constexpr PrefillTiling kTiling = {.keys = 128, .stages = 2, .q_steps = 0, .takes_turns = true};

template <DType kType, int kDQk>
Status run_of(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return run_warpgroup_prefill<PrefillKernel<kType, kDQk, 128, kTiling>>(args, queue, workspace, 2);
}

template <DType kType>
Status run_type(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return args.d_qk == 192 ? run_of<kType, 192>(args, queue, workspace) : run_of<kType, 128>(args, queue, workspace);
}

/// Computes d_qk of 192 or 128 with d_v of 128, in bf16 and f16; the backend's refusal keeps all else away.
Status run(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return args.dtype == DType::kBF16 ? run_type<DType::kBF16>(args, queue, workspace)
                                    : run_type<DType::kF16>(args, queue, workspace);
}

}  // namespace

cuda::PlannedOperation<core::PrefillArgs> prefill() { return warpgroup_prefill<run>(); }

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

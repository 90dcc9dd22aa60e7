// SPDX-License-Identifier: Apache-2.0
// The host side of prefill by wgmma chooses the kernel.
#include "cuda/backends/sm90/prefill.cuh"

#include <cstdint>

#include "cuda/attention/warpgroup_prefill_launch.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

/// Returns the tiling of head dims: what fits shared memory, and what fits registers beside outputs of d_v. With 256
/// outputs a loop for whole tiles spills what lies around it. docs/kernels/cuda_sm90_prefill.md has other tilings.
constexpr PrefillTiling tiling_of(int d_qk, int d_v) {
  if (d_v == 256) return {.keys = 64, .stages = 2, .q_steps = 0, .takes_turns = true, .whole_loop = false};
  if (d_qk == 256) return {.keys = 64, .stages = 3, .q_steps = 8, .takes_turns = true, .whole_loop = true};
  return {.keys = 128, .stages = 2, .q_steps = 4, .takes_turns = true, .whole_loop = true};
}

template <DType kType, int kDQk, int kDV>
Status run_widths(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  constexpr int64_t kLaneElements = 2;
  return run_warpgroup_prefill<PrefillKernel<kType, kDQk, kDV, tiling_of(kDQk, kDV)>>(args, queue, workspace,
                                                                                      kLaneElements);
}

template <DType kType>
Status run_type(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  if (args.d_v == 256) return run_widths<kType, 256, 256>(args, queue, workspace);
  switch (args.d_qk) {
    case 128: return run_widths<kType, 128, 128>(args, queue, workspace);
    case 192: return run_widths<kType, 192, 128>(args, queue, workspace);
    default: return run_widths<kType, 256, 128>(args, queue, workspace);
  }
}

/// Computes bf16 and f16; the backend's refusal keeps other types and head dims away.
Status run(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return args.dtype == DType::kBF16 ? run_type<DType::kBF16>(args, queue, workspace)
                                    : run_type<DType::kF16>(args, queue, workspace);
}

}  // namespace

cuda::PlannedOperation<core::PrefillArgs> prefill() { return warpgroup_prefill<run>(); }

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

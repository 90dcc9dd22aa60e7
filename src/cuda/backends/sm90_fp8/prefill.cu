// SPDX-License-Identifier: Apache-2.0
// The host side of prefill chooses the kernel.
#include "cuda/backends/sm90_fp8/prefill.cuh"

#include "cuda/attention/warpgroup_prefill_launch.cuh"
#include "cuda/backends/sm90_fp8/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {
namespace {

template <int kDQk, int kDV>
Status run_widths(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  constexpr int64_t kLaneElements = 4;
  return run_warpgroup_prefill<PrefillKernel<kDQk, kDV>>(args, queue, workspace, kLaneElements);
}

/// Computes the head dims that the backend's refusal lets through.
Status run(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  if (args.d_v == 256) return run_widths<256, 256>(args, queue, workspace);
  switch (args.d_qk) {
    case 128: return run_widths<128, 128>(args, queue, workspace);
    case 192: return run_widths<192, 128>(args, queue, workspace);
    default: return run_widths<256, 128>(args, queue, workspace);
  }
}

}  // namespace

cuda::PlannedOperation<core::PrefillArgs> prefill() { return warpgroup_prefill<run>(); }

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

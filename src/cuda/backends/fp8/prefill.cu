// SPDX-License-Identifier: Apache-2.0
// The host side of prefill chooses the kernel and its grid.
#include "cuda/backends/fp8/prefill.cuh"

#include "cuda/attention/prefill_launch.h"
#include "cuda/backends/fp8/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {
namespace {

/// Chooses the tiling, so that two or three blocks share an SM. docs/kernels/cuda_fp8_prefill.md has the arithmetic.
constexpr PrefillTiling tiling_of(int d_qk, int d_v) {
  if (d_v == 256) return {.row_tiles = 1, .q_segments = 2, .keys = 32, .stages = 2, .min_blocks = 2};
  if (d_qk == 128) return {.row_tiles = 2, .q_segments = 1, .keys = 64, .stages = 2, .min_blocks = 2};
  return {.row_tiles = 2, .q_segments = 1, .keys = 32, .stages = 2, .min_blocks = 2};
}

template <int kDQk, int kDV>
Status run_widths(const core::PrefillArgs& args, cuda::Queue& queue) {
  using Kernel = PrefillKernel<kDQk, kDV, tiling_of(kDQk, kDV)>;
  const PrefillParams params = prefill_params(args, queue.device(), 4);
  return launch<Kernel>(queue, prefill_shape(params, Kernel::kRows, Kernel::kSharedBytes), params);
}

size_t workspace_size(const core::PrefillArgs&, const cuda::DeviceProperties&) { return 0; }

/// There is nothing to plan: one block computes all keys of a row, in ascending order.
Status plan(const core::PrefillArgs&, cuda::Queue&, std::span<std::byte>) { return {}; }

/// Computes the head dims that the backend's refusal lets through.
Status run(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte>) {
  if (args.num_tokens == 0 || args.num_heads == 0 || args.batch_size == 0) return {};
  if (args.d_v == 256) return run_widths<256, 256>(args, queue);
  switch (args.d_qk) {
    case 128: return run_widths<128, 128>(args, queue);
    case 192: return run_widths<192, 128>(args, queue);
    default: return run_widths<256, 128>(args, queue);
  }
}

}  // namespace

cuda::PlannedOperation<core::PrefillArgs> prefill() {
  return {.workspace_size = workspace_size, .plan = plan, .run = run};
}

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

// SPDX-License-Identifier: Apache-2.0
// The host side of prefill chooses the kernel and its grid.
#include "cuda/backends/portable/prefill.cuh"

#include <cstdint>

#include "cuda/attention/prefill_launch.h"
#include "cuda/backends/portable/operations.h"
#include "cuda/backends/portable/prefill_any.cuh"

namespace mla::MLA_CUDA_NAMESPACE::portable {
namespace {

/// Chooses the tiling by the shared memory of a block. docs/kernels/cuda_portable_prefill.md has the arithmetic, and
/// the figures of these and other tilings on an H200, where those for 163 and 99 KB were timed with as many blocks an
/// SM as their own machines have.
constexpr PrefillTiling tiling_of(int d_qk, int d_v) {
  constexpr bool kLarge = kSharedBytesPerBlock >= 163 * 1024, kHuge = kSharedBytesPerBlock >= 227 * 1024;
  if (d_v == 256) {
    if (kLarge) return {.groups = 1, .warps = 4, .row_tiles = 1, .keys = 64, .q_steps = 8, .min_blocks = 2};
    return {.groups = 2, .warps = 4, .row_tiles = 1, .keys = 48, .q_steps = 16, .min_blocks = 1};
  }
  if (kHuge || (kLarge && d_qk == 128))
    return {.groups = 1, .warps = 4, .row_tiles = 2, .keys = 64, .q_steps = 1, .min_blocks = 2};
  if (d_qk == 256) return {.groups = 2, .warps = 4, .row_tiles = 1, .keys = 64, .q_steps = 16, .min_blocks = 1};
  if (kLarge) return {.groups = 1, .warps = 4, .row_tiles = 2, .keys = 48, .q_steps = 0, .min_blocks = 2};
  if (d_qk == 128) return {.groups = 2, .warps = 4, .row_tiles = 2, .keys = 64, .q_steps = 0, .min_blocks = 1};
  return {.groups = 2, .warps = 4, .row_tiles = 2, .keys = 48, .q_steps = 4, .min_blocks = 1};
}

template <DType kType, int kDQk, int kDV>
Status run_tensor_cores(const core::PrefillArgs& args, cuda::Queue& queue) {
  using Kernel = PrefillKernel<kType, kDQk, kDV, tiling_of(kDQk, kDV)>;
  const PrefillParams params = prefill_params(args, queue.device(), 2);
  return launch<Kernel>(queue, prefill_shape(params, Kernel::kRows, Kernel::kSharedBytes), params);
}

template <DType kType>
Status run_any(const core::PrefillArgs& args, cuda::Queue& queue) {
  using Kernel = PrefillAnyKernel<kType>;
  const auto num_blocks = static_cast<int>((args.num_tokens + Kernel::kWarps - 1) / Kernel::kWarps);
  return launch<Kernel>(queue, shape_for_heads(num_blocks, args.num_heads, 0), args);
}

template <DType kType>
Status run_16bit(const core::PrefillArgs& args, cuda::Queue& queue) {
  if (args.d_v == 128 && args.d_qk == 192) return run_tensor_cores<kType, 192, 128>(args, queue);
  if (args.d_v == 128 && args.d_qk == 128) return run_tensor_cores<kType, 128, 128>(args, queue);
  if (args.d_v == 256 && args.d_qk == 256) return run_tensor_cores<kType, 256, 256>(args, queue);
  if (args.d_v == 128 && args.d_qk == 256) return run_tensor_cores<kType, 256, 128>(args, queue);
  return run_any<kType>(args, queue);
}

size_t workspace_size(const core::PrefillArgs&, const cuda::DeviceProperties&) { return 0; }

/// There is nothing to plan: one block computes all keys of a row, in ascending order.
Status plan(const core::PrefillArgs&, cuda::Queue&, std::span<std::byte>) { return {}; }

Status run(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte>) {
  if (args.num_tokens == 0 || args.num_heads == 0 || args.batch_size == 0) return {};
  switch (args.dtype) {
    case DType::kBF16: return run_16bit<DType::kBF16>(args, queue);
    case DType::kF16: return run_16bit<DType::kF16>(args, queue);
    case DType::kE4M3: return run_any<DType::kE4M3>(args, queue);
    default: return run_any<DType::kF32>(args, queue);
  }
}

}  // namespace

cuda::PlannedOperation<core::PrefillArgs> prefill() {
  return {.workspace_size = workspace_size, .plan = plan, .run = run};
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

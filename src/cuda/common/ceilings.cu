// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/ceilings.cuh"

#include <type_traits>

#include "cuda/common/ceilings.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

Status run_read(const std::byte* data, size_t bytes, uint32_t* sink, cuda::Queue& queue) {
  const cuda::LaunchShape shape{.grid_x = queue.device().num_sms * ReadCeilingKernel::kMinBlocks * 2};
  return launch<ReadCeilingKernel>(queue, shape,
                                   {.data = reinterpret_cast<const ptx::Vec4*>(data),
                                    .count = static_cast<int64_t>(bytes / sizeof(ptx::Vec4)),
                                    .sink = sink});
}

Status run_copy(std::byte* to, const std::byte* from, size_t bytes, cuda::Queue& queue) {
  const cuda::LaunchShape shape{.grid_x = queue.device().num_sms * CopyCeilingKernel::kMinBlocks * 2};
  return launch<CopyCeilingKernel>(queue, shape,
                                   {.to = reinterpret_cast<ptx::Vec4*>(to),
                                    .from = reinterpret_cast<const ptx::Vec4*>(from),
                                    .count = static_cast<int64_t>(bytes / sizeof(ptx::Vec4))});
}

// These are templates, so that only architectures with an instruction compile its kernel.
template <class Kernel>
Status run_mma(int32_t rounds, uint32_t* sink, cuda::Queue& queue) {
  const cuda::LaunchShape shape{.grid_x = queue.device().num_sms * Kernel::kMinBlocks};
  return launch<Kernel>(queue, shape, {.rounds = rounds, .sink = sink});
}

template <class Kernel>
double mma_flops(int32_t rounds, const cuda::DeviceProperties& device) {
  const int32_t warps = device.num_sms * Kernel::kMinBlocks * (Kernel::kThreads / kWarpSize);
  return static_cast<double>(warps) * rounds * Kernel::kChains * Kernel::kFlops;
}

template <class Kernel>
Status run_wgmma(int32_t rounds, uint32_t* sink, cuda::Queue& queue) {
  const cuda::LaunchShape shape{.grid_x = queue.device().num_sms, .shared_bytes = Kernel::kSharedBytes};
  return launch<Kernel>(queue, shape, {.rounds = rounds, .sink = sink});
}

template <class Kernel>
double wgmma_flops(int32_t rounds, const cuda::DeviceProperties& device) {
  const int32_t warpgroups = device.num_sms * (Kernel::kThreads / Kernel::kWarpgroup);
  return static_cast<double>(warpgroups) * rounds * Kernel::kGroup * Kernel::kFlops;
}

/// Adds the mma.sync kernel on e4m3 to the table. `Mma` is a MmaOfE4M3, or void where there is none.
template <class Mma>
void add_e4m3(cuda::CeilingKernels& kernels) {
  if constexpr (!std::is_void_v<Mma>) {
    kernels.mma_e4m3 = run_mma<MmaCeilingKernel<Mma>>;
    kernels.mma_e4m3_flops = mma_flops<MmaCeilingKernel<Mma>>;
  }
}

/// Adds the wgmma kernel to the table. `Kernel` is a WgmmaCeilingKernel, or void where there is none.
template <class Kernel>
void add_wgmma(cuda::CeilingKernels& kernels) {
  if constexpr (!std::is_void_v<Kernel>) {
    kernels.wgmma_bf16 = run_wgmma<Kernel>;
    kernels.wgmma_bf16_flops = wgmma_flops<Kernel>;
  }
}

}  // namespace

const cuda::CeilingKernels& ceiling_kernels() {
  static const cuda::CeilingKernels kernels = [] {
    cuda::CeilingKernels all = {.arch = kArch,
                                .read = run_read,
                                .copy = run_copy,
                                .mma_bf16 = run_mma<MmaCeilingKernel<MmaOfBf16>>,
                                .mma_bf16_flops = mma_flops<MmaCeilingKernel<MmaOfBf16>>,
                                .mma_e4m3 = nullptr,
                                .mma_e4m3_flops = nullptr,
                                .wgmma_bf16 = nullptr,
                                .wgmma_bf16_flops = nullptr};
    add_e4m3<std::conditional_t<kHasE4M3, MmaOfE4M3<>, void>>(all);
    add_wgmma<std::conditional_t<kHasWgmma, WgmmaCeilingKernel<>, void>>(all);
    return all;
  }();
  return kernels;
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/ceilings.cuh"

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

int32_t mma_blocks(const cuda::DeviceProperties& device) { return device.num_sms * MmaCeilingKernel::kMinBlocks; }

Status run_mma(int32_t rounds, uint32_t* sink, cuda::Queue& queue) {
  const cuda::LaunchShape shape{.grid_x = mma_blocks(queue.device())};
  return launch<MmaCeilingKernel>(queue, shape, {.rounds = rounds, .sink = sink});
}

double mma_flops(int32_t rounds, const cuda::DeviceProperties& device) {
  const int32_t warps = mma_blocks(device) * (MmaCeilingKernel::kThreads / kWarpSize);
  return static_cast<double>(warps) * rounds * MmaCeilingKernel::kChains * MmaCeilingKernel::kFlops;
}

#if MLA_CUDA_ARCH == 90
Status run_wgmma(int32_t rounds, uint32_t* sink, cuda::Queue& queue) {
  const cuda::LaunchShape shape{.grid_x = queue.device().num_sms, .shared_bytes = WgmmaCeilingKernel::kSharedBytes};
  return launch<WgmmaCeilingKernel>(queue, shape, {.rounds = rounds, .sink = sink});
}

double wgmma_flops(int32_t rounds, const cuda::DeviceProperties& device) {
  const int32_t warpgroups = device.num_sms * (WgmmaCeilingKernel::kThreads / WgmmaCeilingKernel::kWarpgroup);
  return static_cast<double>(warpgroups) * rounds * WgmmaCeilingKernel::kGroup * WgmmaCeilingKernel::kFlops;
}
#endif

}  // namespace

const cuda::CeilingKernels& ceiling_kernels() {
  static const cuda::CeilingKernels kernels = {
    .arch = kArch,
    .read = run_read,
    .copy = run_copy,
    .mma_bf16 = run_mma,
    .mma_bf16_flops = mma_flops,
#if MLA_CUDA_ARCH == 90
    .wgmma_bf16 = run_wgmma,
    .wgmma_bf16_flops = wgmma_flops,
#else
    .wgmma_bf16 = nullptr,
    .wgmma_bf16_flops = nullptr,
#endif
  };
  return kernels;
}

}  // namespace mla::MLA_CUDA_NAMESPACE

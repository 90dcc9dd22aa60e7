// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/device_runtime.h"

#include <utility>

#include "core/format.h"

namespace mla::cuda {

DeviceRuntime::DeviceRuntime(std::string name, GpuInfo info, Code code)
    : name_(std::move(name)),
      info_(std::move(info)),
      properties_{.arch = info_.arch,
                  .num_sms = info_.num_sms,
                  .shared_bytes_per_block = info_.shared_bytes_per_block,
                  .l2_bytes = info_.l2_bytes},
      code_(code) {}

Status check_launch(const KernelEntry& kernel, const LaunchShape& shape, const DeviceProperties& device) {
  constexpr int32_t kMostThreads = 1024, kMostBlocksInYOrZ = 65535, kMostParamBytes = 4096;
  const auto refused = [&](const char* what, int64_t most, int64_t given) {
    return Status(StatusCode::kInternal, core::format("kernel {}: {}: expected at most {} on sm{}, got {}", kernel.name,
                                                      what, most, device.arch, given));
  };
  if (kernel.threads > kMostThreads) return refused("threads of a block", kMostThreads, kernel.threads);
  if (kernel.params_bytes > kMostParamBytes)
    return refused("bytes of parameters", kMostParamBytes, kernel.params_bytes);
  if (shape.shared_bytes > device.shared_bytes_per_block)
    return refused("bytes of shared memory", device.shared_bytes_per_block, shape.shared_bytes);
  if (shape.cluster < 1 || shape.grid_x % shape.cluster != 0 || (shape.cluster > 1 && device.arch < 90))
    return {StatusCode::kInternal,
            core::format("kernel {}: blocks of a cluster: expected a divisor of {}, 1 below sm90, got {} on sm{}",
                         kernel.name, shape.grid_x, shape.cluster, device.arch)};
  for (const int32_t blocks : {shape.grid_y, shape.grid_z})
    if (blocks > kMostBlocksInYOrZ) return refused("blocks in y or z", kMostBlocksInYOrZ, blocks);
  return {};
}

}  // namespace mla::cuda

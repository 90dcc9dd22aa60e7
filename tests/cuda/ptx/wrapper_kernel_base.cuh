// SPDX-License-Identifier: Apache-2.0
// Holds what the wrappers' kernels share.
#pragma once

#include "cuda/border/launch.h"
#include "cuda/ptx/wrapper_kernels.h"

namespace mla::MLA_CUDA_NAMESPACE {

template <int kNumThreads, int kNumBlocks = 1, int kNumSharedBytes = 0, bool kOverlaps = false>
struct WrapperKernelBase {
  using Params = cuda::WrapperParams;
  static constexpr const char* kName = "wrapper";
  static constexpr int kThreads = kNumThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr cuda::LaunchShape kShape{
      .grid_x = kNumBlocks, .shared_bytes = kNumSharedBytes, .overlaps_previous = kOverlaps};
};

}  // namespace mla::MLA_CUDA_NAMESPACE

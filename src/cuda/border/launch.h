// SPDX-License-Identifier: Apache-2.0
// This file is the glue between a kernel and the queue. A kernel is a class:
//   struct AppendKernel {
//     using Params = core::AppendArgs;            // passed by value, trivially copyable, at most 4 KB
//     static constexpr const char* kName = "append";
//     static constexpr int kThreads = 256;        // threads of a block
//     static constexpr int kMinBlocks = 1;        // blocks per SM that registers must suffice for
//     static MLA_DEVICE void run(const Params& params);
//   };
#pragma once

#include "cuda/border/queue.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

#if MLA_EMULATED
template <class Kernel>
void kernel_entry(const void* params) {
  Kernel::run(*static_cast<const typename Kernel::Params*>(params));
}
#else
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocks)
    kernel_entry(const __grid_constant__ typename Kernel::Params params) {
  Kernel::run(params);
}
#endif

template <class Kernel>
Status launch(cuda::Queue& queue, const cuda::LaunchShape& shape, const typename Kernel::Params& params) {
  static_assert(sizeof(params) <= 4096);
  return queue.launch({Kernel::kName, reinterpret_cast<const void*>(&kernel_entry<Kernel>), Kernel::kThreads,
                       static_cast<int32_t>(sizeof(params))},
                      shape, &params);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

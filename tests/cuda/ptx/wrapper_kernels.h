// SPDX-License-Identifier: Apache-2.0
// Declares kernels that call every wrapper of src/cuda/ptx, compiled for every architecture and machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/border/queue.h"
#include "mla/status.h"

namespace mla::cuda {

/// Holds what a kernel reads and writes, both in the device's memory and aligned to 256 bytes. The expect_... function
/// that wrapper_cases.cpp names for the kernel says what lies there.
struct WrapperParams {
  const uint32_t* in;
  uint32_t* out;
};

struct WrapperKernel {
  const char* name;
  Status (*launch)(Queue& queue, const WrapperParams& params);
};

}  // namespace mla::cuda

// The table of each build, in namespace mla::MLA_CUDA_NAMESPACE.
#define MLA_DECLARE_WRAPPER_KERNELS(space)                \
  namespace mla::space {                                  \
  std::span<const cuda::WrapperKernel> wrapper_kernels(); \
  }

// X(columns, element type, its name in constants) of every size of wgmma.
#define MLA_FOR_EVERY_WGMMA(X) \
  X(64, bf16, Bf16), X(128, bf16, Bf16), X(256, bf16, Bf16), X(64, f16, F16), X(128, f16, F16), X(256, f16, F16)

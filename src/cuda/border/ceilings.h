// SPDX-License-Identifier: Apache-2.0
// What a GPU can do at best, as kernels to be timed: reading, copying, and multiplying in registers. One table per
// architecture, beside that of its operations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/border/queue.h"

namespace mla::cuda {

struct CeilingKernels {
  int32_t arch;
  /// Reads [data, data + bytes), bytes a multiple of 16, once. `sink` is 4 bytes that are never written, which the
  /// compiler does not know.
  Status (*read)(const std::byte* data, size_t bytes, uint32_t* sink, Queue& queue);
  /// Copies bytes, a multiple of 16, that do not overlap.
  Status (*copy)(std::byte* to, const std::byte* from, size_t bytes, Queue& queue);
  /// Enough warps to fill the GPU, `rounds` times their independent chains of mma.sync.m16n8k16 on bf16.
  Status (*mma_bf16)(int32_t rounds, uint32_t* sink, Queue& queue);
  /// The floating-point operations of one call of mma_bf16.
  double (*mma_bf16_flops)(int32_t rounds, const DeviceProperties& device);
  /// The same of wgmma.mma_async.m64n256k16; null where the architecture has none.
  Status (*wgmma_bf16)(int32_t rounds, uint32_t* sink, Queue& queue);
  double (*wgmma_bf16_flops)(int32_t rounds, const DeviceProperties& device);
};

}  // namespace mla::cuda

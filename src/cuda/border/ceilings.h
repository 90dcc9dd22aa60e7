// SPDX-License-Identifier: Apache-2.0
// These are kernels that are timed to learn what a GPU can do at best: read, copy, and multiply in registers. Each
// architecture has one table of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/border/queue.h"

namespace mla::cuda {

struct CeilingKernels {
  int32_t arch;
  /// Reads [data, data + bytes) once; `bytes` is a multiple of 16. `sink` is 4 bytes that are never written, but the
  /// compiler cannot know that.
  Status (*read)(const std::byte* data, size_t bytes, uint32_t* sink, Queue& queue);
  /// Copies `bytes` bytes, a multiple of 16, between ranges that do not overlap.
  Status (*copy)(std::byte* to, const std::byte* from, size_t bytes, Queue& queue);
  /// Runs enough warps to fill the GPU; each repeats its independent chains of mma.sync.m16n8k16 on bf16 `rounds`
  /// times.
  Status (*mma_bf16)(int32_t rounds, uint32_t* sink, Queue& queue);
  /// Returns the floating-point operations of one call of mma_bf16.
  double (*mma_bf16_flops)(int32_t rounds, const DeviceProperties& device);
  /// Do the same with mma.sync.m16n8k32 on e4m3; null where the architecture has none, below SM89. On SM90 and SM100
  /// ptxas makes of each such product conversions to f16 and products of f16.
  Status (*mma_e4m3)(int32_t rounds, uint32_t* sink, Queue& queue);
  double (*mma_e4m3_flops)(int32_t rounds, const DeviceProperties& device);
  /// Do the same as mma_bf16 with wgmma.mma_async.m64n256k16; null where the architecture has none.
  Status (*wgmma_bf16)(int32_t rounds, uint32_t* sink, Queue& queue);
  double (*wgmma_bf16_flops)(int32_t rounds, const DeviceProperties& device);
};

}  // namespace mla::cuda

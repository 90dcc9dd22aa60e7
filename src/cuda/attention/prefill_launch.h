// SPDX-License-Identifier: Apache-2.0
// This is the host side that kernels of up-projected prefill have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/tile/query_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns whether every row of a tensor begins at a multiple of so many bytes in memory.
inline bool begins_at_multiples(int64_t bytes, DType dtype, const void* base, int64_t stride_token,
                                int64_t stride_head) {
  const auto size = static_cast<int64_t>(size_of(dtype));
  return reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(bytes) == 0 && stride_token * size % bytes == 0 &&
         stride_head * size % bytes == 0;
}

/// Returns whether rows of q, k and v may be copied 16 bytes at a time.
inline bool inputs_are_aligned(const core::PrefillArgs& args) {
  return begins_at_multiples(16, args.dtype, args.q, args.q_stride_token, args.q_stride_head) &&
         begins_at_multiples(16, args.dtype, args.k, args.k_stride_token, args.k_stride_head) &&
         begins_at_multiples(16, args.dtype, args.v, args.v_stride_token, args.v_stride_head);
}

/// Returns whether n neighbouring elements of an output row may be stored together, where n divides the first one's
/// number.
inline bool outputs_are_aligned(const core::PrefillArgs& args, int64_t n) {
  return begins_at_multiples(n * static_cast<int64_t>(size_of(args.o_dtype)), args.o_dtype, args.o, args.o_stride_token,
                             args.o_stride_head);
}

/// Returns a grid of so many blocks for each head.
inline cuda::LaunchShape shape_for_heads(int num_blocks, int num_heads, int shared_bytes) {
  return {.grid_x = num_blocks,
          .grid_y = std::min(num_heads, kMaxGridY),
          .grid_z = (num_heads + kMaxGridY - 1) / kMaxGridY,
          .shared_bytes = shared_bytes};
}

}  // namespace mla::MLA_CUDA_NAMESPACE

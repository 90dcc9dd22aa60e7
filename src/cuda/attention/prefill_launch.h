// SPDX-License-Identifier: Apache-2.0
// This is the host side that kernels of up-projected prefill have in common.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/tile/query_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds what kernels by mma.sync are called with.
struct PrefillParams {
  core::PrefillArgs args;
  bool rows_aligned;   // whether every row of q, k and v begins at a multiple of 16 bytes
  bool o_aligned;      // whether every row of o begins at a multiple of what a lane stores together
  int32_t heads_log2;  // logarithm of how many heads a group has
};

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

/// Returns the logarithm of how many heads' query blocks are computed in turns, the longest first: as many as have
/// their keys and values of a request of average length in half of the second-level cache, 2 to 32. With one head at a
/// time, the longest blocks of the last one begin when others have nearly ended, and 16 heads of 8k took 1.13 times as
/// long (cuda_sm90 on an H200, 2026-12-01); with too many, keys are read again from memory.
inline int heads_log2(const core::PrefillArgs& args, const cuda::DeviceProperties& device) {
  const int64_t bytes =
      args.num_keys / args.batch_size * (args.d_qk + args.d_v) * static_cast<int64_t>(size_of(args.dtype));
  int log2 = 1;
  while (log2 < 5 && bytes << (log2 + 1) <= device.l2_bytes / 2) ++log2;
  return log2;
}

/// Returns the parameters of kernels whose blocks have their rows by with_query_block(), and whose lanes store
/// `lane_elements` of o together.
inline PrefillParams prefill_params(const core::PrefillArgs& args, const cuda::DeviceProperties& device,
                                    int64_t lane_elements) {
  // A group has no more heads than there are, so that few blocks have nothing to do.
  const auto most = static_cast<int>(std::bit_width(static_cast<uint32_t>(args.num_heads))) - 1;
  int log2 = std::min(heads_log2(args, device), most);
  while ((args.num_heads - 1) >> log2 >= kMaxGridY) ++log2;
  return {.args = args,
          .rows_aligned = inputs_are_aligned(args),
          .o_aligned = outputs_are_aligned(args, lane_elements),
          .heads_log2 = log2};
}

/// Returns their grid, for blocks of so many query rows.
inline cuda::LaunchShape prefill_shape(const PrefillParams& params, int rows, int shared_bytes) {
  const core::PrefillArgs& args = params.args;
  return {.grid_x = num_query_blocks(args.num_tokens, args.batch_size, rows) << params.heads_log2,
          .grid_y = ((args.num_heads - 1) >> params.heads_log2) + 1,
          .shared_bytes = shared_bytes};
}

/// Returns a grid of so many blocks for each head.
inline cuda::LaunchShape shape_for_heads(int num_blocks, int num_heads, int shared_bytes) {
  return {.grid_x = num_blocks,
          .grid_y = std::min(num_heads, kMaxGridY),
          .grid_z = (num_heads + kMaxGridY - 1) / kMaxGridY,
          .shared_bytes = shared_bytes};
}

}  // namespace mla::MLA_CUDA_NAMESPACE

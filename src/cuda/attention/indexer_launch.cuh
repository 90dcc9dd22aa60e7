// SPDX-License-Identifier: Apache-2.0
// The host side of the indexer's kernels divides the work into blocks.
#pragma once

#include <algorithm>

#include "cuda/attention/block_rows.h"
#include "cuda/attention/indexer_block.cuh"
#include "cuda/border/launch.h"
#include "cuda/common/operations.h"
#include "cuda/common/top_k.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace indexer {

constexpr int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

/// A block has at most so many tokens. Tokens of one request share its keys; groups so large that two blocks no longer
/// fit an SM do not pay. The number was chosen without a recorded measurement.
inline constexpr int32_t kMostTokens = 8;
/// A block has at most and at least so many keys. Twice as many stage the queries half as often: 116.7 us with 4,096
/// keys, 122 with 2,048 (64 heads, batch 64, kv 32k; H200, 2026-11-27). The groups of a prompt see more and more keys,
/// so that its blocks have unequal work, and smaller ones share it out better: 525 and 542 us (2,048 tokens over 8k).
/// Blocks of fewer than 256 keys would mostly stage queries; that bound was chosen without a recorded measurement.
inline constexpr int32_t kMostKeys = 4096, kMostKeysOfPrompts = 2048, kFewestKeys = 256;

template <class Kernel>
constexpr int64_t token_bytes(int64_t heads) {
  return ceil_div(heads, Kernel::kHeadTile) * Kernel::kHeadTile * Kernel::kHeadBytes;
}

/// This is half of an SM's shared memory, less what it keeps for a block: it has 1 KB more than a block may take, and
/// keeps 1 KB of each block.
inline constexpr int64_t kHalfOfShared = kSharedBytesPerBlock / 2 - 512;

template <class Kernel>
IndexerShape shape_of(const core::IndexerLogitsArgs& args) {
  const bool uniform = args.queries.indptr == nullptr;
  const int64_t q_len = uniform ? args.queries.uniform_len : ceil_div(args.num_tokens, std::max(args.batch_size, 1));
  if (args.blocks.given()) return {.group_tokens = 1, .groups_per_request = static_cast<int32_t>(uniform ? q_len : 0)};
  const int64_t most = std::clamp<int64_t>(kHalfOfShared / token_bytes<Kernel>(args.num_heads), 1, kMostTokens);
  // The groups are as few as hold q_len tokens, and of equal size.
  IndexerShape shape;
  if (q_len > 0) shape.group_tokens = ceil_div(q_len, ceil_div(q_len, most));
  if (uniform) shape.groups_per_request = ceil_div(q_len, shape.group_tokens);
  return shape;
}

template <class Kernel>
Status launch_heads(const core::IndexerLogitsArgs& args, bool adds, cuda::Queue& queue) {
  IndexerShape shape = shape_of<Kernel>(args);
  shape.adds = adds;
  shape.page_size = cuda::FastDivisor(args.pages.page_size);
  shape.ratio = cuda::FastDivisor(args.ratio);
  shape.block_size = cuda::FastDivisor(args.blocks.size);
  // Without indptr every group has tokens. With it, up to a group of each request may have none.
  const bool uniform = shape.groups_per_request > 0;
  const int64_t num_groups = uniform ? int64_t{args.batch_size} * shape.groups_per_request
                                     : args.num_tokens / shape.group_tokens + args.batch_size;
  const int64_t busy_groups = uniform ? num_groups : ceil_div(args.num_tokens, shape.group_tokens);
  const bool prompts = busy_groups > args.batch_size;
  // Two blocks run on an SM at a time. With fewer than three for two SMs, SMs would idle. With four for each, the keys
  // of one request of 128k came in 512 blocks, twice what runs at a time: 15.3 instead of 12.0 us (H200, 2026-11-27).
  static_assert(kFewestKeys % Kernel::kBlockKeys == 0);
  shape.split_keys = prompts ? kMostKeysOfPrompts : kMostKeys;
  const auto blocks_of = [&](int64_t groups) { return groups * ceil_div(args.num_logits, shape.split_keys); };
  while (shape.split_keys > kFewestKeys && 2 * blocks_of(busy_groups) < 3 * int64_t{queue.device().num_sms})
    shape.split_keys /= 2;
  shape.num_splits = ceil_div(args.num_logits, shape.split_keys);
  return launch<Kernel>(
      queue,
      {.grid_x = static_cast<int32_t>(blocks_of(num_groups)),
       .shared_bytes = static_cast<int32_t>(shape.group_tokens * token_bytes<Kernel>(args.num_heads))},
      {.args = args, .shape = shape});
}

template <class Kernel>
Status run_kernel(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  if (args.batch_size == 0 || args.num_tokens == 0 || args.num_logits == 0) return {};
  constexpr auto kMostHeads =
      static_cast<int32_t>(kSharedBytesPerBlock / Kernel::kHeadBytes / Kernel::kHeadTile * Kernel::kHeadTile);
  static_assert(kMostHeads >= cuda::kMostHeadsOfShortLogits);
  for (int32_t head = 0; head < args.num_heads; head += kMostHeads) {
    core::IndexerLogitsArgs some = args;  // the heads of one launch
    some.num_heads = std::min(kMostHeads, args.num_heads - head);
    some.q =
        static_cast<const std::byte*>(args.q) + head * args.q_stride_head * static_cast<int64_t>(size_of(args.q_dtype));
    some.weights = args.weights + head;
    if (Status status = launch_heads<Kernel>(some, head > 0, queue); !status.ok()) return status;
  }
  return {};
}

template <template <DType, IndexerFormat, bool> class Kernel, DType kQueries, IndexerFormat kKeys>
Status run(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  return args.blocks.given() ? run_kernel<Kernel<kQueries, kKeys, true>>(args, queue)
                             : run_kernel<Kernel<kQueries, kKeys, false>>(args, queue);
}

/// Computes logits, chooses the largest, and turns their indices into slots.
inline Status run_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue,
                        cuda::DirectOperation<core::IndexerLogitsArgs> run_logits) {
  if (Status status = run_logits(args.indexer, queue); !status.ok()) return status;
  return run_visible_top_k(args, queue);
}

}  // namespace indexer
}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// The host side of the indexer's kernels divides the work into blocks.
#pragma once

#include <algorithm>

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
/// A block has at most and at least so many keys. Twice 1,024 keys stage the queries half as often: 127 instead of 137
/// us (64 heads, batch 64, kv 32k; H200, 2026-11-21). Blocks of fewer than 256 keys would mostly stage queries; that
/// bound was chosen without a recorded measurement.
inline constexpr int32_t kMostKeys = 2048, kFewestKeys = 256;

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
  const int64_t num_groups = shape.groups_per_request > 0 ? int64_t{args.batch_size} * shape.groups_per_request
                                                          : args.num_tokens / shape.group_tokens + args.batch_size;
  // Two blocks run on an SM at a time. With fewer than four for each SM, some SMs would idle at the end.
  static_assert(kFewestKeys % Kernel::kBlockKeys == 0);
  shape.split_keys = kMostKeys;
  const auto blocks = [&] { return num_groups * ceil_div(args.max_kv_len, shape.split_keys); };
  while (shape.split_keys > kFewestKeys && blocks() < 4 * int64_t{queue.device().num_sms}) shape.split_keys /= 2;
  shape.num_splits = ceil_div(args.max_kv_len, shape.split_keys);
  return launch<Kernel>(
      queue,
      {.grid_x = static_cast<int32_t>(blocks()),
       .shared_bytes = static_cast<int32_t>(shape.group_tokens * token_bytes<Kernel>(args.num_heads))},
      {.args = args, .shape = shape});
}

template <class Kernel>
Status run(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  if (args.batch_size == 0 || args.num_tokens == 0 || args.max_kv_len == 0) return {};
  constexpr auto kMostHeads =
      static_cast<int32_t>(kSharedBytesPerBlock / Kernel::kHeadBytes / Kernel::kHeadTile * Kernel::kHeadTile);
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

/// Computes logits, chooses the largest, and turns their indices into slots.
inline Status run_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue,
                        cuda::DirectOperation<core::IndexerLogitsArgs> run_logits) {
  if (Status status = run_logits(args.indexer, queue); !status.ok()) return status;
  if (Status status = run_visible_top_k(args.top_k, args.indexer, queue); !status.ok()) return status;
  return run_physical_slots(args.slots, queue);
}

}  // namespace indexer
}  // namespace mla::MLA_CUDA_NAMESPACE

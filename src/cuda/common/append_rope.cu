// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/append_rope.cuh"

#include <optional>

#include "cuda/common/append_groups.cuh"
#include "cuda/common/operations.h"
#include "cuda/common/query_rows.cuh"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

namespace {

template <class Kernel>
Status launch_rows(const core::AppendRopeArgs& args, bool overlaps_previous, cuda::Queue& queue) {
  const int64_t rows = args.num_tokens * (int64_t{args.num_heads} + 1);
  cuda::LaunchShape shape = cuda::warp_per_row(rows, Kernel::kThreads);
  shape.overlaps_previous = overlaps_previous;
  return launch<Kernel>(queue, shape, args);
}

/// Writes queries that the kernel takes; returns nothing for others.
template <class Kernel>
std::optional<Status> launch_queries(const core::AppendRopeArgs& args, cuda::Queue& queue) {
  if (!Kernel::takes(args)) return {};
  const int64_t rows = args.num_tokens * args.num_heads;
  return launch<Kernel>(queue, cuda::resident_warps(rows, Kernel::kThreads, Kernel::kMinBlocks, queue.device()),
                        {.args = args, .num_heads = cuda::FastDivisor(args.num_heads)});
}

/// Writes keys that the kernel takes; returns nothing for others.
template <class Kernel>
std::optional<Status> launch_keys(const core::AppendRopeArgs& args, bool overlaps_previous, cuda::Queue& queue) {
  if (args.num_heads > 0 || !Kernel::takes(args)) return {};
  cuda::LaunchShape shape = cuda::warp_per_rows(args.num_tokens, Kernel::kThreads);
  shape.overlaps_previous = overlaps_previous;
  return launch<Kernel>(queue, shape, {.args = args, .page_size = cuda::FastDivisor(args.cache.page_size)});
}

}  // namespace

Status run_append_rope(const core::AppendRopeArgs& args, cuda::Queue& queue) {
  using QuantizedKeys = AppendGroupsKernel<DType::kE4M3, core::AppendRopeArgs>;
  using NormalizedKeys = AppendGroupsKernel<DType::kBF16, core::AppendRopeArgs>;
  core::AppendRopeArgs keys = args;
  const std::optional<Status> queries = args.q_norm ? launch_queries<QueryRowsKernel<true>>(args, queue)
                                                    : launch_queries<QueryRowsKernel<false>>(args, queue);
  if (queries.has_value()) {
    if (!queries->ok()) return *queries;
    keys.num_heads = 0;
    keys.q_norm = false;
  }
  const bool overlaps = queries.has_value();
  if (const auto status = launch_keys<QuantizedKeys>(keys, overlaps, queue)) return *status;
  if (const auto status = launch_keys<NormalizedKeys>(keys, overlaps, queue)) return *status;
  return keys.normalizes() ? launch_rows<AppendRopeKernel<true>>(keys, overlaps, queue)
                           : launch_rows<AppendRopeKernel<false>>(keys, overlaps, queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

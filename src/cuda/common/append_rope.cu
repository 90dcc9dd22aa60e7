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

Status run_rope_queries(const core::AppendRopeArgs& args, core::AppendRopeArgs& rest, cuda::Queue& queue) {
  rest = args;
  const std::optional<Status> queries = args.q_norm ? launch_queries<QueryRowsKernel<true>>(args, queue)
                                                    : launch_queries<QueryRowsKernel<false>>(args, queue);
  if (!queries.has_value()) return {};
  rest.num_heads = 0;
  rest.q_norm = false;
  return *queries;
}

Status run_rope_rest(const core::AppendRopeArgs& rest, bool overlaps_previous, cuda::Queue& queue) {
  using QuantizedKeys = AppendGroupsKernel<DType::kE4M3, core::AppendRopeArgs>;
  using NormalizedKeys = AppendGroupsKernel<DType::kBF16, core::AppendRopeArgs>;
  if (const auto status = launch_keys<QuantizedKeys>(rest, overlaps_previous, queue)) return *status;
  if (const auto status = launch_keys<NormalizedKeys>(rest, overlaps_previous, queue)) return *status;
  return rest.normalizes() ? launch_rows<AppendRopeKernel<true>>(rest, overlaps_previous, queue)
                           : launch_rows<AppendRopeKernel<false>>(rest, overlaps_previous, queue);
}

Status run_append_rope(const core::AppendRopeArgs& args, cuda::Queue& queue) {
  core::AppendRopeArgs rest;
  const Status status = run_rope_queries(args, rest, queue);
  return status.ok() ? run_rope_rest(rest, rest.num_heads < args.num_heads, queue) : status;
}

}  // namespace mla::MLA_CUDA_NAMESPACE

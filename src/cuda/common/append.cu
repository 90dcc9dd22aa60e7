// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/append.cuh"

#include "cuda/common/append_groups.cuh"
#include "cuda/common/operations.h"
#include "cuda/common/row_parts.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_append(const core::AppendArgs& args, cuda::Queue& queue) {
  const auto enqueue = [&]<class Kernel>(Kernel) {
    return launch<Kernel>(queue, cuda::warp_per_row(args.num_tokens, Kernel::kThreads), args);
  };
  if (args.dtype == args.cache.ckv_dtype) return enqueue(AppendKernel<RowWay::kCopied>{});
  const core::AppendArgs parts = cuda::in_parts(args);
  const auto enqueue_groups = [&]<class Kernel>(Kernel) {
    return launch<Kernel>(queue, cuda::warp_per_rows(args.num_tokens, Kernel::kThreads),
                          {.args = parts, .page_size = cuda::FastDivisor(args.cache.page_size)});
  };
  if (AppendGroupsKernel<DType::kE4M3, core::AppendArgs>::takes(parts))
    return enqueue_groups(AppendGroupsKernel<DType::kE4M3, core::AppendArgs>{});
  if (AppendGroupsKernel<DType::kE2M1, core::AppendArgs>::takes(parts))
    return enqueue_groups(AppendGroupsKernel<DType::kE2M1, core::AppendArgs>{});
  if (args.cache.writes_scales) return enqueue(AppendKernel<RowWay::kGrouped>{});
  return enqueue(AppendKernel<RowWay::kEncoded>{});
}

}  // namespace mla::MLA_CUDA_NAMESPACE

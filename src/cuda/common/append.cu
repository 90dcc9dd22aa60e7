// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/append.cuh"

#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_append(const core::AppendArgs& args, cuda::Queue& queue) {
  const auto enqueue = [&]<class Kernel>(Kernel) {
    return launch<Kernel>(queue, cuda::warp_per_row(args.num_tokens, Kernel::kThreads), args);
  };
  if (args.dtype == args.cache.ckv_dtype) return enqueue(AppendKernel<RowWay::kCopied>{});
  if (args.cache.writes_scales) return enqueue(AppendKernel<RowWay::kGrouped>{});
  return enqueue(AppendKernel<RowWay::kEncoded>{});
}

}  // namespace mla::MLA_CUDA_NAMESPACE

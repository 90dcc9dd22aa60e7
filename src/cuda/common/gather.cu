// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/gather.cuh"

#include "cuda/common/gather_rows.cuh"
#include "cuda/common/operations.h"
#include "cuda/common/row_parts.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_gather(const core::GatherArgs& args, cuda::Queue& queue) {
  const auto enqueue = [&]<class Kernel>(Kernel) {
    return launch<Kernel>(queue, cuda::warp_per_row(args.num_rows, Kernel::kThreads), args);
  };
  if (args.out_dtype == args.cache.ckv_dtype) return enqueue(GatherKernel<RowWay::kCopied>{});
  if (const core::GatherArgs parts = cuda::in_parts(args); GatherRowsKernel::takes(parts)) {
    constexpr int64_t kRows = GatherRowsKernel::kRows;
    return launch<GatherRowsKernel>(queue,
                                    cuda::warp_per_row((args.num_rows + kRows - 1) / kRows, GatherRowsKernel::kThreads),
                                    GatherRowsKernel::params_of(parts));
  }
  if (args.cache.is_quantized() && args.out_dtype == DType::kBF16) return enqueue(GatherKernel<RowWay::kDequantized>{});
  return args.cache.is_quantized() ? enqueue(GatherKernel<RowWay::kConverted>{})
                                   : enqueue(GatherKernel<RowWay::kEncoded>{});
}

}  // namespace mla::MLA_CUDA_NAMESPACE

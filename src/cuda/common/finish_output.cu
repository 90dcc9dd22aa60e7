// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/finish_output.cuh"

#include "cuda/common/finish_rows.cuh"
#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_finish_output(const core::FinishOutputArgs& args, cuda::Queue& queue) {
  const int64_t rows = args.num_tokens * args.num_heads;
  const auto enqueue = [&]<class Kernel>(Kernel, cuda::LaunchShape shape, const typename Kernel::Params& params) {
    shape.overlaps_previous = true;
    return launch<Kernel>(queue, shape, params);
  };
  const FinishRowsParams params = {.args = args,
                                   .num_heads = cuda::FastDivisor(args.num_heads),
                                   .heads_per_group = cuda::FastDivisor(args.heads_per_group)};
  const auto enqueue_few = [&]<class Kernel>(Kernel kernel) {
    return enqueue(kernel, cuda::resident_warps(rows, Kernel::kThreads, Kernel::kMinBlocks, queue.device()), params);
  };
  if (FinishRowsKernel<true>::takes(args)) return enqueue_few(FinishRowsKernel<true>{});
  if (FinishRowsKernel<false>::takes(args)) return enqueue_few(FinishRowsKernel<false>{});
  return enqueue(FinishOutputKernel{}, cuda::warp_per_row(rows, FinishOutputKernel::kThreads), args);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

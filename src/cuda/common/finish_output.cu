// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/finish_output.cuh"

#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_finish_output(const core::FinishOutputArgs& args, cuda::Queue& queue) {
  cuda::LaunchShape shape = cuda::warp_per_row(args.num_tokens * args.num_heads, FinishOutputKernel::kThreads);
  shape.overlaps_previous = true;
  return launch<FinishOutputKernel>(queue, shape, args);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

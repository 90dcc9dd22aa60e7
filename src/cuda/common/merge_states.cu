// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/merge_states.cuh"

#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_merge_states(const core::MergeStatesArgs& args, cuda::Queue& queue) {
  const int64_t rows = args.num_tokens * args.num_heads;
  cuda::LaunchShape shape = cuda::warp_per_row(rows, MergeStatesKernel::kThreads);
  shape.overlaps_previous = true;
  return launch<MergeStatesKernel>(queue, shape, args);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

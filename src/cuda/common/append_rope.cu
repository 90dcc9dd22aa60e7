// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/append_rope.cuh"

#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_append_rope(const core::AppendRopeArgs& args, cuda::Queue& queue) {
  const int64_t rows = args.num_tokens * (int64_t{args.num_heads} + 1);
  const auto enqueue = [&]<class Kernel>(Kernel) {
    return launch<Kernel>(queue, cuda::warp_per_row(rows, Kernel::kThreads), args);
  };
  return args.normalizes() ? enqueue(AppendRopeKernel<true>{}) : enqueue(AppendRopeKernel<false>{});
}

}  // namespace mla::MLA_CUDA_NAMESPACE

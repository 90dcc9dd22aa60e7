// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/shared_prefix.cuh"

#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status find_shared_prefixes(const core::SharedPrefixArgs& args, cuda::Queue& queue) {
  Status status =
      launch<CommonPagesKernel>(queue, cuda::warp_per_row(args.batch_size, CommonPagesKernel::kThreads), args);
  if (!status.ok()) return status;
  return launch<PrefixGroupsKernel>(queue, {.shared_bytes = PrefixGroupsKernel::kSharedBytes}, args);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/index_tools.cuh"

#include <algorithm>

#include "cuda/common/operations.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_block_table_to_csr(const core::BlockTableToCsrArgs& args, cuda::Queue& queue) {
  Status status = launch<ScanPagesKernel>(queue, {.shared_bytes = ScanPagesKernel::kSharedBytes}, args);
  if (!status.ok()) return status;
  return launch<CopyPageRowsKernel>(queue, {.grid_x = args.batch_size, .overlaps_previous = true}, args);
}

Status run_physical_slots(const core::PhysicalSlotsArgs& args, cuda::Queue& queue) {
  const auto blocks = static_cast<int32_t>(std::min<int64_t>(args.num_tokens, INT32_MAX));
  return launch<PhysicalSlotsKernel>(
      queue, {.grid_x = blocks, .shared_bytes = PhysicalSlotsKernel::kSharedBytes, .overlaps_previous = true}, args);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/append_indexer.cuh"

#include "cuda/border/launch.h"
#include "cuda/common/operations.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_append_indexer(const core::AppendIndexerArgs& args, cuda::Queue& queue) {
  const int64_t blocks = (args.num_tokens + AppendIndexerKernel::kTokens - 1) / AppendIndexerKernel::kTokens;
  return launch<AppendIndexerKernel>(queue, {.grid_x = static_cast<int32_t>(blocks)}, args);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

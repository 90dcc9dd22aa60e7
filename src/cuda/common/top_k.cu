// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/top_k.h"

#include "cuda/border/launch.h"
#include "cuda/common/operations.h"
#include "cuda/common/top_k.cuh"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

Status run_rows(const TopKParams& params, cuda::Queue& queue) {
  static_assert(TopKKernel::kSharedBytes <= kSharedBytesPerBlock);
  return launch<TopKKernel>(
      queue, {.grid_x = static_cast<int32_t>(params.args.num_tokens), .shared_bytes = TopKKernel::kSharedBytes},
      params);
}

}  // namespace

Status run_top_k(const core::TopKArgs& args, cuda::Queue& queue) {
  return run_rows({.args = args, .batch = {}}, queue);
}

Status run_visible_top_k(const core::TopKArgs& args, const core::IndexerLogitsArgs& indexer, cuda::Queue& queue) {
  return run_rows({.args = args,
                   .batch = {.queries = indexer.queries,
                             .kv_len = indexer.pages.kv_len,
                             .batch_size = indexer.batch_size,
                             .causal = indexer.causal}},
                  queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

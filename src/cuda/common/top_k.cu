// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/top_k.h"

#include "cuda/border/launch.h"
#include "cuda/common/operations.h"
#include "cuda/common/top_k.cuh"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

template <class Row>
Status launch_rows(const TopKParams& params, cuda::Queue& queue) {
  using Kernel = TopKKernel<Row>;
  static_assert(Kernel::kSharedBytes <= kSharedBytesPerBlock);
  return launch<Kernel>(
      queue, {.grid_x = static_cast<int32_t>(params.args.num_tokens), .shared_bytes = Kernel::kSharedBytes}, params);
}

Status run_rows(const TopKParams& params, cuda::Queue& queue) {
  return params.args.block_size > 1 ? launch_rows<BlockRow>(params, queue) : launch_rows<LogitRow>(params, queue);
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
                             .causal = indexer.causal && indexer.key_end == nullptr,
                             .ratio = indexer.ratio}},
                  queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

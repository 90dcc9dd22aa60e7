// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/sm90/indexer.cuh"

#include "cuda/attention/indexer_launch.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  switch (args.q_dtype) {
    case DType::kE4M3: return indexer::run<IndexerKernel, DType::kE4M3>(args, queue);
    case DType::kF16: return indexer::run<IndexerKernel, DType::kF16>(args, queue);
    default: return indexer::run<IndexerKernel, DType::kBF16>(args, queue);
  }
}

Status run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue) {
  return indexer::run_top_k(args, queue, run_indexer_logits);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

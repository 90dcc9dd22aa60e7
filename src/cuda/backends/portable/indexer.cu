// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/portable/indexer.cuh"

#include "cuda/attention/indexer_launch.cuh"
#include "cuda/backends/portable/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  switch (args.q_dtype) {
    case DType::kE4M3: return indexer::run<IndexerKernel, DType::kE4M3>(args, queue);
    case DType::kF16: return indexer::run<IndexerKernel, DType::kF16>(args, queue);
    case DType::kBF16: return indexer::run<IndexerKernel, DType::kBF16>(args, queue);
    default: return indexer::run<IndexerKernel, DType::kF32>(args, queue);
  }
}

Status run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue) {
  return indexer::run_top_k(args, queue, run_indexer_logits);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/portable/indexer.cuh"

#include "cuda/attention/indexer_launch.cuh"
#include "cuda/backends/portable/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

namespace {

template <IndexerFormat kKeys>
Status run_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  switch (args.q_dtype) {
    case DType::kE4M3: return indexer::run<IndexerKernel, DType::kE4M3, kKeys>(args, queue);
    case DType::kF16: return indexer::run<IndexerKernel, DType::kF16, kKeys>(args, queue);
    case DType::kBF16: return indexer::run<IndexerKernel, DType::kBF16, kKeys>(args, queue);
    default: return indexer::run<IndexerKernel, DType::kF32, kKeys>(args, queue);
  }
}

}  // namespace

Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  return args.cache.format == IndexerFormat::kMXFP4 ? run_logits<IndexerFormat::kMXFP4>(args, queue)
                                                    : run_logits<IndexerFormat::kFP8>(args, queue);
}

Status run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue) {
  return indexer::run_top_k(args, queue, run_indexer_logits);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

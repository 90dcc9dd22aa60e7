// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/sm90/indexer.cuh"

#include "cuda/attention/indexer_launch.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  constexpr IndexerFormat kFP8 = IndexerFormat::kFP8, kMXFP4 = IndexerFormat::kMXFP4;
  const bool mxfp4 = args.cache.format == kMXFP4;
  switch (args.q_dtype) {
    case DType::kE4M3:
      return mxfp4 ? indexer::run<IndexerKernel, DType::kE4M3, kMXFP4>(args, queue)
                   : indexer::run<IndexerKernel, DType::kE4M3, kFP8>(args, queue);
    case DType::kF16: return indexer::run<IndexerKernel, DType::kF16, kFP8>(args, queue);
    default:
      return mxfp4 ? indexer::run<IndexerKernel, DType::kBF16, kMXFP4>(args, queue)
                   : indexer::run<IndexerKernel, DType::kBF16, kFP8>(args, queue);
  }
}

Status run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue) {
  return indexer::run_top_k(args, queue, run_indexer_logits);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

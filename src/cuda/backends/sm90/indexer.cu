// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/sm90/indexer.cuh"

#include <optional>

#include "cuda/attention/indexer_launch.cuh"
#include "cuda/backends/sm90/indexer_e4m3.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

/// Describes both operands for tensor copies, queries by boxes of kHeads heads. Returns false where the kernel for
/// products of e4m3 cannot compute the problem: it copies 64 rows of a page at a time.
template <IndexerFormat kFormat, int kHeads>
bool describe(const core::IndexerLogitsArgs& args, const cuda::Queue& queue, IndexerE4m3Params& params) {
  constexpr int kTileKeys = IndexerE4m3Kernel<kFormat, kHeads, 1>::kTileKeys;
  if (args.num_heads > kHeads || args.cache.page_size % kTileKeys != 0) return false;
  const int64_t row = kIndexerLayout.head_dim;
  const cuda::RowTensor keys = {.base = args.cache.base,
                                .channels = cuda::kBoxChannels,
                                .rows = args.cache.page_size,
                                .heads = args.cache.num_pages,
                                .row_stride = row,
                                .head_stride = args.cache.stride_page,
                                .box_rows = kTileKeys};
  const cuda::RowTensor queries = {.base = args.q,
                                   .channels = cuda::kBoxChannels,
                                   .rows = args.num_heads,
                                   .heads = args.num_tokens,
                                   .row_stride = args.q_stride_head,
                                   .head_stride = args.q_stride_token,
                                   .box_rows = kHeads};
  const bool copies_keys =
      kFormat == IndexerFormat::kFP8
          ? queue.make_tensor_map(keys, params.keys)
          : (reinterpret_cast<uintptr_t>(args.cache.base) | static_cast<uintptr_t>(args.cache.stride_page)) % 16 == 0;
  return copies_keys && queue.make_tensor_map(queries, params.queries);
}

template <IndexerFormat kFormat, int kHeads, int kTokens>
Status launch_e4m3(IndexerE4m3Params& params, int64_t q_len, cuda::Queue& queue) {
  using Kernel = IndexerE4m3Kernel<kFormat, kHeads, kTokens>;
  const core::IndexerLogitsArgs& args = params.args;
  const bool uniform = args.queries.indptr == nullptr;
  if (uniform) params.groups_per_request = indexer::ceil_div(q_len, kTokens);
  params.num_groups = static_cast<int32_t>(uniform ? int64_t{args.batch_size} * params.groups_per_request
                                                   : args.num_tokens / kTokens + args.batch_size);
  params.groups = cuda::FastDivisor(params.groups_per_request);
  params.page_size = cuda::FastDivisor(args.cache.page_size);
  params.ratio = cuda::FastDivisor(args.ratio);
  const int64_t most_tiles = params.num_groups * ((args.num_logits + Kernel::kTileKeys - 1) / Kernel::kTileKeys);
  return launch<Kernel>(queue,
                        {.grid_x = static_cast<int32_t>(std::min<int64_t>(queue.device().num_sms, most_tiles)),
                         .shared_bytes = Kernel::kSharedBytes,
                         .overlaps_previous = true},
                        params);
}

/// Runs the kernel for products of e4m3, with up to 128 columns of a product; returns nothing where it cannot compute
/// the problem.
template <IndexerFormat kFormat>
std::optional<Status> run_e4m3(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  IndexerE4m3Params params = {.args = args};
  const int64_t q_len =
      args.queries.indptr == nullptr ? args.queries.uniform_len : indexer::ceil_div(args.num_tokens, args.batch_size);
  if (describe<kFormat, 32>(args, queue, params))
    return q_len > 2   ? launch_e4m3<kFormat, 32, 4>(params, q_len, queue)
           : q_len > 1 ? launch_e4m3<kFormat, 32, 2>(params, q_len, queue)
                       : launch_e4m3<kFormat, 32, 1>(params, q_len, queue);
  if (describe<kFormat, 64>(args, queue, params))
    return q_len > 1 ? launch_e4m3<kFormat, 64, 2>(params, q_len, queue)
                     : launch_e4m3<kFormat, 64, 1>(params, q_len, queue);
  return std::nullopt;
}

}  // namespace

Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue) {
  constexpr IndexerFormat kFP8 = IndexerFormat::kFP8, kMXFP4 = IndexerFormat::kMXFP4;
  const bool mxfp4 = args.cache.format == kMXFP4;
  if (args.batch_size == 0 || args.num_tokens == 0 || args.num_logits == 0) return {};
  if (args.multiplies_e4m3())
    if (const auto status = mxfp4 ? run_e4m3<kMXFP4>(args, queue) : run_e4m3<kFP8>(args, queue)) return *status;
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

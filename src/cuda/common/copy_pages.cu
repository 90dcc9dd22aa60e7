// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/copy_pages.cuh"

#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

/// Returns whether it is certain on the host that all bits mean the same in both caches. The host cannot compare scales
/// of whole tensors.
bool certainly_same_code(const core::Cache& from, const core::Cache& to) {
  const bool tensor_scales = (from.is_quantized() && !from.writes_scales) || from.outer_scale != nullptr ||
                             to.outer_scale != nullptr || from.has_quantized_kpe();
  return from.format == to.format && from.num_scales == to.num_scales && !tensor_scales && to.takes_scales_of(from);
}

}  // namespace

Status run_copy_pages(const core::CopyPagesArgs& args, cuda::Queue& queue) {
  const auto enqueue = [&]<class Kernel>(Kernel) {
    return launch<Kernel>(queue, cuda::warp_per_row(args.num_tokens(), Kernel::kThreads), args);
  };
  if (certainly_same_code(args.from, args.to))
    return args.to.writes_scales ? enqueue(CopyPagesKernel<RowWay::kWithScales>{})
                                 : enqueue(CopyPagesKernel<RowWay::kCopied>{});
  if (args.to.writes_scales) return enqueue(CopyPagesKernel<RowWay::kGrouped>{});
  if (args.from.is_quantized() && args.to.ckv_dtype == DType::kBF16)
    return enqueue(CopyPagesKernel<RowWay::kDequantized>{});
  return args.from.is_quantized() ? enqueue(CopyPagesKernel<RowWay::kConverted>{})
                                  : enqueue(CopyPagesKernel<RowWay::kEncoded>{});
}

}  // namespace mla::MLA_CUDA_NAMESPACE

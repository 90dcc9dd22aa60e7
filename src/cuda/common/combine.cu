// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/combine.cuh"

#include <algorithm>

#include "cuda/border/launch.h"
#include "cuda/common/combine.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

template <class Args>
Status launch_combine(const cuda::WorkShape& shape, const Args& args, const cuda::WorkList& list,
                      bool next_starts_early, cuda::Queue& queue) {
  if (list.max_slots == 0) return {};
  CombineKernel::Params params{.list = list,
                               .num_heads = cuda::FastDivisor(args.num_heads),
                               .d_v = args.d_v,
                               .attn_sink = args.options.attn_sink,
                               .lse_form = args.lse_form,
                               .o_dtype = args.o_dtype,
                               .o_scale = args.o_scale,
                               .o = args.o,
                               .o_stride_token = args.o_stride_token,
                               .o_stride_head = args.o_stride_head,
                               .lse = args.lse,
                               .lse_stride_token = args.lse_stride_token,
                               .lse_stride_head = args.lse_stride_head};
  params.batch_invariant = shape.batch_invariant;
  params.next_starts_early = next_starts_early;
  if constexpr (requires { args.max_logits; }) {
    params.max_logits = args.max_logits;
    params.max_logits_stride_token = args.max_logits_stride_token;
    params.max_logits_stride_head = args.max_logits_stride_head;
  }
  // The grid has a block for each slice of each row, and no more than run at a time. There are no more rows than the
  // batch has, and no more than there are partial states for.
  const int64_t rows = std::min(shape.max_tokens * shape.num_heads, int64_t{list.max_slots} * list.block_rows);
  const int64_t slices = args.d_v / CombineKernel::kSliceColumns;
  const int64_t resident = int64_t{queue.device().num_sms} * CombineKernel::kMinBlocks;
  const auto grid = static_cast<int32_t>(std::min(rows * slices, std::max<int64_t>(resident, 1)));
  return launch<CombineKernel>(
      queue, {.grid_x = grid, .shared_bytes = CombineKernel::kSharedBytes, .overlaps_previous = true}, params);
}

}  // namespace

Status combine_work(const cuda::WorkShape& shape, const core::DecodeArgs& args, const cuda::WorkList& list,
                    bool next_starts_early, cuda::Queue& queue) {
  return launch_combine(shape, args, list, next_starts_early, queue);
}

Status combine_work(const cuda::WorkShape& shape, const core::DecodeSparseArgs& args, const cuda::WorkList& list,
                    bool next_starts_early, cuda::Queue& queue) {
  return launch_combine(shape, args, list, next_starts_early, queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

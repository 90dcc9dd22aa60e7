// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/top_k.h"

#include "cuda/border/launch.h"
#include "cuda/common/operations.h"
#include "cuda/common/top_k.cuh"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

/// Returns of how many parts a row is: of few where blocks would have little of it, or would wait for others to end. A
/// block has a multiprocessor for itself.
template <class Row>
int32_t parts_of_row(const core::TopKArgs& args, int32_t num_sms) {
  if (!kHasClusters || args.blocks.given()) return 1;  // listed blocks are few
  const int64_t entries = args.num_logits / args.block_size;
  int32_t parts = 1;
  while (parts < TopKKernel<Row>::kMostParts && 2 * parts * args.num_tokens <= num_sms &&
         entries > int64_t{parts} * Row::kPartEntries)
    parts *= 2;
  return parts;
}

template <class Row>
Status launch_rows(TopKParams params, cuda::Queue& queue) {
  using Kernel = TopKKernel<Row>;
  static_assert(Kernel::kSharedBytes <= kSharedBytesPerBlock);
  params.parts = parts_of_row<Row>(params.args, queue.device().num_sms);
  return launch<Kernel>(queue,
                        {.grid_x = static_cast<int32_t>(params.args.num_tokens * params.parts),
                         .cluster = params.parts,
                         .shared_bytes = Kernel::kSharedBytes,
                         .overlaps_previous = true},
                        params);
}

Status run_rows(const TopKParams& params, cuda::Queue& queue) {
  return params.args.block_size > 1 ? launch_rows<BlockRow>(params, queue) : launch_rows<LogitRow>(params, queue);
}

}  // namespace

Status run_top_k(const core::TopKArgs& args, cuda::Queue& queue) { return run_rows({.args = args}, queue); }

Status run_visible_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue) {
  const core::IndexerLogitsArgs& indexer = args.indexer;
  TopKParams params = {.args = args.top_k,
                       .batch = {.queries = indexer.queries,
                                 .kv_len = indexer.pages.kv_len,
                                 .batch_size = indexer.batch_size,
                                 .causal = indexer.causal && indexer.key_end == nullptr,
                                 .ratio = indexer.ratio}};
  // A key's slot is the kernel's own affair where each key has one, of this rank. Otherwise indices become slots later.
  const core::PhysicalSlotsArgs& slots = args.slots;
  const bool has_one_slot = !slots.list_tokens && slots.context_parallel.world == 1;
  if (has_one_slot) {
    params.args.indices = slots.slots;
    params.slots = {.pages = slots.pages,
                    .page_size = cuda::FastDivisor(slots.pages.page_size),
                    .count = slots.num_slots,
                    .valid_count = slots.valid_count};
  }
  if (Status status = run_rows(params, queue); !status.ok() || has_one_slot) return status;
  return run_physical_slots(slots, queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

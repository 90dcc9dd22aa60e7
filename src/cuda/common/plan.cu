// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/plan.cuh"

#include <algorithm>

#include "cuda/border/launch.h"
#include "cuda/common/plan.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

/// Returns the most row blocks (runs of at most block_rows query rows) that a batch within the shapes can have.
int64_t max_row_blocks(const cuda::WorkShape& shape) {
  const int64_t by_tokens = shape.max_tokens * ceil_div(shape.num_heads, shape.block_rows);
  const int64_t requests = std::min<int64_t>(shape.batch, shape.max_tokens);
  return std::min(by_tokens, shape.max_tokens * shape.num_heads / shape.block_rows + requests);
}

/// Returns the most portions into which batch_invariant may cut a unit; 1 without batch_invariant.
int64_t max_portions(const cuda::WorkShape& shape) {
  if (!shape.batch_invariant) return 1;
  const int64_t portion = std::max(shape.invariant_portion_keys / shape.step_keys, 1) * int64_t{shape.step_keys};
  return std::clamp<int64_t>(ceil_div(shape.max_keys, portion), 1, cuda::kMaxInvariantPortions);
}

/// Lays out arrays in a workspace one after another. With a null base it only counts their bytes.
struct Layout {
  std::byte* base;
  size_t bytes = 0;

  template <class T>
  T* take(int64_t count) {
    constexpr size_t kAlignment = 64;
    T* array = base != nullptr ? reinterpret_cast<T*>(base + bytes) : nullptr;
    bytes += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
};

cuda::WorkList lay_out(const cuda::WorkShape& shape, Layout& layout) {
  const int64_t row_blocks = max_row_blocks(shape);
  const int64_t portions = max_portions(shape);
  const int64_t workers = std::clamp(shape.max_grid_blocks, 1, kMaxPlanWorkers);
  const int64_t segments = std::max(row_blocks * portions, workers) + workers;
  // A merged unit has at least two portions.
  const int64_t merges = shape.batch_invariant ? row_blocks * portions / 2 : workers;
  // A block leaves at most two partial states, where its share begins and ends inside an item. A portion leaves one.
  int64_t slots = 2 * std::max<int64_t>(shape.max_grid_blocks, 1);
  if (shape.batch_invariant) slots = portions > 1 ? row_blocks * portions : 0;

  cuda::WorkList list{};
  list.header = layout.take<cuda::WorkListHeader>(1);
  list.shares = layout.take<cuda::Share>(std::max(shape.max_grid_blocks, 1));
  list.segments = layout.take<cuda::Segment>(segments);
  list.merges = layout.take<cuda::Merge>(merges);
  if (shape.batch > kSharedRequests) {
    list.request_cost = layout.take<int64_t>(shape.batch + int64_t{1});
    list.request_items = layout.take<int32_t>(shape.batch + int64_t{1});
    list.request_steps = layout.take<int32_t>(shape.batch);
    list.request_row_blocks = layout.take<int32_t>(shape.batch);
  }
  list.partial_max = layout.take<float>(slots * shape.block_rows);
  list.partial_sum = layout.take<float>(slots * shape.block_rows);
  list.partial_o = layout.take<float>(slots * shape.block_rows * shape.d_v);
  list.max_workers = static_cast<int32_t>(workers);
  list.max_segments = static_cast<int32_t>(segments);
  list.max_merges = static_cast<int32_t>(merges);
  list.max_slots = static_cast<int32_t>(slots);
  list.max_requests = shape.batch;
  list.max_portions = static_cast<int32_t>(portions);
  list.block_rows = shape.block_rows;
  list.step_keys = shape.step_keys;
  return list;
}

template <class Lengths>
Status launch_plan(const cuda::WorkShape& shape, const cuda::WorkList& list, const Lengths& lengths,
                   cuda::Queue& queue) {
  using Kernel = PlanKernel<Lengths>;
  return launch<Kernel>(queue, {.shared_bytes = static_cast<int32_t>(sizeof(PlanShared))}, {shape, list, lengths});
}

}  // namespace

size_t work_list_bytes(const cuda::WorkShape& shape) {
  Layout layout{nullptr};
  lay_out(shape, layout);
  return layout.bytes;
}

cuda::WorkList place_work_list(const cuda::WorkShape& shape, std::byte* base) {
  Layout layout{base};
  return lay_out(shape, layout);
}

Status plan_work(const cuda::WorkShape& shape, const core::DecodeArgs& args, const cuda::WorkList& list,
                 cuda::Queue& queue) {
  return launch_plan(shape, list,
                     DecodeLengths{.queries = args.queries,
                                   .pages = args.pages,
                                   .share = args.context_parallel,
                                   .window_left = args.options.window_left,
                                   .num_tokens = args.num_tokens,
                                   .step_keys = shape.step_keys},
                     queue);
}

Status plan_work(const cuda::WorkShape& shape, const core::DecodeSparseArgs& args, const cuda::WorkList& list,
                 cuda::Queue& queue) {
  SparseLengths lengths{.queries = args.queries, .batch_size = args.batch_size, .step_keys = shape.step_keys};
  for (int32_t pool = 0; pool < args.num_pools; ++pool) {
    lengths.topk_length[pool] = args.pools[pool].topk_length;
    lengths.topk[pool] = args.pools[pool].topk;
    lengths.length_per_request[pool] = args.pools[pool].length_per_request;
  }
  return launch_plan(shape, list, lengths, queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

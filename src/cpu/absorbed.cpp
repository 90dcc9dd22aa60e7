// SPDX-License-Identifier: Apache-2.0
#include "cpu/absorbed.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cpu/finisher.h"
#include "cpu/lse.h"

namespace mla::cpu {

const TileKernels& absorbed_kernels(const KernelSet& set, DType q_dtype, std::span<const core::Cache> caches) {
  const DType q = q_dtype == DType::kE4M3 ? DType::kBF16 : q_dtype;  // bf16 holds every e4m3 exactly
  const bool f16 = std::any_of(caches.begin(), caches.end(),
                               [](const core::Cache& cache) { return cache.ckv_dtype == DType::kF16; });
  return set.pick(q, f16 ? DType::kF16 : DType::kBF16);
}

TileShape absorbed_shape(const TileKernels& kernels, int32_t d_qk, int32_t d_v, DType q_dtype,
                         std::span<const core::Cache> caches) {
  const bool quantized =
      std::any_of(caches.begin(), caches.end(), [](const core::Cache& cache) { return cache.is_quantized(); });
  TileShape shape = TileShape::choose(kernels, d_qk, d_v);
  shape.decoded_rows = quantized && kernels.pack == 1;
  shape.decoded_queries = q_dtype == DType::kE4M3;
  return shape;
}

const void* AbsorbedRun::q_nope(const Row& row) const {
  return problem_.q_nope + (row.token * problem_.q_nope_stride_token + row.head * problem_.q_nope_stride_head) *
                               static_cast<int64_t>(size_of(problem_.q_dtype));
}

const void* AbsorbedRun::q_pe(const Row& row) const {
  return problem_.q_pe + (row.token * problem_.q_pe_stride_token + row.head * problem_.q_pe_stride_head) *
                             static_cast<int64_t>(size_of(problem_.q_dtype));
}

template <class Store>
void AbsorbedRun::store_output(const Row& row, const Store& store) const {
  if (problem_.finish != nullptr) {
    Finisher finisher(set_, *problem_.finish, problem_.d_v);
    store(finisher.row(), DType::kF32);
    return finisher.finish(row.token, row.head);
  }
  store(static_cast<char*>(problem_.o) + (row.token * problem_.o_stride_token + row.head * problem_.o_stride_head) *
                                             static_cast<int64_t>(size_of(problem_.o_dtype)),
        problem_.o_dtype);
}

void AbsorbedRun::write_statistics(const Row& row, float lse, float largest) const {
  if (problem_.lse != nullptr)
    problem_.lse[row.token * problem_.lse_stride_token + row.head * problem_.lse_stride_head] =
        written_lse(lse, problem_.lse_form);
  if (problem_.max_logits != nullptr)
    problem_.max_logits[row.token * problem_.max_logits_stride_token + row.head * problem_.max_logits_stride_head] =
        largest * std::numbers::ln2_v<float>;
}

void AbsorbedRun::finish(const schedule::Task& task, int64_t first_token, const Tiles& tiles,
                         const AttentionLayout& layout) const {
  if (task.num_splits == 1) {
    for (int32_t i = 0; i < task.row_count; ++i) {
      const Row row = row_of(task, first_token, i);
      const float lse = tiles.lse(i);
      const float factor = sink_factor(problem_.options.attn_sink, row.head, lse) * problem_.o_factor;
      store_output(row, [&](void* o, DType dtype) { tiles.store(i, factor, o, dtype); });
      write_statistics(row, lse, tiles.largest_score(i));
    }
    return;
  }
  const TileShape& shape = setup_.shape;
  const int64_t first = static_cast<int64_t>(task.partial_slot + task.split_idx) * shape.max_rows;
  setup_.kernels.prefetch_for_write(layout.partial_o + first * shape.d_v,
                                    static_cast<int64_t>(task.row_count) * shape.d_v * 4);
  for (int32_t i = 0; i < task.row_count; ++i) {
    tiles.store(i, 1.0F, layout.partial_o + (first + i) * shape.d_v, DType::kF32);
    layout.partial_lse[first + i] = tiles.lse(i);
    if (setup_.keeps_max) layout.partial_max[first + i] = tiles.largest_score(i);
  }
  // The worker that finishes a unit's last split merges the unit. Here it acquires what the workers of the other splits
  // released.
  if (layout.merged_splits[task.partial_slot].fetch_add(1, std::memory_order_acq_rel) + 1 == task.num_splits)
    merge(task, first_token, layout);
}

void AbsorbedRun::merge(const schedule::Task& task, int64_t first_token, const AttentionLayout& layout) const {
  const TileShape& shape = setup_.shape;
  const int64_t first = static_cast<int64_t>(task.partial_slot) * shape.max_rows;
  // [n * max_rows + i] is the lse of row i and split n, and becomes the factor.
  float* factors = layout.partial_lse + first;
  for (int32_t i = 0; i < task.row_count; ++i) {
    const Row row = row_of(task, first_token, i);
    const float lse = merge_factors(factors + i, shape.max_rows, task.num_splits);
    const float factor = sink_factor(problem_.options.attn_sink, row.head, lse) * problem_.o_factor;
    float largest = -std::numeric_limits<float>::infinity();
    for (int32_t n = 0; n < task.num_splits; ++n) {
      factors[n * shape.max_rows + i] *= factor;
      if (setup_.keeps_max) largest = std::max(largest, layout.partial_max[first + n * shape.max_rows + i]);
    }
    store_output(row, [&](void* o, DType dtype) {
      setup_.kernels.weighted_sum(layout.partial_o + (first + i) * shape.d_v,
                                  static_cast<int64_t>(shape.max_rows) * shape.d_v, DType::kF32, task.num_splits,
                                  factors + i, shape.max_rows, shape.d_v, nullptr, o, dtype);
    });
    write_statistics(row, lse, largest);
  }
}

}  // namespace mla::cpu

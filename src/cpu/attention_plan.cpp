// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_plan.h"

namespace mla::cpu {
namespace {

/// Holds the costs of kernels of AMX, in units of 46 ns, what a group of rows and a key take at 576/512 (one core of an
/// Intel Xeon, Emerald Rapids, 2026-11-28). A key by itself costs as much as it does to bring it from L3; task and
/// split cost what they do on Zen 4.
constexpr schedule::CostModel kTilesCost = {.per_key = 1.6, .per_task_group = 67, .per_split_group = 250};

}  // namespace

schedule::SplitOptions split_options(const TileKernels& kernels, const TileShape& shape, int32_t num_threads,
                                     bool batch_invariant) {
  schedule::SplitOptions options{.num_workers = num_threads,
                                 .max_rows = shape.max_rows,
                                 .key_block = shape.key_block,
                                 .batch_invariant = batch_invariant};
  if (kernels.tile_keys > 1) options.cost = kTilesCost;
  options.cost.group_rows = kernels.lanes;
  return options;
}

AttentionLayout::AttentionLayout(Carver& carver, const AttentionSetup& setup, const TaskList::Capacity& capacity,
                                 int32_t num_threads)
    : tasks(carver, capacity), tile_bytes((Tiles::bytes(setup.kernels, setup.shape) + 63) / 64 * 64) {
  const int64_t rows = static_cast<int64_t>(capacity.partials) * setup.shape.max_rows;
  merged_splits = carver.take<std::atomic<int32_t>>(capacity.partials);
  partial_lse = carver.take<float>(rows);
  partial_max = carver.take<float>(setup.keeps_max ? rows : 0);
  partial_o = carver.take<float>(rows * setup.shape.d_v);
  tiles = carver.take<std::byte>(static_cast<int64_t>(tile_bytes) * num_threads);
}

size_t attention_workspace_size(const AttentionSetup& setup, const TaskList::Capacity& capacity) {
  Carver carver(nullptr);
  const AttentionLayout layout(carver, setup, capacity, setup.options.num_workers);
  return carver.used();
}

core::PlanSummary plan_attention(const AttentionSetup& setup, const TaskList::Capacity& capacity,
                                 const std::vector<schedule::Sequence>& sequences, std::span<std::byte> workspace) {
  Carver carver(workspace.data());
  AttentionLayout layout(carver, setup, capacity, setup.options.num_workers);
  return layout.tasks.store(schedule::make_schedule(sequences, setup.options), setup.shape);
}

}  // namespace mla::cpu

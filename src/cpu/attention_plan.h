// SPDX-License-Identifier: Apache-2.0
// This file has the code that planned attention operations share: the layout of the workspace, and the loop over the
// tasks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "cpu/task_list.h"
#include "plan/schedule.h"

namespace mla::cpu {

/// Says how an operation computes one problem.
struct AttentionSetup {
  const TileKernels& kernels;
  TileShape shape;
  schedule::SplitOptions options;
  bool keeps_max = false;  // partial states also hold the largest score
};

/// Returns the options that all operations set alike.
schedule::SplitOptions split_options(const TileKernels& kernels, const TileShape& shape, int32_t num_threads,
                                     bool batch_invariant);

/// Points at everything that `run` finds in the workspace.
struct AttentionLayout {
  TaskList tasks;
  // [partial slots]; the entry of a unit's first slot counts its finished splits.
  std::atomic<int32_t>* merged_splits = nullptr;
  float* partial_lse = nullptr;  // [partial slots][max_rows], to base 2
  float* partial_max = nullptr;  // [partial slots][max_rows], if kept
  float* partial_o = nullptr;    // [partial slots][max_rows][d_v]
  std::byte* tiles = nullptr;    // [workers][tile_bytes]
  size_t tile_bytes = 0;

  AttentionLayout(Carver& carver, const AttentionSetup& setup, const TaskList::Capacity& capacity, int32_t num_threads);
};

/// Returns the room for any lengths of `num_rows` rows in `num_sequences` sequences. With batch_invariant the number of
/// splits depends on the lengths, which `sequences` then gives.
template <class Sequences>
TaskList::Capacity capacity_of(const AttentionSetup& setup, int64_t num_rows, int64_t num_sequences,
                               const Sequences& sequences) {
  const schedule::SplitOptions& options = setup.options;
  if (options.batch_invariant && options.split_keys) {
    const schedule::Schedule schedule = schedule::make_schedule(sequences(), options);
    return {.tasks = static_cast<int32_t>(schedule.tasks.size()), .partials = schedule.num_partials};
  }
  const bool splits = options.split_keys && options.num_workers > 1;
  return {.tasks = static_cast<int32_t>(schedule::max_tasks(num_rows, num_sequences, options)),
          .partials = splits ? schedule::kMaxPartialsPerWorker * options.num_workers : 0};
}

size_t attention_workspace_size(const AttentionSetup& setup, const TaskList::Capacity& capacity);

core::PlanSummary plan_attention(const AttentionSetup& setup, const TaskList::Capacity& capacity,
                                 const std::vector<schedule::Sequence>& sequences, std::span<std::byte> workspace);

/// Calls f(task, tiles, layout) for every planned task.
template <class F>
void run_attention(const AttentionSetup& setup, core::ThreadPool& pool, std::span<std::byte> workspace, const F& f) {
  Carver carver(workspace.data());
  const AttentionLayout layout(carver, setup, TaskList::stored_capacity(workspace.data()), pool.size());
  for (int32_t i = 0; i < layout.tasks.num_partials(); ++i) layout.merged_splits[i].store(0, std::memory_order_relaxed);
  layout.tasks.for_each(pool, [&](const schedule::Task& task, int32_t worker) {
    Tiles tiles(setup.kernels, setup.shape, layout.tiles + static_cast<size_t>(worker) * layout.tile_bytes);
    if (setup.kernels.begin != nullptr) setup.kernels.begin();
    f(task, tiles, layout);
    if (setup.kernels.end != nullptr) setup.kernels.end();
  });
}

}  // namespace mla::cpu

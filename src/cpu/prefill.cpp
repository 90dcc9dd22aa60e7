// SPDX-License-Identifier: Apache-2.0
// Up-projected prefill: rows are query tokens of one request and head, keys the request's tokens of that head.
#include <algorithm>
#include <cstring>
#include <numbers>
#include <vector>

#include "cpu/attention.h"
#include "cpu/task_list.h"
#include "plan/schedule.h"

namespace mla::cpu {
namespace {

const TileKernels& kernels_for(const KernelSet& set, const core::PrefillArgs& args) {
  return set.pick(args.dtype, args.dtype);
}

schedule::Sequence sequence_of(const core::PrefillArgs& args, int32_t request, int32_t head) {
  return {.request = request,
          .head = head,
          .q_len = args.qo_indptr[request + 1] - args.qo_indptr[request],
          .rows_per_token = 1,
          .kv_len = args.kv_indptr[request + 1] - args.kv_indptr[request],
          .causal = args.causal};
}

schedule::SplitOptions split_options(const core::PrefillArgs& args, const TileKernels& kernels, const TileShape& shape,
                                     int32_t num_threads) {
  schedule::SplitOptions options{.num_workers = num_threads,
                                 .max_rows = shape.max_rows,
                                 .key_block = shape.key_block,
                                 .split_keys = false,
                                 .batch_invariant = args.batch_invariant};
  options.cost.group_rows = kernels.lanes;
  return options;
}

schedule::Schedule schedule_of(const core::PrefillArgs& args, const schedule::SplitOptions& options) {
  std::vector<schedule::Sequence> sequences;
  sequences.reserve(static_cast<size_t>(args.batch_size) * static_cast<size_t>(args.num_heads));
  for (int32_t request = 0; request < args.batch_size; ++request)
    for (int32_t head = 0; head < args.num_heads; ++head) sequences.push_back(sequence_of(args, request, head));
  return schedule::make_schedule(sequences, options);
}

struct Layout {
  TaskList tasks;
  std::byte* tiles = nullptr;  // [workers][tile_bytes]
  size_t tile_bytes = 0;

  Layout(Carver& carver, const TileKernels& kernels, const TileShape& shape, const TaskList::Capacity& capacity,
         int32_t num_threads)
      : tasks(carver, capacity), tile_bytes((Tiles::bytes(kernels, shape) + 63) / 64 * 64) {
    tiles = carver.take<std::byte>(static_cast<int64_t>(tile_bytes) * num_threads);
  }
};

TaskList::Capacity capacity_of(const core::PrefillArgs& args, const schedule::SplitOptions& options) {
  const int64_t heads = args.num_heads;
  return {.tasks = static_cast<int32_t>(schedule::max_tasks(args.num_tokens * heads, args.batch_size * heads, options)),
          .partials = 0};
}

class PrefillRun {
 public:
  PrefillRun(const core::PrefillArgs& args, const TileKernels& kernels, const TileShape& shape)
      : args_(args), kernels_(kernels), shape_(shape), element_(static_cast<int64_t>(size_of(args.dtype))) {}

  void run(const schedule::Task& task, Tiles& tiles) const {
    const int64_t first_token = args_.qo_indptr[task.request] + task.row_begin;
    const schedule::Sequence sequence = sequence_of(args_, task.request, task.head);
    tiles.begin(task.row_count);
    for (int32_t row = 0; row < task.row_count; ++row) {
      const char* q = element(args_.q, (first_token + row) * args_.q_stride_token + task.head * args_.q_stride_head);
      tiles.set_row(row, q, nullptr, schedule::visible_keys(sequence, task.row_begin + row));
    }
    tiles.pack_queries(args_.dtype, args_.d_qk);
    const float scale_log2 = args_.sm_scale * std::numbers::log2e_v<float>;
    KeyBlock block;
    for (int32_t key = task.kv_begin; key < task.kv_end; key += shape_.key_block) {
      load(task, key, std::min(shape_.key_block, task.kv_end - key), tiles, block);
      tiles.attend(block, key, scale_log2);
    }
    for (int32_t row = 0; row < task.row_count; ++row) {
      if (row + kRowsAhead < task.row_count)
        kernels_.prefetch_for_write(output(task, row + kRowsAhead),
                                    args_.d_v * static_cast<int64_t>(size_of(args_.o_dtype)));
      const float lse = tiles.finish(row, output(task, row), args_.o_dtype);
      const int64_t token = first_token + row;
      if (args_.lse != nullptr)
        args_.lse[token * args_.lse_stride_token + task.head * args_.lse_stride_head] =
            args_.lse_base == LseBase::kE ? lse * std::numbers::ln2_v<float> : lse;
    }
  }

 private:
  static constexpr int32_t kRowsAhead = 8;  // outputs of one head lie far apart too

  void* output(const schedule::Task& task, int32_t row) const {
    const int64_t token = args_.qo_indptr[task.request] + task.row_begin + row;
    return static_cast<char*>(args_.o) + (token * args_.o_stride_token + task.head * args_.o_stride_head) *
                                             static_cast<int64_t>(size_of(args_.o_dtype));
  }
  const char* element(const void* base, int64_t index) const {
    return static_cast<const char*>(base) + index * element_;
  }

  void load(const schedule::Task& task, int32_t begin, int32_t count, Tiles& tiles, KeyBlock& block) const {
    const void** k = tiles.rows(0);
    const void** v = tiles.rows(1);
    const int64_t first = args_.kv_indptr[task.request] + begin;
    const int32_t listed = std::min(count + shape_.key_block, task.kv_end - begin);
    for (int32_t key = 0; key < listed; ++key) {
      k[key] = element(args_.k, (first + key) * args_.k_stride_token + task.head * args_.k_stride_head);
      v[key] = element(args_.v, (first + key) * args_.v_stride_token + task.head * args_.v_stride_head);
    }
    pad_rows(k, listed, count + shape_.key_block);
    pad_rows(v, listed, count + shape_.key_block);
    block.num_keys = count;
    block.num_segments = 0;
    const auto lines = [&](int32_t width) { return static_cast<int32_t>((width * element_ + 63) / 64); };
    block.prefetch = {.rows = {k + shape_.key_block, v + shape_.key_block},
                      .lines = {lines(args_.d_qk), lines(args_.d_v)}};
    if (kernels_.pack == 2) {
      if (rows_collide()) copy_keys(k, tiles, count);
      block.segments[block.num_segments++] = {.rows = k, .steps = args_.d_qk / 2};
      block.value_rows = v;
    } else {
      for (int32_t channel = 0; channel < args_.d_qk; channel += kSlab)
        tiles.add_key_slab({.rows = k,
                            .dtype = args_.dtype,
                            .num_keys = count,
                            .channel = channel,
                            .width = std::min(kSlab, args_.d_qk - channel)},
                           block);
      for (int32_t slab = 0; slab < args_.d_v / kSlab; ++slab)
        kernels_.pack_slab({.rows = v, .dtype = args_.dtype, .num_keys = count, .channel = slab * kSlab},
                           tiles.value_slabs() + slab * tiles.slab_stride());
      block.value_rows = nullptr;
      block.value_slabs = tiles.value_slabs();
    }
  }

  /// Rows a multiple of a page apart share their cache sets and would evict one another: such a block is copied once
  /// for all its query rows.
  bool rows_collide() const { return args_.k_stride_token * element_ % 4096 == 0; }

  void copy_keys(const void** rows, Tiles& tiles, int32_t num_keys) const {
    const size_t bytes = static_cast<size_t>(args_.d_qk * element_);
    auto* copy = reinterpret_cast<std::byte*>(tiles.keys());
    for (int32_t key = 0; key < num_keys; ++key, copy += bytes) {
      std::memcpy(copy, rows[key], bytes);
      rows[key] = copy;
    }
  }

  const core::PrefillArgs& args_;
  const TileKernels& kernels_;
  const TileShape& shape_;
  int64_t element_;
};

}  // namespace

size_t prefill_workspace_size(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(nullptr);
  const schedule::SplitOptions options = split_options(args, kernels, shape, num_threads);
  const Layout layout(carver, kernels, shape, capacity_of(args, options), num_threads);
  return carver.used();
}

dispatch::PlanSummary plan_prefill(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads,
                                   std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(workspace.data());
  const schedule::SplitOptions options = split_options(args, kernels, shape, num_threads);
  Layout layout(carver, kernels, shape, capacity_of(args, options), num_threads);
  return layout.tasks.store(schedule_of(args, options), shape);
}

void run_prefill(const KernelSet& set, const core::PrefillArgs& args, core::ThreadPool& pool,
                 std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(workspace.data());
  const Layout layout(carver, kernels, shape, TaskList::stored_capacity(workspace.data()), pool.size());
  const PrefillRun run(args, kernels, shape);
  layout.tasks.for_each(pool, [&](const schedule::Task& task, int32_t worker) {
    Tiles tiles(kernels, shape, layout.tiles + static_cast<size_t>(worker) * layout.tile_bytes);
    run.run(task, tiles);
  });
}

}  // namespace mla::cpu

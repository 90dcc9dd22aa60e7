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

int32_t visible_keys(const core::PrefillArgs& args, int32_t request, int32_t row) {
  const int32_t kv_len = args.kv_indptr[request + 1] - args.kv_indptr[request];
  const int32_t q_len = args.qo_indptr[request + 1] - args.qo_indptr[request];
  return args.causal ? std::clamp(kv_len - q_len + row + 1, 0, kv_len) : kv_len;
}

plan::Schedule schedule_of(const core::PrefillArgs& args, const TileKernels& kernels, const TileShape& shape,
                           int32_t num_threads) {
  std::vector<plan::Unit> units;
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int32_t num_rows = args.qo_indptr[request + 1] - args.qo_indptr[request];
    const int32_t block = plan::even_block_rows(num_rows, shape.max_rows, kernels.lanes);
    for (int32_t head = 0; head < args.num_heads; ++head)
      for (int32_t row = 0; row < num_rows; row += block) {
        const int32_t count = std::min(block, num_rows - row);
        units.push_back({.request = request, .head = head, .row_begin = row, .row_count = count,
                         .num_keys = visible_keys(args, request, row + count - 1)});
      }
  }
  plan::CostModel cost;
  cost.group_rows = kernels.lanes;
  return plan::make_schedule(units, {.num_workers = num_threads, .key_block = shape.key_block, .split = false,
                                     .batch_invariant = args.batch_invariant, .cost = cost});
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

TaskList::Capacity capacity_of(const core::PrefillArgs& args, const TileShape& shape) {
  const int64_t blocks = args.num_tokens / shape.max_rows + args.batch_size;
  return {.tasks = static_cast<int32_t>(blocks * args.num_heads), .partials = 0};
}

class PrefillRun {
 public:
  PrefillRun(const core::PrefillArgs& args, const TileKernels& kernels, const TileShape& shape)
      : args_(args), kernels_(kernels), shape_(shape), element_(static_cast<int64_t>(size_of(args.dtype))) {}

  void run(const plan::Task& task, Tiles& tiles) const {
    const int64_t first_token = args_.qo_indptr[task.request] + task.row_begin;
    tiles.begin(task.row_count);
    for (int32_t row = 0; row < task.row_count; ++row) {
      const char* q = element(args_.q, (first_token + row) * args_.q_stride_token + task.head * args_.q_stride_head);
      kernels_.pack_query(q, args_.dtype, args_.d_qk, tiles.lane_of(row), tiles.query(row, 0));
      tiles.set_visible(row, visible_keys(args_, task.request, task.row_begin + row));
    }
    const float scale_log2 = args_.sm_scale * std::numbers::log2e_v<float>;
    KeyBlock block;
    for (int32_t key = task.kv_begin; key < task.kv_end; key += shape_.key_block) {
      load(task, key, std::min(shape_.key_block, task.kv_end - key), tiles, block);
      tiles.attend(block, key, scale_log2);
    }
    for (int32_t row = 0; row < task.row_count; ++row) {
      const int64_t token = first_token + row;
      auto* o = static_cast<char*>(args_.o) + (token * args_.o_stride_token + task.head * args_.o_stride_head) *
                                                  static_cast<int64_t>(size_of(args_.o_dtype));
      const float lse = tiles.finish(row, o, args_.o_dtype);
      if (args_.lse != nullptr)
        args_.lse[token * args_.lse_stride_token + task.head * args_.lse_stride_head] =
            args_.lse_base == LseBase::kE ? lse * std::numbers::ln2_v<float> : lse;
    }
  }

 private:
  const char* element(const void* base, int64_t index) const { return static_cast<const char*>(base) + index * element_; }

  void load(const plan::Task& task, int32_t begin, int32_t count, Tiles& tiles, KeyBlock& block) const {
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
      copy_keys(k, tiles, block);
      block.value_rows = v;
    } else {
      for (int32_t channel = 0; channel < args_.d_qk; channel += kSlab)
        tiles.add_key_slab({.rows = k, .dtype = args_.dtype, .num_keys = count, .channel = channel,
                            .width = std::min(kSlab, args_.d_qk - channel)},
                           block);
      for (int32_t slab = 0; slab < args_.d_v / kSlab; ++slab)
        kernels_.pack_slab({.rows = v, .dtype = args_.dtype, .num_keys = count, .channel = slab * kSlab},
                           tiles.value_slabs() + slab * tiles.slab_stride());
      block.value_rows = nullptr;
      block.value_slabs = tiles.value_slabs();
    }
  }

  /// Keys of one head lie a whole token apart, often a multiple of 4 KiB, where they would evict one another from L1:
  /// the block is made contiguous once for all its rows.
  void copy_keys(const void** rows, Tiles& tiles, KeyBlock& block) const {
    const size_t bytes = static_cast<size_t>(args_.d_qk * element_);
    auto* copy = reinterpret_cast<std::byte*>(tiles.keys());
    for (int32_t key = 0; key < block.num_keys; ++key, copy += bytes) {
      std::memcpy(copy, rows[key], bytes);
      rows[key] = copy;
    }
    block.segments[block.num_segments++] = {.rows = rows, .steps = args_.d_qk / 2};
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
  const Layout layout(carver, kernels, shape, capacity_of(args, shape), num_threads);
  return carver.used();
}

dispatch::PlanSummary plan_prefill(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads,
                                   std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(workspace.data());
  Layout layout(carver, kernels, shape, capacity_of(args, shape), num_threads);
  return layout.tasks.store(schedule_of(args, kernels, shape, num_threads), shape);
}

void run_prefill(const KernelSet& set, const core::PrefillArgs& args, core::ThreadPool& pool,
                 std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(workspace.data());
  const Layout layout(carver, kernels, shape, TaskList::stored_capacity(workspace.data()), pool.size());
  const PrefillRun run(args, kernels, shape);
  layout.tasks.for_each(pool, [&](const plan::Task& task, int32_t worker) {
    Tiles tiles(kernels, shape, layout.tiles + static_cast<size_t>(worker) * layout.tile_bytes);
    run.run(task, tiles);
  });
}

}  // namespace mla::cpu

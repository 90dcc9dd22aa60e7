// SPDX-License-Identifier: Apache-2.0
// Absorbed decode: rows are (query token, head) pairs of one request, keys are rows of the paged cache.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/task_list.h"
#include "plan/schedule.h"

namespace mla::cpu {
namespace {

DType cache_dtype(const core::Cache& cache) { return cache.format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

const TileKernels& kernels_for(const KernelSet& set, const core::DecodeArgs& args) {
  return set.pick(args.q_dtype, cache_dtype(args.cache));
}

schedule::Sequence sequence_of(const core::DecodeArgs& args, int32_t request) {
  return {.request = request,
          .head = 0,
          .q_len = args.queries.len(request),
          .rows_per_token = args.num_heads,
          .kv_len = args.pages.kv_len[request],
          .causal = args.causal};
}

schedule::SplitOptions split_options(const core::DecodeArgs& args, const TileKernels& kernels, const TileShape& shape,
                                     int32_t num_threads) {
  schedule::SplitOptions options{.num_workers = num_threads,
                                 .max_rows = shape.max_rows,
                                 .key_block = shape.key_block,
                                 .batch_invariant = args.batch_invariant};
  options.cost.group_rows = kernels.lanes;
  return options;
}

schedule::Schedule schedule_of(const core::DecodeArgs& args, const schedule::SplitOptions& options) {
  std::vector<schedule::Sequence> sequences;
  sequences.reserve(static_cast<size_t>(args.batch_size));
  for (int32_t request = 0; request < args.batch_size; ++request) sequences.push_back(sequence_of(args, request));
  return schedule::make_schedule(sequences, options);
}

/// Everything `run` finds in the workspace.
struct Layout {
  TaskList tasks;
  std::atomic<int32_t>* merged_splits = nullptr;  // [partial slots] of each unit's first slot: splits done
  float* partial_lse = nullptr;                   // [partial slots][max_rows], base 2
  float* partial_o = nullptr;                     // [partial slots][max_rows][d_v]
  std::byte* tiles = nullptr;                     // [workers][tile_bytes]
  size_t tile_bytes = 0;

  Layout(Carver& carver, const TileKernels& kernels, const TileShape& shape, const TaskList::Capacity& capacity,
         int32_t num_threads)
      : tasks(carver, capacity) {
    merged_splits = carver.take<std::atomic<int32_t>>(capacity.partials);
    partial_lse = carver.take<float>(static_cast<int64_t>(capacity.partials) * shape.max_rows);
    partial_o = carver.take<float>(static_cast<int64_t>(capacity.partials) * shape.max_rows * shape.d_v);
    tile_bytes = (Tiles::bytes(kernels, shape) + 63) / 64 * 64;
    tiles = carver.take<std::byte>(static_cast<int64_t>(tile_bytes) * num_threads);
  }
};

/// Room for any lengths of these shapes; batch_invariant splits by length, so there the lengths decide.
TaskList::Capacity capacity_of(const core::DecodeArgs& args, const schedule::SplitOptions& options) {
  if (args.batch_invariant) {
    const schedule::Schedule schedule = schedule_of(args, options);
    return {.tasks = static_cast<int32_t>(schedule.tasks.size()), .partials = schedule.num_partials};
  }
  const int64_t tasks = schedule::max_tasks(args.num_tokens * args.num_heads, args.batch_size, options);
  return {.tasks = static_cast<int32_t>(tasks),
          .partials = options.num_workers > 1 ? schedule::kMaxPartialsPerWorker * options.num_workers : 0};
}

/// Addresses of a request's rows in one tensor of the cache.
struct PagedRows {
  const char* base;
  int64_t page_stride, row_stride;  // bytes
  const int32_t* pages;
  int32_t page_size;

  /// Keys [begin, begin + count) into `rows`.
  void fill(int32_t begin, int32_t count, const void** rows) const {
    int32_t page = begin / page_size;
    int32_t slot = begin % page_size;
    for (int32_t key = 0; key < count; ++page, slot = 0) {
      const char* row = base + pages[page] * page_stride + slot * row_stride;
      const int32_t end = std::min(count, key + page_size - slot);
      for (; key < end; ++key, row += row_stride) rows[key] = row;
    }
  }
};

/// Makes key blocks of a paged cache. Pairs: the cache's rows as they lie. Floats: rows converted into slabs. Either
/// way the rows that come next are prefetched, since the hardware cannot follow a page table.
class PagedLoader {
 public:
  PagedLoader(const core::DecodeArgs& args, int32_t request, Tiles& tiles)
      : tiles_(tiles), in_place_(tiles.kernels().pack == 2), dtype_(cache_dtype(args.cache)) {
    const core::Cache& cache = args.cache;
    const bool one_tensor =
        cache.ckv != nullptr && cache.kpe == static_cast<const uint16_t*>(cache.ckv) + cache.d_ckv &&
        cache.kpe_stride_page == cache.ckv_stride_page && cache.kpe_stride_token == cache.ckv_stride_token;
    const auto part = [&](const void* base, int64_t page_stride, int64_t row_stride) {
      const auto element = static_cast<int64_t>(size_of(dtype_));
      return PagedRows{.base = static_cast<const char*>(base),
                       .page_stride = page_stride * element,
                       .row_stride = row_stride * element,
                       .pages = args.pages.of(request),
                       .page_size = args.pages.page_size};
    };
    parts_[0] = part(cache.ckv, cache.ckv_stride_page, cache.ckv_stride_token);
    widths_[0] = one_tensor ? args.d_qk : cache.d_ckv;
    if (one_tensor || cache.d_kpe == 0) return;
    parts_[1] = part(cache.kpe, cache.kpe_stride_page, cache.kpe_stride_token);
    widths_[1] = cache.d_kpe;
    num_parts_ = 2;
  }

  /// Keys [begin, begin + count) of a task whose keys end at `end`.
  void load(int32_t begin, int32_t count, int32_t end, KeyBlock& block) {
    const int32_t ahead = in_place_ ? kTilesAhead * kKeyTile : tiles_.shape().key_block;
    const int32_t listed = std::min(count + ahead, end - begin);
    block.num_keys = count;
    block.num_segments = 0;
    block.prefetch = {};
    for (int32_t i = 0; i < num_parts_; ++i) {
      const void** rows = tiles_.rows(i);
      parts_[i].fill(begin, listed, rows);
      pad_rows(rows, listed, count + ahead);
      block.prefetch.rows[i] = rows + ahead;
      block.prefetch.lines[i] = static_cast<int32_t>((widths_[i] * static_cast<int64_t>(size_of(dtype_)) + 63) / 64);
      if (in_place_) {
        block.segments[block.num_segments++] = {.rows = rows, .steps = widths_[i] / 2};
      } else {
        convert(rows, widths_[i], block);
      }
    }
    block.value_rows = in_place_ ? tiles_.rows(0) : nullptr;
    block.value_slabs = tiles_.keys();
  }

 private:
  static constexpr int32_t kTilesAhead = 4;

  void convert(const void** rows, int32_t width, KeyBlock& block) {
    for (int32_t channel = 0; channel < width; channel += kSlab)
      tiles_.add_key_slab({.rows = rows,
                           .dtype = dtype_,
                           .num_keys = block.num_keys,
                           .channel = channel,
                           .width = std::min(kSlab, width - channel)},
                          block);
  }

  Tiles& tiles_;
  bool in_place_;
  DType dtype_;
  PagedRows parts_[2] = {};  // ckv, or whole rows; kpe
  int32_t widths_[2] = {0, 0};
  int32_t num_parts_ = 1;
};

class DecodeRun {
 public:
  DecodeRun(const core::DecodeArgs& args, const TileKernels& kernels, const TileShape& shape, const Layout& layout)
      : args_(args), kernels_(kernels), shape_(shape), layout_(layout) {}

  void run(const schedule::Task& task, Tiles& tiles) const {
    pack_rows(task, tiles);
    const float scale_log2 = args_.sm_scale * std::numbers::log2e_v<float>;
    PagedLoader loader(args_, task.request, tiles);
    KeyBlock block;
    for (int32_t key = task.kv_begin; key < task.kv_end; key += shape_.key_block) {
      loader.load(key, std::min(shape_.key_block, task.kv_end - key), task.kv_end, block);
      tiles.attend(block, key, scale_log2);
    }
    if (task.num_splits == 1) {
      for (int32_t row = 0; row < task.row_count; ++row)
        write_lse(task, row, tiles.finish(row, output(task, row), args_.o_dtype));
      return;
    }
    const int64_t first = static_cast<int64_t>(task.partial_slot + task.split_idx) * shape_.max_rows;
    kernels_.prefetch_for_write(layout_.partial_o + first * shape_.d_v,
                                static_cast<int64_t>(task.row_count) * shape_.d_v * 4);
    for (int32_t row = 0; row < task.row_count; ++row)
      layout_.partial_lse[first + row] = tiles.finish(row, layout_.partial_o + (first + row) * shape_.d_v, DType::kF32);
    // Whoever finishes a unit's last split merges it: the release of each split is acquired here.
    if (layout_.merged_splits[task.partial_slot].fetch_add(1, std::memory_order_acq_rel) + 1 == task.num_splits)
      merge(task);
  }

 private:
  void pack_rows(const schedule::Task& task, Tiles& tiles) const {
    tiles.begin(task.row_count);
    const auto element = static_cast<int64_t>(size_of(args_.q_dtype));
    const int32_t first_token = args_.queries.begin(task.request);
    const schedule::Sequence sequence = sequence_of(args_, task.request);
    for (int32_t i = 0; i < task.row_count; ++i) {
      const int32_t row = task.row_begin + i;
      const int64_t token = first_token + row / args_.num_heads;
      const int64_t head = row % args_.num_heads;
      const auto* nope = static_cast<const char*>(args_.q_nope) +
                         (token * args_.q_nope_stride_token + head * args_.q_nope_stride_head) * element;
      const auto* pe = static_cast<const char*>(args_.q_pe) +
                       (token * args_.q_pe_stride_token + head * args_.q_pe_stride_head) * element;
      tiles.set_row(i, nope, pe, std::min(schedule::visible_keys(sequence, row), task.kv_end));
    }
    tiles.pack_queries(args_.q_dtype, args_.cache.d_ckv);
  }

  void* output(const schedule::Task& task, int32_t i) const {
    const int32_t row = task.row_begin + i;
    const int64_t token = args_.queries.begin(task.request) + row / args_.num_heads;
    const int64_t head = row % args_.num_heads;
    return static_cast<char*>(args_.o) +
           (token * args_.o_stride_token + head * args_.o_stride_head) * static_cast<int64_t>(size_of(args_.o_dtype));
  }

  void write_lse(const schedule::Task& task, int32_t i, float lse_log2) const {
    if (args_.lse == nullptr) return;
    const int32_t row = task.row_begin + i;
    const int64_t token = args_.queries.begin(task.request) + row / args_.num_heads;
    const int64_t head = row % args_.num_heads;
    args_.lse[token * args_.lse_stride_token + head * args_.lse_stride_head] =
        args_.lse_base == LseBase::kE ? lse_log2 * std::numbers::ln2_v<float> : lse_log2;
  }

  void merge(const schedule::Task& task) const {
    const int64_t first = static_cast<int64_t>(task.partial_slot) * shape_.max_rows;
    float* weight = layout_.partial_lse + first;  // of row i and split n, [n * max_rows + i], becomes the weight
    for (int32_t i = 0; i < task.row_count; ++i) {
      const float lse = merge_weights(weight + i, shape_.max_rows, task.num_splits);
      kernels_.weighted_sum(layout_.partial_o + (first + i) * shape_.d_v,
                            static_cast<int64_t>(shape_.max_rows) * shape_.d_v, DType::kF32, task.num_splits,
                            weight + i, shape_.max_rows, shape_.d_v, nullptr, output(task, i), args_.o_dtype);
      write_lse(task, i, lse);
    }
  }

  const core::DecodeArgs& args_;
  const TileKernels& kernels_;
  const TileShape& shape_;
  const Layout& layout_;
};

}  // namespace

size_t decode_workspace_size(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(nullptr);
  const schedule::SplitOptions options = split_options(args, kernels, shape, num_threads);
  const Layout layout(carver, kernels, shape, capacity_of(args, options), num_threads);
  return carver.used();
}

dispatch::PlanSummary plan_decode(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads,
                                  std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  const schedule::SplitOptions options = split_options(args, kernels, shape, num_threads);
  Carver carver(workspace.data());
  Layout layout(carver, kernels, shape, capacity_of(args, options), num_threads);
  return layout.tasks.store(schedule_of(args, options), shape);
}

void run_decode(const KernelSet& set, const core::DecodeArgs& args, core::ThreadPool& pool,
                std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(workspace.data());
  const Layout layout(carver, kernels, shape, TaskList::stored_capacity(workspace.data()), pool.size());
  for (int32_t i = 0; i < layout.tasks.num_partials(); ++i) layout.merged_splits[i].store(0, std::memory_order_relaxed);
  const DecodeRun run(args, kernels, shape, layout);
  layout.tasks.for_each(pool, [&](const schedule::Task& task, int32_t worker) {
    Tiles tiles(kernels, shape, layout.tiles + static_cast<size_t>(worker) * layout.tile_bytes);
    run.run(task, tiles);
  });
}

}  // namespace mla::cpu

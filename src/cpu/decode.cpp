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

DType cache_dtype(const core::Cache& cache) {
  return cache.format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
}

const TileKernels& kernels_for(const KernelSet& set, const core::DecodeArgs& args) {
  return set.pick(args.q_dtype, cache_dtype(args.cache));
}

/// Keys that row `row` of request `request` sees.
int32_t visible_keys(const core::DecodeArgs& args, int32_t request, int32_t row) {
  const int32_t kv_len = args.pages.kv_len[request];
  if (!args.causal) return kv_len;
  const int32_t token = row / args.num_heads;
  return std::clamp(kv_len - args.queries.len(request) + token + 1, 0, kv_len);
}

std::vector<plan::Unit> units_of(const core::DecodeArgs& args, const TileKernels& kernels, const TileShape& shape) {
  std::vector<plan::Unit> units;
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int32_t num_rows = args.queries.len(request) * args.num_heads;
    const int32_t block = plan::even_block_rows(num_rows, shape.max_rows, kernels.lanes);
    for (int32_t row = 0; row < num_rows; row += block) {
      const int32_t count = std::min(block, num_rows - row);
      units.push_back({.request = request, .head = 0, .row_begin = row, .row_count = count,
                       .num_keys = visible_keys(args, request, row + count - 1)});
    }
  }
  return units;
}

plan::Schedule schedule_of(const core::DecodeArgs& args, const TileKernels& kernels, const TileShape& shape,
                           int32_t num_threads) {
  plan::CostModel cost;
  cost.group_rows = kernels.lanes;
  return plan::make_schedule(units_of(args, kernels, shape),
                             {.num_workers = num_threads, .key_block = shape.key_block,
                              .batch_invariant = args.batch_invariant, .cost = cost});
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
TaskList::Capacity capacity_of(const core::DecodeArgs& args, const TileKernels& kernels, const TileShape& shape,
                               int32_t num_threads) {
  if (args.batch_invariant) {
    const plan::Schedule schedule = schedule_of(args, kernels, shape, num_threads);
    return {.tasks = static_cast<int32_t>(schedule.tasks.size()), .partials = schedule.num_partials};
  }
  const auto units = static_cast<int32_t>(args.num_tokens * args.num_heads / shape.max_rows + args.batch_size);
  const int32_t partials = num_threads > 1 ? plan::kMaxPartialsPerWorker * num_threads : 0;
  return {.tasks = units + partials, .partials = partials};
}

/// Fills row lists with the keys [begin, begin + count) of a request; past `kv_end` the last key stands in.
class PagedRows {
 public:
  PagedRows(const core::DecodeArgs& args, int32_t request)
      : cache_(args.cache), pages_(args.pages.of(request)), element_(size_of(cache_dtype(args.cache))) {
    if (cache_.d_kpe > 0) return;
    cache_.kpe = cache_.ckv;  // "NoPE": a list that nobody reads, but may not point nowhere
    cache_.kpe_stride_page = cache_.kpe_stride_token = 0;
  }

  void fill(int32_t begin, int32_t count, const void** ckv, const void** kpe) const {
    const int32_t page_size = cache_.page_size;
    const int64_t ckv_step = cache_.ckv_stride_token * static_cast<int64_t>(element_);
    const int64_t kpe_step = cache_.kpe_stride_token * static_cast<int64_t>(element_);
    int32_t page = begin / page_size;
    int32_t slot = begin % page_size;
    for (int32_t key = 0; key < count; ++page, slot = 0) {
      const int64_t number = pages_[page];
      const auto* c = at(cache_.ckv, number * cache_.ckv_stride_page + slot * cache_.ckv_stride_token);
      const auto* r = at(cache_.kpe, number * cache_.kpe_stride_page + slot * cache_.kpe_stride_token);
      const int32_t end = std::min(count, key + page_size - slot);
      for (; key < end; ++key, c += ckv_step, r += kpe_step) {
        ckv[key] = c;
        kpe[key] = r;
      }
    }
  }

 private:
  const char* at(const void* base, int64_t element) const {
    return static_cast<const char*>(base) + element * static_cast<int64_t>(element_);
  }

  core::Cache cache_;
  const int32_t* pages_;
  size_t element_;
};

/// Makes key blocks of a paged cache. Pairs: the cache's rows as they lie. Floats: rows converted into slabs. Either way
/// the rows that come next are prefetched, since the hardware cannot follow a page table.
class PagedLoader {
 public:
  PagedLoader(const core::DecodeArgs& args, int32_t request, Tiles& tiles)
      : args_(args), rows_(args, request), tiles_(tiles), in_place_(tiles.kernels().pack == 2) {}

  /// Keys [begin, begin + count) of a task whose keys end at `end`.
  void load(int32_t begin, int32_t count, int32_t end, KeyBlock& block) {
    const void** ckv = tiles_.rows(0);
    const void** kpe = tiles_.rows(1);
    const core::Cache& cache = args_.cache;
    const bool one_row = cache.kpe == static_cast<const uint16_t*>(cache.ckv) + cache.d_ckv &&
                         cache.kpe_stride_page == cache.ckv_stride_page &&
                         cache.kpe_stride_token == cache.ckv_stride_token;
    const int32_t ahead = in_place_ ? kTilesAhead * kKeyTile : tiles_.shape().key_block;
    const int32_t listed = std::min(count + ahead, end - begin);
    rows_.fill(begin, listed, ckv, kpe);
    pad_rows(ckv, listed, count + ahead);
    pad_rows(kpe, listed, count + ahead);
    block.num_keys = count;
    block.num_segments = 0;
    const auto lines = [](int32_t width) { return (width * 2 + 63) / 64; };
    block.prefetch = {.rows = {ckv + ahead, kpe + ahead},
                      .lines = {lines(one_row ? args_.d_qk : cache.d_ckv), one_row ? 0 : lines(cache.d_kpe)}};
    if (in_place_) {
      block.value_rows = ckv;
      block.segments[block.num_segments++] = {.rows = ckv, .steps = (one_row ? args_.d_qk : cache.d_ckv) / 2};
      if (!one_row && cache.d_kpe > 0) block.segments[block.num_segments++] = {.rows = kpe, .steps = cache.d_kpe / 2};
    } else {
      convert_rows(ckv, kpe, block);
    }
  }

 private:
  static constexpr int32_t kTilesAhead = 4;

  void convert_rows(const void** ckv, const void** kpe, KeyBlock& block) {
    block.value_rows = nullptr;
    block.value_slabs = tiles_.keys();
    add_slabs(ckv, args_.cache.d_ckv, block);
    add_slabs(kpe, args_.cache.d_kpe, block);
  }

  void add_slabs(const void** rows, int32_t width, KeyBlock& block) {
    for (int32_t channel = 0; channel < width; channel += kSlab)
      tiles_.add_key_slab({.rows = rows, .dtype = cache_dtype(args_.cache), .num_keys = block.num_keys,
                           .channel = channel, .width = std::min(kSlab, width - channel)},
                          block);
  }

  const core::DecodeArgs& args_;
  PagedRows rows_;
  Tiles& tiles_;
  bool in_place_;
};

class DecodeRun {
 public:
  DecodeRun(const core::DecodeArgs& args, const TileKernels& kernels, const TileShape& shape, const Layout& layout)
      : args_(args), kernels_(kernels), shape_(shape), layout_(layout) {}

  void run(const plan::Task& task, Tiles& tiles) const {
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
    for (int32_t row = 0; row < task.row_count; ++row)
      layout_.partial_lse[first + row] =
          tiles.finish(row, layout_.partial_o + (first + row) * shape_.d_v, DType::kF32);
    // Whoever finishes a unit's last split merges it: the release of each split is acquired here.
    if (layout_.merged_splits[task.partial_slot].fetch_add(1, std::memory_order_acq_rel) + 1 == task.num_splits)
      merge(task);
  }

 private:
  void pack_rows(const plan::Task& task, Tiles& tiles) const {
    tiles.begin(task.row_count);
    const auto element = static_cast<int64_t>(size_of(args_.q_dtype));
    const int32_t first_token = args_.queries.begin(task.request);
    for (int32_t i = 0; i < task.row_count; ++i) {
      const int32_t row = task.row_begin + i;
      const int64_t token = first_token + row / args_.num_heads;
      const int64_t head = row % args_.num_heads;
      const auto* nope = static_cast<const char*>(args_.q_nope) +
                         (token * args_.q_nope_stride_token + head * args_.q_nope_stride_head) * element;
      kernels_.pack_query(nope, args_.q_dtype, args_.cache.d_ckv, tiles.lane_of(i), tiles.query(i, 0));
      if (args_.cache.d_kpe > 0) {
        const auto* pe = static_cast<const char*>(args_.q_pe) +
                         (token * args_.q_pe_stride_token + head * args_.q_pe_stride_head) * element;
        kernels_.pack_query(pe, args_.q_dtype, args_.cache.d_kpe, tiles.lane_of(i),
                            tiles.query(i, args_.cache.d_ckv / kernels_.pack));
      }
      tiles.set_visible(i, std::min(visible_keys(args_, task.request, row), task.kv_end));
    }
  }

  void* output(const plan::Task& task, int32_t i) const {
    const int32_t row = task.row_begin + i;
    const int64_t token = args_.queries.begin(task.request) + row / args_.num_heads;
    const int64_t head = row % args_.num_heads;
    return static_cast<char*>(args_.o) + (token * args_.o_stride_token + head * args_.o_stride_head) *
                                             static_cast<int64_t>(size_of(args_.o_dtype));
  }

  void write_lse(const plan::Task& task, int32_t i, float lse_log2) const {
    if (args_.lse == nullptr) return;
    const int32_t row = task.row_begin + i;
    const int64_t token = args_.queries.begin(task.request) + row / args_.num_heads;
    const int64_t head = row % args_.num_heads;
    args_.lse[token * args_.lse_stride_token + head * args_.lse_stride_head] =
        args_.lse_base == LseBase::kE ? lse_log2 * std::numbers::ln2_v<float> : lse_log2;
  }

  void merge(const plan::Task& task) const {
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
  const Layout layout(carver, kernels, shape, capacity_of(args, kernels, shape, num_threads), num_threads);
  return carver.used();
}

dispatch::PlanSummary plan_decode(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads,
                                  std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  const plan::Schedule schedule = schedule_of(args, kernels, shape, num_threads);
  Carver carver(workspace.data());
  Layout layout(carver, kernels, shape, capacity_of(args, kernels, shape, num_threads), num_threads);
  return layout.tasks.store(schedule, shape);
}

void run_decode(const KernelSet& set, const core::DecodeArgs& args, core::ThreadPool& pool,
                std::span<std::byte> workspace) {
  const TileKernels& kernels = kernels_for(set, args);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  Carver carver(workspace.data());
  const Layout layout(carver, kernels, shape, TaskList::stored_capacity(workspace.data()), pool.size());
  for (int32_t i = 0; i < layout.tasks.num_partials(); ++i)
    layout.merged_splits[i].store(0, std::memory_order_relaxed);
  const DecodeRun run(args, kernels, shape, layout);
  layout.tasks.for_each(pool, [&](const plan::Task& task, int32_t worker) {
    Tiles tiles(kernels, shape, layout.tiles + static_cast<size_t>(worker) * layout.tile_bytes);
    run.run(task, tiles);
  });
}

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Up-projected prefill: rows are query tokens of one request and head, keys the request's tokens of that head.
#include <algorithm>
#include <cstring>
#include <numbers>
#include <vector>

#include "cpu/attention_plan.h"
#include "cpu/lse.h"
#include "cpu/operations.h"

namespace mla::cpu {
namespace {

schedule::Sequence sequence_of(const core::PrefillArgs& args, int32_t request, int32_t head) {
  return {.request = request,
          .head = head,
          .q_len = args.qo_indptr[request + 1] - args.qo_indptr[request],
          .rows_per_token = 1,
          .kv_len = args.kv_indptr[request + 1] - args.kv_indptr[request],
          .causal = args.causal,
          .window_left = args.options.window_left};
}

AttentionSetup setup_of(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads) {
  const TileKernels& kernels = set.pick(args.dtype, args.dtype);
  const TileShape shape = TileShape::choose(kernels, args.d_qk, args.d_v);
  schedule::SplitOptions options = split_options(kernels, shape, num_threads, args.batch_invariant);
  options.split_keys = false;
  return {.kernels = kernels, .shape = shape, .options = options};
}

std::vector<schedule::Sequence> sequences_of(const core::PrefillArgs& args) {
  std::vector<schedule::Sequence> sequences;
  sequences.reserve(static_cast<size_t>(args.batch_size) * static_cast<size_t>(args.num_heads));
  for (int32_t request = 0; request < args.batch_size; ++request)
    for (int32_t head = 0; head < args.num_heads; ++head) sequences.push_back(sequence_of(args, request, head));
  return sequences;
}

TaskList::Capacity capacity_of(const AttentionSetup& setup, const core::PrefillArgs& args) {
  const int64_t heads = args.num_heads;
  return capacity_of(setup, args.num_tokens * heads, args.batch_size * heads, [&] { return sequences_of(args); });
}

/// Makes key blocks of one head. The rows of a head lie far apart: pairs multiply a copy of the keys, made beside the
/// multiplies of the block before, since rows that share cache sets evict one another; floats convert them into slabs.
class HeadLoader {
 public:
  HeadLoader(const core::PrefillArgs& args, const schedule::Task& task, Tiles& tiles)
      : tiles_(tiles),
        key_block_(tiles.shape().key_block),
        dtype_(args.dtype),
        d_qk_(args.d_qk),
        d_v_(args.d_v),
        k_(rows_of(args.k, args.k_stride_token, args.k_stride_head, args, task)),
        v_(rows_of(args.v, args.v_stride_token, args.v_stride_head, args, task)),
        end_(task.kv_end),
        listed_(task.kv_begin) {
    if (task.kv_begin >= task.kv_end) return;
    list(task.kv_begin, 0);
    if (tiles_.kernels().pack == 2) tiles_.kernels().copy_rows(copy_of(tiles_.rows(0), count_at(task.kv_begin)));
  }

  /// The block that begins at key `begin`; blocks must be asked for in order.
  void load(int32_t begin, KeyBlock& block) {
    const void** k = tiles_.rows(0);
    const void** v = tiles_.rows(1);
    if (begin > listed_) {  // what came next is now the block
      std::copy_n(k + key_block_, key_block_, k);
      std::copy_n(v + key_block_, key_block_, v);
      listed_ = begin;
    }
    const int32_t count = count_at(begin);
    const int32_t next_count = count_at(begin + count);
    if (next_count > 0) {
      list(begin + count, key_block_);
    } else {
      pad_rows(k, count, 2 * key_block_);
      pad_rows(v, count, 2 * key_block_);
    }
    block = KeyBlock();
    block.num_keys = count;
    block.prefetch = {.rows = {k + key_block_, v + key_block_}, .lines = {lines(d_qk_), lines(d_v_)}};
    if (tiles_.kernels().pack == 1) return convert(block);
    block.value_rows = v;
    block.values_far = true;
    point_at_copy(k, count);
    block.segments[block.num_segments++] = {.rows = k, .steps = d_qk_ / 2};
    if (next_count == 0) return;
    block.next_num_keys = next_count;
    block.next_value_rows = v + key_block_;
    block.next_keys = copy_of(k + key_block_, next_count);
  }

 private:
  struct Rows {
    const char* first;  // of the request and head
    int64_t stride;     // bytes
  };

  static Rows rows_of(const void* base, int64_t stride_token, int64_t stride_head, const core::PrefillArgs& args,
                      const schedule::Task& task) {
    const auto element = static_cast<int64_t>(size_of(args.dtype));
    const int64_t first = args.kv_indptr[task.request] * stride_token + task.head * stride_head;
    return {.first = static_cast<const char*>(base) + first * element, .stride = stride_token * element};
  }

  int32_t count_at(int32_t key) const { return std::min(key_block_, end_ - key); }
  int32_t lines(int32_t width) const {
    return static_cast<int32_t>((width * static_cast<int64_t>(size_of(dtype_)) + 63) / 64);
  }
  RowCopy copy_of(const void* const* rows, int32_t count) const {
    return {.rows = rows, .num_rows = count, .lines = lines(d_qk_), .to = tiles_.keys()};
  }

  /// Lists the block at key `begin` from entry `entry` of both lists on.
  void list(int32_t begin, int32_t entry) {
    const int32_t count = count_at(begin);
    for (const auto& [rows, list] : {std::pair(&k_, tiles_.rows(0)), std::pair(&v_, tiles_.rows(1))}) {
      const char* row = rows->first + begin * rows->stride;
      for (int32_t i = 0; i < count; ++i, row += rows->stride) list[entry + i] = row;
      pad_rows(list + entry, count, key_block_);
    }
  }

  void point_at_copy(const void** k, int32_t count) const {
    const auto* row = reinterpret_cast<const std::byte*>(tiles_.keys());
    for (int32_t key = 0; key < count; ++key, row += int64_t{lines(d_qk_)} * 64) k[key] = row;
    pad_rows(k, count, count);
  }

  void convert(KeyBlock& block) const {
    for (int32_t channel = 0; channel < d_qk_; channel += kSlab)
      tiles_.add_key_slab({.rows = tiles_.rows(0),
                           .dtype = dtype_,
                           .num_keys = block.num_keys,
                           .channel = channel,
                           .width = std::min(kSlab, d_qk_ - channel)},
                          block);
    for (int32_t slab = 0; slab < d_v_ / kSlab; ++slab)
      tiles_.kernels().pack_slab(
          {.rows = tiles_.rows(1), .dtype = dtype_, .num_keys = block.num_keys, .channel = int64_t{slab} * kSlab},
          tiles_.value_slabs() + slab * tiles_.slab_stride());
    block.value_slabs = tiles_.value_slabs();
  }

  Tiles& tiles_;
  int32_t key_block_;
  DType dtype_;
  int32_t d_qk_, d_v_;
  Rows k_, v_;
  int32_t end_;
  int32_t listed_;  // first key of the lists
};

class PrefillRun {
 public:
  PrefillRun(const core::PrefillArgs& args, const TileKernels& kernels, const TileShape& shape)
      : args_(args), kernels_(kernels), shape_(shape), element_(static_cast<int64_t>(size_of(args.dtype))) {}

  void run(const schedule::Task& task, Tiles& tiles) const {
    const int64_t first_token = args_.qo_indptr[task.request] + task.row_begin;
    const schedule::Sequence sequence = sequence_of(args_, task.request, task.head);
    const core::Options& options = args_.options;
    const Scoring scoring{
        .scale = args_.sm_scale, .soft_cap = options.logits_soft_cap, .biased = options.alibi_slopes != nullptr};
    tiles.begin(task.row_count);
    for (int32_t row = 0; row < task.row_count; ++row) {
      const char* q = element(args_.q, (first_token + row) * args_.q_stride_token + task.head * args_.q_stride_head);
      tiles.set_row(row, q, nullptr, schedule::visible_keys(sequence, task.row_begin + row));
      if (scoring.biased)
        tiles.set_bias(row, options.alibi_slopes[task.head], schedule::query_position(sequence, task.row_begin + row));
    }
    tiles.pack_queries(args_.dtype, args_.d_qk);
    HeadLoader loader(args_, task, tiles);
    KeyBlock block;
    for (int32_t key = task.kv_begin; key < task.kv_end; key += shape_.key_block) {
      loader.load(key, block);
      tiles.attend(block, key, scoring);
    }
    for (int32_t row = 0; row < task.row_count; ++row) {
      if (row + kRowsAhead < task.row_count)
        kernels_.prefetch_for_write(output(task, row + kRowsAhead),
                                    args_.d_v * static_cast<int64_t>(size_of(args_.o_dtype)));
      const float lse = tiles.lse(row);
      tiles.store(row, sink_factor(options.attn_sink, task.head, lse), output(task, row), args_.o_dtype);
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

  const core::PrefillArgs& args_;
  const TileKernels& kernels_;
  const TileShape& shape_;
  int64_t element_;
};

}  // namespace

size_t prefill_workspace_size(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads) {
  const AttentionSetup setup = setup_of(set, args, num_threads);
  return attention_workspace_size(setup, capacity_of(setup, args));
}

dispatch::PlanSummary plan_prefill(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads,
                                   std::span<std::byte> workspace) {
  const AttentionSetup setup = setup_of(set, args, num_threads);
  return plan_attention(setup, capacity_of(setup, args), sequences_of(args), workspace);
}

void run_prefill(const KernelSet& set, const core::PrefillArgs& args, core::ThreadPool& pool,
                 std::span<std::byte> workspace) {
  const AttentionSetup setup = setup_of(set, args, pool.size());
  const PrefillRun run(args, setup.kernels, setup.shape);
  run_attention(setup, pool, workspace,
                [&](const schedule::Task& task, Tiles& tiles, const AttentionLayout&) { run.run(task, tiles); });
}

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// This file computes up-projected prefill, where query rows are the query tokens of one request and head, and keys are
// the request's tokens of that head.
#include <algorithm>
#include <array>
#include <cstring>
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
  const DType multiplied = args.dtype == DType::kE4M3 ? DType::kBF16 : args.dtype;  // bf16 holds every e4m3 exactly
  const TileKernels& kernels = set.pick(multiplied, multiplied);
  TileShape shape = TileShape::choose_for_many_rows(kernels, args.d_qk, args.d_v);
  // Half as many rows give idle threads tasks: 1k tokens are two tasks a head otherwise.
  if (shape.key_lanes && num_threads > args.num_heads) shape.max_rows = std::max(shape.max_rows / 2, kMaxLanes);
  shape.decoded_queries = args.dtype == DType::kE4M3;
  shape.decoded_rows = shape.key_lanes && shape.decoded_queries;
  shape.copied_values = kernels.pack == 2 && (!shape.key_lanes || shape.decoded_queries);
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

/// Makes key blocks of one head. The rows of a head lie far apart, each in a page of memory of its own. Kernels of
/// pairs multiply a copy, so that every row is read once. It is made while the block before is multiplied; but rows of
/// e4m3 are decoded to bf16 when their block is loaded. Kernels of floats convert the rows into slabs, and
/// KeyLaneKernels pack them from where they lie.
class HeadLoader {
 public:
  HeadLoader(const core::PrefillArgs& args, const schedule::Task& task, Tiles& tiles)
      : args_(args),
        task_(task),
        tiles_(tiles),
        key_block_(tiles.shape().key_block),
        copies_(tiles.shape().copied_values),
        decodes_(copies_ && args.dtype == DType::kE4M3),
        d_qk_(args.d_qk),
        d_v_(args.d_v) {
    if (task.kv_begin >= task.kv_end) return;
    list(task.kv_begin, 0);
    if (!copies_) return;
    if (decodes_)
      decode(0, count_at(task.kv_begin));
    else
      for (const RowCopy& copy : copies_of(0, count_at(task.kv_begin))) tiles.kernels().copy_rows(copy);
    point_at(copied_keys(), d_qk_, tiles_.rows(0));
    point_at(tiles_.copied_values(), d_v_, tiles_.rows(kCopiedValues));
  }

  /// Makes the block that begins at key `begin`. Blocks must be loaded in order.
  void load(int32_t begin, KeyBlock& block) {
    const void** k = tiles_.rows(0);
    const void** v = tiles_.rows(1);
    if (decodes_ && begin > task_.kv_begin) decode(key_block_, count_at(begin));
    if (copies_) {
      // set_aside() may have replaced some entries in the block before.
      std::copy_n(tiles_.rows(kCopiedValues), key_block_, v);
    } else if (begin > task_.kv_begin) {  // the rows listed as next are now the block's
      std::copy_n(k + key_block_, key_block_, k);
      std::copy_n(v + key_block_, key_block_, v);
    }
    block = KeyBlock();
    block.num_keys = count_at(begin);
    block.far = true;
    const int32_t next_begin = begin + block.num_keys;
    if (next_begin < task_.kv_end) {
      list(next_begin, key_block_);
      block.prefetch = {.rows = {k + key_block_, v + key_block_},
                        .lines = {lines(d_qk_, args_.dtype), lines(d_v_, args_.dtype)}};
    }
    if (tiles_.kernels().pack == 1) return convert(block);
    block.segments[block.num_segments++] = {.rows = k, .steps = d_qk_ / 2};
    block.value_rows = v;
    if (next_begin == task_.kv_end || !copies_ || decodes_) return;
    block.next_num_keys = count_at(next_begin);
    block.next_value_rows = tiles_.rows(kCopiedValues);
    block.next_copies = copies_of(key_block_, block.next_num_keys);
  }

 private:
  // The list of the copied values' rows; lists 0 and 1 hold keys and values of this block and the next.
  static constexpr int32_t kCopiedValues = 2;

  uint32_t* copied_keys() const {
    return tiles_.shape().key_lanes ? reinterpret_cast<uint32_t*>(tiles_.decoded_rows()) : tiles_.keys();
  }
  int32_t count_at(int32_t key) const { return std::min(key_block_, task_.kv_end - key); }
  static int32_t lines(int32_t width, DType dtype) {
    return static_cast<int32_t>((width * static_cast<int64_t>(size_of(dtype)) + 63) / 64);
  }
  static int32_t copied_lines(int32_t width) { return lines(width, DType::kBF16); }
  /// Returns the copies to make of the keys and values that are listed from entry `entry` on.
  std::array<RowCopy, 2> copies_of(int32_t entry, int32_t count) const {
    const auto copy = [&](int32_t list, int32_t width, uint32_t* to) {
      return RowCopy{.rows = tiles_.rows(list) + entry, .num_rows = count, .lines = copied_lines(width), .to = to};
    };
    return {copy(0, d_qk_, copied_keys()), copy(1, d_v_, tiles_.copied_values())};
  }

  /// Makes the copies of e4m3 keys and values that are listed from entry `entry` on.
  void decode(int32_t entry, int32_t count) const {
    for (const RowCopy& copy : copies_of(entry, count)) {
      auto* to = static_cast<std::byte*>(copy.to);
      const int32_t width = copy.to == copied_keys() ? d_qk_ : d_v_;
      for (int32_t i = 0; i < count; ++i, to += int64_t{copy.lines} * 64)
        tiles_.kernels().decode_row(unscaled_row(copy.rows[i], width), reinterpret_cast<uint16_t*>(to));
    }
  }

  /// Lists the block at key `begin` from entry `entry` of both lists on.
  void list(int32_t begin, int32_t entry) {
    const int32_t count = count_at(begin);
    const auto element = static_cast<int64_t>(size_of(args_.dtype));
    const int64_t token = int64_t{args_.kv_indptr[task_.request]} + begin;
    const auto add = [&](const void** rows, const void* base, int64_t stride_token, int64_t stride_head) {
      const char* row = static_cast<const char*>(base) + (token * stride_token + task_.head * stride_head) * element;
      for (int32_t i = 0; i < count; ++i, row += stride_token * element) rows[entry + i] = row;
      pad_rows(rows + entry, count, key_block_);
    };
    add(tiles_.rows(0), args_.k, args_.k_stride_token, args_.k_stride_head);
    add(tiles_.rows(1), args_.v, args_.v_stride_token, args_.v_stride_head);
  }

  /// Lists the rows of a copy in `rows`.
  void point_at(const uint32_t* copy, int32_t width, const void** rows) const {
    const auto* row = reinterpret_cast<const std::byte*>(copy);
    for (int32_t i = 0; i < key_block_; ++i, row += int64_t{copied_lines(width)} * 64) rows[i] = row;
  }

  void convert(KeyBlock& block) const {
    for (int32_t channel = 0; channel < d_qk_; channel += kSlab)
      tiles_.add_key_slab({.rows = tiles_.rows(0),
                           .dtype = args_.dtype,
                           .num_keys = block.num_keys,
                           .channel = channel,
                           .width = std::min(kSlab, d_qk_ - channel)},
                          block);
    for (int32_t slab = 0; slab < d_v_ / kSlab; ++slab)
      tiles_.kernels().pack_slab(
          {.rows = tiles_.rows(1), .dtype = args_.dtype, .num_keys = block.num_keys, .channel = int64_t{slab} * kSlab},
          tiles_.value_slabs() + slab * tiles_.slab_stride());
    block.value_slabs = tiles_.value_slabs();
  }

  const core::PrefillArgs& args_;
  const schedule::Task& task_;
  Tiles& tiles_;
  int32_t key_block_;
  bool copies_, decodes_;
  int32_t d_qk_, d_v_;
};

class PrefillRun {
 public:
  PrefillRun(const core::PrefillArgs& args, const TileKernels& kernels, const TileShape& shape)
      : args_(args), kernels_(kernels), shape_(shape), element_(static_cast<int64_t>(size_of(args.dtype))) {}

  void run(const schedule::Task& task, Tiles& tiles) const {
    const int64_t first_token = args_.qo_indptr[task.request] + task.row_begin;
    const schedule::Sequence sequence = sequence_of(args_, task.request, task.head);
    const core::Options& options = args_.options;
    const Scoring scoring{.scale = args_.sm_scale * value_of(args_.q_scale) * value_of(args_.k_scale),
                          .soft_cap = options.logits_soft_cap,
                          .biased = options.alibi_slopes != nullptr};
    const float o_factor = value_of(args_.v_scale) / value_of(args_.o_scale);
    tiles.begin(task.row_count);
    for (int32_t row = 0; row < task.row_count; ++row) {
      const char* q = element(args_.q, (first_token + row) * args_.q_stride_token + task.head * args_.q_stride_head);
      tiles.set_row(row, q, nullptr, schedule::visible_keys(sequence, task.row_begin + row));
      if (scoring.biased)
        tiles.set_bias(row, options.alibi_slopes[task.head], schedule::query_position(sequence, task.row_begin + row));
    }
    tiles.set_queries(args_.dtype, args_.d_qk);
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
      tiles.store(row, sink_factor(options.attn_sink, task.head, lse) * o_factor, output(task, row), args_.o_dtype);
      const int64_t token = first_token + row;
      if (args_.lse != nullptr)
        args_.lse[token * args_.lse_stride_token + task.head * args_.lse_stride_head] =
            written_lse(lse, args_.lse_form);
    }
  }

 private:
  // Outputs are prefetched this many rows ahead, since those of one head lie far apart too; 16 or 32 gained nothing
  // (Zen 4, 2026-11-20).
  static constexpr int32_t kRowsAhead = 8;

  /// Returns the scale, which is 1 where none is given.
  static float value_of(const float* scale) { return scale != nullptr ? *scale : 1.0F; }
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

core::PlanSummary plan_prefill(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads,
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

// SPDX-License-Identifier: Apache-2.0
// The combine kernel merges the partial states that several workers left of one unit, and writes o, lse and max_logits.
//
// The grid has as many blocks as the GPU holds, whatever there is to merge. Rows are merged in slices of 128 columns,
// four per lane. Partial states lie in L2, so that latency is what costs; therefore many loads are in flight at a time,
// and all warps have something to do. Of rows with at most four splits, a warp takes all slices and loads all splits at
// once. Of rows with more splits, which come first, a warp takes one slice and loads eight splits at once. Where there
// are few slices of many splits (a small batch), the eight warps of a block share a slice, and each takes every eighth
// split.
//   state    lanes read the states of 128 splits at a time -> the row's max and sum, in every lane
//   o        split i is added to sum i % 8, and the eight sums are added at the end (through shared memory, where each
//            warp has one of them): the arithmetic is the same in all three ways, so that a row's bits do not depend on
//            the batch
// The kernel reads the number of merges first, and ends if there are none.
//
// Where no row has more than four splits, each warp rehearses its first row while attention still runs: it executes the
// same instructions, but loads no partial state and stores nothing. This brings the instructions, which come line by
// line from the L2 cache and take longer than the loads, into the SM. It took 0 to 1.2 us off runs of 16 heads with 4k
// keys (H200, 2026-11-22; docs/notebook/2026-11-22-first-rows.md). Where warps share rows it made runs 0.6 to 1.5 us
// slower, since the others wait for the warp that begins last.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/fast_divisor.h"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/store_output.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct CombineKernel {
  struct Params {
    cuda::WorkList list;
    cuda::FastDivisor num_heads = {};
    int32_t d_v = 0;  // a multiple of kSliceColumns
    const float* attn_sink = nullptr;
    core::LseForm lse_form = {};
    DType o_dtype = DType::kBF16;
    const float* o_scale = nullptr;
    void* o = nullptr;
    int64_t o_stride_token = 0, o_stride_head = 0;
    float* lse = nullptr;
    int64_t lse_stride_token = 0, lse_stride_head = 0;
    float* max_logits = nullptr;
    int64_t max_logits_stride_token = 0, max_logits_stride_head = 0;
    bool next_starts_early = false;  // whether the next kernel may start, up to its wait for this one
  };
  static constexpr const char* kName = "combine";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kLaneColumns = 4;
  static constexpr int kSliceColumns = kLaneColumns * kWarpSize;
  static constexpr int kSums = kThreads / kWarpSize;
  static constexpr int kSharedBytes = kSums * kSliceColumns * 4;

  static MLA_DEVICE void run(const Params& params) {
    if (params.next_starts_early) ptx::allow_next_grid();
    // The plan was complete before attention let this kernel start, so that it may be read while attention still runs.
    const cuda::MergeCounts counts = params.list.header->merges;
    const int32_t slices = params.d_v / kSliceColumns;
    const int32_t block = ptx::block_index_x(), blocks = ptx::grid_size_x();
    const int32_t warp = block * kSums + ptx::warp(), warps = blocks * kSums;
    // Long merges, of which a batch may have few beside many others. How they are merged depends on their splits and on
    // how many blocks the tasks keep busy. docs/notebook/2026-11-22-combine.md compares the ways, and
    // 2026-11-29-small-batches.md has what rows of 9 to 32 splits gain by four loads and by a block for each slice;
    // most thresholds were not measured by themselves.
    if (counts.num_long > 0) {
      const Merges merges = {0, counts.num_long, counts.merge_rows};
      const auto has_more = [&](int32_t splits) { return counts.long_splits > counts.num_long * splits; };
      const int32_t tasks = counts.num_long * counts.merge_rows * slices;
      if (!has_more(kSums) || tasks > (has_more(kManySplits - 1) ? 2 * blocks : blocks))
        for_rows<false>(params, merges, {warp, warps, slices},
                        [&](Row& row, int32_t slice) { merge_slices(params, row, slice, slice + 1); });
      else if (!has_more(kManySplits))
        for_rows<false>(params, merges, {block, blocks, slices},
                        [&](Row& row, int32_t slice) { merge_slice<kManySplits / kSums>(params, row, slice); });
      else
        for_rows<false>(params, merges, {block, blocks, slices},
                        [&](Row& row, int32_t slice) { merge_slice<kSums>(params, row, slice); });
    }
    // The last warps, which have had fewest of those tasks, have the first ones of these.
    if (counts.num_long == 0 || counts.num_merges > counts.num_long)
      for_rows<kHasGridDependencies>(params, {counts.num_long, counts.num_merges, counts.merge_rows},
                                     {counts.num_long > 0 ? warps - 1 - warp : warp, warps, 1},
                                     [&](Row& row, int32_t) { merge_row(params, row, slices); });
  }

 private:
  /// Returns the index in partial_max and partial_sum of a row's state of split `i`.
  static MLA_DEVICE int64_t state_of(const cuda::WorkList& list, const cuda::Merge& merge, int32_t row, int32_t i) {
    const int32_t slot = i == 0 ? merge.first_slot : merge.rest_slot + (i - 1) * merge.slot_stride;
    return int64_t{slot} * list.block_rows + row;  // the slots of the next row lane's rows follow directly
  }

  /// Returns the factor of a split's accumulators and sum, 2^(split_max - max); 0 if the split has no visible key.
  static MLA_DEVICE float split_factor(float split_max, float max) {
    const float factor = ptx::exp2_approx(finite_or_zero(split_max) - finite_or_zero(max));
    return split_max == kNoKey ? 0.0F : factor;
  }

  struct State {
    float max, sum;
  };

  /// Describes a row of a unit; once finish() was called, it also has the row's merged maximum and the factors of its
  /// outputs.
  struct Row {
    cuda::Merge merge;
    int32_t row;  // index of the row in the unit
    int32_t token, head;
    float sink;
    float max = kNoKey;
    FinishedRow finished = {};

    MLA_DEVICE Row(const Params& params, const cuda::Merge& unit, int32_t r) : merge(unit), row(r) {
      const int32_t query = params.num_heads.divide(merge.row_begin + row);
      token = merge.token_begin + query;
      head = merge.row_begin + row - query * params.num_heads.value;
      sink = params.attn_sink != nullptr ? params.attn_sink[head] : kNoKey;
    }
    MLA_DEVICE bool exists() const { return merge.row_begin + row < merge.num_rows && merge.num_splits >= 2; }

    /// Makes this a rehearsed row, of which nothing is loaded or stored. A negative number of splits marks it.
    MLA_DEVICE void rehearse() { merge.num_splits = -merge.num_splits; }
    MLA_DEVICE bool is_rehearsed() const { return kHasGridDependencies && merge.num_splits < 0; }

    /// Computes the factors of the outputs from the merged state of all splits; lane 0 writes lse and max_logits if
    /// `writes`. All lanes of a warp call this.
    MLA_DEVICE void finish(const Params& params, const State& state, bool writes) {
      max = state.max;
      finished = finish_row(state.max, state.sum, sink, inverse_o_scale(params.o_scale), params.lse_form);
      if (!writes || ptx::lane() != 0) return;
      if (params.lse != nullptr)
        params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = finished.lse;
      if (params.max_logits != nullptr)
        params.max_logits[token * params.max_logits_stride_token + head * params.max_logits_stride_head] =
            natural_logit(state.max);
    }

    MLA_DEVICE int64_t output(const Params& params) const {
      return token * params.o_stride_token + head * params.o_stride_head;
    }
    /// Stores the lane's columns of o.
    MLA_DEVICE void store(const Params& params, int32_t column, float (&o)[kLaneColumns]) const {
      for (float& value : o) value *= finished.o_factor;
      store_columns(params.o, params.o_dtype, output(params) + column, o);
    }
  };

  static MLA_DEVICE int32_t lane_column(int32_t slice) { return slice * kSliceColumns + ptx::lane() * kLaneColumns; }

  /// Names merges begin ... end - 1, whose units have at most `rows` rows.
  struct Merges {
    int32_t begin, end, rows;
  };
  /// Says which tasks a warp or block has: every step-th one from `first` on. A row has `per_row` tasks.
  struct Tasks {
    int32_t first, step, per_row;
  };

  /// Says where a task lies: in which merge, in which of its rows, and in which slice of the row. Only the constructor
  /// divides, which is slow; advance() adds.
  struct Place {
    int32_t merge, row, slice;

    MLA_DEVICE Place(int32_t task, int32_t per_row, int32_t merge_rows)
        : merge(task / per_row / merge_rows), row(task / per_row % merge_rows), slice(task % per_row) {}
    MLA_DEVICE void advance(const Place& by, int32_t per_row, int32_t merge_rows) {
      slice += by.slice;
      row += by.row + static_cast<int32_t>(slice >= per_row);
      if (slice >= per_row) slice -= per_row;
      merge += by.merge + static_cast<int32_t>(row >= merge_rows);
      if (row >= merge_rows) row -= merge_rows;
    }
  };

  /// Calls f(row, slice) for all tasks; slice is 0 where a task is a whole row. The plan's entry is read one task
  /// ahead, and that of the first task before attention has ended.
  template <bool kRehearses, class F>
  static MLA_DEVICE void for_rows(const Params& params, const Merges& merges, const Tasks& tasks, const F& f) {
    const int32_t num_merges = merges.end - merges.begin;
    const auto unit_at = [&](const Place& at) {
      return at.merge < num_merges ? params.list.merges[merges.begin + at.merge] : cuda::Merge{};
    };
    const int32_t merge_rows = std::max(merges.rows, 1);
    const Place step(tasks.step, tasks.per_row, merge_rows);
    Place at(tasks.first, tasks.per_row, merge_rows);
    cuda::Merge unit = unit_at(at);
    // `rehearsal` is opaque because nvcc would otherwise compile a copy of the loop for it, whose instructions the real
    // rows do not execute.
    uint32_t rehearsal =
        kRehearses ? ptx::opaque(merges.begin == 0 && params.d_v <= kFewSlices * kSliceColumns ? 1 : 0) : 0;
    if (rehearsal == 0 || at.merge >= num_merges) ptx::wait_for_previous_grid();
    MLA_NO_UNROLL
    while (at.merge < num_merges) {
      Row row(params, unit, at.row);
      const bool exists = row.exists();
      const int32_t slice = at.slice;
      if (rehearsal != 0) {
        row.rehearse();
      } else {
        at.advance(step, tasks.per_row, merge_rows);
        unit = unit_at(at);
      }
      if (exists) f(row, slice);
      if (rehearsal != 0) ptx::wait_for_previous_grid();
      if constexpr (kRehearses) rehearsal = ptx::opaque(0);
    }
  }

  /// With up to so many splits, each warp of a block that shares a slice loads all its splits at once, four.
  static constexpr int kManySplits = 4 * kSums;

  /// Merges one slice of a row with all warps of the block, each of which loads kLoads splits at once.
  template <int kLoads>
  static MLA_DEVICE void merge_slice(const Params& params, Row& row, int32_t slice) {
    float sum[1][kLaneColumns];
    add_splits<true, kLoads>(params, row, lane_column(slice), slice == 0 && ptx::warp() == 0, sum);
    const ptx::SharedAddress mine = ptx::shared_address(ptx::shared_memory()) + ptx::lane() * kLaneColumns * 4;
    ptx::Vec4 four;
    for (int c = 0; c < kLaneColumns; ++c) four.x[c] = std::bit_cast<uint32_t>(sum[0][c]);
    ptx::store_shared(mine + ptx::warp() * kSliceColumns * 4, four);
    ptx::sync_block();  // the sums of all warps are in shared memory
    if (ptx::warp() == 0) {
      float sums[kSums][kLaneColumns], o[kLaneColumns];
      MLA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        four = ptx::load_shared<ptx::Vec4>(mine + i * kSliceColumns * 4);
        for (int c = 0; c < kLaneColumns; ++c) sums[i][c] = std::bit_cast<float>(four.x[c]);
      }
      add_sums(sums, o);
      row.store(params, lane_column(slice), o);
    }
    ptx::sync_block();  // the sums have been read and may be overwritten
  }

  /// Merges a whole row with one warp.
  static MLA_DEVICE void merge_row(const Params& params, Row& row, int32_t slices) {
    const bool two = row.merge.num_splits == 2 || row.merge.num_splits == -2;
    if (slices <= kFewSlices && two) return merge_few<2>(params, row);
    if (slices <= kFewSlices && row.merge.num_splits <= kFewSplits) return merge_few<kFewSplits>(params, row);
    merge_slices(params, row, 0, slices);
  }

  /// Merges slices begin ... end - 1 of a row with one warp.
  static MLA_DEVICE void merge_slices(const Params& params, Row& row, int32_t begin, int32_t end) {
    MLA_NO_UNROLL
    for (int32_t slice = begin; slice < end; ++slice) {
      float sums[kSums][kLaneColumns], o[kLaneColumns];
      add_splits<false, kSums>(params, row, lane_column(slice), slice == 0, sums);
      add_sums(sums, o);
      row.store(params, lane_column(slice), o);
    }
  }

  /// Rows of at most kFewSplits splits and kFewSlices slices are merged by merge_few(), which holds all of them in
  /// registers: 4,096 rows of two splits take 10 us instead of 20 (H200, 2026-11-21).
  static constexpr int kFewSplits = cuda::kFewSplits, kFewSlices = 4;

  /// Merges a row of at most kSplits splits with one warp. The sums of the other splits, which add_sums() would add,
  /// are zeros and are left out.
  template <int kSplits>
  static MLA_DEVICE void merge_few(const Params& params, Row& row) {
    ptx::Vec4 values[kSplits][kFewSlices];
    State states[kSplits];
    MLA_UNROLL
    for (int i = 0; i < kSplits; ++i) {
      const bool exists = i < row.merge.num_splits;
      const int64_t state = state_of(params.list, row.merge, row.row, exists ? i : 0);
      const auto* const from =
          reinterpret_cast<const ptx::Vec4*>(params.list.partial_o + state * params.d_v + lane_column(0));
      MLA_UNROLL
      for (int slice = 0; slice < kFewSlices; ++slice)
        values[i][slice] = ptx::load_once_if(exists && lane_column(slice) < params.d_v, from + slice * kWarpSize);
      states[i] = {ptx::load_if(exists, params.list.partial_max + state),
                   ptx::load_if(exists, params.list.partial_sum + state)};
      if (!exists) states[i].max = kNoKey;
    }
    ptx::sync_warp();  // all loads have been issued before the first one is waited for
    // The states are joined in the same order as in state_of_row().
    State all = joined(states[0], states[1]);
    if constexpr (kSplits > 2) all = joined(all, joined(states[2], states[3]));
    row.finish(params, all, !row.is_rehearsed());
    float scales[kSplits];
    MLA_UNROLL
    for (int i = 0; i < kSplits; ++i) scales[i] = split_factor(states[i].max, row.max);
    const auto add = [&](float(&o)[kLaneColumns], int slice) {
      MLA_UNROLL
      for (int c = 0; c < kLaneColumns; ++c) {
        float sums[kSplits];
        MLA_UNROLL
        for (int i = 0; i < kSplits; ++i)  // a split without a visible key counts as 0, whatever its memory holds
          sums[i] = 0.0F + (states[i].max == kNoKey ? 0.0F : std::bit_cast<float>(values[i][slice].x[c]) * scales[i]);
        if constexpr (kSplits == 2)
          o[c] = sums[0] + sums[1];
        else
          o[c] = (sums[0] + sums[2]) + (sums[1] + sums[3]);
      }
    };
    float o[kLaneColumns];
    const int64_t output = row.output(params);
    auto* const halves = static_cast<uint16_t*>(params.o) + output;
    if ((params.o_dtype == DType::kBF16 || params.o_dtype == DType::kF16) && is_aligned(halves, sizeof(uint64_t))) {
      const bool bf16 = params.o_dtype == DType::kBF16;
      MLA_UNROLL
      for (int slice = 0; slice < kFewSlices; ++slice) {
        add(o, slice);
        for (float& value : o) value *= row.finished.o_factor;
        const uint32_t low = bf16 ? ptx::pack_bf16x2(o[0], o[1]) : ptx::pack_f16x2(o[0], o[1]);
        const uint32_t high = bf16 ? ptx::pack_bf16x2(o[2], o[3]) : ptx::pack_f16x2(o[2], o[3]);
        if (lane_column(slice) < params.d_v && !row.is_rehearsed())
          *reinterpret_cast<uint64_t*>(halves + lane_column(slice)) = uint64_t{high} << 32 | low;
      }
      return;
    }
    MLA_NO_UNROLL
    for (int slice = 0; slice < kFewSlices; ++slice) {
      add(o, 0);
      if (lane_column(slice) < params.d_v && !row.is_rehearsed()) row.store(params, lane_column(slice), o);
      MLA_UNROLL
      for (int i = 0; i < kSplits; ++i) MLA_UNROLL
      for (int next = 1; next < kFewSlices; ++next) values[i][next - 1] = values[i][next];
    }
  }

  static MLA_DEVICE void add_sums(float (&sums)[kSums][kLaneColumns], float (&o)[kLaneColumns]) {
    MLA_UNROLL
    for (int apart = kSums / 2; apart > 0; apart /= 2) MLA_UNROLL
    for (int i = 0; i < apart; ++i) MLA_UNROLL
    for (int c = 0; c < kLaneColumns; ++c) sums[i][c] += sums[i + apart][c];
    MLA_UNROLL
    for (int c = 0; c < kLaneColumns; ++c) o[c] = sums[0][c];
  }

  /// Returns the merged state of all splits of a row, in every lane.
  static MLA_DEVICE State state_of_row(const cuda::WorkList& list, const cuda::Merge& merge, int32_t row) {
    constexpr int kAtOnce = 4;
    State all = {kNoKey, 0.0F};
    for (int32_t first = ptx::lane(); first < merge.num_splits; first += kAtOnce * kWarpSize) {
      State states[kAtOnce];
      MLA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t split = first + i * kWarpSize;
        const int64_t at = state_of(list, merge, row, std::min(split, merge.num_splits - 1));
        states[i] = {list.partial_max[at], list.partial_sum[at]};
        if (split >= merge.num_splits) states[i].max = kNoKey;
      }
      MLA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) all = joined(all, states[i]);
    }
    MLA_UNROLL
    for (int mask = 1; mask < kWarpSize; mask *= 2)
      all = joined(all, {ptx::shuffle_xor(all.max, mask), ptx::shuffle_xor(all.sum, mask)});
    return all;
  }

  /// Merges two states. The sum of a state without a visible key is ignored.
  static MLA_DEVICE State joined(const State& a, const State& b) {
    const float max = larger(a.max, b.max);
    const float of_a = a.sum * split_factor(a.max, max), of_b = b.sum * split_factor(b.max, max);
    return {max, (a.max == kNoKey ? 0.0F : of_a) + (b.max == kNoKey ? 0.0F : of_b)};
  }

  /// Returns the larger number; NaN if one is NaN.
  static MLA_DEVICE float larger(float a, float b) { return b > a || b != b ? b : a; }

  /// Finishes the row, and adds the columns of every split to `sums`; with kShared those of every eighth split,
  /// beginning with the split whose number is the warp's. It loads kLoads splits at once.
  template <bool kShared, int kLoads>
  static MLA_DEVICE void add_splits(const Params& params, Row& row, int32_t column, bool writes,
                                    float (&sums)[kShared ? 1 : kSums][kLaneColumns]) {
    constexpr int kStride = kShared ? kSums : 1;
    const cuda::WorkList& list = params.list;
    int32_t first = kShared ? ptx::warp() : 0;
    // The last split's address stands for those of splits that do not exist; their values are not added.
    const auto state = [&](int i) {
      return state_of(list, row.merge, row.row, std::min(first + i * kStride, row.merge.num_splits - 1));
    };
    ptx::Vec4 values[kLoads];
    const auto load = [&] {
      MLA_UNROLL
      for (int i = 0; i < kLoads; ++i)
        values[i] = ptx::load_once(reinterpret_cast<const ptx::Vec4*>(list.partial_o + state(i) * params.d_v + column));
    };
    load();
    ptx::sync_warp();  // the loads have been issued before the row's state is waited for
    row.finish(params, state_of_row(list, row.merge, row.row), writes);
    const auto add = [&](bool more) {
      MLA_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        const float max = list.partial_max[state(i)];
        const bool counts = first + i * kStride < row.merge.num_splits && max != kNoKey;
        const float scale = split_factor(max, row.max);
        float(&sum)[kLaneColumns] = sums[kShared ? 0 : i];
        MLA_UNROLL
        for (int c = 0; c < kLaneColumns; ++c) {
          const float before = more || (kShared && i > 0) ? sum[c] : 0.0F;
          sum[c] = counts ? std::fma(std::bit_cast<float>(values[i].x[c]), scale, before) : before;
        }
      }
      first += kLoads * kStride;
    };
    add(false);
    MLA_NO_UNROLL
    while (first < row.merge.num_splits) {
      load();
      add(true);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

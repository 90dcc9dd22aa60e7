// SPDX-License-Identifier: Apache-2.0
// The combine kernel merges the partial states that several workers left of one unit, and writes o, lse and max_logits.
//
// The grid has as many blocks as the GPU holds, whatever there is to merge. Partial states lie in L2, so that latency
// is what costs; therefore many loads are in flight at a time, and all warps have something to do:
//   few splits   of rows with at most four a warp takes a whole row, and loads all splits at once
//   more         a team of one to eight warps takes a slice of a row, 128 columns, four for each lane. Warp i of the
//                team adds splits i, i + team, ..., four at once; the warps' sums meet in shared memory
// Rows of more splits come first. A batch may have few of them beside many others.
//
// The kernel reads the number of merges first, and ends if there are none. What a multiprocessor executes for the first
// time comes line by line from the L2 cache, and takes longer than the loads: short code made runs of small batches up
// to 17 % faster (docs/notebook/2026-11-30-combine-again.md). Where no row has more than four splits, each warp also
// rehearses its first row while attention still runs: it executes the same instructions, but loads no partial state
// and stores nothing. That took 0 to 1.2 us off runs of 16 heads with 4k keys (H200, 2026-11-22;
// docs/notebook/2026-11-22-first-rows.md).
#pragma once

#include <algorithm>
#include <bit>
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
    bool batch_invariant = false;    // whether a row's sums are added in an order that no other row changes
    bool next_starts_early = false;  // whether the next kernel may start, up to its wait for this one
  };
  static constexpr const char* kName = "combine";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kLaneColumns = 4;
  static constexpr int kSliceColumns = kLaneColumns * kWarpSize;
  static constexpr int kSharedBytes = kWarps * kSliceColumns * 4;

  static MLA_DEVICE void run(const Params& params) {
    if (params.next_starts_early) ptx::allow_next_grid();
    // The plan was complete before attention let this kernel start, so that it may be read while attention still runs.
    const cuda::MergeCounts counts = params.list.header->merges;
    if (counts.num_merges == 0) return ptx::wait_for_previous_grid();
    const int32_t warp = static_cast<int32_t>(ptx::block_index_x()) * kWarps + ptx::warp();
    const int32_t warps = static_cast<int32_t>(ptx::grid_size_x()) * kWarps;
    const int32_t row_bits = bits_below(counts.merge_rows);
    const int32_t sliced = params.d_v <= kRowSlices * kSliceColumns ? counts.num_long : counts.num_merges;
    if (sliced > 0) {
      const int32_t slice_bits = bits_below(params.d_v / kSliceColumns);
      const int32_t slices = sliced << (row_bits + slice_bits);
      int32_t team_bits = params.batch_invariant ? kInvariantTeamBits : 0;
      while (!params.batch_invariant && team_bits < kMostTeamBits && slices << (team_bits + 1) <= warps) ++team_bits;
      for_rows<false>(params, {0, sliced}, {warp >> team_bits, warps >> team_bits, row_bits, slice_bits},
                      [&](Row& row, int32_t slice) { merge_slice(row, slice, team_bits); });
      if (sliced == counts.num_merges) return;
    }
    // The last warps, which have had fewest slices, have the first ones of these rows.
    for_rows<kHasGridDependencies>(params, {sliced, counts.num_merges},
                                   {sliced > 0 ? warps - 1 - warp : warp, warps, row_bits, 0},
                                   [&](Row& row, int32_t) { merge_row(row); });
  }

 private:
  static constexpr int32_t kRowSlices = 4;  // that a warp can merge at once, of few splits
  // A slice has a team of 2^team_bits warps: as many as leave no warp without work, all of one block.
  static constexpr int32_t kMostTeamBits = 3, kInvariantTeamBits = 2;
  static_assert(kWarps == 1 << kMostTeamBits);

  /// Returns how many bits the numbers below `count` have.
  static MLA_DEVICE int32_t bits_below(int32_t count) {
    return static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(std::max(count, 1) - 1)));
  }
  static MLA_DEVICE int32_t low_bits(int32_t number, int32_t bits) { return number & ((1 << bits) - 1); }

  /// Names merges begin ... end - 1.
  struct Merges {
    int32_t begin, end;
  };
  /// Says which tasks a team has: every step-th one from `first` on. Each merge has 2^row_bits rows, and each row
  /// 2^slice_bits tasks, so that nothing must be divided; some of them do not exist.
  struct Tasks {
    int32_t first, step, row_bits, slice_bits;
  };

  /// Calls f(row, slice) for all tasks. The plan's entry is read one task ahead, and that of the first task before
  /// attention has ended.
  template <bool kRehearses, class F>
  static MLA_DEVICE void for_rows(const Params& params, const Merges& merges, const Tasks& tasks, const F& f) {
    const auto unit_at = [&](int32_t task) {
      const int32_t merge = merges.begin + (task >> (tasks.row_bits + tasks.slice_bits));
      return merge < merges.end ? params.list.merges[merge] : cuda::Merge{};
    };
    int32_t task = tasks.first;
    cuda::Merge next = unit_at(task);
    // `rehearsal` is opaque because nvcc would otherwise compile a copy of the loop for it, whose instructions the real
    // rows do not execute.
    uint32_t rehearsal = kRehearses ? ptx::opaque(merges.begin == 0 && next.num_splits > 0 ? 1 : 0) : 0;
    if (rehearsal == 0) ptx::wait_for_previous_grid();
    MLA_NO_UNROLL
    while (next.num_splits > 0) {
      const cuda::Merge unit = next;
      Row row(params, unit, low_bits(task >> tasks.slice_bits, tasks.row_bits), kRehearses && rehearsal != 0);
      const int32_t slice = low_bits(task, tasks.slice_bits);
      if (rehearsal == 0) {
        task += tasks.step;
        next = unit_at(task);
      }
      if (row.exists() && slice * kSliceColumns < params.d_v) f(row, slice);
      if (rehearsal != 0) ptx::wait_for_previous_grid();
      if constexpr (kRehearses) rehearsal = ptx::opaque(0);
    }
  }

  struct State {
    float max, sum;
  };

  /// Returns the factor of a split's accumulators and sum, 2^(split_max - max); 0 if the split has no visible key.
  static MLA_DEVICE float split_factor(float split_max, float max) {
    const float factor = ptx::exp2_approx(finite_or_zero(split_max) - finite_or_zero(max));
    return split_max == kNoKey ? 0.0F : factor;
  }
  /// Returns the larger number; NaN if one is NaN.
  static MLA_DEVICE float larger(float a, float b) { return b > a || b != b ? b : a; }
  /// Merges two states. The sum of a state without a visible key is ignored.
  static MLA_DEVICE State joined(const State& a, const State& b) {
    const float max = larger(a.max, b.max);
    const float of_a = a.sum * split_factor(a.max, max), of_b = b.sum * split_factor(b.max, max);
    return {max, (a.max == kNoKey ? 0.0F : of_a) + (b.max == kNoKey ? 0.0F : of_b)};
  }
  /// Returns the merged state of those of all lanes, in every lane.
  static MLA_DEVICE State joined_lanes(const State& of_lane) {
    State all = of_lane;
    MLA_UNROLL
    for (int mask = 1; mask < kWarpSize; mask *= 2) all.max = larger(all.max, ptx::shuffle_xor(all.max, mask));
    const float sum = of_lane.sum * split_factor(of_lane.max, all.max);
    all.sum = of_lane.max == kNoKey ? 0.0F : sum;
    MLA_UNROLL
    for (int mask = 1; mask < kWarpSize; mask *= 2) all.sum += ptx::shuffle_xor(all.sum, mask);
    return all;
  }

  /// Finds the partial states of a row of a unit, and stores its results.
  class Row {
   public:
    /// Of a row that is rehearsed nothing is loaded or stored.
    MLA_DEVICE Row(const Params& params, const cuda::Merge& unit, int32_t row, bool is_rehearsed)
        : params_(params), unit_(unit), row_(row), is_rehearsed_(is_rehearsed) {}

    MLA_DEVICE bool exists() const { return unit_.row_begin + row_ < unit_.num_rows; }
    MLA_DEVICE int32_t num_splits() const { return unit_.num_splits; }

    /// Loads four columns of a split; zeros if there is no such split or column.
    MLA_DEVICE ptx::Vec4 load(int32_t split, int32_t column) const {
      const float* const from = params_.list.partial_o + row_ * params_.d_v + column +
                                int64_t{slot(split)} * (params_.list.block_rows * params_.d_v);
      return ptx::load_once_if(has(split) && column < params_.d_v, reinterpret_cast<const ptx::Vec4*>(from));
    }
    MLA_DEVICE State load_state(int32_t split) const {
      const int64_t at = int64_t{slot(split)} * params_.list.block_rows + row_;
      const float max = ptx::load_if(has(split), params_.list.partial_max + at);
      return {has(split) ? max : kNoKey, ptx::load_if(has(split), params_.list.partial_sum + at)};
    }

    /// Computes the factor of the outputs from the merged state of all splits; lane 0 writes lse and max_logits if
    /// `writes`. All lanes of a warp call this.
    MLA_DEVICE void finish(const State& all, bool writes) {
      const float sink = params_.attn_sink != nullptr ? params_.attn_sink[head()] : kNoKey;
      const FinishedRow finished =
          finish_row(all.max, all.sum, sink, inverse_o_scale(params_.o_scale), params_.lse_form);
      o_factor_ = finished.o_factor;
      if (!writes || is_rehearsed_ || ptx::lane() != 0) return;
      if (params_.lse != nullptr)
        params_.lse[token() * params_.lse_stride_token + head() * params_.lse_stride_head] = finished.lse;
      if (params_.max_logits != nullptr)
        params_.max_logits[token() * params_.max_logits_stride_token + head() * params_.max_logits_stride_head] =
            natural_logit(all.max);
    }

    /// Stores the lane's columns of kSlices slices, the first of which is `column`. sum(slice, o) computes the sums of
    /// a slice.
    template <int kSlices, class Sum>
    MLA_DEVICE void store(int32_t column, const Sum& sum) const {
      const int64_t at = token() * params_.o_stride_token + head() * params_.o_stride_head + column;
      const auto output = [&](int slice, float(&o)[kLaneColumns]) {
        sum(slice, o);
        for (float& value : o) value *= o_factor_;
      };
      auto* const halves = static_cast<uint16_t*>(params_.o) + at;
      if (params_.o_dtype == DType::kBF16 && is_aligned(halves, sizeof(uint64_t))) [[likely]] {
        MLA_UNROLL
        for (int slice = 0; slice < kSlices; ++slice) {
          float o[kLaneColumns];
          output(slice, o);
          const uint64_t four = uint64_t{ptx::pack_bf16x2(o[2], o[3])} << 32 | ptx::pack_bf16x2(o[0], o[1]);
          if (stores(column + slice * kSliceColumns))
            *reinterpret_cast<uint64_t*>(halves + slice * kSliceColumns) = four;
        }
        return;
      }
      float o[kSlices][kLaneColumns];
      MLA_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) output(slice, o[slice]);
      MLA_NO_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        if (stores(column + slice * kSliceColumns))
          store_columns(params_.o, params_.o_dtype, at + slice * kSliceColumns, o[0]);
        MLA_UNROLL
        for (int next = 1; next < kSlices; ++next) MLA_UNROLL
        for (int c = 0; c < kLaneColumns; ++c) o[next - 1][c] = o[next][c];
      }
    }

   private:
    MLA_DEVICE bool has(int32_t split) const { return split < unit_.num_splits && !is_rehearsed_; }
    MLA_DEVICE bool stores(int32_t column) const { return column < params_.d_v && !is_rehearsed_; }
    /// Returns the slot of a split. The slots of the next row lane's rows follow it directly.
    MLA_DEVICE int32_t slot(int32_t split) const {
      return split == 0 ? unit_.first_slot : unit_.rest_slot + (split - 1) * unit_.slot_stride;
    }
    MLA_DEVICE int32_t query() const { return params_.num_heads.divide(unit_.row_begin + row_); }
    MLA_DEVICE int64_t token() const { return unit_.token_begin + query(); }
    MLA_DEVICE int64_t head() const { return unit_.row_begin + row_ - query() * params_.num_heads.value; }

    const Params& params_;
    const cuda::Merge& unit_;
    const int32_t row_;  // index in the unit
    const bool is_rehearsed_;
    float o_factor_ = 0.0F;
  };

  /// Returns the factor of a split's outputs. A negative one says that the split has no visible key, or does not exist.
  static MLA_DEVICE float output_factor(const State& split, const State& all) {
    return split.max == kNoKey ? -1.0F : split_factor(split.max, all.max);
  }
  /// Adds a split's columns times its factor. A split without a visible key counts as 0, whatever its memory holds.
  static MLA_DEVICE void add(const ptx::Vec4& values, float factor, float (&sum)[kLaneColumns]) {
    if (factor < 0.0F) return;
    MLA_UNROLL
    for (int c = 0; c < kLaneColumns; ++c) sum[c] = std::fma(std::bit_cast<float>(values.x[c]), factor, sum[c]);
  }

  /// Merges a row of at most kFewSplits splits with one warp. Pairs have code of their own: 4,096 rows of two splits
  /// took 10 us instead of 20 (H200, 2026-11-21).
  static MLA_DEVICE void merge_row(Row& row) {
    if (row.num_splits() == 2)
      merge_few<2>(row);
    else
      merge_few<cuda::kFewSplits>(row);
  }
  template <int kSplits>
  static MLA_DEVICE void merge_few(Row& row) {
    const int32_t column = ptx::lane() * kLaneColumns;
    ptx::Vec4 values[kSplits][kRowSlices];
    State states[kSplits];
    MLA_UNROLL
    for (int i = 0; i < kSplits; ++i) {
      MLA_UNROLL
      for (int slice = 0; slice < kRowSlices; ++slice) values[i][slice] = row.load(i, column + slice * kSliceColumns);
      states[i] = row.load_state(i);
    }
    ptx::sync_warp();  // all loads have been issued before the first one is waited for
    State all = joined(states[0], states[1]);
    if constexpr (kSplits > 2) all = joined(all, joined(states[2], states[3]));
    row.finish(all, true);
    float factors[kSplits];
    MLA_UNROLL
    for (int i = 0; i < kSplits; ++i) factors[i] = output_factor(states[i], all);
    row.store<kRowSlices>(column, [&](int slice, float(&o)[kLaneColumns]) {
      for (float& value : o) value = 0.0F;
      MLA_UNROLL
      for (int i = 0; i < kSplits; ++i) add(values[i][slice], factors[i], o);
    });
  }

  /// Merges a slice of a row with a team of 2^team_bits warps.
  static MLA_DEVICE void merge_slice(Row& row, int32_t slice, int32_t team_bits) {
    constexpr int kAtOnce = 4;
    const int32_t rank = low_bits(ptx::warp(), team_bits);
    const int32_t column = slice * kSliceColumns + ptx::lane() * kLaneColumns;
    const auto split_of = [&](int32_t number) { return rank + (number << team_bits); };  // the warp's splits by number
    ptx::Vec4 values[kAtOnce];
    MLA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) values[i] = row.load(split_of(i), column);
    // A lane has the state of one of the warp's splits, and of one of all splits.
    const State own = row.load_state(split_of(ptx::lane()));
    State all = row.load_state(ptx::lane());
    ptx::sync_warp();  // all loads have been issued before the first one is waited for
    MLA_NO_UNROLL
    for (int32_t split = kWarpSize + ptx::lane(); split < row.num_splits(); split += kWarpSize)
      all = joined(all, row.load_state(split));
    all = joined_lanes(all);
    row.finish(all, slice == 0 && rank == 0);
    float lane_factor = output_factor(own, all);
    float sum[kLaneColumns] = {};
    MLA_NO_UNROLL
    for (int32_t number = 0;;) {
      MLA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        add(values[i], ptx::shuffle(lane_factor, (number + i) % kWarpSize), sum);
        values[i] = row.load(split_of(number + i + kAtOnce), column);
      }
      number += kAtOnce;
      if (split_of(number) >= row.num_splits()) break;
      if (number % kWarpSize == 0) lane_factor = output_factor(row.load_state(split_of(number + ptx::lane())), all);
    }
    if (team_bits > 0) add_up(sum, rank, team_bits);
    if (rank == 0)
      row.store<1>(column, [&](int /*slice*/, float(&o)[kLaneColumns]) {
        MLA_UNROLL
        for (int c = 0; c < kLaneColumns; ++c) o[c] = sum[c];
      });
  }

  /// Adds up the sums of a team's warps. The first warp gets the result.
  static MLA_DEVICE void add_up(float (&sum)[kLaneColumns], int32_t rank, int32_t team_bits) {
    constexpr int kWarpBytes = kSliceColumns * 4;
    const ptx::SharedAddress own = ptx::shared_address(ptx::shared_memory()) +
                                   static_cast<uint32_t>(ptx::warp() * kWarpBytes + ptx::lane() * kLaneColumns * 4);
    ptx::Vec4 four;
    for (int c = 0; c < kLaneColumns; ++c) four.x[c] = std::bit_cast<uint32_t>(sum[c]);
    ptx::store_shared(own, four);
    const int barrier = 1 + (ptx::warp() >> team_bits), threads = kWarpSize << team_bits;  // 0 is that of the block
    ptx::sync_threads(barrier, threads);
    if (rank == 0) {
      MLA_UNROLL
      for (int i = 1; i < kWarps; ++i) {
        if (i >> team_bits != 0) break;
        four = ptx::load_shared<ptx::Vec4>(own + static_cast<uint32_t>(i * kWarpBytes));
        for (int c = 0; c < kLaneColumns; ++c) sum[c] += std::bit_cast<float>(four.x[c]);
      }
    }
    ptx::sync_threads(barrier, threads);  // the sums have been read and may be overwritten
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

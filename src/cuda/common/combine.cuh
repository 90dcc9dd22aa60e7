// SPDX-License-Identifier: Apache-2.0
// Merges the partial states that several workers left of one unit, in key order, and writes o, lse and max_logits.
//
// Grid: as many blocks as the GPU holds, whatever there is to merge; a warp takes one row's columns 128 at a time, four
// per lane. All warps of the grid share (merge, row, slice of columns) evenly.
//   weights  lanes read the states of 32 splits at a time -> the row's max and sum, in every lane
//   o        kInFlight splits' columns are loaded before the first is added: partials lie in L2, latency is what costs
// No shared memory. Reads the number of merges first, and is done if there are none.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/store_output.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct CombineKernel {
  struct Params {
    cuda::WorkList list;
    int32_t num_heads = 0;
    int32_t d_v = 0;
    const float* attn_sink = nullptr;
    LseBase lse_base = LseBase::kE;
    DType o_dtype = DType::kBF16;
    const float* o_scale = nullptr;
    void* o = nullptr;
    int64_t o_stride_token = 0, o_stride_head = 0;
    float* lse = nullptr;
    int64_t lse_stride_token = 0, lse_stride_head = 0;
    float* max_logits = nullptr;
    int64_t max_logits_stride_token = 0, max_logits_stride_head = 0;
  };
  static constexpr const char* kName = "combine";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 6;
  static constexpr int kLaneColumns = 4;
  static constexpr int kSliceColumns = kLaneColumns * kWarpSize;
  static constexpr int kInFlight = 8;

  static MLA_DEVICE void run(const Params& params) {
    ptx::wait_for_previous_grid();
    const cuda::WorkListHeader header = *params.list.header;
    const int32_t slices = (params.d_v + kSliceColumns - 1) / kSliceColumns;
    const int64_t tasks = int64_t{header.num_merges} * header.merge_rows * slices;
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{ptx::grid_size_x()} * kWarps;
    for (int64_t task = int64_t{ptx::block_index_x()} * kWarps + ptx::warp(); task < tasks; task += step) {
      const auto row = static_cast<int32_t>(task / slices % header.merge_rows);
      const cuda::Merge merge = params.list.merges[task / slices / header.merge_rows];
      if (merge.row_begin + row >= merge.num_rows) continue;
      merge_row(params, merge, row, static_cast<int32_t>(task % slices));
    }
  }

 private:
  /// Index of a row's state of split `i` in partial_max and partial_sum.
  static MLA_DEVICE int64_t state_of(const cuda::WorkList& list, const cuda::Merge& merge, int32_t row, int32_t i) {
    const int32_t slot = i == 0 ? merge.first_slot : merge.rest_slot + (i - 1) * merge.slot_stride;
    return (int64_t{slot} + row / list.block_rows) * list.block_rows + row % list.block_rows;
  }

  /// By what a split's accumulators and sum count.
  static MLA_DEVICE float weight(float split_max, float max) {
    return split_max == kNoKey ? 0.0F : ptx::exp2_approx(finite_or_zero(split_max) - finite_or_zero(max));
  }

  /// `row` counts from the unit's first.
  static MLA_DEVICE void merge_row(const Params& params, const cuda::Merge& merge, int32_t row, int32_t slice) {
    const cuda::WorkList& list = params.list;
    float max = kNoKey;
    for (int32_t i = ptx::lane(); i < merge.num_splits; i += kWarpSize)
      max = larger(max, list.partial_max[state_of(list, merge, row, i)]);
    for (int mask = 1; mask < kWarpSize; mask *= 2) max = larger(max, ptx::shuffle_xor(max, mask));
    float sum = 0.0F;
    for (int32_t i = ptx::lane(); i < merge.num_splits; i += kWarpSize) {
      const int64_t state = state_of(list, merge, row, i);
      const float split_max = list.partial_max[state];
      if (split_max != kNoKey) sum += list.partial_sum[state] * weight(split_max, max);
    }
    for (int mask = 1; mask < kWarpSize; mask *= 2) sum += ptx::shuffle_xor(sum, mask);

    const int32_t token = merge.token_begin + (merge.row_begin + row) / params.num_heads;
    const int32_t head = (merge.row_begin + row) % params.num_heads;
    const float sink = params.attn_sink != nullptr ? params.attn_sink[head] : kNoKey;
    const FinishedRow finished = finish_row(max, sum, sink, inverse_o_scale(params.o_scale), params.lse_base);
    if (slice == 0 && ptx::lane() == 0) {
      if (params.lse != nullptr)
        params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = finished.lse;
      if (params.max_logits != nullptr)
        params.max_logits[token * params.max_logits_stride_token + head * params.max_logits_stride_head] =
            natural_logit(max);
    }

    const int32_t column = slice * kSliceColumns + ptx::lane() * kLaneColumns;
    if (column >= params.d_v) return;
    float o[kLaneColumns] = {};
    if (params.d_v % kLaneColumns == 0)
      add_splits<true>(params, merge, row, column, max, o);
    else
      add_splits<false>(params, merge, row, column, max, o);
    for (float& value : o) value *= finished.o_factor;
    store_columns(params.o, params.o_dtype, token * params.o_stride_token + head * params.o_stride_head + column, o,
                  std::min(params.d_v - column, int32_t{kLaneColumns}));
  }

  /// NaN stays.
  static MLA_DEVICE float larger(float a, float b) { return b > a || b != b ? b : a; }

  template <bool kVectors>
  static MLA_DEVICE void add_splits(const Params& params, const cuda::Merge& merge, int32_t row, int32_t column,
                                    float max, float (&o)[kLaneColumns]) {
    const cuda::WorkList& list = params.list;
    constexpr int kStep = kVectors ? kInFlight : 1;
    for (int32_t first = 0; first < merge.num_splits; first += kStep) {
      ptx::Vec4 values[kStep];
      float maxima[kStep];
      MLA_UNROLL
      for (int i = 0; i < kStep; ++i) {
        const int64_t state = state_of(list, merge, row, std::min(first + i, merge.num_splits - 1));
        maxima[i] = list.partial_max[state];
        const float* columns = list.partial_o + state * params.d_v + column;
        if constexpr (kVectors)
          values[i] = ptx::load_once(reinterpret_cast<const ptx::Vec4*>(columns));
        else
          for (int c = 0; c < kLaneColumns; ++c)
            values[i].x[c] = column + c < params.d_v ? std::bit_cast<uint32_t>(columns[c]) : 0;
      }
      MLA_UNROLL
      for (int i = 0; i < kStep; ++i) {
        if (first + i >= merge.num_splits || maxima[i] == kNoKey) continue;
        const float scale = weight(maxima[i], max);
        for (int c = 0; c < kLaneColumns; ++c) o[c] += std::bit_cast<float>(values[i].x[c]) * scale;
      }
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

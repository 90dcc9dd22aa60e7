// SPDX-License-Identifier: Apache-2.0
// finish_rows does what finish_output does with the outputs that engines have: bf16, aligned, at most 512 channels,
// rotary ones in neighbouring pairs, and no gate or one for each head. It is bound by instructions, so that what the
// general kernel asks of every row is known here.
//   grid    warps stride over rows, one for each token and head, and load a row before they compute the one before it;
//   a
//           block is 8 warps that share nothing
//   memory  a lane has 16 neighbouring channels, which are all of a group or a part of it; no shared memory
#pragma once

#include "cuda/border/launch.h"
#include "cuda/common/aligned_rows.h"
#include "cuda/common/finish_output.cuh"
#include "cuda/tile/fast_divisor.h"
#include "cuda/tile/lane_row.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct FinishRowsParams {
  core::FinishOutputArgs args;
  cuda::FastDivisor num_heads, heads_per_group;
};

/// kQuantizes says that outputs are e4m3, and not bf16.
template <bool kQuantizes>
struct FinishRowsKernel {
  using Params = FinishRowsParams;
  static constexpr const char* kName = kQuantizes ? "finish_rows_e4m3" : "finish_rows";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;

  /// Returns whether the kernel takes these rows.
  static bool takes(const core::FinishOutputArgs& args) {
    const int64_t bytes = kQuantizes ? 1 : 2;
    return args.out_dtype == (kQuantizes ? DType::kE4M3 : DType::kBF16) && args.o_dtype == DType::kBF16 &&
           args.num_tokens * args.num_heads <= INT32_MAX / 2 && args.d_v % kLaneChannels == 0 &&
           args.d_v <= kMostLaneChannels && (args.gate == nullptr || args.gate_channels == 1) &&
           args.d_rotary % kLaneChannels == 0 && (args.d_rotary == 0 || args.interleaved) &&
           cuda::has_rows_at(args.cos_sin, {args.cos_sin_stride_position * 4}, 16) &&
           cuda::has_rows_at(args.o, {args.o_stride_token * 2, args.o_stride_head * 2}, 16) &&
           cuda::has_rows_at(
               args.out, {args.out_stride_token * bytes, args.out_stride_group * bytes, args.out_stride_head * bytes},
               16);
  }

  static MLA_DEVICE void run(const Params& params) {
    ptx::allow_next_grid();
    constexpr int kWarps = kThreads / kWarpSize;
    const auto rows = static_cast<int32_t>(params.args.num_tokens * params.args.num_heads);
    const int32_t step = kWarps * ptx::grid_size_x();
    int32_t row = kWarps * ptx::block_index_x() + ptx::warp();
    ptx::wait_for_previous_grid();  // which computes `o`
    if (row >= rows) return;
    Row own(params, row);
    MLA_NO_UNROLL
    while (true) {
      row += step;
      if (row >= rows) break;
      const Row next(params, row);
      own.write(params);
      own = next;
    }
    own.write(params);
  }

 private:
  /// Is what a lane has of a row.
  class Row {
   public:
    MLA_DEVICE Row(const Params& params, int32_t row) {
      const core::FinishOutputArgs& args = params.args;
      token_ = params.num_heads.divide(row);
      head_ = row - token_ * params.num_heads.value;
      if (args.d_rotary > 0) position_ = args.positions[token_];
      if (lane_channel() < args.d_v)
        row_ = LaneRow::load(static_cast<const std::byte*>(args.o) +
                             (token_ * args.o_stride_token + head_ * args.o_stride_head) * 2);
      if (args.gate != nullptr)
        gate_ =
            load_element(args.gate, args.gate_dtype, token_ * args.gate_stride_token + head_ * args.gate_stride_head);
    }

    MLA_DEVICE void write(const Params& params) const {
      const core::FinishOutputArgs& args = params.args;
      float values[kLaneChannels];
      row_.unpack(values);
      if (const int32_t c = lane_channel() - (args.d_v - args.d_rotary); c >= 0 && c < args.d_rotary) {
        const float* const cos = args.cos_sin + position_ * args.cos_sin_stride_position + c / 2;
        const LaneAngles angles = LaneAngles::load(cos, cos + args.d_rotary / 2);
        turn_pairs_back(values, angles.cos, angles.sin);
      }
      if (args.gate != nullptr) {
        const float share = OutputRow::share_of(gate_);
#pragma unroll
        for (float& value : values) value *= share;
      }
      const int32_t group = params.heads_per_group.divide(head_);
      const int32_t head = head_ - group * params.heads_per_group.value;
      const int64_t first =
          token_ * args.out_stride_token + group * args.out_stride_group + head * args.out_stride_head;
      std::byte* const out = static_cast<std::byte*>(args.out) + first * (kQuantizes ? 1 : 2);
      if constexpr (kQuantizes)
        quantize(args, group, head, values, out);
      else if (lane_channel() < args.d_v)
        store_rounded(values, out);
    }

   private:
    MLA_DEVICE void quantize(const core::FinishOutputArgs& args, int32_t group, int32_t head,
                             const float (&values)[kLaneChannels], std::byte* out) const {
      float amax = 0;
#pragma unroll
      for (float value : values) amax = ptx::max_or_nan(amax, magnitude(value));
      const bool finite = is_finite(amax);
      if (!finite) [[unlikely]] {
        amax = 0;
#pragma unroll
        for (float value : values) amax = with_magnitude(amax, value);
      }
      const int32_t lanes = args.channels_per_scale / kLaneChannels;
      amax = max_of_lanes(amax, lanes);
      const float scale = args.power_of_two_scales ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax);
      if (lane_channel() >= args.d_v) return;
      if ((ptx::lane() & (lanes - 1)) == 0) {
        const int32_t s = lane_channel() / args.channels_per_scale;
        store_output_scale(args, args.scale_at(token_, group, head, s), scale);
      }
      if (finite && args.power_of_two_scales) [[likely]]
        store_quantized_by_power_of_two(values, scale, out);
      else
        store_quantized(values, ScaleDivisor(scale), out);
    }

    int32_t token_, head_;
    int64_t position_ = 0;
    LaneRow row_ = {};  // zeros, where the lane has no channels
    float gate_ = 0;
  };
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// query_rows does what append_rope does with the queries that engines have: bf16, aligned, at most 512 channels and 64
// rotary ones in neighbouring pairs. It is bound by instructions, so that what the general kernel asks of every row is
// known here.
//   grid    warps stride over queries, one for each token and head, and load a query before they compute the one before
//           it; a block is 8 warps that share nothing
//   memory  a lane has 16 neighbouring channels and one rotary pair; no shared memory
#pragma once

#include "cuda/border/launch.h"
#include "cuda/common/aligned_rows.h"
#include "cuda/tile/fast_divisor.h"
#include "cuda/tile/lane_row.cuh"
#include "cuda/tile/normalized.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct QueryRowsParams {
  core::AppendRopeArgs args;
  cuda::FastDivisor num_heads;
};

/// kNormalizes is core::AppendRopeArgs::q_norm.
template <bool kNormalizes>
struct QueryRowsKernel {
  using Params = QueryRowsParams;
  static constexpr const char* kName = kNormalizes ? "query_rows_norm" : "query_rows";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = kNormalizes ? 3 : 4;

  /// Returns whether the kernel takes these queries.
  static bool takes(const core::AppendRopeArgs& args) {
    const int32_t plain = args.cache.d_plain(), rotary = args.cache.d_rotary();
    const int32_t most =
        kNormalizes ? kMostLaneChannels - rotary : kMostLaneChannels;  // a norm has the rotary ones too
    const auto bytes = static_cast<int64_t>(size_of(args.q_out_dtype));
    return args.num_heads > 0 && args.num_tokens * args.num_heads <= INT32_MAX / 2 &&
           (args.interleaved || rotary == 0) && args.q_dtype == DType::kBF16 &&
           (args.q_out_dtype == DType::kBF16 || args.q_out_dtype == DType::kE4M3) && plain % kLaneChannels == 0 &&
           plain <= most && rotary % kLaneChannels == 0 && rotary <= 2 * kWarpSize &&
           cuda::has_rows_at(args.q_nope, {args.q_nope_stride_token * 2, args.q_nope_stride_head * 2}, 16) &&
           cuda::has_rows_at(args.q_pe, {args.q_pe_stride_token * 2, args.q_pe_stride_head * 2}, 16) &&
           cuda::has_rows_at(args.q_out, {args.q_out_stride_token * bytes, args.q_out_stride_head * bytes}, 16);
  }

  static MLA_DEVICE void run(const Params& params) {
    ptx::allow_next_grid();
    constexpr int kWarps = kThreads / kWarpSize;
    const auto rows = static_cast<int32_t>(params.args.num_tokens * params.args.num_heads);
    const int32_t step = kWarps * ptx::grid_size_x();
    int32_t row = kWarps * ptx::block_index_x() + ptx::warp();
    if (row >= rows) return;
    Query query(params, row);
    MLA_NO_UNROLL
    while (true) {
      row += step;
      if (row >= rows) break;
      const Query next(params, row);
      query.write(params.args);
      query = next;
    }
    query.write(params.args);
  }

 private:
  static MLA_DEVICE const std::byte* at(const void* base, int64_t element) {
    return static_cast<const std::byte*>(base) + element * 2;
  }

  /// Is what a lane has of a query.
  class Query {
   public:
    MLA_DEVICE Query(const Params& params, int32_t row) {
      const core::AppendRopeArgs& args = params.args;
      token_ = params.num_heads.divide(row);
      head_ = row - token_ * params.num_heads.value;
      const int32_t plain = args.cache.d_plain(), rotary = args.cache.d_rotary();
      const float* const angles = args.angles(token_);
      const std::byte* const pe = at(args.q_pe, token_ * args.q_pe_stride_token + head_ * args.q_pe_stride_head);
      if (lane_channel() < plain)
        plain_ = LaneRow::load(at(args.q_nope, token_ * args.q_nope_stride_token + head_ * args.q_nope_stride_head));
      else if (kNormalizes && lane_channel() < plain + rotary)
        plain_ = LaneRow::load(pe - plain * 2);  // for the norm, which has the rotary channels behind the others
      if (2 * ptx::lane() < rotary) {
        pair_ = ptx::load_global(as<uint32_t>(pe) + ptx::lane());
        cos_[0] = angles[ptx::lane()];
        sin_[0] = angles[rotary / 2 + ptx::lane()];
      }
    }

    MLA_DEVICE void write(const core::AppendRopeArgs& args) const {
      const int32_t plain = args.cache.d_plain(), rotary = args.cache.d_rotary();
      const bool quantizes = args.q_out_dtype == DType::kE4M3;
      const int64_t first = token_ * args.q_out_stride_token + head_ * args.q_out_stride_head;
      std::byte* const out = static_cast<std::byte*>(args.q_out) + first * (quantizes ? 1 : 2);
      float pair[2];
      ptx::unpack_bf16x2(pair_, pair[0], pair[1]);
      if constexpr (kNormalizes) {
        float values[kLaneChannels];
        plain_.unpack(values);
        const int32_t n = plain + rotary, c = plain + 2 * ptx::lane();
        const LaneWeights weights = LaneWeights::load(args.q_norm_weight, args.q_norm_weight_dtype, c, n);
        const float factor = factor_of(sum_of_lanes(sum_of_squares(values), kWarpSize), n, args.norm_eps);
        scale_by(factor, weights.channels, values);
        scale_by(factor, weights.pair, pair);
        if (lane_channel() < plain) store(args, values, quantizes, out);
      } else if (lane_channel() < plain) {
        if (quantizes) {
          float values[kLaneChannels];
          plain_.unpack(values);
          store(args, values, true, out);
        } else {
          plain_.store(out);
        }
      }
      if (2 * ptx::lane() >= rotary) return;
      turn_pairs(pair, cos_, sin_);
      const float turned[kVector] = {pair[0], pair[1]};  // of which two are used
      if (quantizes)
        as<uint16_t>(out + plain)[ptx::lane()] = half_of(quantize8(turned, ScaleDivisor(*args.q_scale)), 0);
      else
        as<uint32_t>(out + plain * 2)[ptx::lane()] = encode8(turned, DType::kBF16).w[0];
    }

   private:
    static MLA_DEVICE void store(const core::AppendRopeArgs& args, const float (&values)[kLaneChannels], bool quantizes,
                                 std::byte* out) {
      if (quantizes)
        store_quantized(values, ScaleDivisor(*args.q_scale), out);
      else
        store_rounded(values, out);
    }

    int32_t token_, head_;
    LaneRow plain_ = {};  // zeros, where the lane has no channels
    uint32_t pair_ = 0;
    float cos_[1] = {1}, sin_[1] = {0};
  };
};

}  // namespace mla::MLA_CUDA_NAMESPACE

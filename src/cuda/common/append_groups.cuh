// SPDX-License-Identifier: Apache-2.0
// append_groups does what append, and append_rope with keys, do with the rows that engines have: bf16, aligned, into
// groups of channels whose scales it chooses, or, where append_rope normalizes them, into bf16. It is bound by the
// instructions of that work, so that what the general kernels ask of every row is known here.
//   grid    warps stride over tokens, and load a token's row before they quantize the one before it
//   memory  a lane has 16 neighbouring channels, which are all of a group or a part of it: one scale a lane
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/border/launch.h"
#include "cuda/common/aligned_rows.h"
#include "cuda/tile/lane_row.cuh"
#include "cuda/tile/normalized.cuh"
#include "cuda/tile/page_place.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Args>
struct AppendGroupsParams {
  Args args;
  cuda::FastDivisor page_size;
};

/// kElement is the cache's, e4m3 or e2m1, or bf16 of normalized keys. Args are those of append, or those of
/// append_rope, whose keys are normalized and turn.
template <DType kElement, class Args>
struct AppendGroupsKernel {
  static constexpr bool kTurns = std::is_same_v<Args, core::AppendRopeArgs>;
  static constexpr bool kQuantizes = kElement != DType::kBF16;

  using Params = AppendGroupsParams<Args>;
  static constexpr const char* kName = !kQuantizes ? "append_turned_rows"
                                       : kTurns    ? "append_turned_groups"
                                                   : "append_groups";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = kTurns ? 2 : kArch >= 100 ? 3 : 4;  // without spills

  /// Returns whether the kernel takes these rows.
  static bool takes(const Args& args) {
    const core::Cache& cache = args.cache;
    if constexpr (kTurns) {
      const int32_t plain = cache.d_plain(), rotary = cache.d_rotary();
      if ((!args.interleaved && rotary > 0) || plain % kLaneChannels != 0 || rotary % kLaneChannels != 0 ||
          rotary > 2 * kWarpSize ||
          std::max(plain + (cache.rotary_in_ckv > 0 ? rotary : 0), args.norm_channels) > kMostLaneChannels ||
          !cuda::has_rows_at(args.kpe, {args.kpe_stride_token * 2}, 16) ||
          !cuda::has_rows_at(args.cos_sin, {args.cos_sin_stride_position * 4}, 16))
        return false;
    }
    return cache.ckv_dtype == kElement && takes_scales(args) && args.dtype == DType::kBF16 &&
           cache.d_ckv % kLaneChannels == 0 && cache.d_ckv <= kMostLaneChannels && cache.num_slots() <= INT32_MAX &&
           args.num_tokens <= INT32_MAX / 2 && cuda::has_rows_at(args.ckv, {args.ckv_stride_token * 2}, 16) &&
           cuda::has_planes_at(cache.ckv, 16) &&
           (!kQuantizes || cuda::has_planes_at(cache.scales, size_of(cache.scale_type))) &&
           (cache.d_kpe == 0 ||
            ((cache.kpe_dtype == DType::kBF16 || cache.kpe_scale != nullptr) && cache.d_kpe <= 2 * kWarpSize &&
             cache.d_kpe % 2 == 0 && cuda::has_rows_at(args.kpe, {args.kpe_stride_token * 2}, 4) &&
             cuda::has_planes_at(cache.kpe, 4)));
  }

  static MLA_DEVICE void run(const Params& params) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    const Args& args = params.args;
    constexpr int kWarps = kThreads / kWarpSize;
    const int32_t step = kWarps * ptx::grid_size_x();
    int32_t token = kWarps * ptx::block_index_x() + ptx::warp();
    if (token >= args.num_tokens) return;
    Row row(args, token);
    MLA_NO_UNROLL
    while (true) {
      token += step;
      if (token >= args.num_tokens) break;
      const Row next(args, token);
      append(args, params.page_size, row);
      row = next;
    }
    append(args, params.page_size, row);
    // The kernel in front writes the queries, and this one starts beside it and needs nothing of it, but must not end
    // before it.
    if constexpr (kTurns) ptx::wait_for_previous_grid();
  }

  /// Appends one token's row, for another kernel whose warps do so. All lanes of a warp call this.
  static MLA_DEVICE void append_token(const Args& args, const cuda::FastDivisor& page_size, int32_t token) {
    append(args, page_size, Row(args, token));
  }

 private:
  static bool takes_scales(const Args& args) {
    const core::Cache& cache = args.cache;
    if constexpr (!kQuantizes) return args.norm_weight != nullptr;  // other rows are copied, by the general kernel
    if (!cache.writes_scales) return cache.num_scales == 1 && cache.scale_type == ScaleType::kF32;
    const int32_t group = cache.channels_per_scale;
    return group % kLaneChannels == 0 && std::has_single_bit(static_cast<uint32_t>(group / kLaneChannels));
  }

  static MLA_DEVICE const std::byte* at(const void* base, int64_t element) {
    return static_cast<const std::byte*>(base) + element * 2;
  }

  /// Is what a lane has of a token's row.
  struct Row {
    MLA_DEVICE Row(const Args& args, int32_t token) {
      slot = ptx::load_global(args.slot_mapping + token);
      const std::byte* const kpe = at(args.kpe, token * args.kpe_stride_token);
      const int32_t plain = plain_of(args.cache);
      if (lane_channel() < plain) latents = LaneRow::load(at(args.ckv, token * args.ckv_stride_token));
      if constexpr (kTurns) {
        // Rotary channels are behind the others in a row that ends with them, and in a norm of both.
        const bool joined = args.cache.rotary_in_ckv > 0;
        const int32_t rotary = args.cache.d_rotary();
        if (lane_channel() >= plain && lane_channel() < plain + rotary && (joined || args.norm_channels > plain))
          latents = LaneRow::load(kpe - plain * 2);
        angles = args.angles(token);
        if (!joined && 2 * ptx::lane() < rotary) {
          cos[0] = angles[ptx::lane()];
          sin[0] = angles[rotary / 2 + ptx::lane()];
        }
      }
      if (2 * ptx::lane() < args.cache.d_kpe) rope = ptx::load_once(as<uint32_t>(kpe) + ptx::lane());
    }

    int64_t slot;
    LaneRow latents = {};  // zeros, where the lane has no channels
    uint32_t rope = 0;
    const float* angles = nullptr;     // of the token's position
    float cos[1] = {1}, sin[1] = {0};  // of the lane's pair
  };

  /// Returns the channels that do not turn.
  static MLA_DEVICE int32_t plain_of(const core::Cache& cache) { return kTurns ? cache.d_plain() : cache.d_ckv; }

  static MLA_DEVICE void append(const Args& args, const cuda::FastDivisor& page_size, const Row& row) {
    const core::Cache& cache = args.cache;
    if (row.slot < 0 || row.slot >= cache.num_slots()) return;
    const PagePlace place = place_in_pages(static_cast<int32_t>(row.slot), page_size);
    float values[kLaneChannels], pair[2];
    row.latents.unpack(values);
    ptx::unpack_bf16x2(row.rope, pair[0], pair[1]);
    if constexpr (kTurns) {
      normalize(args, values, pair);
      turn_channels(args, row, values, pair);
    }
    if (2 * ptx::lane() < cache.d_kpe) store_rope(cache, cache.kpe.row(place.page, place.offset), row.rope, pair);
    std::byte* const to = cache.ckv.row(place.page, place.offset);
    if constexpr (!kQuantizes) {
      if (lane_channel() < cache.d_ckv) store_rounded(values, to);
    } else {
      std::byte* const scales = cache.scales.row(place.page, place.offset);
      bool finite = false;
      const float scale = cache.writes_scales ? choose_scales(cache, scales, values, finite) : *as<float>(scales);
      if (lane_channel() < cache.d_ckv) store_channels(cache, to, row, values, scale, finite);
    }
  }

  static MLA_DEVICE void normalize(const Args& args, float (&values)[kLaneChannels], float (&pair)[2]) {
    if (args.norm_weight == nullptr) return;
    const bool takes_part = lane_channel() < args.norm_channels;
    const int32_t n = args.norm_channels, c = args.cache.d_plain() + 2 * ptx::lane();
    const LaneWeights weights = LaneWeights::load(args.norm_weight, args.norm_weight_dtype, c, n);
    const float squares = sum_of_lanes(takes_part ? sum_of_squares(values) : 0.0F, kWarpSize);
    const float factor = factor_of(squares, n, args.norm_eps);
    if (takes_part) scale_by(factor, weights.channels, values);
    if (c < n) scale_by(factor, weights.pair, pair);
  }

  /// Turns the lane's pair, or, of a row that ends with the rotary channels, those that the lane has of these.
  static MLA_DEVICE void turn_channels(const Args& args, const Row& row, float (&values)[kLaneChannels],
                                       float (&pair)[2]) {
    turn_pairs(pair, row.cos, row.sin);
    const int32_t c = lane_channel() - args.cache.d_plain(), rotary = args.cache.d_rotary();
    if (args.cache.rotary_in_ckv == 0 || c < 0 || c >= rotary) return;
    const LaneAngles angles = LaneAngles::load(row.angles + c / 2, row.angles + rotary / 2 + c / 2);
    turn_pairs(values, angles.cos, angles.sin);
    MLA_UNROLL
    for (float& value : values) value = bf16_to_f32(f32_to_bf16(value));  // as the formats' own writers do
  }

  /// Stores the lane's two rotary channels, as they are or quantized.
  static MLA_DEVICE void store_rope(const core::Cache& cache, std::byte* to, uint32_t rope, const float (&pair)[2]) {
    const float values[kVector] = {pair[0], pair[1]};  // of which two are used
    if (cache.kpe_dtype == DType::kBF16) [[likely]] {
      as<uint32_t>(to)[ptx::lane()] = kTurns ? encode8(values, DType::kBF16).w[0] : rope;
      return;
    }
    as<uint16_t>(to)[ptx::lane()] = half_of(quantize8(values, ScaleDivisor(*cache.kpe_scale)), 0);
  }

  /// Chooses and stores the scales of a row, and returns that of the lane's group; `finite` gets whether all channels
  /// of the row are.
  static MLA_DEVICE float choose_scales(const core::Cache& cache, std::byte* scales,
                                        const float (&values)[kLaneChannels], bool& finite) {
    const int32_t lanes = cache.channels_per_scale / kLaneChannels;
    float amax = 0;
    MLA_UNROLL
    for (float value : values) amax = ptx::max_or_nan(amax, magnitude(value));
    finite = !ptx::any(!is_finite(amax));
    if (!finite) [[unlikely]] {
      amax = 0;
      MLA_UNROLL
      for (float value : values) amax = with_magnitude(amax, value);
    }
    const float scale = scale_of(cache, max_of_lanes(amax, lanes));
    if (lane_channel() < cache.d_ckv && (ptx::lane() & (lanes - 1)) == 0)
      store_whole_scale(scales, cache.scale_type, ptx::lane() / lanes, scale);
    if (const int32_t pad = cache.num_scales * size_of(cache.scale_type) + ptx::lane(); pad < cache.scale_bytes)
      scales[pad] = std::byte{0};
    return scale;
  }

  /// Returns the scale that the cache holds for a group.
  static MLA_DEVICE float scale_of(const core::Cache& cache, float amax) {
    const float outer = cache.outer_scale != nullptr ? *cache.outer_scale : 1.0F;
    if (cache.scale_type != ScaleType::kE4M3)
      return choose_scale(kElement, cache.scale_type, cache.power_of_two_scales, amax, outer, cache.least_scale);
    // It is rounded by an instruction, where there is one.
    const float wanted = amax / outer / (kElement == DType::kE2M1 ? kE2M1Max : kE4M3Max);
    float scale, none;
    ptx::unpack_f16x2(
        ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(ptx::pack_e4m3x2(wanted > kLeastE4M3 ? wanted : kLeastE4M3, 0.0F))),
        scale, none);
    return scale;
  }

  static MLA_DEVICE void store_whole_scale(std::byte* scales, ScaleType type, int32_t i, float scale) {
    if (type == ScaleType::kF32)
      as<float>(scales)[i] = scale;
    else
      store_scale(scales, type, i, scale);
  }

  /// Quantizes and stores the lane's channels. `finite` says that all are.
  static MLA_DEVICE void store_channels(const core::Cache& cache, std::byte* to, const Row& row,
                                        const float (&values)[kLaneChannels], float scale, bool finite) {
    const bool power_of_two =
        cache.scale_type == ScaleType::kUE8M0 || (cache.scale_type == ScaleType::kF32 && cache.power_of_two_scales);
    const ScaleDivisor divide(cache.outer_scale != nullptr ? scale * *cache.outer_scale : scale);
    float halves[2][kVector];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) half_of_lane(values, half, halves[half]);
    if constexpr (kElement == DType::kE2M1) {
      if (finite && cache.outer_scale == nullptr) [[likely]]
        return store_codes(to, e2m1_of(row.latents.bits[0], halves[0], scale),
                           e2m1_of(row.latents.bits[1], halves[1], scale));
    } else if (finite && power_of_two && cache.outer_scale == nullptr) [[likely]] {
      return store_quantized_by_power_of_two(values, scale, to);
    }
    store_codes8(to, kElement, lane_channel(), halves[0], divide);
    store_codes8(to, kElement, lane_channel() + kVector, halves[1], divide);
  }

  static MLA_DEVICE void store_codes(std::byte* to, uint32_t low, uint32_t high) {
    *as<uint64_t>(to + lane_channel() / 2) = uint64_t{high} << 32 | low;
  }

  /// Returns eight finite bf16 values, divided by a scale, as e2m1. The scale has four significant bits at most, a
  /// value eight. So a quotient is halfway between two e2m1 numbers, or differs from that by 2^-8 of itself or more;
  /// rounded to the eight bits of bf16 it stays on its side, and an approximate quotient that is halfway becomes so
  /// exactly.
  static MLA_DEVICE uint32_t e2m1_of(const ptx::Vec4& bits, const float (&values)[kVector], float scale) {
    const float reciprocal = 1.0F / scale;
    uint32_t pairs[4];
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t quotient = ptx::pack_bf16x2(ptx::mul_rn(magnitude(values[2 * i]), reciprocal),
                                                 ptx::mul_rn(magnitude(values[2 * i + 1]), reciprocal));
      // The sign goes to bit 3 of a half, the code to bits 0 to 2.
      pairs[i] = bf16x2_to_e2m1(quotient) | (bits.x[i] >> 12 & 0x00080008U);
    }
    // The codes of a word of two pairs are 0, 2, 1 and 3, a byte each.
    const uint32_t low = pairs[0] | pairs[1] << 8, high = pairs[2] | pairs[3] << 8;
    return ptx::permute_bytes(low | low >> 12, high | high >> 12, 0x5410U);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

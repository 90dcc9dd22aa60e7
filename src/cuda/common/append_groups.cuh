// SPDX-License-Identifier: Apache-2.0
// append_groups does what append does with the rows that engines have: bf16, aligned, into groups of channels whose
// scales it chooses. It is bound by the instructions that quantize, so that what the general kernel asks of every row
// is known here.
//   grid    warps stride over tokens, and load a token's row before they quantize the one before it
//   memory  a lane has 16 neighbouring channels, which are all of a group or a part of it: one scale a lane
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"
#include "cuda/tile/page_place.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct AppendGroupsParams {
  core::AppendArgs args;
  cuda::FastDivisor page_size;
};

/// kElement is the cache's, e4m3 or e2m1.
template <DType kElement>
struct AppendGroupsKernel {
  using Params = AppendGroupsParams;
  static constexpr const char* kName = "append_groups";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;
  static constexpr int kLaneChannels = 16;

  /// Returns whether the kernel takes these rows.
  static bool takes(const core::AppendArgs& args) {
    const core::Cache& cache = args.cache;
    const int32_t group = cache.channels_per_scale;
    const bool takes_groups =
        cache.writes_scales
            ? group % kLaneChannels == 0 && std::has_single_bit(static_cast<uint32_t>(group / kLaneChannels))
            : cache.num_scales == 1 && cache.scale_type == ScaleType::kF32;
    return cache.ckv_dtype == kElement && takes_groups && args.dtype == DType::kBF16 &&
           cache.d_ckv % kLaneChannels == 0 && cache.d_ckv <= kWarpSize * kLaneChannels &&
           cache.num_slots() <= INT32_MAX && args.num_tokens <= INT32_MAX / 2 &&
           has_rows_at(args.ckv, args.ckv_stride_token * 2, 16) && has_planes_at(cache.ckv, 16) &&
           has_planes_at(cache.scales, size_of(cache.scale_type)) &&
           (cache.d_kpe == 0 || ((cache.kpe_dtype == DType::kBF16 || cache.kpe_scale != nullptr) &&
                                 cache.d_kpe <= 2 * kWarpSize && cache.d_kpe % 2 == 0 &&
                                 has_rows_at(args.kpe, args.kpe_stride_token * 2, 4) && has_planes_at(cache.kpe, 4)));
  }

  static MLA_DEVICE void run(const Params& params) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    const core::AppendArgs& args = params.args;
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
      append(params, row);
      row = next;
    }
    append(params, row);
  }

 private:
  static bool has_rows_at(const void* base, int64_t stride, int64_t bytes) {
    return reinterpret_cast<intptr_t>(base) % bytes == 0 && stride % bytes == 0;
  }
  static bool has_planes_at(const core::Plane& plane, int64_t bytes) {
    return has_rows_at(plane.base, plane.stride_page, bytes) && plane.stride_token % bytes == 0;
  }

  /// Is what a lane has of a token's row.
  struct Row {
    MLA_DEVICE Row(const core::AppendArgs& args, int32_t token) {
      slot = ptx::load_global(args.slot_mapping + token);
      if (first_channel() < args.cache.d_ckv) {
        const auto* const from = as<ptx::Vec4>(static_cast<const std::byte*>(args.ckv) +
                                               (token * args.ckv_stride_token + first_channel()) * 2);
        // The sectors of the first load hold half of the second one, which finds them in L1.
        latents[0] = ptx::load_global(from);
        latents[1] = ptx::load_global(from + 1);
      }
      if (ptx::lane() * 2 < args.cache.d_kpe)
        rope = ptx::load_once(
            as<uint32_t>(static_cast<const std::byte*>(args.kpe) + token * args.kpe_stride_token * 2) + ptx::lane());
    }

    int64_t slot;
    ptx::Vec4 latents[2] = {};  // zeros, where the lane has no channels
    uint32_t rope = 0;
  };

  MLA_DEVICE static int32_t first_channel() { return ptx::lane() * kLaneChannels; }

  static MLA_DEVICE void append(const Params& params, const Row& row) {
    const core::Cache& cache = params.args.cache;
    if (row.slot < 0 || row.slot >= cache.num_slots()) return;
    const PagePlace place = place_in_pages(static_cast<int32_t>(row.slot), params.page_size);
    if (ptx::lane() * 2 < cache.d_kpe) store_rope(cache, cache.kpe.row(place.page, place.offset), row.rope);
    float values[2][kVector];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int i = 0; i < 4; ++i)
      ptx::unpack_bf16x2(row.latents[half].x[i], values[half][2 * i], values[half][2 * i + 1]);
    std::byte* const scales = cache.scales.row(place.page, place.offset);
    bool finite = false;
    const float scale = cache.writes_scales ? choose_scales(cache, scales, values, finite) : *as<float>(scales);
    if (first_channel() < cache.d_ckv)
      store_channels(cache, cache.ckv.row(place.page, place.offset), row, values, scale, finite);
  }

  /// Stores the lane's two rotary channels, as they are or quantized.
  static MLA_DEVICE void store_rope(const core::Cache& cache, std::byte* to, uint32_t rope) {
    if (cache.kpe_dtype == DType::kBF16) [[likely]] {
      as<uint32_t>(to)[ptx::lane()] = rope;
      return;
    }
    float values[kVector] = {};  // of which two are used
    ptx::unpack_bf16x2(rope, values[0], values[1]);
    as<uint16_t>(to)[ptx::lane()] = half_of(quantize8(values, ScaleDivisor(*cache.kpe_scale)), 0);
  }

  /// Chooses and stores the scales of a row, and returns that of the lane's group; `finite` gets whether all channels
  /// of the row are.
  static MLA_DEVICE float choose_scales(const core::Cache& cache, std::byte* scales, const float (&values)[2][kVector],
                                        bool& finite) {
    const int32_t lanes = cache.channels_per_scale / kLaneChannels;
    float amax = 0;
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int i = 0; i < kVector; ++i) amax = ptx::max_or_nan(amax, magnitude(values[half][i]));
    finite = !ptx::any(!is_finite(amax));
    if (!finite) [[unlikely]] {
      amax = 0;
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) MLA_UNROLL
      for (int i = 0; i < kVector; ++i) amax = with_magnitude(amax, values[half][i]);
    }
    const float scale = scale_of(cache, max_of_lanes(amax, lanes));
    if (first_channel() < cache.d_ckv && (ptx::lane() & (lanes - 1)) == 0)
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
                                        const float (&values)[2][kVector], float scale, bool finite) {
    const bool power_of_two =
        cache.scale_type == ScaleType::kUE8M0 || (cache.scale_type == ScaleType::kF32 && cache.power_of_two_scales);
    const float divisor = cache.outer_scale != nullptr ? scale * *cache.outer_scale : scale;
    Bits8 codes[2];
    if constexpr (kElement == DType::kE2M1) {
      if (finite && cache.outer_scale == nullptr) [[likely]]
        return store_codes(to, e2m1_of(row.latents[0], values[0], scale), e2m1_of(row.latents[1], values[1], scale));
    } else if (finite && power_of_two && cache.outer_scale == nullptr) [[likely]] {
      codes[0] = quantize8_by_power_of_two(values[0], scale);
      codes[1] = quantize8_by_power_of_two(values[1], scale);
      *as<ptx::Vec4>(to + first_channel()) = {codes[0].w[0], codes[0].w[1], codes[1].w[0], codes[1].w[1]};
      return;
    }
    const ScaleDivisor divide(divisor);
    store_codes8(to, kElement, first_channel(), values[0], divide);
    store_codes8(to, kElement, first_channel() + kVector, values[1], divide);
  }

  static MLA_DEVICE void store_codes(std::byte* to, uint32_t low, uint32_t high) {
    *as<uint64_t>(to + first_channel() / 2) = uint64_t{high} << 32 | low;
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

// SPDX-License-Identifier: Apache-2.0
// gather_rows does what gather does with the rows that engines have: quantized, aligned, into bf16. A row's place is
// three dependent loads away, so that a warp finds those of several rows at once, and loads a row while it converts the
// one before it.
//   grid    a warp has kRows neighbouring rows of the output; lane i finds the place of row i
//   memory  a lane has two times eight channels, so that loads and stores of a warp are contiguous
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"
#include "cuda/tile/page_place.cuh"
#include "cuda/tile/search.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct GatherRowsParams {
  core::GatherArgs args;
  cuda::FastDivisor page_size;
  int32_t scale_shift;  // channel / 8 >> scale_shift is the number of the channel's scale
};

struct GatherRowsKernel {
  using Params = GatherRowsParams;
  static constexpr const char* kName = "gather_rows";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;
  static constexpr int kRows = 8;
  static constexpr int kParts = 2;  // of a row, each eight channels a lane

  /// Returns whether the kernel takes these rows.
  static bool takes(const core::GatherArgs& args) {
    const core::Cache& cache = args.cache;
    const auto group = static_cast<uint32_t>(cache.channels_per_scale);
    return cache.is_quantized() && args.out_dtype == DType::kBF16 && cache.d_ckv % kVector == 0 &&
           cache.d_ckv <= kParts * kWarpChannels && cache.num_slots() <= INT32_MAX &&
           (cache.num_scales == 1 || (group % kVector == 0 && std::has_single_bit(group))) &&
           are_at(cache.ckv, cache.ckv_dtype == DType::kE2M1 ? 4 : 8) &&
           are_at(cache.scales, size_of(cache.scale_type)) && are_at(args.out_ckv, args.out_ckv_stride_token * 2, 16) &&
           (cache.d_kpe == 0 ||
            ((cache.kpe_dtype == DType::kBF16 || cache.kpe_scale != nullptr) && cache.d_kpe <= 2 * kWarpSize &&
             cache.d_kpe % 2 == 0 && are_at(cache.kpe, 4) && are_at(args.out_kpe, args.out_kpe_stride_token * 2, 4)));
  }
  static Params params_of(const core::GatherArgs& args) {
    const auto vectors = static_cast<uint32_t>(args.cache.channels_per_scale / kVector);
    return {.args = args,
            .page_size = cuda::FastDivisor(args.cache.page_size),
            .scale_shift = args.cache.num_scales == 1 ? 31 : static_cast<int32_t>(std::bit_width(vectors)) - 1};
  }

  static MLA_DEVICE void run(const Params& params) {
    const core::GatherArgs& args = params.args;
    const int64_t first = (int64_t{kThreads / kWarpSize} * ptx::block_index_x() + ptx::warp()) * kRows;
    const PagePlace found = find(params, first, first + ptx::lane());
    Row row(params, place_of(found, 0));
    MLA_NO_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Row next(params, i + 1 < kRows ? place_of(found, i + 1) : kNowhere);
      store(args, first + i, row);
      row = next;
    }
  }

 private:
  static constexpr PagePlace kNowhere = {-1, 0};

  static bool are_at(const void* base, int64_t stride, int64_t bytes) {
    return reinterpret_cast<intptr_t>(base) % bytes == 0 && stride % bytes == 0;
  }
  static bool are_at(const core::Plane& plane, int64_t bytes) {
    return are_at(plane.base, plane.stride_page, bytes) && plane.stride_token % bytes == 0;
  }

  /// Returns where the row for row `out` of the output lies, where `first` is the warp's first row.
  static MLA_DEVICE PagePlace find(const Params& params, int64_t first, int64_t out) {
    const core::GatherArgs& args = params.args;
    int32_t request = find_range(args.out_indptr, args.batch_size, first);
    if (request < 0 || ptx::lane() >= kRows || out >= args.num_rows) return kNowhere;
    while (request < args.batch_size && args.out_indptr[request + 1] <= out) ++request;
    if (request == args.batch_size) return kNowhere;
    const int32_t start = args.token_start != nullptr ? args.token_start[request] : 0;
    const auto token = start + static_cast<int32_t>(out - args.out_indptr[request]);
    const PagePlace at = place_in_pages(token, params.page_size);
    return {args.pages.of(request)[at.page], at.offset};
  }
  static MLA_DEVICE PagePlace place_of(const PagePlace& found, int lane) {
    return {ptx::shuffle(found.page, lane), ptx::shuffle(found.offset, lane)};
  }

  /// Is what a lane has of a row.
  struct Row {
    MLA_DEVICE Row(const Params& params, const PagePlace& at) : exists(at.page >= 0) {
      const core::Cache& cache = params.args.cache;
      if (!exists) return;
      const std::byte* const ckv = cache.ckv.row(at.page, at.offset);
      const std::byte* const of_scales = cache.scales.row(at.page, at.offset);
      MLA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const int32_t c = part * kWarpChannels + ptx::lane() * kVector;
        if (c >= cache.d_ckv) continue;
        if (cache.ckv_dtype == DType::kE2M1)
          codes[part] = ptx::load_once(as<uint32_t>(ckv + c / 2));
        else
          codes[part] = ptx::load_once(as<uint64_t>(ckv + c));
        const int32_t group = c / kVector >> params.scale_shift;
        scales[part] = cache.scale_type == ScaleType::kF32 ? as<uint32_t>(of_scales)[group]
                                                           : static_cast<uint32_t>(of_scales[group]);
      }
      if (ptx::lane() * 2 >= cache.d_kpe) return;
      const std::byte* const kpe = cache.kpe.row(at.page, at.offset);
      rope = cache.kpe_dtype == DType::kBF16 ? ptx::load_once(as<uint32_t>(kpe) + ptx::lane())
                                             : ptx::load_once(as<uint16_t>(kpe) + ptx::lane());
    }

    bool exists;
    uint64_t codes[kParts] = {};
    uint32_t scales[kParts] = {};  // bits of the scales of the codes
    uint32_t rope = 0;
  };

  static MLA_DEVICE void store(const core::GatherArgs& args, int64_t out, const Row& row) {
    const core::Cache& cache = args.cache;
    if (!row.exists) return;
    auto* const ckv = static_cast<std::byte*>(args.out_ckv) + out * args.out_ckv_stride_token * 2;
    MLA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const int32_t c = part * kWarpChannels + ptx::lane() * kVector;
      if (c >= cache.d_ckv) continue;
      const auto low = static_cast<uint32_t>(row.codes[part]);
      const Bits8 codes = cache.ckv_dtype == DType::kE2M1 ? e2m1x8_to_e4m3(low)
                                                          : Bits8{low, static_cast<uint32_t>(row.codes[part] >> 32)};
      const Bits8 values = dequantize8(codes, scale_of(cache, row.scales[part]));
      *as<ptx::Vec4>(ckv + c * 2) = {values.w[0], values.w[1], values.w[2], values.w[3]};
    }
    if (ptx::lane() * 2 >= cache.d_kpe) return;
    const uint32_t rope =
        cache.kpe_dtype == DType::kBF16 ? row.rope : dequantize8(Bits8{row.rope}, *cache.kpe_scale).w[0];
    as<uint32_t>(static_cast<std::byte*>(args.out_kpe) + out * args.out_kpe_stride_token * 2)[ptx::lane()] = rope;
  }

  static MLA_DEVICE float scale_of(const core::Cache& cache, uint32_t bits) {
    float scale;
    if (cache.scale_type == ScaleType::kF32) {
      scale = std::bit_cast<float>(bits);
    } else if (cache.scale_type == ScaleType::kUE8M0) {
      scale = ue8m0_to_f32(static_cast<uint8_t>(bits));
    } else {
      scale = e4m3_to_f32(static_cast<uint8_t>(bits));
    }
    return cache.outer_scale != nullptr ? scale * *cache.outer_scale : scale;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

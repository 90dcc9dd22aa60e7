// SPDX-License-Identifier: Apache-2.0
// copy_pages copies the tokens of some pages of one cache into pages of another, whose format and page size may differ.
// It is bound by memory.
//   grid    warps stride over tokens: one token's row per warp and step; a block is 8 warps that share nothing
//   memory  each lane moves 16 bytes per access, a row's loads all in flight; no shared memory
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// With kCopied and kWithScales the host knows that the bits of all parts mean the same in both caches.
template <RowWay kWay>
struct CopyPagesKernel {
  using Params = core::CopyPagesArgs;
  static constexpr bool kCopies = kWay == RowWay::kCopied || kWay == RowWay::kWithScales;
  static constexpr const char* kName = kCopies ? "copy_pages" : "copy_pages_converted";
  static constexpr int kThreads = 256;
  // The kernel asks for as many blocks per SM as the registers allow without spills.
  static constexpr int kMinBlocks = kCopies                        ? 4
                                    : kWay == RowWay::kDequantized ? (kArch == 90 ? 3 : 2)
                                    : kArch >= 100                 ? 1
                                                                   : 2;

  static MLA_DEVICE void run(const Params& args) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x(), num_tokens = args.num_tokens();
    const bool copies_ckv = kCopies || same_ckv_code(args.from, args.to);
    const bool copies_kpe = kCopies || same_kpe_code(args.from, args.to);
    for (int64_t token = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); token < num_tokens; token += step)
      copy(args, token, copies_ckv, copies_kpe);
  }

 private:
  static MLA_DEVICE float outer_scale(const core::Cache& cache) {
    return cache.outer_scale != nullptr ? *cache.outer_scale : 1.0F;
  }
  /// Returns whether the same bits mean the same values in both caches: then a copy must not round.
  static MLA_DEVICE bool same_ckv_code(const core::Cache& from, const core::Cache& to) {
    if (from.format != to.format || from.num_scales != to.num_scales) return false;
    if (!from.is_quantized()) return true;
    if (outer_scale(from) != outer_scale(to)) return false;
    if (!from.writes_scales) return load_f32_anywhere(from.scales.base) == load_f32_anywhere(to.scales.base);
    return to.takes_scales_of(from);
  }
  static MLA_DEVICE bool same_kpe_code(const core::Cache& from, const core::Cache& to) {
    if (from.d_kpe == 0) return true;
    if (from.writes_kpe_scale() || to.writes_kpe_scale()) return from.format == to.format;
    return from.kpe_dtype == to.kpe_dtype && (!is_quantized(from.kpe_dtype) || *from.kpe_scale == *to.kpe_scale);
  }

  static MLA_DEVICE void copy(const Params& args, int64_t token, bool copies_ckv, bool copies_kpe) {
    const CacheRow from = CacheRow::at(args.from, args.from_pages, token);
    const CacheRow to = CacheRow::at(args.to, args.to_pages, token);
    const Piece ckv = {to.of(args.to.ckv), from.of(args.from.ckv), args.from.ckv_bytes()};
    const Piece kpe = {to.of(args.to.kpe), from.of(args.from.kpe), args.from.kpe_bytes()};
    const bool copies_scales = kCopies ? kWay == RowWay::kWithScales : copies_ckv && args.to.writes_scales;
    const PieceInFlight scales(copies_scales ? from.of(args.from.scales) : nullptr,
                               copies_scales ? args.from.scale_bytes : 0);
    copy_pieces(copies_ckv ? ckv : Piece{}, copies_kpe ? kpe : Piece{});
    scales.store(to.of(args.to.scales));
    if constexpr (kWay == RowWay::kGrouped)
      if (copies_kpe && args.to.writes_kpe_scale())
        copy_piece({to.of(args.to.kpe_scales()), from.of(args.from.kpe_scales()), args.from.kpe_scale_bytes});
    if constexpr (!kCopies) {
      write_row<kWay>(to, !copies_ckv, from.ckv(), !copies_kpe, args.from.d_kpe > 0 ? from.kpe() : Channels{});
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

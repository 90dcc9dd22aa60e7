// SPDX-License-Identifier: Apache-2.0
// gather copies the cache rows of a range of every request into dense tensors, dequantized. It is bound by memory.
//   grid    warps stride over output rows: one row per warp and step, whose request the warp finds in out_indptr;
//           a block is 8 warps that share nothing
//   memory  each lane moves 16 bytes per access, a row's loads all in flight; no shared memory
// Rows beyond out_indptr[batch_size] are not written.
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"
#include "cuda/tile/search.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <RowWay kWay>
struct GatherKernel {
  using Params = core::GatherArgs;
  static constexpr bool kCopies = kWay == RowWay::kCopied;
  static constexpr const char* kName = kCopies ? "gather" : "gather_converted";
  // Rows that are converted take 72 registers on SM90, and more elsewhere.
  static constexpr bool kSmallBlocks = kWay == RowWay::kConverted && kArch == 90;
  static constexpr int kThreads = kSmallBlocks ? 128 : 256;
  static constexpr int kMinBlocks = kCopies ? 5 : kSmallBlocks ? 7 : kWay == RowWay::kConverted ? 2 : 3;

  static MLA_DEVICE void run(const Params& args) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x();
    for (int64_t row = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); row < args.num_rows; row += step)
      gather(args, row);
  }

 private:
  static MLA_DEVICE void gather(const Params& args, int64_t out) {
    const int32_t request = find_range(args.out_indptr, args.batch_size, out);
    if (request < 0) return;
    const int64_t start = args.token_start != nullptr ? args.token_start[request] : 0;
    const CacheRow row = CacheRow::at(args.cache, args.pages.of(request), start + out - args.out_indptr[request]);
    const auto bytes = static_cast<int64_t>(size_of(args.out_dtype));
    auto* ckv = static_cast<std::byte*>(args.out_ckv) + out * args.out_ckv_stride_token * bytes;
    auto* kpe = static_cast<std::byte*>(args.out_kpe) + out * args.out_kpe_stride_token * bytes;
    const int64_t kpe_bytes = args.cache.d_kpe * bytes;
    if constexpr (kCopies) {
      copy_pieces({ckv, row.of(args.cache.ckv), args.cache.d_ckv * bytes}, {kpe, row.of(args.cache.kpe), kpe_bytes});
    } else {
      const bool copies_kpe = args.out_dtype == args.cache.kpe_dtype;
      const PieceInFlight kpe_bits(row.of(args.cache.kpe), copies_kpe ? kpe_bytes : 0);
      const Encoder encode(args.out_dtype);
#pragma unroll 1
      // The loop is not unrolled, which halves the code.
      for (int part = copies_kpe || args.cache.d_kpe == 0 ? 1 : 0; part < 2; ++part) {
        Channels source = part == 0 ? row.kpe() : row.ckv();
        if constexpr (kWay == RowWay::kEncoded) source.scales = nullptr;
        const int32_t n = part == 0 ? args.cache.d_kpe : args.cache.d_ckv;
        std::byte* const to = part == 0 ? kpe : ckv;
        if constexpr (kWay == RowWay::kDequantized)
          write_dequantized(source, n, to);
        else
          write_channels(source, n, encode, to);
      }
      kpe_bits.store(kpe);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

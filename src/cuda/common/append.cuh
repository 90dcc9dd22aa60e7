// SPDX-License-Identifier: Apache-2.0
// append writes latent rows into cache slots, converted or quantized as the format requires. It is bound by memory.
//   grid    warps stride over tokens: one token's row per warp and step; a block is 8 warps that share nothing
//   memory  each lane moves 16 bytes per access, a row's loads all in flight; no shared memory
// Slots that are negative, or beyond the pool, write nothing.
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <RowWay kWay>
struct AppendKernel {
  using Params = core::AppendArgs;
  static constexpr bool kCopies = kWay == RowWay::kCopied;
  static constexpr const char* kName = kCopies ? "append" : "append_converted";
  static constexpr int kThreads = 256;
  // The kernel asks for as many blocks per SM as the registers allow without spills.
  static constexpr int kMinBlocks = kCopies ? 5 : kArch >= 100 ? 2 : 3;

  static MLA_DEVICE void run(const Params& args) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x();
    for (int64_t token = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); token < args.num_tokens; token += step)
      append(args, token);
  }

 private:
  static MLA_DEVICE void append(const Params& args, int64_t token) {
    const int64_t slot = args.slot_mapping[token];
    const auto bytes = static_cast<int64_t>(size_of(args.dtype));
    const auto* ckv = static_cast<const std::byte*>(args.ckv) + token * args.ckv_stride_token * bytes;
    const auto* kpe = static_cast<const std::byte*>(args.kpe) + token * args.kpe_stride_token * bytes;
    const int64_t kpe_bytes = args.cache.d_kpe * bytes;
    const bool copies_kpe = kCopies || args.dtype == args.cache.kpe_dtype;
    const PieceInFlight kpe_bits(kpe, kCopies || !copies_kpe ? 0 : kpe_bytes);
    if (slot < 0 || slot >= args.cache.num_slots()) return;
    const CacheRow row = CacheRow::at_slot(args.cache, slot);
    if constexpr (kCopies) {
      copy_pieces({row.of(args.cache.ckv), ckv, args.cache.d_ckv * bytes}, {row.of(args.cache.kpe), kpe, kpe_bytes});
    } else {
      write_row<kWay>(row, true, {.data = ckv, .dtype = args.dtype}, !copies_kpe, {.data = kpe, .dtype = args.dtype});
      kpe_bits.store(row.of(args.cache.kpe));
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// These are parts of kernels of up-projected prefill by mma.sync, whatever their elements: which rows a block has,
// which keys its warps see, how tiles of rows come into shared memory, and what becomes of finished rows. A block
// computes neighbouring query rows of a head; each of its warps has 16 * kRowTiles of them, as accumulators of m16n8.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/args.h"
#include "cuda/attention/prefill_launch.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/query_block.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Calls f(block, head) for the rows that the block of threads has, if it has any. Grid: y = groups of heads; x =
/// num_query_blocks() times the heads of a group, which take turns, the longest rows of a request first. Blocks begin
/// in the order of their numbers, so a group with fewer heads stands first, as all others are whole.
template <int kRows, class F>
MLA_DEVICE void with_query_block(const PrefillParams& params, const F& f) {
  const int x = ptx::grid_size_x() - 1 - ptx::block_index_x(), y = ptx::grid_size_y() - 1 - ptx::block_index_y();
  const int head = y << params.heads_log2 | (x & ((1 << params.heads_log2) - 1));
  if (head >= params.args.num_heads) return;
  const QueryBlock block = find_query_block(params.args, kRows, x >> params.heads_log2);
  if (block.rows > 0) f(block, head);
}

/// Describes a warp's rows. It lies in shared memory, because the main loop leaves no registers for it.
struct alignas(16) WarpRows {
  int first_token;  // number of the first row's token, among all tokens of the batch
  int position;     // position of the first row in its request
  int rows;         // how many of the warp's rows exist
  int head;
};

/// Starts to copy rows of global memory, of kRowBytes, into a tile whose rows have kRowBytes, rounded up to whole
/// segments; rows from `num_rows` on become zero. `offset` and `stride` count elements. kLoaders threads call it, whose
/// numbers in the block follow each other from a multiple of kLoaders on, and a warp copies four rows of 128 bytes at a
/// time. Rows that are not `aligned` to 16 bytes have been copied when it returns. `aligned` is one of the kernel's
/// parameters, which the compiler need not keep in a register.
template <class Element, int kLoaders, int kTileRows, int kRowBytes>
MLA_DEVICE void load_tile(const bool& aligned, ptx::SharedAddress to, const void* from, int64_t offset, int64_t stride,
                          int num_rows) {
  constexpr int kRowsAtOnce = kLoaders / kChunksPerSegment;
  constexpr int kPieces = (kRowBytes + kSegmentBytes - 1) / kSegmentBytes, kTileRowBytes = kPieces * kSegmentBytes;
  constexpr int kWordElements = 4 / static_cast<int>(sizeof(Element));
  static_assert(kTileRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0 && kRowBytes % kChunkBytes == 0);
  const int loader = ptx::thread_index() % kLoaders;
  const int chunk = loader % kChunksPerSegment, row = loader / kChunksPerSegment;
  const auto has_chunk = [&](int piece) {
    return kRowBytes % kSegmentBytes == 0 || piece * kSegmentBytes + chunk * kChunkBytes < kRowBytes;
  };
  const Element* source = static_cast<const Element*>(from) + offset + row * stride + chunk * 4 * kWordElements;
  to += tile_offset<kTileRowBytes>(row, chunk);
  if (aligned) {
    MLA_UNROLL
    for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
      MLA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece)
        if (has_chunk(piece))
          ptx::cp_async_16(to + static_cast<uint32_t>(r * kTileRowBytes + piece * kSegmentBytes),
                           source + piece * 32 * kWordElements, row + r < num_rows);
      source += kRowsAtOnce * stride;
    }
    return;
  }
  MLA_NO_UNROLL
  for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
    MLA_NO_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      if (!has_chunk(piece)) continue;
      ptx::Vec4 words = {};
      if (row + r < num_rows) {
        const Element* elements = source + piece * 32 * kWordElements;
        MLA_UNROLL
        for (int i = 0; i < 4 * kWordElements; ++i)
          words.x[i / kWordElements] |= static_cast<uint32_t>(elements[i]) << i % kWordElements * (32 / kWordElements);
      }
      ptx::store_shared(to + static_cast<uint32_t>(r * kTileRowBytes + piece * kSegmentBytes), words);
    }
    source += kRowsAtOnce * stride;
  }
}

/// This base of `Kernel` knows a warp's rows. Scores come kKeys keys at a time. The warps' WarpRows lie in shared
/// memory behind Kernel::kTilesBytes bytes.
template <class Kernel, int kRowTiles, int kKeys>
class PrefillBlock {
 protected:
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kKeyTiles = kKeys / 8;  // tiles of 8 columns of scores
  using Scores = float[kRowTiles][kKeyTiles][4];

  const core::PrefillArgs& args_;
  const QueryBlock block_;
  const int head_;
  const int warp_row_;  // first row of the warp in the block
  const ptx::SharedAddress shared_;

  MLA_DEVICE PrefillBlock(const core::PrefillArgs& args, const QueryBlock& block, int head, int warp_row)
      : args_(args),
        block_(block),
        head_(head),
        warp_row_(warp_row),
        shared_(ptx::shared_address(ptx::shared_memory())) {}

  MLA_DEVICE ptx::SharedAddress warp_rows_address() const {
    return shared_ + static_cast<uint32_t>(Kernel::kTilesBytes + ptx::warp() * static_cast<int>(sizeof(WarpRows)));
  }
  MLA_DEVICE WarpRows warp_rows() const { return ptx::load_shared<WarpRows>(warp_rows_address()); }
  MLA_DEVICE void store_warp_rows() const {
    if (ptx::lane() != 0) return;
    const int rows = block_.rows - warp_row_ < kWarpRows ? block_.rows - warp_row_ : kWarpRows;
    ptx::store_shared(warp_rows_address(),
                      WarpRows{block_.first_token + warp_row_, block_.position + warp_row_, rows, head_});
  }

  MLA_DEVICE KeyRange visible(int position) const {
    return visible_keys(position, block_.kv_len, args_.causal, args_.options.window_left);
  }
  /// Returns the keys that any row of the block sees.
  MLA_DEVICE KeyRange visible_to_block() const {
    return {visible(block_.position).begin, visible(block_.position + block_.rows - 1).end};
  }
  /// Returns whether any of the warp's rows sees any of the kKeys keys from first_key on, and whether all rows see all.
  MLA_DEVICE bool any_visible(int first_key) const {
    const WarpRows rows = warp_rows();
    return rows.rows > 0 && first_key < visible(rows.position + rows.rows - 1).end &&
           first_key + kKeys > visible(rows.position).begin;
  }
  MLA_DEVICE bool all_visible(int first_key) const {
    const WarpRows rows = warp_rows();
    return first_key + kKeys <= visible(rows.position).end && first_key >= visible(rows.position + kWarpRows - 1).begin;
  }

  /// Applies soft cap and ALiBi to products that mean `scale` times as much; scores become natural logits.
  MLA_DEVICE void transform(Scores& s, int first_key, float scale) const {
    const core::Options& options = args_.options;
    const WarpRows rows = warp_rows();
    const float slope = options.alibi_slopes != nullptr ? options.alibi_slopes[rows.head] : 0.0F;
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      if (options.logits_soft_cap != 0.0F) cap_scores(s[r], scale, options.logits_soft_cap);
      const int position = rows.position + r * 16 + accumulator_row();
      add_slope(s[r], options.logits_soft_cap == 0.0F ? scale : 1.0F, slope,
                first_key + accumulator_column() - position);
    }
  }

  MLA_DEVICE void mask(Scores& s, int first_key) const {
    const int position = warp_rows().position + accumulator_row();
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r)
      mask_scores(s[r], {visible(position + r * 16), visible(position + r * 16 + 8)}, first_key);
  }

  /// Stores lse of the warp's rows, and calls store(r, i, offset, factor) to store the output of the lane's row i of
  /// tile r: accumulators times `factor`, of which o_factor is a part, to where the row begins in o.
  template <class Store>
  MLA_DEVICE void finish(const SoftmaxRows (&states)[kRowTiles], float o_factor, const Store& store) const {
    const WarpRows rows = warp_rows();
    const float sink = load_sink(args_.options, rows.head);
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      FinishedRow finished[2];
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const ScoreState& state = states[r].of[i];
        finished[i] = finish_row(state.max, quad_sum(state.sum), sink, o_factor, args_.lse_form);
      }
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = r * 16 + accumulator_row() + i * 8;
        if (row >= rows.rows) continue;
        const int token = rows.first_token + row;
        if (args_.lse != nullptr && (ptx::lane() & 3) == 0)
          args_.lse[token * args_.lse_stride_token + rows.head * args_.lse_stride_head] = finished[i].lse;
        store(r, i, token * args_.o_stride_token + rows.head * args_.o_stride_head, finished[i].o_factor);
      }
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// indexer_logits by wgmma (attention/indexer_block.cuh says what is computed). A warpgroup takes 64 keys at a time, a
// warp 16 of them: decoded to A operands in registers (M = keys) once for all tokens; 64 heads (N) are one product, and
// each lane adds up 2 keys over the heads that it has. The next keys' rows are on their way meanwhile. Once queries are
// staged, warpgroups do not wait for each other.
// Shared memory: queries [tokens][tiles of 64 heads][two pieces of 64 channels][64 rows of 128 bytes, swizzled], then
// weights [tokens][heads, padded to 64] f32.
#pragma once

#include "cuda/attention/indexer_block.cuh"
#include "cuda/backends/sm90/wgmma.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <DType kQueries>
class IndexerKernel : IndexerBlock<kQueries, 2> {
  using Block = IndexerBlock<kQueries, 2>;
  using Block::args_, Block::shape_, Block::kOperand, Block::kSteps, Block::kWarpKeys;
  using typename Block::Operands, typename Block::Places, typename Block::Rows, typename Block::Segment,
      typename Block::Sums, typename Block::Weights;
  static_assert(kQueries != DType::kF32);

 public:
  using Block::kName;
  using typename Block::Params;
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kBlockKeys = kThreads / kWarpSize * kWarpKeys;
  static constexpr int kHeadTile = 64;
  static constexpr int kRowBytes = kIndexerLayout.head_dim * 2;
  static constexpr int64_t kHeadBytes = kRowBytes + 4;  // of a token's padded heads

  static MLA_DEVICE void run(const Params& params) { IndexerKernel(params).run(); }

 private:
  static constexpr int kGroupWarps = 4, kGroupKeys = kGroupWarps * kWarpKeys;
  static constexpr int kPieceDims = 64, kPieceRowBytes = kPieceDims * 2, kPieceBytes = kHeadTile * kPieceRowBytes;
  static constexpr int kTileBytes = kHeadTile * kRowBytes, kProducts = kHeadTile / 2;
  static constexpr int kPieceSteps = kPieceDims / 16;

  MLA_DEVICE explicit IndexerKernel(const Params& params)
      : Block(params), head_tiles_((args_.num_heads + kHeadTile - 1) / kHeadTile) {}

  MLA_DEVICE void run() {
    const Segment segment = Block::find_segment();
    if (segment.first >= segment.stop) return;
    const int32_t begin = Block::first_key(), end = Block::end_key();
    const int32_t seen = Block::num_visible(segment, segment.stop - 1);  // by any of its tokens
    const int32_t group_begin = begin + ptx::warp() / kGroupWarps * kGroupKeys;
    const int32_t warp_offset = ptx::warp() % kGroupWarps * kWarpKeys;
    Places places = {};
    Rows rows = {};
    if (group_begin < seen) {
      Block::load_rows(Block::find_rows(segment.request, group_begin + warp_offset, seen), rows);
      places = Block::find_rows(segment.request, group_begin + kBlockKeys + warp_offset, seen);
    }
    if (begin < seen) {
      Block::template stage<kThreads, 4>(
          segment.first, segment.stop - segment.first, head_tiles_ * kHeadTile, weight_address(0, 0),
          [&](int32_t row, int32_t column, const Bits8& bits) { store_query(row, column, bits); });
      ptx::fence_async_proxy();
      ptx::sync_block();  // staged, before warpgroups multiply
    }
    MLA_NO_UNROLL
    for (int32_t base = group_begin; base < end; base += kBlockKeys) {
      const float scale = rows.scale;
      Operands keys;
      if (base < seen) Block::decode(rows, keys);
      if (base + kBlockKeys < std::min(seen, end)) {
        Block::load_rows(places, rows);
        places = Block::find_rows(segment.request, base + 2 * kBlockKeys + warp_offset, seen);
      }
      MLA_NO_UNROLL
      for (int32_t token = segment.first; token < segment.stop; ++token) {
        const int32_t visible = Block::num_visible(segment, token);
        Sums sums = {};
        if (base < visible) add_heads(token - segment.first, keys, sums);
        Block::write_logit(token, base + warp_offset, visible, Block::own_sum(sums) * scale);
      }
    }
  }

  MLA_DEVICE ptx::SharedAddress tile_address(int32_t token, int32_t tile) const {
    return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>((token * head_tiles_ + tile) * kTileBytes);
  }
  MLA_DEVICE ptx::SharedAddress weight_address(int32_t token, int32_t head) const {
    return tile_address(shape_.group_tokens, 0) + static_cast<uint32_t>((token * head_tiles_ * kHeadTile + head) * 4);
  }

  /// Adds what the staged heads of the group's token give.
  MLA_DEVICE void add_heads(int32_t token, const Operands& keys, Sums& sums) const {
    MLA_NO_UNROLL
    for (int32_t tile = 0; tile < head_tiles_; ++tile) {
      float products[kProducts];
      multiply(tile_address(token, tile), keys, products);
      MLA_UNROLL
      for (int j = 0; j < kHeadTile / 8; ++j) {
        const float four[4] = {products[4 * j], products[4 * j + 1], products[4 * j + 2], products[4 * j + 3]};
        const auto weights =
            ptx::load_shared<Weights>(weight_address(token, tile * kHeadTile + j * 8 + ptx::lane() % 4 * 2));
        Block::add_heads(four, weights, sums.of[0]);
      }
    }
  }

  static MLA_DEVICE void multiply(ptx::SharedAddress queries, const Operands& keys, float (&products)[kProducts]) {
    const uint64_t tile = ptx::matrix_descriptor(queries, 0, 8 * kPieceRowBytes, ptx::Swizzle::k128);
    ptx::wgmma_hold(products);
    ptx::wgmma_fence();
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int at = step / kPieceSteps * kPieceBytes + step % kPieceSteps * 32;
      wgmma<kOperand, kHeadTile>(products, keys.of[0][step], advance(tile, at), step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(products);
  }

  /// Eight channels of a row, of all tokens' padded heads, as 16-bit operands in the order in which lanes hold those of
  /// keys: step s of a piece multiplies channels 16 t + 4 s and the next as k = 2t, 2t + 1, the two behind as k = 2t +
  /// 8, 2t + 9.
  MLA_DEVICE void store_query(int32_t row, int32_t column, const Bits8& bits) const {
    const int quad_lane = column / 2 % 4;
    const ptx::SharedAddress to =
        tile_address(0, 0) + static_cast<uint32_t>(row / kHeadTile * kTileBytes + column / 8 * kPieceBytes +
                                                   row % kHeadTile * kPieceRowBytes + quad_lane * 4);
    MLA_UNROLL
    for (int i = 0; i < kVector / 2; ++i) {
      const int chunk = column % 2 * 4 + i;  // of 16 bytes: two for each step
      uint32_t pair = bits.w[i];
      if constexpr (kQueries == DType::kE4M3) pair = ptx::e4m3x2_to_f16x2(half_of(bits, i));
      ptx::store_shared(to + static_cast<uint32_t>((chunk ^ (row & 7)) * kChunkBytes), pair);
    }
  }

  int32_t head_tiles_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

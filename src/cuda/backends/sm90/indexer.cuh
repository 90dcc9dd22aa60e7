// SPDX-License-Identifier: Apache-2.0
// This kernel computes indexer_logits by wgmma (attention/indexer_block.cuh says what is computed). A warpgroup
// computes 64 keys at a time, of which a warp has 16: it decodes them to A operands in registers (M = keys) once for
// all tokens. 64 heads (N) are one product, and each lane adds up 2 keys over the heads that it has. The next keys'
// rows are on their way meanwhile. Once queries are staged, warpgroups do not wait for each other.
// Shared memory: queries [tokens][tiles of 64 heads][two pieces of 64 channels][64 rows of 128 bytes, swizzled], then
// weights [tokens][heads, padded to 64] f32.
#pragma once

#include "cuda/attention/indexer_block.cuh"
#include "cuda/backends/sm90/wgmma.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <DType kQueries, IndexerFormat kKeys, bool kListed>
class IndexerKernel : IndexerBlock<kQueries, kKeys, 2, kListed> {
  using Block = IndexerBlock<kQueries, kKeys, 2, kListed>;
  using Block::args_, Block::shape_, Block::kOperand, Block::kSteps, Block::kWarpKeys;
  using typename Block::Operands, typename Block::Places, typename Block::Range, typename Block::Rows,
      typename Block::TokenGroup, typename Block::Sums, typename Block::Weights;
  static_assert(size_of(kQueries) <= 2 && (kQueries != DType::kF16 || kOperand == DType::kF16));

 public:
  using Block::kName;
  using typename Block::Params;
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kBlockKeys = kThreads / kWarpSize * kWarpKeys;
  static constexpr int kHeadTile = 64;
  static constexpr int kRowBytes = kIndexerLayout.head_dim * 2;
  static constexpr int64_t kHeadBytes = kRowBytes + 4;  // shared memory for each padded head of a token

  static MLA_DEVICE void run(const Params& params) { IndexerKernel(params).run(); }

 private:
  static constexpr int kGroupWarps = 4, kGroupKeys = kGroupWarps * kWarpKeys;
  static constexpr int kPieceDims = 64, kPieceRowBytes = kPieceDims * 2, kPieceBytes = kHeadTile * kPieceRowBytes;
  static constexpr int kTileBytes = kHeadTile * kRowBytes, kProducts = kHeadTile / 2;
  static constexpr int kPieceSteps = kPieceDims / 16;  // a step has 16 channels, 32 bytes

  MLA_DEVICE explicit IndexerKernel(const Params& params)
      : Block(params), head_tiles_((args_.num_heads + kHeadTile - 1) / kHeadTile) {}

  MLA_DEVICE void run() {
    const TokenGroup group = Block::find_group();
    if (group.first >= group.stop) return;
    const int32_t begin = Block::first_key(), end = Block::end_key();
    const Range all = Block::computed(group);
    const int32_t group_begin = begin + ptx::warp() / kGroupWarps * kGroupKeys;
    const int32_t warp_offset = ptx::warp() % kGroupWarps * kWarpKeys;
    Places places = {};
    Rows rows = {};
    if (all.meets(group_begin, end - group_begin)) {
      Block::load_rows(Block::find_rows(group, group_begin + warp_offset, all.end), rows);
      places = Block::find_rows(group, group_begin + kBlockKeys + warp_offset, all.end);
    }
    if (all.meets(begin, end - begin)) {
      Block::template stage<kThreads, 4>(
          group, head_tiles_ * kHeadTile, weight_address(0, 0),
          [&](int32_t row, int32_t column, const Bits8& bits) { store_query(row, column, bits); });
      ptx::fence_async_proxy();
      ptx::sync_block();  // queries and weights are staged
    }
    MLA_NO_UNROLL
    for (int32_t base = group_begin; base < end; base += kBlockKeys) {
      const float scale = rows.scale;
      Operands keys;
      if (all.meets(base, kGroupKeys)) Block::decode(rows, keys);
      if (base + kBlockKeys < std::min(all.end, end)) {
        if (all.meets(base + kBlockKeys, kGroupKeys)) Block::load_rows(places, rows);
        places = Block::find_rows(group, base + 2 * kBlockKeys + warp_offset, all.end);
      }
      const typename Block::LogitsAt logits(*this, all, base, kGroupKeys, base + warp_offset + Block::own_key());
      MLA_NO_UNROLL
      for (int32_t token = group.first; token < group.stop; ++token) {
        const typename Block::Computed computed = logits.of(group, token);
        Sums sums = {};
        if (computed.any) add_heads(token - group.first, keys, sums);
        Block::write_logit(group, token, base + warp_offset, computed.own, Block::own_sum(sums) * scale);
      }
    }
  }

  MLA_DEVICE ptx::SharedAddress tile_address(int32_t token, int32_t tile) const {
    return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>((token * head_tiles_ + tile) * kTileBytes);
  }
  MLA_DEVICE ptx::SharedAddress weight_address(int32_t token, int32_t head) const {
    return tile_address(shape_.group_tokens, 0) + static_cast<uint32_t>((token * head_tiles_ * kHeadTile + head) * 4);
  }

  /// Adds what all heads of a staged token give.
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

  /// Stores eight channels of a query as 16-bit operands. `row` counts the padded heads of all tokens. The channels
  /// stand in the order in which lanes hold those of keys: for lane t of a quad, step s of a piece multiplies channels
  /// 16 t + 4 s and the next one as k = 2t, 2t + 1, and the two behind them as k = 2t + 8, 2t + 9.
  MLA_DEVICE void store_query(int32_t row, int32_t column, const Bits8& bits) const {
    const int quad_lane = column / 2 % 4;
    const ptx::SharedAddress to =
        tile_address(0, 0) + static_cast<uint32_t>(row / kHeadTile * kTileBytes + column / 8 * kPieceBytes +
                                                   row % kHeadTile * kPieceRowBytes + quad_lane * 4);
    MLA_UNROLL
    for (int i = 0; i < kVector / 2; ++i) {
      const int chunk = column % 2 * 4 + i;  // a step has two chunks of 16 bytes
      ptx::store_shared(to + static_cast<uint32_t>((chunk ^ (row & 7)) * kChunkBytes), Block::query_pair(bits, i));
    }
  }

  int32_t head_tiles_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

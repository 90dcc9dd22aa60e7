// SPDX-License-Identifier: Apache-2.0
// This kernel computes indexer_logits by mma.sync (indexer_block.cuh says what is computed). Once queries are staged,
// warps do not wait for each other. A warp loads 32 keys at a time from global memory into registers and decodes them
// to A operands of m16n8k16 (M = keys, N = heads), once for all tokens and heads; each lane adds up 4 keys over the
// heads that it has. An f32 query is the sum of three bf16 terms, which hold all its bits; so is an f16 query, of two,
// with keys of e2m1. Shared memory: queries
// [tokens][terms][heads, padded to 8][272 bytes], then weights [tokens][heads, padded] f32.
#pragma once

#include "cuda/attention/indexer_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::portable {

template <DType kQueries, IndexerFormat kKeys, bool kListed>
class IndexerKernel : IndexerBlock<kQueries, kKeys, 4, kListed> {
  using Block = IndexerBlock<kQueries, kKeys, 4, kListed>;
  using Block::args_, Block::shape_, Block::kOperand, Block::kSteps, Block::kTiles, Block::kWarpKeys;
  using typename Block::Operands, typename Block::Range, typename Block::Rows, typename Block::TokenGroup,
      typename Block::Sums, typename Block::Weights;

 public:
  using Block::kName;
  using typename Block::Params;
  static constexpr int kThreads = 256;
  static constexpr int kBlockKeys = kThreads / kWarpSize * kWarpKeys;
  static constexpr int kHeadTile = 8;
  static constexpr int kTerms = kQueries == DType::kF32                               ? 3
                                : kQueries == DType::kF16 && kOperand == DType::kBF16 ? 2
                                                                                      : 1;
  static constexpr int kMinBlocks = kTerms > 1 ? 1 : 2;
  /// 16 bytes behind each row move the next one by 4 banks, so that 8 lanes read from 32 different banks.
  static constexpr int kRowBytes = kIndexerLayout.head_dim * 2 + 16;
  static constexpr int64_t kHeadBytes = kTerms * kRowBytes + 4;  // shared memory for each padded head of a token

  static MLA_DEVICE void run(const Params& params) { IndexerKernel(params).run(); }

 private:
  MLA_DEVICE explicit IndexerKernel(const Params& params)
      : Block(params), padded_heads_((args_.num_heads + kHeadTile - 1) / kHeadTile * kHeadTile) {}

  MLA_DEVICE void run() {
    const TokenGroup group = Block::find_group();
    if (group.first >= group.stop) return;
    const int32_t begin = Block::first_key(), end = Block::end_key();
    const Range all = Block::computed(group);
    if (all.meets(begin, end - begin)) {
      Block::template stage<kThreads, kQueries == DType::kF32 ? 2 : 4>(
          group, padded_heads_, weight_address(0, 0),
          [&](int32_t row, int32_t column, const Bits8& bits) { store_query(row, column, bits); });
      ptx::sync_block();  // queries and weights are staged
    }
    MLA_NO_UNROLL
    for (int32_t base = begin; base < end; base += kBlockKeys) {
      const int32_t warp_base = base + ptx::warp() * kWarpKeys;
      Operands keys;
      float scale = 0.0F;
      if (all.meets(warp_base, kWarpKeys)) {
        Rows rows;
        Block::load_rows(Block::find_rows(group, warp_base, all.end), rows);
        Block::decode(rows, keys);
        scale = rows.scale;
      }
      const typename Block::LogitsAt logits(*this, all, warp_base, kWarpKeys, warp_base + Block::own_key());
      MLA_NO_UNROLL
      for (int32_t token = group.first; token < group.stop; ++token) {
        const typename Block::Computed computed = logits.of(group, token);
        Sums sums = {};
        if (computed.any) add_heads(token - group.first, keys, sums);
        Block::write_logit(group, token, warp_base, computed.own, Block::own_sum(sums) * scale);
      }
    }
  }

  MLA_DEVICE ptx::SharedAddress row_address(int32_t token, int term, int32_t head) const {
    return ptx::shared_address(ptx::shared_memory()) +
           static_cast<uint32_t>(((token * kTerms + term) * padded_heads_ + head) * kRowBytes);
  }
  MLA_DEVICE ptx::SharedAddress weight_address(int32_t token, int32_t head) const {
    return row_address(shape_.group_tokens, 0, 0) + static_cast<uint32_t>((token * padded_heads_ + head) * 4);
  }

  /// Adds what all heads of a staged token give.
  MLA_DEVICE void add_heads(int32_t token, const Operands& keys, Sums& sums) const {
    int32_t head = 0;
    MLA_NO_UNROLL
    for (; head + 2 * kHeadTile <= padded_heads_; head += 2 * kHeadTile) add_tiles<2>(token, head, keys, sums);
    if (head < padded_heads_) add_tiles<1>(token, head, keys, sums);
  }

  static MLA_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kOperand == DType::kF16)
      ptx::mma_f16(c, a, b0, b1);
    else
      ptx::mma_bf16(c, a, b0, b1);
  }

  template <int kCount>
  MLA_DEVICE void add_tiles(int32_t token, int32_t head, const Operands& keys, Sums& sums) const {
    float scores[kCount][kTiles][4] = {};
    const auto lane_offset = static_cast<uint32_t>(ptx::lane() / 4 * kRowBytes + ptx::lane() % 4 * 32);
    MLA_NO_UNROLL
    for (int term = kTerms - 1; term >= 0; --term) {  // the small terms first
      const ptx::SharedAddress row = row_address(token, term, head) + lane_offset;
      MLA_UNROLL
      for (int step = 0; step < kSteps; step += 2) {
        MLA_UNROLL
        for (int n = 0; n < kCount; ++n) {
          const auto b = ptx::load_shared<ptx::Vec4>(
              row + static_cast<uint32_t>(n * kHeadTile * kRowBytes + step / 4 * 128 + step % 4 * 8));
          MLA_UNROLL
          for (int m = 0; m < kTiles; ++m) {
            multiply(scores[n][m], keys.of[m][step], b.x[0], b.x[1]);
            multiply(scores[n][m], keys.of[m][step + 1], b.x[2], b.x[3]);
          }
        }
      }
    }
    MLA_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const auto weights = ptx::load_shared<Weights>(weight_address(token, head + n * kHeadTile + ptx::lane() % 4 * 2));
      MLA_UNROLL
      for (int m = 0; m < kTiles; ++m) Block::add_heads(scores[n][m], weights, sums.of[m]);
    }
  }

  /// Stores eight channels of a query as 16-bit operands. `row` counts the padded heads of all tokens.
  MLA_DEVICE void store_query(int32_t row, int32_t column, const Bits8& bits) const {
    ptx::Vec4 operands[kTerms];
    MLA_UNROLL
    for (int i = 0; i < kVector / 2; ++i) {
      if constexpr (kQueries == DType::kF32) {
        split_pair(bits.w[2 * i], bits.w[2 * i + 1], operands[0].x[i], operands[1].x[i], operands[2].x[i]);
      } else if constexpr (kTerms == 2) {
        float low, high;
        ptx::unpack_f16x2(bits.w[i], low, high);
        uint32_t none;  // f16 has 11 significant bits, two terms have 16
        split_pair(std::bit_cast<uint32_t>(low), std::bit_cast<uint32_t>(high), operands[0].x[i], operands[1].x[i],
                   none);
      } else {
        operands[0].x[i] = Block::query_pair(bits, i);
      }
    }
    MLA_UNROLL
    for (int term = 0; term < kTerms; ++term)
      ptx::store_shared(
          row_address(row / padded_heads_, term, row % padded_heads_) + static_cast<uint32_t>(column * 16),
          operands[term]);
  }

  /// Splits two f32 into three bf16 terms each, whose sums they are. Terms are truncated, not rounded, so that none
  /// overflows.
  static MLA_DEVICE void split_pair(uint32_t low, uint32_t high, uint32_t& first, uint32_t& second, uint32_t& third) {
    constexpr uint32_t kTop = 0xFFFF0000U, kQuietNan = 0x400000U;
    const auto rest = [](uint32_t value) {  // what truncation to bf16 leaves; nothing of infinity or NaN
      const auto f32 = std::bit_cast<float>(value);
      return is_finite(f32) ? std::bit_cast<uint32_t>(f32 - std::bit_cast<float>(value & kTop)) : 0U;
    };
    const auto join = [](uint32_t a, uint32_t b) { return a >> 16 | (b & kTop); };
    const auto quiet = [](uint32_t value) { return is_nan(std::bit_cast<float>(value)) ? value | kQuietNan : value; };
    const uint32_t low_rest = rest(low), high_rest = rest(high);
    first = join(quiet(low), quiet(high));
    second = join(low_rest, high_rest);
    third = join(rest(low_rest), rest(high_rest));
  }

  int32_t padded_heads_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

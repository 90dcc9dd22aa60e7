// SPDX-License-Identifier: Apache-2.0
// indexer_logits: logits[t][j] = scale[j] * sum_h weight[t][h] * max(0, q[t][h] . k[j]); -inf where t does not see j.
//
// Grid: a block per group of a request's query tokens and chunk of keys (see IndexerShape), known from shapes alone:
// blocks whose keys no token of theirs sees write -inf, and some have no tokens. The queries of the group, as 16-bit
// operands, lie in shared memory; hundreds of heads take more than one launch, which add up. Warps do not wait for each
// other after that: each takes 32 keys at a time from global memory into registers, decoded to A operands of m16n8k16
// (M = keys, N = heads) once for all tokens and heads, and each of its lanes adds up 4 keys over the heads that it has.
// Lanes of a quad share a key's row: lane t of it reads bytes 64 j + 16 t ... + 15, so that a warp reads whole sectors.
// The dot product does not care that the mma takes these for other channels, as the queries' lanes do the same.
// Products of e4m3 with f16 or bf16 are exact in f32; f32 queries are three bf16 parts, which hold all their bits.
// (mma on e4m3 itself sums in fewer bits than f32 on some chips.)
// Shared memory: queries [tokens][parts][heads, padded to 8][272 bytes], then weights [tokens][heads, padded] f32.
#pragma once

#include <algorithm>
#include <limits>

#include "core/args.h"
#include "cuda/common/query_batch.cuh"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/page_place.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Who computes what.
struct IndexerShape {
  int32_t group_tokens = 1;        // query tokens of a block, of one request, all in shared memory
  int32_t groups_per_request = 0;  // for equal q_len; 0: request r has groups from qo_indptr[r] / group_tokens + r on
  bool adds = false;               // to logits of other heads
  int32_t chunk_keys = 0;          // keys of a block
  int32_t num_chunks = 0;
};

struct IndexerParams {
  core::IndexerLogitsArgs args;
  IndexerShape shape;
};

template <DType kQueries>
class IndexerKernel {
 public:
  using Params = IndexerParams;
  static constexpr const char* kName = "indexer_logits";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = kQueries == DType::kF32 ? 1 : 2;
  static constexpr int kWarpKeys = 32;
  static constexpr int kBlockKeys = kThreads / kWarpSize * kWarpKeys;
  static constexpr int kHeadTile = 8;
  static constexpr int kParts = kQueries == DType::kF32 ? 3 : 1;
  /// 16 bytes behind each row move the next one by 4 banks, so that 8 lanes read from 32 different ones.
  static constexpr int kRowBytes = kIndexerLayout.head_dim * 2 + 16;
  static constexpr int64_t kHeadBytes = kParts * kRowBytes + 4;  // of a token's padded heads

  static MLA_DEVICE void run(const Params& params) { IndexerKernel(params).run(); }

 private:
  /// e4m3 and f16 queries meet keys in f16, which holds every e4m3; the others have the range of bf16.
  static constexpr DType kOperand = kQueries == DType::kE4M3 || kQueries == DType::kF16 ? DType::kF16 : DType::kBF16;
  static constexpr int kSteps = kIndexerLayout.head_dim / 16;  // mma over the channels
  static constexpr int kTiles = kWarpKeys / 16;                // mma over the keys
  static constexpr int kLaneKeys = 2 * kTiles;                 // of whose rows a lane has a part
  static constexpr float kUnseen = -std::numeric_limits<float>::infinity();

  /// What a lane holds of its warp's keys: A operands, and the scale of key `own_key()`.
  struct Keys {
    uint32_t operands[kTiles][kSteps][4];
    float scale;
  };
  /// Sums over heads of keys lane / 4 + 8 i.
  struct Sums {
    float of[kLaneKeys];
  };

  /// Consecutive tokens of one request, and how many keys token 0 would see.
  struct Segment {
    int32_t request, first, stop, origin;
  };

  MLA_DEVICE explicit IndexerKernel(const Params& params)
      : args_(params.args),
        shape_(params.shape),
        padded_heads_((args_.num_heads + kHeadTile - 1) / kHeadTile * kHeadTile),
        aligned_(is_aligned(args_.cache.base, 16) && args_.cache.stride_page % 16 == 0) {}

  MLA_DEVICE void run() {
    const Segment segment = find_segment(ptx::block_index_x() / shape_.num_chunks);
    const int32_t chunk = ptx::block_index_x() % shape_.num_chunks;
    if (segment.first < segment.stop) run_segment(segment, chunk * shape_.chunk_keys);
  }

  /// The tokens of a group; none if there are more groups than the lengths need.
  MLA_DEVICE Segment find_segment(int32_t group) const {
    const core::QueryRanges& queries = args_.queries;
    const int32_t size = shape_.group_tokens;
    int32_t request, part;
    if (shape_.groups_per_request > 0) {
      request = group / shape_.groups_per_request;
      part = group % shape_.groups_per_request;
    } else {
      const auto first_group = [&](int32_t r) { return queries.indptr[r] / size + r; };
      request = count_leading(args_.batch_size - 1, [&](int32_t r) { return first_group(r + 1) <= group; });
      part = group - first_group(request);
    }
    const int32_t first = queries.begin(request) + part * size, end = queries.begin(request) + queries.len(request);
    const int32_t kv_len = args_.pages.kv_len[request];
    return {.request = request,
            .first = first,
            .stop = std::min(first + size, end),
            .origin = args_.causal ? kv_len - end + 1 : kv_len};
  }

  MLA_DEVICE int32_t visible_keys(const Segment& segment, int32_t token) const {
    const int32_t visible = segment.origin + (args_.causal ? token : 0);
    return std::clamp(visible, 0, static_cast<int32_t>(args_.max_kv_len));
  }

  MLA_DEVICE void run_segment(const Segment& segment, int32_t begin) {
    const int32_t end = std::min(begin + shape_.chunk_keys, static_cast<int32_t>(args_.max_kv_len));
    const int32_t seen = visible_keys(segment, segment.stop - 1);  // by any of its tokens
    if (begin < seen) {
      stage_queries(segment.first, segment.stop - segment.first);
      ptx::sync_block();  // staged, before warps multiply
    }
    MLA_NO_UNROLL
    for (int32_t base = begin; base < end; base += kBlockKeys) {
      const int32_t warp_base = base + ptx::warp() * kWarpKeys;
      Keys keys;
      keys.scale = 0.0F;
      if (warp_base < seen) load_keys(segment.request, warp_base, seen, keys);
      MLA_NO_UNROLL
      for (int32_t token = segment.first; token < segment.stop; ++token) {
        const int32_t visible = visible_keys(segment, token);
        Sums sums = {};
        if (warp_base < visible) add_heads(token - segment.first, keys, sums);
        const float logit = own_sum(sums) * keys.scale;
        const int32_t key = warp_base + own_key();
        if (key >= args_.max_kv_len) continue;
        float* const out = args_.logits + token * args_.logits_stride_token + key;
        *out = key >= visible ? kUnseen : shape_.adds ? *out + logit : logit;
      }
    }
  }

  /// Of the warp's 32 keys, the one that the lane writes.
  static MLA_DEVICE int32_t own_key() { return ptx::lane() % 4 * 8 + ptx::lane() / 4; }

  /// Lanes of a quad have summed different heads.
  static MLA_DEVICE float own_sum(Sums& sums) {
    float own = 0.0F;
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      sums.of[i] += ptx::shuffle_xor(sums.of[i], 1);
      sums.of[i] += ptx::shuffle_xor(sums.of[i], 2);
      if (i == ptx::lane() % 4) own = sums.of[i];
    }
    return own;
  }

  /// Keys [warp_base, seen), at most kWarpKeys; behind them the last one again, for logits that nobody asks for. A load
  /// waits for its page's number, and for no other row.
  MLA_DEVICE void load_keys(int32_t request, int32_t warp_base, int32_t seen, Keys& keys) const {
    static_assert(kLaneKeys == 4, "as many rows of keys as lanes in a quad");
    const int32_t* const pages = args_.pages.of(request);
    const int32_t quad_lane = ptx::lane() % 4;
    const std::byte *rows[kLaneKeys], *scale = nullptr;
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      const int32_t key = std::min(warp_base + ptx::lane() / 4 + 8 * i, seen - 1);
      const PagePlace at = place_in_pages(key, args_.pages.page_size);
      const int32_t page = pages[at.page];
      rows[i] = args_.cache.key(page, at.offset) + quad_lane * 16;
      if (i == quad_lane) scale = args_.cache.scale(page, at.offset);
    }
    ptx::Vec4 halves[kLaneKeys][2];
    if (aligned_) [[likely]] {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) MLA_UNROLL
      for (int j = 0; j < 2; ++j) halves[i][j] = ptx::load_global(as<ptx::Vec4>(rows[i] + j * 64));
    } else {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) MLA_UNROLL
      for (int j = 0; j < 2; ++j) halves[i][j] = load_bytes(rows[i] + j * 64);
    }
    keys.scale = load_f32_anywhere(scale);
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      auto& operands = keys.operands[i / 2][step];
      ptx::e4m3x4_to_f16x2(halves[i][step / 4].x[step % 4], operands[i % 2], operands[i % 2 + 2]);
      if constexpr (kOperand == DType::kBF16) {
        operands[i % 2] = f16_to_bf16x2(operands[i % 2]);
        operands[i % 2 + 2] = f16_to_bf16x2(operands[i % 2 + 2]);
      }
    }
  }

  static MLA_DEVICE ptx::Vec4 load_bytes(const std::byte* at) {
    ptx::Vec4 bytes = {};
    if (is_aligned(at, 4)) {
      for (int i = 0; i < 4; ++i) bytes.x[i] = ptx::load_global(as<uint32_t>(at) + i);
    } else {
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        MLA_NO_UNROLL
        for (int j = 3; j >= 0; --j) bytes.x[i] = bytes.x[i] << 8 | static_cast<uint32_t>(at[4 * i + j]);
      }
    }
    return bytes;
  }

  static MLA_DEVICE uint32_t f16_to_bf16x2(uint32_t pair) {
    float low, high;
    ptx::unpack_f16x2(pair, low, high);
    return ptx::pack_bf16x2(low, high);
  }

  MLA_DEVICE ptx::SharedAddress row_address(int32_t token, int part, int32_t head) const {
    return ptx::shared_address(ptx::shared_memory()) +
           static_cast<uint32_t>(((token * kParts + part) * padded_heads_ + head) * kRowBytes);
  }
  MLA_DEVICE ptx::SharedAddress weight_address(int32_t token, int32_t head) const {
    return row_address(shape_.group_tokens, 0, 0) + static_cast<uint32_t>((token * padded_heads_ + head) * 4);
  }

  /// Adds what the staged heads of the group's token give.
  MLA_DEVICE void add_heads(int32_t token, const Keys& keys, Sums& sums) const {
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
  MLA_DEVICE void add_tiles(int32_t token, int32_t head, const Keys& keys, Sums& sums) const {
    float scores[kCount][kTiles][4] = {};
    const auto lane_offset = static_cast<uint32_t>(ptx::lane() / 4 * kRowBytes + ptx::lane() % 4 * 32);
    MLA_NO_UNROLL
    for (int part = kParts - 1; part >= 0; --part) {  // the small parts first
      const ptx::SharedAddress row = row_address(token, part, head) + lane_offset;
      MLA_UNROLL
      for (int step = 0; step < kSteps; step += 2) {
        MLA_UNROLL
        for (int n = 0; n < kCount; ++n) {
          const auto b = ptx::load_shared<ptx::Vec4>(
              row + static_cast<uint32_t>(n * kHeadTile * kRowBytes + step / 4 * 128 + step % 4 * 8));
          MLA_UNROLL
          for (int m = 0; m < kTiles; ++m) {
            multiply(scores[n][m], keys.operands[m][step], b.x[0], b.x[1]);
            multiply(scores[n][m], keys.operands[m][step + 1], b.x[2], b.x[3]);
          }
        }
      }
    }
    struct alignas(8) Weights {
      float of[2];
    };
    MLA_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const auto weights = ptx::load_shared<Weights>(weight_address(token, head + n * kHeadTile + ptx::lane() % 4 * 2));
      MLA_UNROLL
      for (int column = 0; column < 2; ++column) {
        MLA_UNROLL
        for (int i = 0; i < kLaneKeys; ++i) {
          sums.of[i] += weights.of[column] * ptx::max_or_nan(scores[n][i / 2][i % 2 * 2 + column], 0.0F);
        }
      }
    }
  }

  /// Queries and weights of `count` tokens, zeros behind the last head.
  MLA_DEVICE void stage_queries(int32_t first, int32_t count) const {
    constexpr int kAhead = kQueries == DType::kF32 ? 2 : 4;  // reads under way
    constexpr int kLanes = kIndexerLayout.head_dim / kVector, kRows = kThreads / kLanes;
    const int32_t rows = count * padded_heads_, column = ptx::thread_index() % kLanes;
    MLA_NO_UNROLL
    for (int32_t row = ptx::thread_index() / kLanes; row < rows; row += kRows * kAhead) {
      Bits8 bits[kAhead] = {};
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int32_t at = row + a * kRows, head = at % padded_heads_;
        if (at < rows && head < args_.num_heads)
          bits[a] = load_query(first + at / padded_heads_, head, column * kVector);
      }
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int32_t at = row + a * kRows;
        if (at < rows) store_query(at / padded_heads_, at % padded_heads_, column, bits[a]);
      }
    }
    for (int32_t i = ptx::thread_index(); i < rows; i += kThreads) {
      const int32_t head = i % padded_heads_;
      const int64_t at = (first + i / padded_heads_) * args_.weights_stride_token + head;
      ptx::store_shared(weight_address(i / padded_heads_, head), head < args_.num_heads ? args_.weights[at] : 0.0F);
    }
  }

  MLA_DEVICE Bits8 load_query(int32_t token, int32_t head, int32_t channel) const {
    constexpr auto kBytes = static_cast<int32_t>(size_of(kQueries));
    const int64_t element = token * args_.q_stride_token + head * args_.q_stride_head + channel;
    return load_bits8(static_cast<const std::byte*>(args_.q) + element * kBytes, kBytes);
  }

  /// Eight channels as 16-bit operands.
  MLA_DEVICE void store_query(int32_t token, int32_t head, int32_t column, const Bits8& bits) const {
    ptx::Vec4 operands[kParts];
    MLA_UNROLL
    for (int i = 0; i < kVector / 2; ++i) {
      if constexpr (kQueries == DType::kE4M3)
        operands[0].x[i] = ptx::e4m3x2_to_f16x2(half_of(bits, i));
      else if constexpr (kQueries == DType::kF32)
        split_pair(bits.w[2 * i], bits.w[2 * i + 1], operands[0].x[i], operands[1].x[i], operands[2].x[i]);
      else
        operands[0].x[i] = bits.w[i];
    }
    MLA_UNROLL
    for (int part = 0; part < kParts; ++part)
      ptx::store_shared(row_address(token, part, head) + static_cast<uint32_t>(column * 16), operands[part]);
  }

  /// Two f32 in three parts of bf16 each, whose sums they are. Parts are cut off, not rounded: none is too large.
  static MLA_DEVICE void split_pair(uint32_t low, uint32_t high, uint32_t& first, uint32_t& second, uint32_t& third) {
    constexpr uint32_t kTop = 0xFFFF0000U;
    const auto rest = [](uint32_t value) {  // of a value of bf16, infinity or NaN: nothing
      const auto f32 = std::bit_cast<float>(value);
      return is_finite(f32) ? std::bit_cast<uint32_t>(f32 - std::bit_cast<float>(value & kTop)) : 0U;
    };
    const auto join = [](uint32_t a, uint32_t b) { return a >> 16 | (b & kTop); };
    const auto quiet = [](uint32_t value) { return is_nan(std::bit_cast<float>(value)) ? value | 0x400000U : value; };
    const uint32_t low_rest = rest(low), high_rest = rest(high);
    first = join(quiet(low), quiet(high));
    second = join(low_rest, high_rest);
    third = join(rest(low_rest), rest(high_rest));
  }

  const core::IndexerLogitsArgs& args_;
  const IndexerShape& shape_;
  int32_t padded_heads_;
  bool aligned_;  // whether all rows of keys are at multiples of 16 bytes
};

}  // namespace mla::MLA_CUDA_NAMESPACE

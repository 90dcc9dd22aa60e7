// SPDX-License-Identifier: Apache-2.0
// The indexer's kernels share what is here: who computes what, how rows of keys and queries are read, and who writes a
// logit.
//   logits[t][j] = scale[j] * sum_h weight[t][h] * max(0, q[t][h] . k[j]), or -inf where token t does not see key j
// Where blocks of keys are listed for each token, j counts the listed keys, and a group has one token.
// Grid: a block for each group of a request's query tokens and each split of the keys (IndexerShape). It is known from
// shapes alone: a block writes -inf if none of its tokens sees its keys, and some blocks have no tokens. The group's
// queries lie in shared memory as 16-bit operands. Hundreds of heads take more than one launch; each adds to the
// logits. The four lanes of a quad share a key's row: lane t of it reads bytes 64 j + 16 t ... + 15, so that a warp
// reads whole sectors. A product takes these bytes for other channels than they are, which does not change it, because
// queries are laid out alike. Products of e4m3 with f16 or bf16 are exact in f32. (Products of two e4m3 are summed in
// fewer bits than f32 on some chips.)
// Of a key of MXFP4, lane t reads bytes 16 t ... + 15: 32 channels, which have one scale. It multiplies them by it,
// which bf16 holds exactly. Queries are staged in another order, so that products take the same channels of both.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/args.h"
#include "cuda/common/query_batch.cuh"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/logits.cuh"
#include "cuda/tile/page_place.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says how the work is divided into blocks.
struct IndexerShape {
  int32_t group_tokens = 1;        // query tokens of a block; they are of one request, and all in shared memory
  int32_t groups_per_request = 0;  // for equal q_len; 0: request r has groups from qo_indptr[r] / group_tokens + r on
  bool adds = false;               // whether logits, which are f32 then, are added to those of other heads
  int32_t split_keys = 0;          // keys of a block
  int32_t num_splits = 0;
  cuda::FastDivisor page_size = {}, ratio = {}, block_size = {};
};

struct IndexerParams {
  core::IndexerLogitsArgs args;
  IndexerShape shape;
};

/// This is the base of the indexer's kernels. A lane reads its quarter of the rows of kLaneKeys_ keys, which are keys
/// lane / 4 + 8 i of its warp's keys. kListed says whether blocks of keys are listed.
template <DType kQueries, IndexerFormat kKeys, int kLaneKeys_, bool kListed>
class IndexerBlock {
 public:
  using Params = IndexerParams;
  static constexpr const char* kName = "indexer_logits";
  static constexpr int kWarpKeys = 8 * kLaneKeys_;

 protected:
  static constexpr IndexerLayout kLayout = indexer_layout(kKeys);
  static constexpr bool kE2m1 = kLayout.codec.element == DType::kE2M1;
  /// e4m3 and f16 queries are multiplied with keys of e4m3 as f16, which holds every e4m3; the others, and keys of e2m1
  /// times their scales, have the range of bf16.
  static constexpr DType kOperand =
      !kE2m1 && (kQueries == DType::kE4M3 || kQueries == DType::kF16) ? DType::kF16 : DType::kBF16;
  static constexpr int kLaneKeys = kLaneKeys_, kTiles = kLaneKeys / 2;  // a tile has 16 keys
  static constexpr int kSteps = kIndexerLayout.head_dim / 16;           // multiplications over the channels
  static constexpr float kHidden =
      -std::numeric_limits<float>::infinity();  // the logit of a key that a token does not see

  /// Has the numbers of the pages that the lane's keys are in, and their places there.
  struct Places {
    PagePlace of[kLaneKeys];
  };
  /// Has the lane's bytes of its keys' rows, 16 of each half, and the scale of key own_key().
  struct E4m3Rows {
    ptx::Vec4 halves[kLaneKeys][2];
    float scale;
  };
  /// Has the lane's bytes of its keys' rows, and the scales of their channels. Sums are not scaled any more.
  struct E2m1Rows {
    ptx::Vec4 rows[kLaneKeys];
    uint8_t scales[kLaneKeys];
    static constexpr float scale = 1.0F;
  };
  using Rows = std::conditional_t<kE2m1, E2m1Rows, E4m3Rows>;
  /// Has the same keys as A operands, of 16 keys each.
  struct Operands {
    uint32_t of[kTiles][kSteps][4];
  };
  /// Has sums over heads, for the lane's keys.
  struct Sums {
    float of[kTiles][2];
  };

  /// Has keys or logits [begin, end), none if end is not above begin.
  struct alignas(8) Range {
    int32_t begin, end;
    /// Says whether some of n from `first` on are in the range.
    MLA_DEVICE bool meets(int32_t first, int32_t n) const { return first < end && first + n > begin; }
    MLA_DEVICE bool has(int32_t one) const { return begin <= one && one < end; }
  };

  /// Describes consecutive tokens of one request. Token t sees the keys of origin + t tokens under causality, and of
  /// origin tokens without it. `listed`, where blocks are listed, are the keys that the one token sees.
  struct TokenGroup {
    int32_t request, first, stop, origin;
    Range listed;
  };

  MLA_DEVICE explicit IndexerBlock(const Params& params)
      : args_(params.args),
        shape_(params.shape),
        aligned_(is_aligned(args_.cache.base, 16) && args_.cache.stride_page % 16 == 0),
        has_ranges_(!kListed && (args_.key_begin != nullptr || args_.key_end != nullptr)) {}

  MLA_DEVICE TokenGroup find_group() const { return find_group(ptx::block_index_x() / shape_.num_splits); }
  /// Returns the block's first key, and the one behind its last.
  MLA_DEVICE int32_t first_key() const { return ptx::block_index_x() % shape_.num_splits * shape_.split_keys; }
  MLA_DEVICE int32_t end_key() const {
    return std::min(first_key() + shape_.split_keys, static_cast<int32_t>(args_.num_logits));
  }

  /// Returns which logits are computed for a token of the group; the others are -inf.
  MLA_DEVICE Range computed(const TokenGroup& group, int32_t token) const {
    if constexpr (kListed)
      return {.begin = 0, .end = group.listed.begin < group.listed.end ? args_.blocks.num_keys() : 0};
    const Range seen = seen_keys(group, token);
    return {.begin = seen.begin, .end = std::min(seen.end, static_cast<int32_t>(args_.num_logits))};
  }
  /// Returns a range that has those of all tokens of the group.
  MLA_DEVICE Range computed(const TokenGroup& group) const {
    Range all = computed(group, group.stop - 1);  // without ranges of their own, the last token sees most
    for (int32_t token = group.first; has_ranges_ && token < group.stop - 1; ++token) {
      const Range one = computed(group, token);
      if (one.begin >= one.end) continue;
      all = all.begin < all.end ? Range{std::min(all.begin, one.begin), std::max(all.end, one.end)} : one;
    }
    return all;
  }

  /// Says whether any of a warp's or warpgroup's logits are computed for a token, and whether its own_key()'s is.
  struct Computed {
    bool any, own;
  };
  /// Says so of logits [first, first + count) and of logit `own`, for one token after another.
  class LogitsAt {
   public:
    /// `all` are the logits that are computed for any token of the group.
    MLA_DEVICE LogitsAt(const IndexerBlock& block, const Range& all, int32_t first, int32_t count, int32_t own)
        : block_(block), first_(first), count_(count), own_(own) {
      // A division by the ratio for each token would take 2 % of the time (2,048 tokens over 8k, H200, 2026-11-27).
      const auto tokens_of = [&](int32_t key) {
        const auto keys = static_cast<uint32_t>(std::min(key, all.end)) + 1;
        return ptx::opaque(keys * static_cast<uint32_t>(block.shape_.ratio.value));  // or computed for every token
      };
      needed_ = tokens_of(first);
      own_needed_ = tokens_of(own);
    }
    MLA_DEVICE Computed of(const TokenGroup& group, int32_t token) const {
      if (kListed || block_.has_ranges_) {
        const Range range = block_.computed(group, token);
        return {.any = range.meets(first_, count_), .own = range.has(own_)};
      }
      const uint32_t seen = block_.num_seen(group, token);
      return {.any = needed_ <= seen, .own = own_needed_ <= seen};
    }

   private:
    const IndexerBlock& block_;
    int32_t first_, count_, own_;
    uint32_t needed_ = 0, own_needed_ = 0;  // tokens that one must see for the first logit and for the own one
  };

  /// Finds the keys of the lane's logits among [warp_base, end), of which the warp has at most kWarpKeys. The last key
  /// stands for those behind it, and key 0 for listed ones that the group does not see; their logits are not written.
  MLA_DEVICE Places find_rows(const TokenGroup& group, int32_t warp_base, int32_t end) const {
    const int32_t* const pages = args_.pages.of(group.request);
    Places places;
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      int32_t key = std::min(warp_base + ptx::lane() / 4 + 8 * i, end - 1);
      if constexpr (kListed) key = std::max(listed_key(group, group.first, key), 0);
      const PagePlace at = place_in_pages(key, shape_.page_size);
      places.of[i] = {pages[at.page], at.offset};
    }
    return places;
  }

  /// Loads the lane's bytes of its keys' rows and a scale, so that no load waits for another one.
  MLA_DEVICE void load_rows(const Places& places, E4m3Rows& to) const {
    const int32_t quad_lane = ptx::lane() % 4;
    const std::byte *rows[kLaneKeys], *scale = nullptr;
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      const PagePlace& at = places.of[i];
      rows[i] = args_.cache.key<kKeys>(at.page, at.offset) + quad_lane * 16;
      if (i == quad_lane % kLaneKeys) scale = args_.cache.scale<kKeys>(at.page, at.offset);
    }
    if (aligned_) [[likely]] {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) MLA_UNROLL
      for (int j = 0; j < 2; ++j) to.halves[i][j] = ptx::load_global(as<ptx::Vec4>(rows[i] + j * 64));
      to.scale = ptx::load_global(as<float>(scale));
    } else {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) MLA_UNROLL
      for (int j = 0; j < 2; ++j) to.halves[i][j] = load_bytes(rows[i] + j * 64);
      to.scale = load_f32_anywhere(scale);
    }
  }

  MLA_DEVICE void load_rows(const Places& places, E2m1Rows& to) const {
    const int32_t quad_lane = ptx::lane() % 4;
    const std::byte *rows[kLaneKeys], *scales[kLaneKeys];
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      const PagePlace& at = places.of[i];
      rows[i] = args_.cache.key<kKeys>(at.page, at.offset) + quad_lane * 16;
      scales[i] = args_.cache.scale<kKeys>(at.page, at.offset) + quad_lane;
    }
    if (aligned_) [[likely]] {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) to.rows[i] = ptx::load_global(as<ptx::Vec4>(rows[i]));
    } else {
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) to.rows[i] = load_bytes(rows[i]);
    }
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) to.scales[i] = ptx::load_global(as<uint8_t>(scales[i]));
  }

  static MLA_DEVICE void decode(const E4m3Rows& rows, Operands& to) {
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      auto& operands = to.of[i / 2][step];
      ptx::e4m3x4_to_f16x2(rows.halves[i][step / 4].x[step % 4], operands[i % 2], operands[i % 2 + 2]);
      if constexpr (kOperand == DType::kBF16) {
        operands[i % 2] = f16_to_bf16x2(operands[i % 2]);
        operands[i % 2 + 2] = f16_to_bf16x2(operands[i % 2 + 2]);
      }
    }
  }

  static MLA_DEVICE void decode(const E2m1Rows& rows, Operands& to) {
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      const float scale = ue8m0_to_f32(rows.scales[i]);
      const uint32_t scales = ptx::pack_bf16x2(scale, scale);
      MLA_UNROLL
      for (int word = 0; word < 4; ++word) {  // eight channels, which are two steps
        const ptx::Vec4 values = e2m1x8_to_bf16(rows.rows[i].x[word], scales);
        MLA_UNROLL
        for (int j = 0; j < 4; ++j) to.of[i / 2][2 * word + j / 2][i % 2 + j % 2 * 2] = values.x[j];
      }
    }
  }

  /// Has the weights of two neighbouring heads.
  struct alignas(8) Weights {
    float of[2];
  };
  /// Adds what two heads give to the sums of two keys. `products` are those of both heads with the first key, then with
  /// the second.
  static MLA_DEVICE void add_heads(const float (&products)[4], const Weights& weights, float (&sums)[2]) {
    MLA_UNROLL
    for (int head = 0; head < 2; ++head) MLA_UNROLL
    for (int key = 0; key < 2; ++key) sums[key] += weights.of[head] * ptx::max_or_nan(products[key * 2 + head], 0.0F);
  }

  /// Returns which of the warp's keys is the one whose logit the lane writes; kWarpKeys or more: none.
  static MLA_DEVICE int32_t own_key() { return ptx::lane() % 4 * 8 + ptx::lane() / 4; }

  /// Returns the sum over all heads for own_key(), by adding up the lanes of a quad, which have summed different heads.
  static MLA_DEVICE float own_sum(Sums& sums) {
    float own = 0.0F;
    MLA_UNROLL
    for (int i = 0; i < kLaneKeys; ++i) {
      float& sum = sums.of[i / 2][i % 2];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if (i == ptx::lane() % 4) own = sum;
    }
    return own;
  }

  /// Writes the logit of the warp's own_key(), if there is such a key. `computed` says whether it has been computed.
  MLA_DEVICE void write_logit(const TokenGroup& group, int32_t token, int32_t warp_base, bool computed,
                              float logit) const {
    const int32_t at = warp_base + own_key();
    if (own_key() >= kWarpKeys || at >= args_.num_logits) return;
    bool hidden = !computed;
    if constexpr (kListed) hidden = hidden || listed_key(group, token, at) < 0;
    const int64_t index = token * args_.logits_stride_token + at;
    if (shape_.adds && !hidden) logit += static_cast<const float*>(args_.logits)[index];
    store_logit(args_.logits, args_.logits_dtype, index, hidden ? kHidden : logit);
  }

  /// Stages queries and weights of the group's tokens in shared memory, for the block; heads behind the last one are
  /// zeros. store_query(row, column, bits) gets eight channels of a query at a time, where `row` counts the padded
  /// heads of all tokens, and `column` is where products with keys of e4m3 would take them. `weights` is where the
  /// weights go, as f32. Each thread has kAhead loads under way.
  template <int kThreads, int kAhead, class Store>
  MLA_DEVICE void stage(const TokenGroup& group, int32_t padded_heads, ptx::SharedAddress weights,
                        const Store& store_query) const {
    const int32_t first = group.first, count = group.stop - group.first;
    constexpr int kLanes = kIndexerLayout.head_dim / kVector, kRows = kThreads / kLanes;
    const int32_t rows = count * padded_heads, column = ptx::thread_index() % kLanes;
    MLA_NO_UNROLL
    for (int32_t row = ptx::thread_index() / kLanes; row < rows; row += kRows * kAhead) {
      Bits8 bits[kAhead] = {};
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int32_t at = row + a * kRows, head = at % padded_heads;
        if (at < rows && head < args_.num_heads)
          bits[a] = load_query(first + at / padded_heads, head, column * kVector);
      }
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a)
        if (row + a * kRows < rows) store_query(row + a * kRows, place_of(column), bits[a]);
    }
    for (int32_t i = ptx::thread_index(); i < rows; i += kThreads) {
      const int32_t head = i % padded_heads;
      const int64_t at = (first + i / padded_heads) * args_.weights_stride_token + head;
      ptx::store_shared(weights + static_cast<uint32_t>(i * 4), head < args_.num_heads ? args_.weights[at] : 0.0F);
    }
  }

  /// Returns pair `i` of eight channels of a query of 8 or 16 bits as an operand.
  static MLA_DEVICE uint32_t query_pair(const Bits8& bits, int i) {
    if constexpr (kQueries != DType::kE4M3) return bits.w[i];
    const uint32_t pair = ptx::e4m3x2_to_f16x2(half_of(bits, i));
    return kOperand == DType::kBF16 ? f16_to_bf16x2(pair) : pair;
  }

  const core::IndexerLogitsArgs& args_;
  const IndexerShape& shape_;

 private:
  /// Returns how many tokens of its request a token of the group sees.
  MLA_DEVICE uint32_t num_seen(const TokenGroup& group, int32_t token) const {
    return static_cast<uint32_t>(std::max(group.origin + (args_.causal ? token : 0), 0));
  }
  /// Returns the keys that a token of the group sees.
  MLA_DEVICE Range seen_keys(const TokenGroup& group, int32_t token) const {
    Range seen = {.begin = 0, .end = shape_.ratio.divide(static_cast<int32_t>(num_seen(group, token)))};
    if (args_.key_end != nullptr)
      seen.end = std::min(shape_.ratio.divide(std::max(args_.pages.kv_len[group.request], 0)), args_.key_end[token]);
    if (args_.key_begin != nullptr) seen.begin = std::max(args_.key_begin[token], 0);
    return seen;
  }
  /// Returns the key that logit `at` of a token belongs to; -1 if the token does not see it.
  MLA_DEVICE int32_t listed_key(const TokenGroup& group, int32_t token, int32_t at) const {
    const int32_t m = shape_.block_size.divide(at), size = args_.blocks.size;
    const int64_t key = int64_t{args_.blocks.blocks[token * args_.blocks.stride_token + m]} * size + (at - m * size);
    return group.listed.begin <= key && key < group.listed.end ? static_cast<int32_t>(key) : -1;
  }

  MLA_DEVICE Bits8 load_query(int32_t token, int32_t head, int32_t channel) const {
    constexpr auto kBytes = static_cast<int32_t>(size_of(kQueries));
    const int64_t element = token * args_.q_stride_token + head * args_.q_stride_head + channel;
    return load_bits8(static_cast<const std::byte*>(args_.q) + element * kBytes, kBytes);
  }

  /// Finds the tokens of a group; it has none if there are more groups than the lengths need.
  MLA_DEVICE TokenGroup find_group(int32_t number) const {
    const core::QueryRanges& queries = args_.queries;
    const int32_t size = shape_.group_tokens;
    int32_t request, in_request;
    if (shape_.groups_per_request > 0) {
      request = number / shape_.groups_per_request;
      in_request = number % shape_.groups_per_request;
    } else {
      const auto first_group = [&](int32_t r) { return queries.indptr[r] / size + r; };
      request = count_leading(args_.batch_size - 1, [&](int32_t r) { return first_group(r + 1) <= number; });
      in_request = number - first_group(request);
    }
    const int32_t first = queries.begin(request) + in_request * size,
                  end = queries.begin(request) + queries.len(request);
    const int32_t kv_len = args_.pages.kv_len[request];
    TokenGroup group = {.request = request,
                        .first = first,
                        .stop = std::min(first + size, end),
                        .origin = args_.causal ? kv_len - end + 1 : kv_len,
                        .listed = {}};
    if (kListed && first < end) group.listed = seen_keys(group, first);
    return group;
  }

  /// Returns which channels of a key of e4m3 a lane has in the place of channels 8 column ... + 7, in eights. A lane
  /// has eights 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of e4m3, and 4 t ... 4 t + 3 of e2m1.
  static MLA_DEVICE int32_t place_of(int32_t column) {
    return kE2m1 ? (column & 2) * 4 + column / 4 * 2 + (column & 1) : column;
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

  bool aligned_;     // whether all rows of keys begin at multiples of 16 bytes
  bool has_ranges_;  // whether tokens of a group see ranges of their own
};

}  // namespace mla::MLA_CUDA_NAMESPACE

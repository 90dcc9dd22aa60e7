// SPDX-License-Identifier: Apache-2.0
// This is the query side of absorbed attention. It finds which query token and head a row of the block is, which keys
// it sees, its operand of the multiplication, and where its outputs go.
#pragma once

#include <algorithm>

#include "cuda/attention/absorbed_args.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/element16.cuh"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/key_range.cuh"
#include "cuda/tile/score_state.cuh"
#include "cuda/tile/scoring.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Identifies one query row of the block. `query` counts the query tokens of the request, `token` those of the batch;
/// token is -1 where the request has no such row.
struct QueryRow {
  int32_t token = -1, query = 0, head = 0;
};

/// Describes the query rows of one unit.
struct UnitRows {
  int32_t row_begin;    // number, in the request, of the block's row 0
  int32_t num_rows;     // rows of the request
  int32_t token_begin;  // the request's first query token

  MLA_DEVICE QueryRow row(const cuda::AbsorbedArgs& args, int r) const {
    const int32_t at = row_begin + r;
    if (at >= num_rows) return {};
    const int32_t query = args.num_heads.divide(at);
    return {token_begin + query, query, at - query * args.num_heads.value};
  }
};

/// Returns this rank's share of a length of all context-parallel ranks. It divides only where there are several ranks.
MLA_DEVICE int32_t local(const cuda::AbsorbedArgs& args, int64_t length) {
  if (args.context_parallel.world == 1) [[likely]]
    return static_cast<int32_t>(length);
  return static_cast<int32_t>(local_length(args.context_parallel, length));
}

MLA_DEVICE bool has_tree(const cuda::AbsorbedArgs& args) {
  return args.tree_mask != nullptr || args.tree_parents != nullptr;
}

/// Returns the rank's keys that causality and the window leave visible to a query token of a dense segment. With a
/// draft tree causality does not apply, and RowScores::in_tree() decides about the tree's keys.
MLA_DEVICE KeyRange visible_local_keys(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, int32_t query) {
  const KeyRange visible = visible_keys(segment.kv_len - segment.q_len + query, segment.kv_len,
                                        args.causal && !has_tree(args), args.options.window_left);
  return {local(args, visible.begin), local(args, visible.end)};
}

/// Returns the rank's first key that belongs to the draft tree; INT32_MAX if there is no tree.
MLA_DEVICE int32_t tree_begin(const cuda::AbsorbedArgs& args, const cuda::Segment& segment) {
  return has_tree(args) ? local(args, std::max<int64_t>(int64_t{segment.kv_len} - segment.q_len, 0)) : INT32_MAX;
}

/// Returns the keys that all rows of a unit see, if they have a row, and whose scores need nothing but the scale; an
/// empty range if there are none.
MLA_DEVICE KeyRange unmasked_keys(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, const UnitRows& rows,
                                  int num_rows) {
  if (!needs_only_scale(args.options)) return {0, 0};
  if (args.sparse()) return {0, INT32_MAX};
  const int32_t last_row = std::min<int32_t>(rows.row_begin + num_rows, rows.num_rows) - 1;
  const int32_t begin = visible_local_keys(args, segment, args.num_heads.divide(last_row)).begin;
  const int32_t end = visible_local_keys(args, segment, args.num_heads.divide(rows.row_begin)).end;
  const int32_t tree = tree_begin(args, segment);
  return {begin, end < tree ? end : tree};
}

/// Returns the factor from scores to logits: the softmax scale times the scale of the queries.
MLA_DEVICE float score_scale(const cuda::AbsorbedArgs& args) {
  return args.q_scale != nullptr ? args.sm_scale * *args.q_scale : args.sm_scale;
}

/// Returns eight channels of a query row, from `channel` on, as they are stored; zeros where there is no such row or
/// channel.
MLA_DEVICE Bits8 query_bits(const cuda::AbsorbedArgs& args, const QueryRow& row, int channel) {
  if (row.token < 0 || channel >= args.d_qk) return {};
  const int32_t d_ckv = args.pools[0].cache.d_ckv;
  const bool latent = channel < d_ckv;
  const int64_t at =
      latent ? int64_t{row.token} * args.q_nope_stride_token + row.head * args.q_nope_stride_head + channel
             : int64_t{row.token} * args.q_pe_stride_token + row.head * args.q_pe_stride_head + channel - d_ckv;
  const int32_t element_bytes = static_cast<int32_t>(size_of(args.q_dtype));
  const auto* base = static_cast<const std::byte*>(latent ? args.q_nope : args.q_pe);
  return load_bits8(base + at * element_bytes, element_bytes);
}

/// Returns whether queries have a type of 16 bits, `type`, and all their rows begin at multiples of 16 bytes.
MLA_DEVICE bool queries_are_chunks(const cuda::AbsorbedArgs& args, DType type) {
  const auto aligned = [](const void* from, int64_t stride_token, int64_t stride_head) {
    return ((reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(stride_token * 2) |
             static_cast<uint64_t>(stride_head * 2)) &
            (kChunkBytes - 1)) == 0;
  };
  return args.q_dtype == type && aligned(args.q_nope, args.q_nope_stride_token, args.q_nope_stride_head) &&
         aligned(args.q_pe, args.q_pe_stride_token, args.q_pe_stride_head);
}

/// Returns eight channels of a query row, from `channel` on, in kType; they are in w[0] ... w[3] of the result. Queries
/// that kType does not hold exactly are split into two terms: term 0 is the rounded value, term 1 the rest.
template <DType kType>
MLA_DEVICE Bits8 query_channels(const cuda::AbsorbedArgs& args, const QueryRow& row, int channel, int term) {
  const Bits8 bits = query_bits(args, row, channel);
  if (args.q_dtype == kType) return bits;
  float values[kVector];
  decode8(bits, args.q_dtype, values);
  const Bits8 rounded = encode8(values, kType);
  if (term == 0) return rounded;
  float kept[kVector];
  decode8(rounded, kType, kept);
  // A value that overflowed to infinity gets the rest 0: infinity minus infinity would be NaN.
  MLA_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] = is_finite(kept[i]) ? values[i] - kept[i] : 0.0F;
  return encode8(values, kType);
}

/// Returns the lowest `count` bits; none if it is negative, at most 64.
MLA_DEVICE uint64_t low_bits(int64_t count) {
  if (count <= 0) return 0;
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

/// Decides which keys one row sees and computes its logits, with all options. Steps that are not unmasked use it.
class RowScores {
 public:
  MLA_DEVICE RowScores(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, const QueryRow& row)
      : args_(args), row_(row), scale_(score_scale(args)) {
    if (row.token < 0) return;
    visible_ = args.sparse() ? KeyRange{0, INT32_MAX} : visible_local_keys(args, segment, row.query);
    draft_begin_ = segment.kv_len - segment.q_len;
    if (!args.sparse()) tree_begin_ = tree_begin(args, segment);
    if (args.options.alibi_slopes != nullptr) slope_ = args.options.alibi_slopes[row.head];
  }

  /// Returns which of the keys that `asked` has bits of are visible to the row; bit i stands for key first + i.
  MLA_DEVICE uint64_t visible_keys(int32_t first, uint64_t asked) const {
    uint64_t visible = asked & low_bits(int64_t{visible_.end} - first) & ~low_bits(int64_t{visible_.begin} - first);
    MLA_NO_UNROLL
    for (int64_t i = std::max<int64_t>(int64_t{tree_begin_} - first, 0); i < 64; ++i)
      if ((visible >> i & 1) != 0 && !in_tree(static_cast<int32_t>(first + i))) visible &= ~(uint64_t{1} << i);
    return visible;
  }

  /// Returns the base-2 logit of a key from the row's score.
  MLA_DEVICE float logit(float score, int32_t key) const {
    float s = score * scale_;
    const float cap = args_.options.logits_soft_cap;
    if (cap > 0.0F) s = soft_capped(s / cap * kSoftCapExponent, cap);
    if (args_.options.alibi_slopes != nullptr)
      s += slope_ * static_cast<float>(global_position(args_.context_parallel, key) - draft_begin_ - row_.query);
    return s * std::numbers::log2e_v<float>;
  }

 private:
  /// Returns whether a key of the draft tree is the row's query or an ancestor of it.
  MLA_DEVICE bool in_tree(int32_t key) const {
    const int64_t draft = global_position(args_.context_parallel, key) - draft_begin_;
    if (args_.tree_mask != nullptr)
      return args_.tree_mask[int64_t{row_.token} * args_.tree_mask_stride_token + draft] != 0;
    const int32_t* parents = args_.tree_parents + (row_.token - row_.query);
    int64_t at = row_.query;
    // Parents come before their children. A list that breaks this rule ends the walk, so that the loop always ends.
    for (int64_t next; at > draft; at = next)
      if (next = parents[at]; next >= at) return false;
    return at == draft;
  }

  const cuda::AbsorbedArgs& args_;
  QueryRow row_;
  float scale_, slope_ = 0.0F;
  KeyRange visible_ = {0, 0};
  int64_t draft_begin_ = 0;  // position of query 0; may be negative
  int32_t tree_begin_ = INT32_MAX;
};

/// Stores eight channels of an output row, from `channel` on.
MLA_DEVICE void store_output(const cuda::AbsorbedArgs& args, const QueryRow& row, int channel,
                             const float (&values)[kVector]) {
  const int64_t at = int64_t{row.token} * args.o_stride_token + row.head * args.o_stride_head + channel;
  if (args.o_dtype == DType::kE4M3) {
    for (int i = 0; i < kVector; ++i) store_element(args.o, DType::kE4M3, at + i, values[i]);
    return;
  }
  const int32_t element_bytes = static_cast<int32_t>(size_of(args.o_dtype));
  store_bits8(static_cast<std::byte*>(args.o) + at * element_bytes, element_bytes, encode8(values, args.o_dtype));
}

}  // namespace mla::MLA_CUDA_NAMESPACE

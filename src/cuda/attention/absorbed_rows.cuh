// SPDX-License-Identifier: Apache-2.0
// The query side of absorbed attention: which query a row of the block is, what it sees, its operand, its outputs.
#pragma once

#include <algorithm>

#include "cuda/attention/absorbed_args.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/element16.cuh"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/key_range.cuh"
#include "cuda/tile/score_state.cuh"
#include "cuda/tile/scoring.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// One row of the block; token -1: the request has no such row.
struct QueryRow {
  int32_t token = -1, query = 0, head = 0;
};

/// The rows of one unit.
struct UnitRows {
  int32_t row_begin, num_rows;  // of the block's row 0; of the request
  int32_t token_begin;

  MLA_DEVICE QueryRow row(const cuda::AbsorbedArgs& args, int r) const {
    const int32_t at = row_begin + r;
    if (at >= num_rows) return {};
    const int32_t query = args.num_heads.divide(at);
    return {token_begin + query, query, at - query * args.num_heads.value};
  }
};

/// A rank's share of a length; the divisions only where there are ranks.
MLA_DEVICE int32_t local(const cuda::AbsorbedArgs& args, int64_t length) {
  if (args.context_parallel.world == 1) [[likely]]
    return static_cast<int32_t>(length);
  return static_cast<int32_t>(local_length(args.context_parallel, length));
}

MLA_DEVICE bool has_tree(const cuda::AbsorbedArgs& args) {
  return args.tree_mask != nullptr || args.tree_parents != nullptr;
}

/// The rank's keys that causality and the window leave to a query of a dense segment; a draft tree says more by itself.
MLA_DEVICE KeyRange keys_in_sight(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, int32_t query) {
  const KeyRange seen = visible_keys(segment.kv_len - segment.q_len + query, segment.kv_len,
                                     args.causal && !has_tree(args), args.options.window_left);
  return {local(args, seen.begin), local(args, seen.end)};
}

/// The first local key that belongs to the draft tree; none: INT32_MAX.
MLA_DEVICE int32_t tree_begin(const cuda::AbsorbedArgs& args, const cuda::Segment& segment) {
  return has_tree(args) ? local(args, std::max<int64_t>(int64_t{segment.kv_len} - segment.q_len, 0)) : INT32_MAX;
}

/// The keys that all of a unit's rows see and whose scores need nothing but the scale.
MLA_DEVICE KeyRange unmasked_keys(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, const UnitRows& rows,
                                  int num_rows) {
  if (args.sparse() || !needs_only_scale(args.options)) return {0, 0};
  const int32_t last_row = std::min<int32_t>(rows.row_begin + num_rows, rows.num_rows) - 1;
  const int32_t begin = keys_in_sight(args, segment, args.num_heads.divide(last_row)).begin;
  const int32_t end = keys_in_sight(args, segment, args.num_heads.divide(rows.row_begin)).end;
  const int32_t tree = tree_begin(args, segment);
  return {begin, end < tree ? end : tree};
}

/// What products are multiplied by.
MLA_DEVICE float score_scale(const cuda::AbsorbedArgs& args) {
  return args.q_scale != nullptr ? args.sm_scale * *args.q_scale : args.sm_scale;
}

/// Eight channels of a query from `channel` on as kType, in w[0] ... w[3]: part 0 is the value rounded, part 1 the
/// rest.
template <DType kType>
MLA_DEVICE Bits8 query_channels(const cuda::AbsorbedArgs& args, const QueryRow& row, int channel, int part) {
  if (row.token < 0 || channel >= args.d_qk) return {};
  const int32_t d_ckv = args.pools[0].cache.d_ckv;
  const bool latent = channel < d_ckv;
  const int64_t at =
      latent ? int64_t{row.token} * args.q_nope_stride_token + row.head * args.q_nope_stride_head + channel
             : int64_t{row.token} * args.q_pe_stride_token + row.head * args.q_pe_stride_head + channel - d_ckv;
  const int32_t element_bytes = static_cast<int32_t>(size_of(args.q_dtype));
  const auto* base = static_cast<const std::byte*>(latent ? args.q_nope : args.q_pe);
  const Bits8 bits = load_bits8(base + at * element_bytes, element_bytes);
  if (args.q_dtype == kType) return bits;
  float values[kVector];
  decode8(bits, args.q_dtype, values);
  const Bits8 rounded = encode8(values, kType);
  if (part == 0) return rounded;
  float kept[kVector];
  decode8(rounded, kType, kept);
  // What overflowed has no rest: infinity minus infinity would make a NaN of it.
  MLA_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] = is_finite(kept[i]) ? values[i] - kept[i] : 0.0F;
  return encode8(values, kType);
}

/// What one row sees and how its scores are made: the general way.
class RowScores {
 public:
  MLA_DEVICE RowScores(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, const QueryRow& row)
      : args_(args), row_(row), scale_(score_scale(args)) {
    if (row.token < 0) return;
    sight_ = args.sparse() ? KeyRange{0, INT32_MAX} : keys_in_sight(args, segment, row.query);
    draft_begin_ = segment.kv_len - segment.q_len;
    if (!args.sparse()) tree_begin_ = tree_begin(args, segment);
    if (args.options.alibi_slopes != nullptr) slope_ = args.options.alibi_slopes[row.head];
  }

  MLA_DEVICE bool sees(int32_t key) const {
    if (key < sight_.begin || key >= sight_.end) return false;
    return key < tree_begin_ || in_tree(global_position(args_.context_parallel, key) - draft_begin_);
  }

  /// The base-2 logit of a product.
  MLA_DEVICE float logit(float product, int32_t key) const {
    float s = product * scale_;
    const float cap = args_.options.logits_soft_cap;
    if (cap > 0.0F) s = soft_capped(s / cap * kSoftCapExponent, cap);
    if (args_.options.alibi_slopes != nullptr)
      s += slope_ * static_cast<float>(global_position(args_.context_parallel, key) - draft_begin_ - row_.query);
    return s * std::numbers::log2e_v<float>;
  }

 private:
  MLA_DEVICE bool in_tree(int64_t draft) const {
    if (args_.tree_mask != nullptr)
      return args_.tree_mask[int64_t{row_.token} * args_.tree_mask_stride_token + draft] != 0;
    const int32_t* parents = args_.tree_parents + (row_.token - row_.query);
    int64_t at = row_.query;
    // Parents stand before their children; a list that says otherwise ends the walk.
    for (int64_t next; at > draft; at = next)
      if (next = parents[at]; next >= at) return false;
    return at == draft;
  }

  const cuda::AbsorbedArgs& args_;
  QueryRow row_;
  float scale_, slope_ = 0.0F;
  KeyRange sight_ = {0, 0};
  int64_t draft_begin_ = 0;  // position of query 0; may be negative
  int32_t tree_begin_ = INT32_MAX;
};

/// Eight channels of an output row from `channel` on.
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

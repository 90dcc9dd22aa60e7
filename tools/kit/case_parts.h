// SPDX-License-Identifier: Apache-2.0
// Holds what cases have in common: strided views, random streams, and the queries, options and outputs of attention.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "kit/cases.h"
#include "kit/note.h"

namespace mla::kit {

/// Names the random stream from which a tensor is drawn.
enum RandomStream : uint64_t {
  kQ = 11,
  kK,
  kV,
  kO,
  kLse,
  kRows,
  kSlots,
  kEmpty,
  kCache,
  kSink,
  kTree,
  kIndices,
  kLengths,
  kExtraPool,
  kTable,
  kAngles,
  kWeights,
  kFinish,
  kLogits
};

/// Returns the spec, and notes that the process is at it from now on: the report of a crash names it.
template <class Spec>
const Spec& noted(const Spec& spec) {
  note(std::string(name(problem_of(spec).op)) + " [" + describe(spec) + "]");
  return spec;
}

inline void untouched(const std::vector<const Buffer*>& buffers) {
  for (const Buffer* buffer : buffers) buffer->fill(kUntouched);
}

/// Returns a view [outer, heads, width] of `buffer`, with padding behind every head and every outer row.
inline TensorView padded_view(const Buffer& buffer, DType dtype, int64_t outer, int64_t heads, int64_t width,
                              int64_t head_extra, int64_t outer_extra) {
  TensorView view = contiguous(buffer.data(), dtype, {outer, heads, width});
  view.stride[1] = width + head_extra;
  view.stride[0] = heads * view.stride[1] + outer_extra;
  return view;
}

inline Buffer padded_buffer(DType dtype, int64_t outer, int64_t heads, int64_t width, int64_t head_extra,
                            int64_t outer_extra) {
  return Buffer(static_cast<size_t>(outer * (heads * (width + head_extra) + outer_extra)) * size_of(dtype));
}

/// Returns a view [rows, width] of `buffer`, with padding behind every row.
inline TensorView rows_view(const Buffer& buffer, DType dtype, int64_t rows, int64_t width, int64_t row_extra) {
  TensorView view = contiguous(buffer.data(), dtype, {rows, width});
  view.stride[0] = width + row_extra;
  return view;
}

inline Buffer rows_buffer(DType dtype, int64_t rows, int64_t width, int64_t row_extra) {
  return Buffer(static_cast<size_t>(rows * (width + row_extra)) * size_of(dtype));
}

/// Returns a view of lse or max_logits [tokens, heads], with padding behind every head and every token.
inline TensorView statistics_view(const Buffer& buffer, int64_t tokens, int64_t heads, int64_t head_extra,
                                  int64_t token_extra) {
  TensorView view = padded_view(buffer, DType::kF32, tokens, heads, 1, head_extra, token_extra);
  view.ndim = 2;
  return view;
}

inline Buffer statistics_buffer(int64_t tokens, int64_t heads, int64_t head_extra, int64_t token_extra) {
  return padded_buffer(DType::kF32, tokens, heads, 1, head_extra, token_extra);
}

inline TensorView list_view(const Buffer& buffer, DType dtype, int64_t extent) {
  return contiguous(buffer.data(), dtype, {extent});
}

std::vector<int32_t> prefix_sums(const std::vector<int32_t>& lengths);

/// Returns q_len of every request of a spec, which may give one q_len for all.
template <class Spec>
std::vector<int32_t> q_lens(const Spec& spec) {
  std::vector<int32_t> lens;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) lens.push_back(spec.q_len_of(request));
  return lens;
}

/// Fills `view` [outer, heads, width] with random rows: row (i, h) is that of the key (seed, stream, i, h), whatever
/// the strides.
void fill_heads(const TensorView& view, uint64_t seed, uint64_t stream, float std);

/// Describes rows of random values whose groups of channels differ in magnitude; `make_rows` draws them.
struct RowsDraw {
  int64_t num_rows = 0, width = 0, row_extra = 0;
  DType dtype = DType::kBF16;
  double special_share = 0;  ///< share of rows with zeros, infinities, NaN, huge and tiny values
  uint64_t seed = 1;
};
Buffer make_rows(const RowsDraw& draw);

/// Returns the cosines and sines of the angles by which rotary channels turn at each position, and NaN behind each row.
Buffer angles(int64_t positions, int32_t channels, int64_t extra);

/// Returns random lengths from -1 to most + 1: some are too small or too large, and operations clamp them.
std::vector<int32_t> random_lengths(int64_t count, int32_t most, uint64_t seed);

/// Returns indices [num_tokens, topk] with padding behind every row: `values` (dense), and in the padding a number that
/// is no legal index.
Buffer padded_indices(const std::vector<int32_t>& values, int64_t num_tokens, int64_t topk, int64_t row_extra);

/// Makes the sinks and slopes that the options of `spec` ask for.
void make_options(AttentionMemory& memory, const AttentionSpec& spec);
AttentionOptions options_of(const AttentionMemory& memory, const AttentionSpec& spec);

/// Makes the buffers of o and, if it is wanted, of lse.
void make_outputs(AttentionMemory& memory, const AttentionSpec& spec, int64_t num_tokens, int64_t d_v);

/// Sets what attention operations have in common in `params`, but for the queries and sm_scale.
template <class Params>
void set_common(Params& params, const AttentionMemory& memory, const AttentionSpec& spec, int64_t num_tokens,
                int64_t d_v) {
  const int64_t heads = spec.num_heads;
  params.options = options_of(memory, spec);
  params.lse_base = spec.lse_base;
  if constexpr (requires { params.lse_inf_without_keys; }) params.lse_inf_without_keys = spec.lse_inf_without_keys;
  params.batch_invariant = spec.batch_invariant;
  params.o = padded_view(memory.o, spec.o_dtype, num_tokens, heads, d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse)
    params.lse = statistics_view(memory.lse, num_tokens, heads, spec.lse_head_extra, spec.lse_token_extra);
}

/// Returns the standard deviation of the queries, negated: queries and keys come from one table, and a query that
/// happens to be a key's very values must not score far above all others.
inline float query_std(const AttentionSpec& spec, float sm_scale, int32_t d_qk) {
  return -spec.score_std / (sm_scale * std::sqrt(static_cast<float>(d_qk)));
}

/// Sets the queries of decode and decode_sparse, and the scales of e4m3 queries and outputs.
template <class Params>
void set_queries(Params& params, const AttentionMemory& memory, const AbsorbedSpec& spec, int64_t num_tokens,
                 const CacheSpec& cache) {
  const int64_t heads = spec.num_heads;
  const auto view = [&](const Buffer& buffer, int64_t width) {
    return padded_view(buffer, spec.q_dtype, num_tokens, heads, width, spec.q_head_extra, spec.q_token_extra);
  };
  if (spec.split_q) {
    params.q_nope = view(memory.q_nope, cache.d_ckv());
    if (cache.d_kpe() > 0) params.q_pe = view(memory.q_pe, cache.d_kpe());
  } else {
    params.q = view(memory.q, cache.d_qk);
  }
  if (spec.q_dtype == DType::kE4M3) params.q_scale = list_view(memory.q_scale, DType::kF32, 1);
  if (spec.o_dtype == DType::kE4M3) params.o_scale = list_view(memory.o_scale, DType::kF32, 1);
}

void make_queries(AttentionMemory& memory, const AbsorbedSpec& spec, float sm_scale, int64_t num_tokens,
                  const CacheSpec& cache);

/// Describes random indices into one pool or tensor; `draw_indices` draws them.
struct IndexDraw {
  int64_t num_tokens = 0;  ///< queries
  int32_t topk = 0;
  int64_t num_rows = 0;   ///< rows that may be named
  int64_t num_slots = 0;  ///< indices from this number on are invalid
  double invalid_share = 0, duplicate_share = 0, empty_share = 0;
};

/// Returns indices [num_tokens, topk], dense. `slot` maps a row to its index; entries from length[t] on are garbage.
template <class Slot>
std::vector<int32_t> draw_indices(const IndexDraw& draw, const std::vector<int32_t>& length, uint64_t seed,
                                  const Slot& slot) {
  std::vector<int32_t> indices;
  indices.reserve(static_cast<size_t>(draw.num_tokens * draw.topk));
  for (int64_t t = 0; t < draw.num_tokens; ++t) {
    Random random(mix(seed, static_cast<uint64_t>(t)));
    const bool empty = draw.num_rows == 0 || random.chance(draw.empty_share);
    const int32_t wild[] = {-1, -1, -1, 2147483647, static_cast<int32_t>(draw.num_slots), -2147483647 - 1, -77};
    int32_t first = -1;
    for (int32_t i = 0; i < draw.topk; ++i) {
      int32_t index = random.pick(std::span<const int32_t>(wild));
      const bool garbage = i >= length[static_cast<size_t>(t)];
      if (garbage) {
        if (draw.num_slots > 0 && random.chance(0.5))
          index = static_cast<int32_t>(random.integer(0, draw.num_slots - 1));  // a row that must not be looked at
      } else if (!empty && !random.chance(draw.invalid_share)) {
        index = first >= 0 && random.chance(draw.duplicate_share)
                    ? first
                    : static_cast<int32_t>(slot(random.integer(0, draw.num_rows - 1)));
        if (first < 0) first = index;
      }
      indices.push_back(index);
    }
  }
  return indices;
}

}  // namespace mla::kit

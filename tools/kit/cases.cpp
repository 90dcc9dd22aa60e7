// SPDX-License-Identifier: Apache-2.0
#include "kit/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kit/paged_memory.h"

namespace mla::kit {
namespace {

/// Which random stream a tensor draws from.
enum Stream : uint64_t { kQ = 11, kK, kV, kO, kLse, kRows, kSlots, kEmpty, kCache };

/// [outer, heads, width] with padding behind every head and every outer row.
TensorView padded_view(const Buffer& buffer, DType dtype, int64_t outer, int64_t heads, int64_t width,
                       int64_t head_extra, int64_t outer_extra) {
  TensorView view = contiguous(buffer.data(), dtype, {outer, heads, width});
  view.stride[1] = width + head_extra;
  view.stride[0] = heads * view.stride[1] + outer_extra;
  return view;
}

Buffer padded_buffer(DType dtype, int64_t outer, int64_t heads, int64_t width, int64_t head_extra,
                     int64_t outer_extra) {
  return Buffer(static_cast<size_t>(outer * (heads * (width + head_extra) + outer_extra)) * size_of(dtype));
}

/// [rows, width] with padding behind every row.
TensorView rows_view(const Buffer& buffer, DType dtype, int64_t rows, int64_t width, int64_t row_extra) {
  TensorView view = contiguous(buffer.data(), dtype, {rows, width});
  view.stride[0] = width + row_extra;
  return view;
}

Buffer rows_buffer(DType dtype, int64_t rows, int64_t width, int64_t row_extra) {
  return Buffer(static_cast<size_t>(rows * (width + row_extra)) * size_of(dtype));
}

std::vector<int32_t> prefix_sums(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> sums = {0};
  for (int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

/// Rows of `view` [outer, heads, width]: columns [first, first + n) of row (i, h) are those of the key (seed, stream,
/// i, h), whatever the strides.
void fill_heads(const TensorView& view, uint64_t seed, uint64_t stream, float std) {
  for (int64_t i = 0; i < view.shape[0]; ++i)
    for (int64_t h = 0; h < view.shape[1]; ++h)
      fill_normal(view.data, view.dtype, i * view.stride[0] + h * view.stride[1], view.shape[2],
                  mix(seed, stream, static_cast<uint64_t>(i), static_cast<uint64_t>(h)), std);
}

}  // namespace

DecodeCase::DecodeCase(const DecodeSpec& decode_spec) : spec(decode_spec) {
  std::vector<int32_t> q_len;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) q_len.push_back(spec.q_len_of(request));
  const std::vector<int32_t> indptr = prefix_sums(q_len);
  num_tokens = indptr.back();
  if (!spec.omit_qo_indptr) qo_indptr = to_buffer(indptr);
  memory = make_paged(spec.cache, spec.kv_len, mix(spec.seed, kCache));

  const int64_t heads = spec.num_heads, d_v = spec.cache.d_v, d_pe = spec.cache.d_qk - spec.cache.d_v;
  const auto d_qk = static_cast<float>(spec.cache.d_qk);
  const float std = spec.score_std / (spec.effective_sm_scale() * std::sqrt(d_qk));
  const auto make = [&](Buffer& buffer, int64_t width) {
    buffer = padded_buffer(spec.q_dtype, num_tokens, heads, width, spec.q_head_extra, spec.q_token_extra);
    buffer.fill(kNanByte);
  };
  // The parts are drawn one by one, so that split and joined queries of one seed are equal.
  TensorView nope, pe;
  if (spec.split_q) {
    make(q_nope, d_v);
    if (d_pe > 0) make(q_pe, d_pe);
    nope = params().q_nope;
    pe = params().q_pe;
  } else {
    make(q, spec.cache.d_qk);
    nope = pe = params().q;
    nope.shape[2] = d_v;
    pe.shape[2] = d_pe;
    pe.data = static_cast<std::byte*>(pe.data) + static_cast<size_t>(d_v) * size_of(spec.q_dtype);
  }
  fill_heads(nope, spec.seed, kQ, std);
  if (d_pe > 0) fill_heads(pe, spec.seed, kQ + 100, std);

  o = padded_buffer(spec.o_dtype, num_tokens, heads, d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) lse = rows_buffer(DType::kF32, num_tokens, heads, spec.lse_token_extra);
  reset_outputs();
}

DecodeParams DecodeCase::params() const {
  const int64_t heads = spec.num_heads, d_v = spec.cache.d_v, d_pe = spec.cache.d_qk - spec.cache.d_v;
  DecodeParams p;
  if (spec.split_q) {
    p.q_nope = padded_view(q_nope, spec.q_dtype, num_tokens, heads, d_v, spec.q_head_extra, spec.q_token_extra);
    if (d_pe > 0)
      p.q_pe = padded_view(q_pe, spec.q_dtype, num_tokens, heads, d_pe, spec.q_head_extra, spec.q_token_extra);
  } else {
    p.q = padded_view(q, spec.q_dtype, num_tokens, heads, spec.cache.d_qk, spec.q_head_extra, spec.q_token_extra);
  }
  p.cache = memory.cache;
  p.pages = memory.pages;
  if (!spec.omit_qo_indptr) p.qo_indptr = contiguous(qo_indptr.data(), DType::kI32, {spec.batch_size() + 1});
  p.causal = spec.causal;
  p.sm_scale = spec.effective_sm_scale();
  p.lse_base = spec.lse_base;
  p.batch_invariant = spec.batch_invariant;
  p.o = padded_view(o, spec.o_dtype, num_tokens, heads, d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) p.lse = rows_view(lse, DType::kF32, num_tokens, heads, spec.lse_token_extra);
  return p;
}

void DecodeCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
}

PrefillCase::PrefillCase(const PrefillSpec& prefill_spec) : spec(prefill_spec) {
  std::vector<int32_t> q_len;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) q_len.push_back(spec.q_len_of(request));
  const std::vector<int32_t> qo = prefix_sums(q_len), kv = prefix_sums(spec.kv_len);
  num_tokens = qo.back();
  num_keys = kv.back();
  qo_indptr = to_buffer(qo);
  kv_indptr = to_buffer(kv);
  const int64_t heads = spec.num_heads;
  q = padded_buffer(spec.dtype, num_tokens, heads, spec.d_qk, spec.q_head_extra, spec.q_token_extra);
  k = padded_buffer(spec.dtype, num_keys, heads, spec.d_qk, spec.k_head_extra, spec.k_token_extra);
  v = padded_buffer(spec.dtype, num_keys, heads, spec.d_v, spec.v_head_extra, spec.v_token_extra);
  if (spec.poison)
    for (const Buffer* buffer : {&q, &k, &v}) buffer->fill(kNanByte);
  const PrefillParams p = params();
  const float std = spec.score_std / (p.sm_scale * std::sqrt(static_cast<float>(spec.d_qk)));
  fill_heads(p.q, spec.seed, kQ, std);
  fill_heads(p.k, spec.seed, kK, 1.0F);
  fill_heads(p.v, spec.seed, kV, 1.0F);
  o = padded_buffer(spec.o_dtype, num_tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) lse = rows_buffer(DType::kF32, num_tokens, heads, spec.lse_token_extra);
  reset_outputs();
}

PrefillParams PrefillCase::params() const {
  const int64_t heads = spec.num_heads;
  PrefillParams p;
  p.q = padded_view(q, spec.dtype, num_tokens, heads, spec.d_qk, spec.q_head_extra, spec.q_token_extra);
  p.k = padded_view(k, spec.dtype, num_keys, heads, spec.d_qk, spec.k_head_extra, spec.k_token_extra);
  p.v = padded_view(v, spec.dtype, num_keys, heads, spec.d_v, spec.v_head_extra, spec.v_token_extra);
  p.qo_indptr = contiguous(qo_indptr.data(), DType::kI32, {spec.batch_size() + 1});
  p.kv_indptr = contiguous(kv_indptr.data(), DType::kI32, {spec.batch_size() + 1});
  p.causal = spec.causal;
  p.sm_scale = spec.effective_sm_scale();
  p.lse_base = spec.lse_base;
  p.batch_invariant = spec.batch_invariant;
  p.o = padded_view(o, spec.o_dtype, num_tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) p.lse = rows_view(lse, DType::kF32, num_tokens, heads, spec.lse_token_extra);
  return p;
}

void PrefillCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
}

namespace {

/// Draws the states of `o` [T, H, d_v] and `lse` [T, H]; empty ones have lse = -inf and NaN for o.
void fill_states(const MergeSpec& spec, const TensorView& o, const TensorView& lse, uint64_t state) {
  float* lse_data = static_cast<float*>(lse.data);
  for (int64_t t = 0; t < o.shape[0]; ++t) {
    for (int64_t h = 0; h < o.shape[1]; ++h) {
      const uint64_t key = mix(spec.seed, state, static_cast<uint64_t>(t), static_cast<uint64_t>(h));
      float* const lse_at = lse_data + t * lse.stride[0] + h * lse.stride[1];
      const int64_t o_at = t * o.stride[0] + h * o.stride[1];
      if (Random(mix(key, kEmpty)).chance(spec.empty_share)) {
        *lse_at = -std::numeric_limits<float>::infinity();
        std::fill_n(static_cast<std::byte*>(o.data) + static_cast<size_t>(o_at) * size_of(o.dtype),
                    static_cast<size_t>(o.shape[2]) * size_of(o.dtype), std::byte{kNanByte});
      } else {
        fill_normal(lse.data, DType::kF32, lse_at - lse_data, 1, mix(key, kLse), spec.lse_std);
        fill_normal(o.data, o.dtype, o_at, o.shape[2], mix(key, kO));
      }
    }
  }
}

}  // namespace

MergeCase::MergeCase(const MergeSpec& merge_spec) : spec(merge_spec) {
  const int64_t tokens = spec.num_tokens, heads = spec.num_heads;
  const int64_t token = heads * (spec.d_v + spec.partial_head_extra) + spec.partial_token_extra;
  partial_o = Buffer(static_cast<size_t>(spec.num_states * (tokens * token + spec.partial_state_extra)) *
                     size_of(spec.partial_dtype));
  partial_o.fill(kNanByte);
  partial_lse = Buffer(static_cast<size_t>(spec.num_states * tokens * heads) * sizeof(float));
  o = padded_buffer(spec.o_dtype, tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) lse = rows_buffer(DType::kF32, tokens, heads, 0);

  const MergeStatesParams p = params();
  for (int64_t n = 0; n < spec.num_states; ++n) {
    TensorView state = contiguous(static_cast<std::byte*>(p.partial_o.data) +
                                      static_cast<size_t>(n * p.partial_o.stride[0]) * size_of(spec.partial_dtype),
                                  spec.partial_dtype, {tokens, heads, spec.d_v});
    state.stride[0] = p.partial_o.stride[1];
    state.stride[1] = p.partial_o.stride[2];
    const TensorView state_lse = contiguous(partial_lse.as<float>() + n * tokens * heads, DType::kF32, {tokens, heads});
    fill_states(spec, state, state_lse, static_cast<uint64_t>(n));
  }
  reset_outputs();
}

MergeStatesParams MergeCase::params() const {
  const int64_t states = spec.num_states, tokens = spec.num_tokens, heads = spec.num_heads;
  MergeStatesParams p;
  p.partial_o = contiguous(partial_o.data(), spec.partial_dtype, {states, tokens, heads, spec.d_v});
  p.partial_o.stride[2] = spec.d_v + spec.partial_head_extra;
  p.partial_o.stride[1] = heads * p.partial_o.stride[2] + spec.partial_token_extra;
  p.partial_o.stride[0] = tokens * p.partial_o.stride[1] + spec.partial_state_extra;
  p.partial_lse = contiguous(partial_lse.data(), DType::kF32, {states, tokens, heads});
  p.lse_base = spec.lse_base;
  p.in_place = spec.in_place;
  p.o = padded_view(o, spec.o_dtype, tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) p.lse = rows_view(lse, DType::kF32, tokens, heads, 0);
  return p;
}

void MergeCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
  const MergeStatesParams p = params();
  if (spec.in_place) fill_states(spec, p.o, p.lse, static_cast<uint64_t>(spec.num_states));
}

AppendCase::AppendCase(const AppendSpec& append_spec) : spec(append_spec) {
  const int64_t d_pe = spec.cache.d_qk - spec.cache.d_v;
  const auto make = [&](Buffer& buffer, int64_t width, uint64_t stream) {
    buffer = rows_buffer(spec.dtype, spec.num_tokens, width, spec.row_extra);
    buffer.fill(kNanByte);
    for (int64_t t = 0; t < spec.num_tokens; ++t)
      fill_normal(buffer.data(), spec.dtype, t * (width + spec.row_extra), width,
                  mix(spec.seed, stream, static_cast<uint64_t>(t)));
  };
  if (spec.split_rows) {
    make(ckv_rows, spec.cache.d_v, kRows);
    if (d_pe > 0) make(kpe_rows, d_pe, kRows + 100);
  } else {
    make(rows, spec.cache.d_qk, kRows);
  }

  Random random(mix(spec.seed, kSlots));
  std::vector<int64_t> slots(static_cast<size_t>(spec.num_pages) * static_cast<size_t>(spec.cache.page_size));
  std::iota(slots.begin(), slots.end(), 0);
  for (size_t i = 0; i < static_cast<size_t>(spec.num_tokens); ++i) {
    std::swap(
        slots[i],
        slots[static_cast<size_t>(random.integer(static_cast<int64_t>(i), static_cast<int64_t>(slots.size()) - 1))]);
    if (random.chance(spec.skip_share)) slots[i] = -random.integer(1, 3);
  }
  slots.resize(static_cast<size_t>(spec.num_tokens));
  slot_mapping = to_buffer(slots);
  memory = make_pool(spec.cache, spec.num_pages);
  reset_outputs();
}

AppendParams AppendCase::params() const {
  AppendParams p;
  if (spec.split_rows) {
    p.ckv = rows_view(ckv_rows, spec.dtype, spec.num_tokens, spec.cache.d_v, spec.row_extra);
    if (spec.cache.d_qk > spec.cache.d_v)
      p.kpe = rows_view(kpe_rows, spec.dtype, spec.num_tokens, spec.cache.d_qk - spec.cache.d_v, spec.row_extra);
  } else {
    p.kv = rows_view(rows, spec.dtype, spec.num_tokens, spec.cache.d_qk, spec.row_extra);
  }
  p.slot_mapping = contiguous(slot_mapping.data(), DType::kI64, {spec.num_tokens});
  p.cache = memory.cache;
  return p;
}

void AppendCase::reset_outputs() const {
  for (const Buffer* buffer : {&memory.kv, &memory.ckv, &memory.kpe}) buffer->fill(kUntouched);
}

GatherCase::GatherCase(const GatherSpec& gather_spec) : spec(gather_spec) {
  memory = make_paged(spec.cache, spec.kv_len, mix(spec.seed, kCache));
  const std::vector<int32_t> indptr = prefix_sums(spec.count);
  num_rows = indptr.back();
  out_indptr = to_buffer(indptr);
  if (!spec.omit_token_start) token_start = to_buffer(spec.token_start);
  if (spec.split_out) {
    out_ckv = rows_buffer(spec.out_dtype, num_rows, spec.cache.d_v, spec.row_extra);
    if (spec.cache.d_qk > spec.cache.d_v)
      out_kpe = rows_buffer(spec.out_dtype, num_rows, spec.cache.d_qk - spec.cache.d_v, spec.row_extra);
  } else {
    out_kv = rows_buffer(spec.out_dtype, num_rows, spec.cache.d_qk, spec.row_extra);
  }
  reset_outputs();
}

GatherParams GatherCase::params() const {
  GatherParams p;
  p.cache = memory.cache;
  p.pages = memory.pages;
  if (!spec.omit_token_start) p.token_start = contiguous(token_start.data(), DType::kI32, {spec.batch_size()});
  p.out_indptr = contiguous(out_indptr.data(), DType::kI32, {spec.batch_size() + 1});
  if (spec.split_out) {
    p.out_ckv = rows_view(out_ckv, spec.out_dtype, num_rows, spec.cache.d_v, spec.row_extra);
    if (spec.cache.d_qk > spec.cache.d_v)
      p.out_kpe = rows_view(out_kpe, spec.out_dtype, num_rows, spec.cache.d_qk - spec.cache.d_v, spec.row_extra);
  } else {
    p.out_kv = rows_view(out_kv, spec.out_dtype, num_rows, spec.cache.d_qk, spec.row_extra);
  }
  return p;
}

void GatherCase::reset_outputs() const {
  for (const Buffer* buffer : {&out_kv, &out_ckv, &out_kpe}) buffer->fill(kUntouched);
}

}  // namespace mla::kit

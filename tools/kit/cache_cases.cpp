// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "kit/case_parts.h"
#include "kit/cases.h"
#include "kit/paged_memory.h"

namespace mla::kit {
namespace {

constexpr int64_t kGroup = 64;  // channels that share a magnitude

/// Fills a group with values that quantization must get right: zeros, infinities, NaN, huge and tiny ones among usual
/// ones.
void fill_special(void* data, DType dtype, int64_t offset, int64_t n, uint64_t key) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr std::array<float, 12> kValues = {0.0F,  -0.0F,  kInf, -kInf,  std::numeric_limits<float>::quiet_NaN(),
                                             3e38F, -1e30F, 6e4F, 1e-30F, 1e-41F,
                                             1e-4F, -448.0F};
  Random random(key);
  const int64_t kind = random.integer(0, 3);
  fill_normal(data, dtype, offset, n, key);
  for (int64_t c = 0; c < n; ++c) {
    if (kind == 0) store_element(data, dtype, offset + c, 0.0F);
    if (kind == 1) store_element(data, dtype, offset + c, random.chance(0.5) ? 0.0F : 1e-6F);
    if (kind >= 2 && random.chance(kind == 2 ? 0.05 : 0.6))
      store_element(data, dtype, offset + c, random.pick(std::span<const float>(kValues)));
  }
}

}  // namespace

Buffer make_rows(const RowsDraw& draw) {
  constexpr std::array<float, 5> kMagnitudes = {0.01F, 0.5F, 1.0F, 1.0F, 20.0F};
  const int64_t stride = draw.width + draw.row_extra;
  Buffer buffer = rows_buffer(draw.dtype, draw.num_rows, draw.width, draw.row_extra);
  buffer.fill(kNanByte);
  for (int64_t t = 0; t < draw.num_rows; ++t) {
    const uint64_t key = mix(draw.seed, static_cast<uint64_t>(t));
    const bool special = Random(key).chance(draw.special_share);
    for (int64_t c = 0; c < draw.width; c += kGroup) {
      const int64_t n = std::min(kGroup, draw.width - c);
      const uint64_t group = mix(key, static_cast<uint64_t>(c));
      if (special)
        fill_special(buffer.data(), draw.dtype, t * stride + c, n, group);
      else
        fill_normal(buffer.data(), draw.dtype, t * stride + c, n, group, kMagnitudes[group % kMagnitudes.size()]);
    }
  }
  return buffer;
}

Buffer angles(int64_t positions, int32_t channels, int64_t extra) {
  Buffer buffer = rows_buffer(DType::kF32, positions, channels, extra);
  buffer.fill(kNanByte);
  for (int64_t position = 0; position < positions; ++position) {
    float* const row = buffer.as<float>() + position * (channels + extra);
    for (int32_t i = 0; i < channels / 2; ++i) {
      const float angle = static_cast<float>(position) *
                          std::pow(10000.0F, -2.0F * static_cast<float>(i) / static_cast<float>(channels));
      row[i] = std::cos(angle);
      row[channels / 2 + i] = std::sin(angle);
    }
  }
  return buffer;
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

int64_t lse_state_stride(const MergeSpec& spec) {
  const int64_t token = spec.num_heads * (1 + spec.partial_lse_head_extra) + spec.partial_lse_token_extra;
  return spec.num_tokens * token + spec.partial_lse_state_extra;
}

}  // namespace

MergeCase::MergeCase(const MergeSpec& merge_spec) : spec(noted(merge_spec)) {
  const int64_t tokens = spec.num_tokens, heads = spec.num_heads;
  const int64_t token = heads * (spec.d_v + spec.partial_head_extra) + spec.partial_token_extra;
  partial_o = Buffer(static_cast<size_t>(spec.num_states * (tokens * token + spec.partial_state_extra)) *
                     size_of(spec.partial_dtype));
  partial_o.fill(kNanByte);
  partial_lse = Buffer(static_cast<size_t>(spec.num_states * lse_state_stride(spec)) * sizeof(float));
  partial_lse.fill(kNanByte);
  o = padded_buffer(spec.o_dtype, tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) lse = statistics_buffer(tokens, heads, spec.lse_head_extra, spec.lse_token_extra);

  const MergeStatesParams p = params();
  for (int64_t n = 0; n < spec.num_states; ++n) {
    TensorView state = contiguous(static_cast<std::byte*>(p.partial_o.data) +
                                      static_cast<size_t>(n * p.partial_o.stride[0]) * size_of(spec.partial_dtype),
                                  spec.partial_dtype, {tokens, heads, spec.d_v});
    state.stride[0] = p.partial_o.stride[1];
    state.stride[1] = p.partial_o.stride[2];
    TensorView state_lse =
        contiguous(partial_lse.as<float>() + n * p.partial_lse.stride[0], DType::kF32, {tokens, heads});
    state_lse.stride[0] = p.partial_lse.stride[1];
    state_lse.stride[1] = p.partial_lse.stride[2];
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
  p.partial_lse.stride[2] = 1 + spec.partial_lse_head_extra;
  p.partial_lse.stride[1] = heads * p.partial_lse.stride[2] + spec.partial_lse_token_extra;
  p.partial_lse.stride[0] = lse_state_stride(spec);
  p.lse_base = spec.lse_base;
  p.in_place = spec.in_place;
  p.o = padded_view(o, spec.o_dtype, tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  if (spec.want_lse) p.lse = statistics_view(lse, tokens, heads, spec.lse_head_extra, spec.lse_token_extra);
  return p;
}

void MergeCase::reset_outputs() const {
  o.fill(kUntouched);
  lse.fill(kUntouched);
  const MergeStatesParams p = params();
  if (spec.in_place) fill_states(spec, p.o, p.lse, static_cast<uint64_t>(spec.num_states));
}

AppendCase::AppendCase(const AppendSpec& append_spec) : spec(noted(append_spec)) {
  const auto make = [&](int64_t width, uint64_t stream) {
    return make_rows({.num_rows = spec.num_tokens,
                      .width = width,
                      .row_extra = spec.row_extra,
                      .dtype = spec.dtype,
                      .special_share = spec.special_share,
                      .seed = mix(spec.seed, stream)});
  };
  if (spec.split_rows) {
    ckv_rows = make(spec.cache.d_ckv(), kRows);
    if (spec.cache.d_kpe() > 0) kpe_rows = make(spec.cache.d_kpe(), kRows + 100);
  } else {
    rows = make(spec.cache.d_qk, kRows);
  }
  slot_mapping = make_slot_mapping(spec.num_tokens, int64_t{spec.num_pages} * spec.cache.page_size, spec.skip_share,
                                   mix(spec.seed, kSlots));
  memory = make_pool(spec.cache, spec.num_pages);
  reset_outputs();
}

AppendParams AppendCase::params() const {
  AppendParams p;
  if (spec.split_rows) {
    p.ckv = rows_view(ckv_rows, spec.dtype, spec.num_tokens, spec.cache.d_ckv(), spec.row_extra);
    if (spec.cache.d_kpe() > 0)
      p.kpe = rows_view(kpe_rows, spec.dtype, spec.num_tokens, spec.cache.d_kpe(), spec.row_extra);
  } else {
    p.kv = rows_view(rows, spec.dtype, spec.num_tokens, spec.cache.d_qk, spec.row_extra);
  }
  p.slot_mapping = list_view(slot_mapping, DType::kI64, spec.num_tokens);
  p.cache = memory.cache;
  return p;
}

void AppendCase::reset_outputs() const { untouched(outputs()); }

AppendRopeCase::AppendRopeCase(const AppendRopeSpec& rope_spec) : spec(noted(rope_spec)) {
  const int64_t tokens = spec.num_tokens, heads = spec.num_heads;
  const int32_t d_ckv = spec.cache.d_plain(), d_kpe = spec.cache.d_rotary();
  const auto make = [&](Buffer& buffer, int64_t width) {
    buffer = padded_buffer(spec.q_dtype, tokens, heads, width, spec.q_head_extra, spec.q_token_extra);
    buffer.fill(kNanByte);
  };
  const auto make_key_rows = [&](int64_t width, uint64_t stream, double special_share) {
    return make_rows({.num_rows = tokens,
                      .width = width,
                      .row_extra = spec.row_extra,
                      .dtype = spec.dtype,
                      .special_share = special_share,
                      .seed = mix(spec.seed, stream)});
  };
  using Spec = AppendRopeSpec;
  const auto make_weight = [&](int64_t channels, uint64_t stream) {
    Buffer buffer = rows_buffer(spec.norm_dtype, 1, channels, 0);
    fill_normal(buffer.data(), spec.norm_dtype, 0, channels, mix(spec.seed, stream));
    return buffer;
  };
  // The sign of a NaN that a rotation makes is not defined; a norm leaves one NaN.
  ckv_rows = make_key_rows(d_ckv, kRows, spec.special_share);
  if (d_kpe > 0) kpe_rows = make_key_rows(d_kpe, kRows + 100, spec.norm == Spec::Norm::kRow ? spec.special_share : 0.0);
  memory = make_pool(spec.cache, spec.num_pages);
  slot_mapping = make_slot_mapping(tokens, int64_t{spec.num_pages} * spec.cache.page_size, spec.skip_share,
                                   mix(spec.seed, kSlots));
  if (heads > 0) {
    make(q_nope, d_ckv);
    if (d_kpe > 0) make(q_pe, d_kpe);
    q_out =
        padded_buffer(spec.q_out_dtype, tokens, heads, spec.cache.d_qk, spec.q_out_head_extra, spec.q_out_token_extra);
    if (spec.q_out_dtype == DType::kE4M3) q_scale = to_buffer(std::array{spec.q_scale});
    if (spec.q_norm_weight) q_norm_weight = make_weight(spec.cache.d_qk, kWeights);
  }
  if (spec.norm != Spec::Norm::kNone) norm_weight = make_weight(spec.norm_channels(), kWeights + 100);

  Random random(mix(spec.seed, kAngles));
  std::vector<int64_t> places;
  for (int64_t t = 0; t < tokens; ++t) places.push_back(random.integer(0, int64_t{spec.max_positions} - 1));
  positions = to_buffer(places);
  if (d_kpe > 0) cos_sin = angles(spec.max_positions, d_kpe, spec.cos_sin_extra);
  if (heads > 0) {
    const AppendRopeParams p = params();
    fill_heads(p.q_nope, spec.seed, kQ, 1.0F);
    if (d_kpe > 0) fill_heads(p.q_pe, spec.seed, kQ + 100, 1.0F);
  }
  reset_outputs();
}

AppendRopeParams AppendRopeCase::params() const {
  const int64_t tokens = spec.num_tokens, heads = spec.num_heads;
  const int32_t d_ckv = spec.cache.d_plain(), d_kpe = spec.cache.d_rotary();
  AppendRopeParams p;
  if (heads > 0) {
    p.q_nope = padded_view(q_nope, spec.q_dtype, tokens, heads, d_ckv, spec.q_head_extra, spec.q_token_extra);
    if (d_kpe > 0)
      p.q_pe = padded_view(q_pe, spec.q_dtype, tokens, heads, d_kpe, spec.q_head_extra, spec.q_token_extra);
    p.q_out = padded_view(q_out, spec.q_out_dtype, tokens, heads, spec.cache.d_qk, spec.q_out_head_extra,
                          spec.q_out_token_extra);
    if (spec.q_out_dtype == DType::kE4M3) p.q_scale = list_view(q_scale, DType::kF32, 1);
  }
  p.ckv = rows_view(ckv_rows, spec.dtype, tokens, d_ckv, spec.row_extra);
  if (d_kpe > 0) {
    p.kpe = rows_view(kpe_rows, spec.dtype, tokens, d_kpe, spec.row_extra);
    p.cos_sin = rows_view(cos_sin, DType::kF32, spec.max_positions, d_kpe, spec.cos_sin_extra);
    p.positions = list_view(positions, DType::kI64, tokens);
  }
  p.interleaved = spec.interleaved;
  p.slot_mapping = list_view(slot_mapping, DType::kI64, tokens);
  p.q_norm = heads > 0 && spec.q_norm;
  if (p.q_norm && spec.q_norm_weight) p.q_norm_weight = list_view(q_norm_weight, spec.norm_dtype, spec.cache.d_qk);
  if (spec.norm != AppendRopeSpec::Norm::kNone)
    p.norm_weight = list_view(norm_weight, spec.norm_dtype, spec.norm_channels());
  p.cache = memory.cache;
  return p;
}

std::vector<const Buffer*> AppendRopeCase::outputs() const {
  std::vector<const Buffer*> buffers = memory.written();
  buffers.push_back(&q_out);
  return buffers;
}

void AppendRopeCase::reset_outputs() const { untouched(outputs()); }

GatherCase::GatherCase(const GatherSpec& gather_spec) : spec(noted(gather_spec)) {
  memory = make_paged(spec.cache, spec.kv_len, mix(spec.seed, kCache));
  const std::vector<int32_t> indptr = prefix_sums(spec.count);
  num_rows = indptr.back();
  out_indptr = to_buffer(indptr);
  if (!spec.omit_token_start) token_start = to_buffer(spec.token_start);
  if (spec.split_out) {
    out_ckv = rows_buffer(spec.out_dtype, num_rows, spec.cache.d_ckv(), spec.row_extra);
    if (spec.cache.d_kpe() > 0) out_kpe = rows_buffer(spec.out_dtype, num_rows, spec.cache.d_kpe(), spec.row_extra);
  } else {
    out_kv = rows_buffer(spec.out_dtype, num_rows, spec.cache.d_qk, spec.row_extra);
  }
  reset_outputs();
}

GatherParams GatherCase::params() const {
  GatherParams p;
  p.cache = memory.cache;
  p.pages = memory.pages;
  if (!spec.omit_token_start) p.token_start = list_view(token_start, DType::kI32, spec.batch_size());
  p.out_indptr = list_view(out_indptr, DType::kI32, spec.batch_size() + 1);
  if (spec.split_out) {
    p.out_ckv = rows_view(out_ckv, spec.out_dtype, num_rows, spec.cache.d_ckv(), spec.row_extra);
    if (spec.cache.d_kpe() > 0)
      p.out_kpe = rows_view(out_kpe, spec.out_dtype, num_rows, spec.cache.d_kpe(), spec.row_extra);
  } else {
    p.out_kv = rows_view(out_kv, spec.out_dtype, num_rows, spec.cache.d_qk, spec.row_extra);
  }
  return p;
}

void GatherCase::reset_outputs() const { untouched(outputs()); }

CopyPagesCase::CopyPagesCase(const CopyPagesSpec& copy_spec) : spec(noted(copy_spec)) {
  from = make_paged(spec.from, std::array{spec.num_tokens}, mix(spec.seed, kCache));
  CacheSpec target = spec.to;
  target.poison = false;
  to = make_pool(target, spec.num_tokens / spec.to.page_size + spec.to.unowned_pages);
  from_pages = to_buffer(from.pages_of[0]);
  std::vector<int32_t> order(static_cast<size_t>(to.num_pages));
  std::iota(order.begin(), order.end(), 0);
  Random random(mix(spec.seed, kTable));
  for (size_t i = order.size(); spec.to.shuffled_pages && i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  order.resize(static_cast<size_t>(spec.num_tokens / spec.to.page_size));
  to_pages = to_buffer(order);
  reset_outputs();
}

CopyPagesParams CopyPagesCase::params() const {
  CopyPagesParams p;
  p.from = from.cache;
  p.from_pages = list_view(from_pages, DType::kI32, spec.num_tokens / spec.from.page_size);
  p.to = to.cache;
  p.to_pages = list_view(to_pages, DType::kI32, spec.num_tokens / spec.to.page_size);
  return p;
}

void CopyPagesCase::reset_outputs() const { untouched(outputs()); }

}  // namespace mla::kit

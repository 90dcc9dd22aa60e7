// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kit/case_parts.h"
#include "kit/cases.h"

namespace mla::kit {
namespace {

int64_t gate_channels(const FinishSpec& spec, const FinishedRows& rows) {
  return spec.gate == FinishSpec::Gate::kHead ? 1 : rows.d_v;
}

/// Returns `view`, [T, H, n], as [T, G, H / G, n] whose groups of heads lie one behind another: as they do where tokens
/// are innermost; elsewhere the tokens of a group come before the next group.
TensorView in_groups(TensorView view, int64_t num_groups, bool tokens_inside) {
  if (num_groups == 0) return view;
  const int64_t heads = view.shape[1] / num_groups;
  const int64_t token = tokens_inside ? view.stride[0] : view.stride[0] / num_groups;
  const int64_t group = tokens_inside ? heads * view.stride[1] : view.shape[0] * token;
  view.ndim = 4;
  view.shape = {view.shape[0], num_groups, heads, view.shape[2]};
  view.stride = {token, group, view.stride[1], view.stride[2]};
  return view;
}

TensorView scale_view(const FinishSpec& spec, const FinishedRows& rows, const Buffer& buffer) {
  const int64_t scales = rows.num_scales(spec), heads = rows.num_heads;
  TensorView view = contiguous(buffer.data(), spec.scale_dtype, {rows.num_tokens, heads, scales});
  if (spec.tokens_innermost) {
    const int64_t column = rows.num_tokens + spec.scale_extra;
    view.stride[0] = 1;
    view.stride[1] = scales * column;
    view.stride[2] = column;
  } else {
    view.stride[1] = scales + spec.scale_extra;
    view.stride[0] = heads * view.stride[1];
  }
  return in_groups(view, spec.num_groups, spec.tokens_innermost);
}

}  // namespace

FinishMemory::FinishMemory(const FinishSpec& spec, const FinishedRows& rows, uint64_t seed) {
  const int64_t tokens = rows.num_tokens, heads = rows.num_heads;
  if (spec.d_rotary > 0) {
    Random random(mix(seed, kAngles));
    std::vector<int64_t> places;
    for (int64_t t = 0; t < tokens; ++t) places.push_back(random.integer(0, int64_t{spec.max_positions} - 1));
    positions = to_buffer(places);
    cos_sin = angles(spec.max_positions, spec.d_rotary, spec.cos_sin_extra);
  }
  if (spec.gate != FinishSpec::Gate::kNone) {
    gate = padded_buffer(spec.gate_dtype, tokens, heads, gate_channels(spec, rows), spec.gate_head_extra,
                         spec.gate_token_extra);
    gate.fill(kNanByte);
    fill_heads(params(spec, rows).gate, seed, kWeights, 3.0F);
  }
  if (rows.is_quantized())
    scale =
        Buffer(static_cast<size_t>((tokens + spec.scale_extra) * heads * (rows.num_scales(spec) + spec.scale_extra)) *
               size_of(spec.scale_dtype));
}

OutputFinish FinishMemory::params(const FinishSpec& spec, const FinishedRows& rows) const {
  OutputFinish p;
  if (spec.d_rotary > 0) {
    p.cos_sin = rows_view(cos_sin, DType::kF32, spec.max_positions, spec.d_rotary, spec.cos_sin_extra);
    p.positions = list_view(positions, DType::kI64, rows.num_tokens);
  }
  p.interleaved = spec.interleaved;
  if (spec.gate != FinishSpec::Gate::kNone)
    p.gate = padded_view(gate, spec.gate_dtype, rows.num_tokens, rows.num_heads, gate_channels(spec, rows),
                         spec.gate_head_extra, spec.gate_token_extra);
  if (rows.is_quantized()) p.scale = scale_view(spec, rows, scale);
  p.power_of_two_scales = spec.power_of_two_scales;
  return p;
}

Buffer FinishMemory::output(const FinishSpec& spec, const FinishedRows& rows, const RowGaps& gaps) {
  // Groups lie one behind another, so that the padding behind a token is that of each group.
  return padded_buffer(rows.out_dtype, rows.num_tokens, rows.num_heads, rows.d_v, gaps.head,
                       gaps.token * std::max(spec.num_groups, 1));
}

TensorView FinishMemory::output_view(const FinishSpec& spec, const FinishedRows& rows, const Buffer& out,
                                     const RowGaps& gaps) {
  return in_groups(padded_view(out, rows.out_dtype, rows.num_tokens, rows.num_heads, rows.d_v, gaps.head,
                               gaps.token * std::max(spec.num_groups, 1)),
                   spec.num_groups, false);
}

FinishOutputCase::FinishOutputCase(const FinishOutputSpec& finish_spec)
    : spec(noted(finish_spec)), finish(spec, spec.rows(), spec.seed) {
  const int64_t tokens = spec.num_tokens, heads = spec.num_heads;
  o = padded_buffer(spec.dtype, tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  o.fill(kNanByte);
  const Buffer rows = make_rows({.num_rows = tokens * heads,
                                 .width = spec.d_v,
                                 .dtype = spec.dtype,
                                 .special_share = spec.special_share,
                                 .seed = mix(spec.seed, kRows)});
  const TensorView to = padded_view(o, spec.dtype, tokens, heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  const size_t bytes = static_cast<size_t>(spec.d_v) * size_of(spec.dtype);
  for (int64_t row = 0; row < tokens * heads; ++row)
    std::memcpy(
        o.data() + static_cast<size_t>(row / heads * to.stride[0] + row % heads * to.stride[1]) * size_of(spec.dtype),
        rows.data() + static_cast<size_t>(row) * bytes, bytes);
  out = FinishMemory::output(spec, spec.rows(), {spec.out_head_extra, spec.out_token_extra});
  reset_outputs();
}

FinishOutputParams FinishOutputCase::params() const {
  FinishOutputParams p;
  p.o = padded_view(o, spec.dtype, spec.num_tokens, spec.num_heads, spec.d_v, spec.o_head_extra, spec.o_token_extra);
  p.finish = finish.params(spec, spec.rows());
  p.out = FinishMemory::output_view(spec, spec.rows(), out, {spec.out_head_extra, spec.out_token_extra});
  return p;
}

void FinishOutputCase::reset_outputs() const { untouched(outputs()); }

}  // namespace mla::kit

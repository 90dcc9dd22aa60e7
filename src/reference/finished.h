// SPDX-License-Identifier: Apache-2.0
// This file has what becomes of a row of attention's output: its rotary channels turn back, a gate multiplies it, and
// its groups are quantized. DeepSeek V4's inverse rotation and quantization stand in vLLM
// (models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py) and in FlashMLA (fused_norm_rope_attn_rope_cast_fwd), a
// gate of an MLA output in transformers (models/kimi_k3).
#pragma once

#include <cmath>
#include <cstdint>

#include "reference/rotated.h"

namespace mla::reference {

/// Says which row of outputs is finished.
struct FinishedRow {
  int64_t token;
  int32_t head, d_v;
};

/// Finishes and stores a row, whose channels `o` gives in f32.
template <class Source>
void write_finished(const core::Finish& finish, const FinishedRow& row, const Source& o) {
  const int32_t num_plain = row.d_v - finish.d_rotary;
  const auto pe = [&](int32_t c) { return o(num_plain + c); };
  const Rotated<decltype(pe)> rotated = {
      .pe = pe,
      .dim = finish.d_rotary,
      .cos_sin =
          finish.d_rotary > 0 ? finish.cos_sin + finish.positions[row.token] * finish.cos_sin_stride_position : nullptr,
      .interleaved = finish.interleaved,
      .inverse = true};
  const auto finished = [&](int32_t c) {
    const float value = c < num_plain ? o(c) : rotated(c - num_plain);
    if (finish.gate == nullptr) return value;
    const int64_t gates = row.token * finish.gate_stride_token + row.head * finish.gate_stride_head;
    const float gate = load(finish.gate, finish.gate_dtype, gates + (finish.gate_channels == 1 ? 0 : c));
    return static_cast<float>(static_cast<double>(value) / (1 + std::exp(-static_cast<double>(gate))));
  };
  const int64_t out = finish.out_row(row.token, row.head);
  if (finish.out_dtype != DType::kE4M3) return write_channels(finished, row.d_v, finish.out_dtype, out, finish.out);
  const int32_t group = finish.channels_per_scale;
  for (int32_t s = 0; s < row.d_v / group; ++s) {
    const float scale = choose_scale(DType::kE4M3, ScaleType::kF32, finish.power_of_two_scales,
                                     finite_amax(finished, s * group, group));
    std::byte* const at = finish.scale_at(row.token, row.head, s);
    if (finish.scale_dtype == DType::kF32)
      write_as(at, scale);
    else
      write_as(at, f32_to_ue8m0(scale));
    for (int32_t c = s * group; c < (s + 1) * group; ++c)
      write_as(static_cast<std::byte*>(finish.out) + out + c, quantize_e4m3(finished(c), scale));
  }
}

}  // namespace mla::reference

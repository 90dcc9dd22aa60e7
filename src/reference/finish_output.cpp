// SPDX-License-Identifier: Apache-2.0
// finish_output turns the rotary channels of attention's output back, multiplies by a gate, and quantizes. DeepSeek
// V4's inverse rotation and quantization stand in vLLM (models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py) and
// in FlashMLA (fused_norm_rope_attn_rope_cast_fwd), a gate of an MLA output in transformers (models/kimi_k3).
#include <cmath>

#include "reference/cache_rows.h"
#include "reference/reference.h"
#include "reference/rotated.h"

namespace mla::reference {
namespace {

/// Gives the channels of a finished row, before they are rounded.
struct Finished {
  const core::FinishOutputArgs& args;
  int64_t token;
  int32_t head;

  float operator()(int32_t c) const {
    const int64_t first = token * args.o_stride_token + head * args.o_stride_head;
    const int32_t num_plain = args.d_v - args.d_rotary;
    const Channels o = {args.o, args.o_dtype, first};
    float value = o(c);
    if (c >= num_plain)
      value = Rotated<Channels>{.pe = {args.o, args.o_dtype, first + num_plain},
                                .dim = args.d_rotary,
                                .cos_sin = args.cos_sin + args.positions[token] * args.cos_sin_stride_position,
                                .interleaved = args.interleaved,
                                .inverse = true}(c - num_plain);
    if (args.gate == nullptr) return value;
    const int64_t gates = token * args.gate_stride_token + head * args.gate_stride_head;
    const float gate = load(args.gate, args.gate_dtype, gates + (args.gate_channels == 1 ? 0 : c));
    return static_cast<float>(static_cast<double>(value) / (1 + std::exp(-static_cast<double>(gate))));
  }
};

}  // namespace

void finish_output(const core::FinishOutputArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    for (int32_t head = 0; head < args.num_heads; ++head) {
      const Finished source = {args, token, head};
      const int64_t out = args.out_row(token, head);
      if (args.out_dtype != DType::kE4M3) {
        write_channels(source, args.d_v, args.out_dtype, out, args.out);
        continue;
      }
      const int32_t group = args.channels_per_scale;
      for (int32_t s = 0; s < args.d_v / group; ++s) {
        const float scale = choose_scale(DType::kE4M3, ScaleType::kF32, args.power_of_two_scales,
                                         finite_amax(source, s * group, group));
        std::byte* const at = args.scale_at(token, head, s);
        if (args.scale_dtype == DType::kF32)
          write_as(at, scale);
        else
          write_as(at, f32_to_ue8m0(scale));
        for (int32_t c = s * group; c < (s + 1) * group; ++c)
          write_as(static_cast<std::byte*>(args.out) + out + c, quantize_e4m3(source(c), scale));
      }
    }
  }
}

}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
#include "kit/random_parts.h"
#include "kit/spec_line.h"

namespace mla::kit {

std::string describe(const FinishSpec& spec) {
  using Spec = FinishSpec;
  return Line(spec)
      .append(spec.gate == Spec::Gate::kNone   ? ""
              : spec.gate == Spec::Gate::kHead ? "gate=head"
                                               : "gate=channel")
      .knob("d_rotary", &Spec::d_rotary)
      .knob("interleaved", &Spec::interleaved)
      .knob("max_positions", &Spec::max_positions)
      .knob("gate_dtype", &Spec::gate_dtype)
      .knob("num_groups", &Spec::num_groups)
      .knob("channels_per_scale", &Spec::channels_per_scale)
      .knob("scale_dtype", &Spec::scale_dtype)
      .knob("power_of_two_scales", &Spec::power_of_two_scales)
      .knob("tokens_innermost", &Spec::tokens_innermost)
      .knob("gate_head_extra", &Spec::gate_head_extra)
      .knob("gate_token_extra", &Spec::gate_token_extra)
      .knob("scale_extra", &Spec::scale_extra)
      .knob("cos_sin_extra", &Spec::cos_sin_extra)
      .take();
}

std::string describe(const FinishOutputSpec& spec) {
  using Spec = FinishOutputSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_heads", &Spec::num_heads)
      .always("d_v", &Spec::d_v)
      .always("dtype", &Spec::dtype)
      .always("out_dtype", &Spec::out_dtype)
      .append(describe(static_cast<const FinishSpec&>(spec)))
      .knob("special_share", &Spec::special_share)
      .knob("o_head_extra", &Spec::o_head_extra)
      .knob("o_token_extra", &Spec::o_token_extra)
      .knob("out_head_extra", &Spec::out_head_extra)
      .knob("out_token_extra", &Spec::out_token_extra)
      .take();
}

Problem problem_of(const FinishOutputSpec& spec) {
  return {.op = Op::kFinishOutput,
          .device = {},
          .q_dtype = spec.dtype,
          .cache = {},
          .num_heads = spec.num_heads,
          .d_qk = spec.d_v,
          .d_v = spec.d_v};
}

double bytes_beside_rows(const FinishSpec& spec, const FinishedRows& rows) {
  using Gate = FinishSpec::Gate;
  const double gates = spec.gate == Gate::kNone ? 0 : spec.gate == Gate::kHead ? 1 : rows.d_v;
  const double scales = rows.is_quantized() ? rows.num_scales(spec) * bytes_of(spec.scale_dtype) : 0;
  const double token = spec.d_rotary > 0 ? spec.d_rotary * 4.0 + 8 : 0;
  return static_cast<double>(rows.num_tokens) * (rows.num_heads * (gates * bytes_of(spec.gate_dtype) + scales) + token);
}

Work work_of(const FinishOutputSpec& spec) {
  const double row = spec.d_v * (bytes_of(spec.dtype) + bytes_of(spec.out_dtype));
  return {.flops = 0,
          .bytes = static_cast<double>(spec.num_tokens) * spec.num_heads * row + bytes_beside_rows(spec, spec.rows())};
}

FinishSpec random_finish(Random& random, const FinishedRows& rows) {
  using Gate = FinishSpec::Gate;
  FinishSpec spec;
  spec.d_rotary = random.chance(0.3) ? 0 : pick(random, std::array<int32_t, 5>{64, 64, 32, 2, 6});
  if (random.chance(0.1)) spec.d_rotary = rows.d_v / 2 * 2;  // all channels turn
  spec.d_rotary = std::min(spec.d_rotary, rows.d_v / 2 * 2);
  spec.interleaved = random.chance(0.6);
  spec.max_positions = pick(random, std::array<int32_t, 3>{1, 17, 1000});
  spec.gate = pick(random, std::array<Gate, 4>{Gate::kNone, Gate::kNone, Gate::kHead, Gate::kChannel});
  spec.gate_dtype = random_float(random);
  if (random.chance(0.4)) spec.num_groups = rows.num_heads % 4 == 0 ? 4 : 1;
  spec.channels_per_scale = pick(random, std::array<int32_t, 3>{32, 64, 128});
  spec.scale_dtype = pick(random, std::array<DType, 3>{DType::kF32, DType::kU8, DType::kI32});
  if (rows.d_v / spec.channels_per_scale % 4 != 0 && spec.scale_dtype == DType::kI32) spec.scale_dtype = DType::kU8;
  spec.power_of_two_scales = spec.scale_dtype != DType::kF32 || random.chance(0.5);
  spec.tokens_innermost = random.chance(0.5);
  for (int64_t* extra : {&spec.gate_head_extra, &spec.gate_token_extra, &spec.scale_extra, &spec.cos_sin_extra})
    *extra = random_extra(random);
  return spec;
}

FinishOutputSpec random_finish_output_spec(uint64_t seed, DType dtype) {
  Random random(mix(seed, 0xF1915));
  FinishOutputSpec spec;
  spec.seed = seed;
  spec.num_tokens = static_cast<int32_t>(random.chance(0.05) ? 0 : random.integer(1, 20));
  spec.num_heads = pick(random, std::array<int32_t, 7>{1, 3, 8, 12, 16, 64, 128});
  if (spec.num_heads > 16) spec.num_tokens = std::min(spec.num_tokens, 3);
  spec.d_v = pick(random, std::array<int32_t, 5>{512, 512, 128, 256, 384});
  spec.dtype = dtype;
  spec.out_dtype = random.chance(0.6) ? DType::kE4M3 : random_float(random);
  if (spec.out_dtype != DType::kE4M3 && random.chance(0.2)) spec.d_v = pick(random, std::array<int32_t, 3>{7, 66, 130});
  static_cast<FinishSpec&>(spec) = random_finish(random, spec.rows());
  if (spec.gate == FinishSpec::Gate::kNone) spec.special_share = random.chance(0.3) ? 0.5 : 0.0;
  for (int64_t* extra : {&spec.o_head_extra, &spec.o_token_extra, &spec.out_head_extra, &spec.out_token_extra})
    *extra = random_extra(random);
  return spec;
}

}  // namespace mla::kit

// SPDX-License-Identifier: Apache-2.0
// Validates what becomes of attention's outputs, and the parameters of finish_output.
#include <cstdint>

#include "core/batch_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// Holds the extents and the strides, by group and head, of an output [T, H, n] or [T, G, H / G, n].
struct GroupedShape {
  int64_t num_groups = 1, heads_per_group = kUnbound, n = kUnbound;
  int64_t stride_token = 0, stride_group = 0, stride_head = 0, stride_channel = 0;
};

/// Checks an output of either form. `has_groups` says which; any_inner_stride, whether its channels may lie apart.
bool check_grouped(Checks& check, std::string_view field, const TensorView& view, DTypes dtypes, BatchShape& batch,
                   bool has_groups, bool any_inner_stride, const char* channels, GroupedShape& shape) {
  const auto dims = [&](std::initializer_list<Dim> of) {
    return any_inner_stride ? check.strided(field, view, dtypes, of, Role::kOutput)
                            : check.tensor(field, view, dtypes, of, Role::kOutput);
  };
  if (!has_groups) {
    if (!dims({{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {channels, &shape.n}})) return false;
    shape.heads_per_group = batch.num_heads;
  } else {
    shape.num_groups = kUnbound;
    if (!dims({{"T", &batch.num_tokens},
               {"G", &shape.num_groups},
               {"H / G", &shape.heads_per_group},
               {channels, &shape.n}}))
      return false;
    if (!check.require(shape.num_groups * shape.heads_per_group == batch.num_heads, field,
                       "expected G * (H / G) = {} heads, got {} * {}", batch.num_heads, shape.num_groups,
                       shape.heads_per_group))
      return false;
    shape.stride_group = view.stride[1];
  }
  const auto last = static_cast<size_t>(view.ndim) - 1;
  shape.stride_token = view.stride[0];
  shape.stride_head = view.stride[last - 1];
  shape.stride_channel = view.stride[last];
  return true;
}

/// Checks the rotation of the output's last channels.
bool check_rotation(Checks& check, const OutputFinish& params, int64_t num_tokens, int64_t d_v, Finish& args) {
  if (!params.cos_sin.given()) return check.absent("positions", params.positions, "`cos_sin` is not given");
  int64_t max_positions = kUnbound, rotary = kUnbound;
  if (!check.tensor("cos_sin", params.cos_sin, kF32Only,
                    {{"max_positions", &max_positions}, {"rotary channels", &rotary}}) ||
      !check.require(rotary >= 2 && rotary % 2 == 0 && rotary <= d_v, "cos_sin",
                     "expected an even number of rotary channels from 2 to d_v = {}, got {}", d_v, rotary) ||
      !check_positions(check, params.positions, num_tokens, max_positions))
    return false;
  args.d_rotary = static_cast<int32_t>(rotary);
  args.cos_sin = static_cast<const float*>(params.cos_sin.data);
  args.cos_sin_stride_position = params.cos_sin.stride[0];
  args.positions = static_cast<const int64_t*>(params.positions.data);
  args.interleaved = params.interleaved;
  return true;
}

bool check_gate(Checks& check, const TensorView& gate, BatchShape& batch, int64_t d_v, Finish& args) {
  if (!gate.given()) return true;
  int64_t channels = gate.ndim == 3 && gate.shape[2] == 1 ? 1 : d_v;
  if (!check.tensor("gate", gate, kFloats, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_v", &channels}}))
    return false;
  args.gate = gate.data;
  args.gate_dtype = gate.dtype;
  args.gate_channels = static_cast<int32_t>(channels);
  args.gate_stride_token = gate.stride[0];
  args.gate_stride_head = gate.stride[1];
  return true;
}

/// Checks the scales of an output of e4m3, and finds how many channels share one.
bool check_scale(Checks& check, const OutputFinish& params, std::string_view output, bool is_grouped, BatchShape& batch,
                 const GroupedShape& out, Finish& args) {
  const TensorView& scale = params.scale;
  GroupedShape shape;
  const DTypes dtypes = set_of({DType::kF32, DType::kU8, DType::kI32});
  const char* const extent = scale.dtype == DType::kI32 ? "S / 4" : "S";
  if (!check_grouped(check, "scale", scale, dtypes, batch, is_grouped, true, extent, shape)) return false;
  const int64_t scales = shape.n * (scale.dtype == DType::kI32 ? 4 : 1);
  if (!check.require(shape.num_groups == out.num_groups, "scale", "expected {} groups as in `/{}`, got {}",
                     out.num_groups, output, shape.num_groups) ||
      !check.require(scales * 32 == out.n || scales * 64 == out.n || scales * 128 == out.n, "scale",
                     "expected a scale for each 32, 64 or 128 of {} channels, got {} scales", out.n, scales) ||
      !check.require(scale.dtype == DType::kF32 || params.power_of_two_scales, "power_of_two_scales",
                     "expected true for scales of {}, got false", name(scale.dtype)))
    return false;
  args.channels_per_scale = static_cast<int32_t>(out.n / scales);
  args.scale_dtype = scale.dtype;
  args.scale = static_cast<std::byte*>(scale.data);
  args.scale_stride_token = shape.stride_token;
  args.scale_stride_group = shape.stride_group;
  args.scale_stride_head = shape.stride_head;
  args.scale_stride_scale = shape.stride_channel;
  return true;
}

}  // namespace

bool check_finish(Checks& check, const OutputFinish& params, std::string_view field, const TensorView& view,
                  DTypes dtypes, BatchShape& batch, Dim d_v, Finish& args) {
  GroupedShape out = {.n = *d_v.extent};
  if (!check_grouped(check, field, view, dtypes, batch, view.ndim == 4, false, d_v.name, out)) return false;
  *d_v.extent = out.n;
  const Checks::Within within(check, "finish");
  const bool is_quantized = view.dtype == DType::kE4M3;
  if (!check_rotation(check, params, batch.num_tokens, out.n, args) ||
      !check_gate(check, params.gate, batch, out.n, args) ||
      !(is_quantized ? check_scale(check, params, field, view.ndim == 4, batch, out, args)
                     : check.absent("scale", params.scale, field == "o" ? "`/o` is not e4m3" : "`/out` is not e4m3")))
    return false;
  args.heads_per_group = static_cast<int32_t>(out.heads_per_group);
  args.out_dtype = view.dtype;
  args.out = view.data;
  args.out_stride_token = out.stride_token;
  args.out_stride_group = out.stride_group;
  args.out_stride_head = out.stride_head;
  args.power_of_two_scales = params.power_of_two_scales;
  return true;
}

Status validate(const FinishOutputParams& params, FinishOutputArgs& args, Device& device, Memory memory) {
  Checks check(Op::kFinishOutput, Scope::kAll, memory);
  BatchShape batch;
  int64_t d_v = kUnbound;
  args = {};
  const bool shapes =
      check.tensor("o", params.o, kFloats, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_v", &d_v}}) &&
      check_batch_and_rows(check, batch) && check.at_least("d_v", d_v, 1) && check.fits_int32("d_v", d_v) &&
      check_finish(check, params.finish, "out", params.out, kFloatsAndE4M3, batch, {"d_v", &d_v}, args);
  if (!shapes) return check.take();

  args.num_tokens = batch.num_tokens;
  args.num_heads = static_cast<int32_t>(batch.num_heads);
  args.d_v = static_cast<int32_t>(d_v);
  args.o_dtype = params.o.dtype;
  args.o = params.o.data;
  args.o_stride_token = params.o.stride[0];
  args.o_stride_head = params.o.stride[1];
  return check.finish(device);
}

}  // namespace mla::core

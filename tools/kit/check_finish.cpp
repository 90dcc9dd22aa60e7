// SPDX-License-Identifier: Apache-2.0
// Checks finish_output: to the bit where nothing is gated, and against a computation of its own in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <sstream>
#include <string>
#include <vector>

#include "kit/check_finish.h"
#include "kit/check_parts.h"
#include "mla/numeric.h"

namespace mla::kit {
namespace {

double element(const TensorView& view, int64_t token, int64_t head, int64_t c) {
  return load_element(view.data, view.dtype, token * view.stride[0] + head * view.stride[1] + c * view.stride[2]);
}

}  // namespace

ExactRow ExactRow::finished(const FinishSpec& spec, const OutputFinish& p, int64_t token, int64_t head) const {
  ExactRow row = *this;
  const int32_t half = spec.d_rotary / 2;
  const int64_t plain = std::ssize(values) - spec.d_rotary;
  for (int32_t i = 0; i < half; ++i) {
    const float* const angles = static_cast<const float*>(p.cos_sin.data) +
                                static_cast<const int64_t*>(p.positions.data)[token] * p.cos_sin.stride[0];
    const auto cos = static_cast<double>(angles[i]), sin = static_cast<double>(angles[half + i]);
    const auto x_at = static_cast<size_t>(plain + (spec.interleaved ? 2 * i : i));
    const size_t y_at = x_at + (spec.interleaved ? 1 : static_cast<size_t>(half));
    const double x = values[x_at], y = values[y_at];
    row.values[x_at] = x * cos + y * sin;
    row.values[y_at] = y * cos - x * sin;
    row.magnitudes[x_at] = row.magnitudes[y_at] = magnitudes[x_at] + magnitudes[y_at];
  }
  if (spec.gate == FinishSpec::Gate::kNone) return row;
  for (size_t c = 0; c < values.size(); ++c) {
    const int64_t channel = spec.gate == FinishSpec::Gate::kHead ? 0 : static_cast<int64_t>(c);
    const double share = 1 / (1 + std::exp(-element(p.gate, token, head, channel)));
    row.values[c] *= share;
    row.magnitudes[c] *= share;
  }
  return row;
}

namespace {

/// Reads a scale that the operation wrote, as the value that it stands for.
double scale_of(const TensorView& view, const int64_t (&at)[3], int32_t s) {
  const int32_t packed = view.dtype == DType::kI32 ? 4 : 1;
  const auto last = static_cast<size_t>(view.ndim) - 1;
  const int64_t index = at[0] * view.stride[0] + (view.ndim == 4 ? at[1] * view.stride[1] : 0) +
                        at[2] * view.stride[last - 1] + s / packed * view.stride[last];
  const std::byte* const data =
      static_cast<const std::byte*>(view.data) + static_cast<size_t>(index) * size_of(view.dtype) + s % packed;
  if (view.dtype != DType::kF32) return static_cast<double>(ue8m0_to_f32(std::to_integer<uint8_t>(*data)));
  float scale;
  std::memcpy(&scale, data, sizeof scale);
  return static_cast<double>(scale);
}

}  // namespace

std::string judge_finished(const FinishSpec& spec, const FinishedOutputs& outputs, const ExactRow& row, double error,
                           int64_t token, int64_t head) {
  const FinishedRows& rows = outputs.rows;
  const TensorView& out = outputs.out;
  const int64_t per_group = spec.num_groups > 0 ? rows.num_heads / spec.num_groups : rows.num_heads;
  const int64_t at[3] = {token, head / per_group, head % per_group};
  const int64_t first = token * out.stride[0] + (out.ndim == 4 ? at[1] * out.stride[1] : 0) +
                        at[2] * out.stride[static_cast<size_t>(out.ndim) - 2];
  const auto where = [&](int64_t c) {
    return " of token " + std::to_string(token) + ", head " + std::to_string(head) + ", channel " + std::to_string(c);
  };
  double scale = 1;
  for (int32_t c = 0; c < rows.d_v; ++c) {
    const auto i = static_cast<size_t>(c);
    if (rows.is_quantized() && c % spec.channels_per_scale == 0) {
      double amax = 0, magnitude = 0;
      for (size_t k = i; k < i + static_cast<size_t>(spec.channels_per_scale); ++k) {
        amax = std::max(amax, std::abs(row.values[k]));
        magnitude = std::max(magnitude, row.magnitudes[k]);
      }
      const auto chosen = [&](double of) {
        return static_cast<double>(choose_scale(DType::kE4M3, ScaleType::kF32, spec.power_of_two_scales,
                                                static_cast<float>(std::max(of, 0.0))));
      };
      scale = scale_of(outputs.scale, at, c / spec.channels_per_scale);
      if (!(scale >= chosen(amax - error * magnitude) && scale <= chosen(amax + error * magnitude)))
        return "scale" + where(c) + " is " + std::to_string(scale) + ", expected " + std::to_string(chosen(amax));
    }
    const double want = row.values[i], got = load_element(out.data, out.dtype, first + c) * scale;
    const double magnitude = std::abs(want);
    // Half of a last place: of 4, 8, 11 or 24 bits, and of the smallest numbers.
    const double rounding = rows.is_quantized()              ? std::max(magnitude * 0x1p-4, scale * 0x1p-10)
                            : rows.out_dtype == DType::kBF16 ? std::max(magnitude * 0x1p-8, 0x1p-134)
                            : rows.out_dtype == DType::kF16  ? std::max(magnitude * 0x1p-11, 0x1p-25)
                                                             : std::max(magnitude * 0x1p-24, 0x1p-150);
    const double most = rounding * (1 + error) + error * row.magnitudes[i] * (rows.is_quantized() ? 1 + 0x1p-4 : 1);
    if (!(std::abs(got - want) <= most)) {
      std::ostringstream message;
      message << std::setprecision(9) << "output" << where(c) << " is " << got << ", expected " << want << " within "
              << most;
      return message.str();
    }
  }
  return {};
}

namespace {

/// Says what is wrong with a row of finish_output.
std::string judge_row(const FinishOutputCase& problem, const FinishOutputParams& p, int64_t token, int64_t head) {
  /// f32 loses at most a few 2^-24 of two products, their sum, a power of two, a quotient and a product. The
  /// approximate power of two of GPUs has an argument that is off by 2^-24 of itself, up to 30 here, and an error of
  /// 2^-22.
  constexpr double kF32 = 4e-6;
  ExactRow row;
  for (int32_t c = 0; c < problem.spec.d_v; ++c) row.values.push_back(element(p.o, token, head, c));
  for (double value : row.values) row.magnitudes.push_back(std::abs(value));
  return judge_finished(problem.spec, {problem.spec.rows(), p.out, p.finish.scale},
                        row.finished(problem.spec, p.finish, token, head), kF32, token, head);
}

/// Compares with the outputs of the reference, `want`, to the bit; only the sign of a NaN may be another.
std::string compare(const FinishOutputCase& problem, const std::vector<double>& got, const std::vector<double>& want,
                    const Bytes& want_scale) {
  for (size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i] || std::signbit(got[i]) != std::signbit(want[i]))
      if (!std::isnan(got[i]) || !std::isnan(want[i]))
        return "element " + std::to_string(i) + " of out is " + std::to_string(got[i]) + ", expected " +
               std::to_string(want[i]);
  return std::ranges::equal(problem.finish.scale.bytes(), want_scale) ? "" : "scales are not those of the reference";
}

std::string judge(const FinishOutputCase& problem, const Bytes& given) {
  const FinishOutputSpec& spec = problem.spec;
  const FinishOutputParams p = problem.params();
  const bool is_quantized = spec.rows().is_quantized();
  const std::vector<double> want = to_dense(p.out);
  const Bytes want_scale(problem.finish.scale.bytes().begin(), problem.finish.scale.bytes().end());
  put_back(given, problem.outputs());
  if (!gaps_hold(problem.out, p.out, kUntouched)) return "wrote into the gaps of out";
  if (is_quantized && !gaps_hold(problem.finish.scale, p.finish.scale, kUntouched))
    return "wrote into the gaps of scale";
  if (spec.gate == FinishSpec::Gate::kNone)
    if (std::string failure = compare(problem, to_dense(p.out), want, want_scale); !failure.empty()) return failure;
  if (spec.special_share > 0) return {};
  for (int64_t token = 0; token < spec.num_tokens; ++token)
    for (int64_t head = 0; head < spec.num_heads; ++head)
      if (std::string failure = judge_row(problem, p, token, head); !failure.empty()) return failure;
  return {};
}

}  // namespace

Outcome check_outputs(const FinishOutputCase& problem, std::string_view backend) {
  return check_against_reference(problem, backend, [&](const Bytes& given) { return judge(problem, given); });
}

Outcome check(const Context& context, const FinishOutputSpec& spec) {
  return check_direct<FinishOutputCase>(context, spec);
}

}  // namespace mla::kit

// SPDX-License-Identifier: Apache-2.0
// Checks finish_output: to the bit where nothing is gated, and against a computation of its own in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kit/check_parts.h"
#include "mla/numeric.h"

namespace mla::kit {
namespace {

/// Holds a finished row before it is rounded, and for each channel what its errors in f32 are relative to.
struct ExactRow {
  std::vector<double> values, magnitudes;
};

double element(const TensorView& view, int64_t token, int64_t head, int64_t c) {
  return load_element(view.data, view.dtype, token * view.stride[0] + head * view.stride[1] + c * view.stride[2]);
}

ExactRow exact_row(const FinishOutputCase& problem, const FinishOutputParams& p, int64_t token, int64_t head) {
  const FinishOutputSpec& spec = problem.spec;
  ExactRow row;
  for (int32_t c = 0; c < spec.d_v; ++c) row.values.push_back(element(p.o, token, head, c));
  for (double value : row.values) row.magnitudes.push_back(std::abs(value));
  const int32_t half = spec.d_rotary / 2, plain = spec.d_v - spec.d_rotary;
  for (int32_t i = 0; i < half; ++i) {
    const float* const angles =
        problem.cos_sin.as<float>() + problem.positions.as<int64_t>()[token] * p.cos_sin.stride[0];
    const auto cos = static_cast<double>(angles[i]), sin = static_cast<double>(angles[half + i]);
    const auto x_at = static_cast<size_t>(plain + (spec.interleaved ? 2 * i : i));
    const size_t y_at = x_at + (spec.interleaved ? 1 : static_cast<size_t>(half));
    const double x = row.values[x_at], y = row.values[y_at];
    row.values[x_at] = x * cos + y * sin;
    row.values[y_at] = y * cos - x * sin;
    row.magnitudes[x_at] = row.magnitudes[y_at] = std::abs(x) + std::abs(y);
  }
  if (spec.gate == FinishOutputSpec::Gate::kNone) return row;
  for (int32_t c = 0; c < spec.d_v; ++c) {
    const double gate = element(p.gate, token, head, spec.gate == FinishOutputSpec::Gate::kHead ? 0 : c);
    const double share = 1 / (1 + std::exp(-gate));
    row.values[static_cast<size_t>(c)] *= share;
    row.magnitudes[static_cast<size_t>(c)] *= share;
  }
  return row;
}

/// f32 loses at most a few 2^-24 of two products, their sum, a power of two, a quotient and a product. The approximate
/// power of two of GPUs has an argument that is off by 2^-24 of itself, up to 30 here, and an error of 2^-22.
constexpr double kF32 = 4e-6;

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

/// Says what is wrong with a finished row.
std::string judge_row(const FinishOutputCase& problem, const FinishOutputParams& p, int64_t token, int64_t head) {
  const FinishOutputSpec& spec = problem.spec;
  const ExactRow row = exact_row(problem, p, token, head);
  const int64_t per_group = spec.num_groups > 0 ? spec.num_heads / spec.num_groups : spec.num_heads;
  const int64_t at[3] = {token, head / per_group, head % per_group};
  const int64_t first = token * p.out.stride[0] + (p.out.ndim == 4 ? at[1] * p.out.stride[1] : 0) +
                        at[2] * p.out.stride[static_cast<size_t>(p.out.ndim) - 2];
  const auto where = [&](int64_t c) {
    return " of token " + std::to_string(token) + ", head " + std::to_string(head) + ", channel " + std::to_string(c);
  };
  double scale = 1;
  for (int32_t c = 0; c < spec.d_v; ++c) {
    const auto i = static_cast<size_t>(c);
    if (spec.is_quantized() && c % spec.channels_per_scale == 0) {
      double amax = 0, magnitude = 0;
      for (size_t k = i; k < i + static_cast<size_t>(spec.channels_per_scale); ++k) {
        amax = std::max(amax, std::abs(row.values[k]));
        magnitude = std::max(magnitude, row.magnitudes[k]);
      }
      const auto chosen = [&](double of) {
        return static_cast<double>(choose_scale(DType::kE4M3, ScaleType::kF32, spec.power_of_two_scales,
                                                static_cast<float>(std::max(of, 0.0))));
      };
      scale = scale_of(p.scale, at, c / spec.channels_per_scale);
      if (!(scale >= chosen(amax - kF32 * magnitude) && scale <= chosen(amax + kF32 * magnitude)))
        return "scale" + where(c) + " is " + std::to_string(scale) + ", expected " + std::to_string(chosen(amax));
    }
    const double want = row.values[i], got = load_element(p.out.data, p.out.dtype, first + c) * scale;
    const double magnitude = std::abs(want);
    // Half of a last place: of 4, 8, 11 or 24 bits, and of the smallest numbers.
    const double rounding = spec.is_quantized()              ? std::max(magnitude * 0x1p-4, scale * 0x1p-10)
                            : spec.out_dtype == DType::kBF16 ? magnitude * 0x1p-8
                            : spec.out_dtype == DType::kF16  ? std::max(magnitude * 0x1p-11, 0x1p-25)
                                                             : magnitude * 0x1p-24;
    const double most = rounding * (1 + kF32) + kF32 * row.magnitudes[i];
    if (!(std::abs(got - want) <= most))
      return "output" + where(c) + " is " + std::to_string(got) + ", expected " + std::to_string(want) + " within " +
             std::to_string(most);
  }
  return {};
}

/// Compares with the outputs of the reference, `want`, to the bit; only the sign of a NaN may be another.
std::string compare(const FinishOutputCase& problem, const std::vector<double>& got, const std::vector<double>& want,
                    const Bytes& want_scale) {
  for (size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i] || std::signbit(got[i]) != std::signbit(want[i]))
      if (!std::isnan(got[i]) || !std::isnan(want[i]))
        return "element " + std::to_string(i) + " of out is " + std::to_string(got[i]) + ", expected " +
               std::to_string(want[i]);
  return std::ranges::equal(problem.scale.bytes(), want_scale) ? "" : "scales are not those of the reference";
}

std::string judge(const FinishOutputCase& problem, const Bytes& given) {
  const FinishOutputSpec& spec = problem.spec;
  const FinishOutputParams p = problem.params();
  const std::vector<double> want = to_dense(p.out);
  const Bytes want_scale(problem.scale.bytes().begin(), problem.scale.bytes().end());
  put_back(given, problem.outputs());
  if (!gaps_hold(problem.out, p.out, kUntouched)) return "wrote into the gaps of out";
  if (spec.is_quantized() && !gaps_hold(problem.scale, p.scale, kUntouched)) return "wrote into the gaps of scale";
  if (spec.gate == FinishOutputSpec::Gate::kNone)
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

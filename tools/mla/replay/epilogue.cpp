// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/epilogue.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

constexpr int32_t kHeadsPerGroup = 8;     // DeepSeek V4 projects 8 groups of its 64 heads
constexpr double kLargest = 448.0;        // of e4m3
constexpr double kLeastMagnitude = 1e-4;  // of which a scale is made
constexpr double kScaleSlack = 0x1p-20;   // f32 and float64 may see a group's largest magnitude on different sides

// Returns whether the scale is 2^ceil(log2(max(largest, 1e-4) / 448)).
bool is_scale_of(double scale, double largest) {
  int exponent = 0;
  const double least = std::max(largest, kLeastMagnitude) / kLargest;
  return std::frexp(scale, &exponent) == 0.5 && scale >= least * (1.0 - kScaleSlack) &&
         scale < 2.0 * least * (1.0 + kScaleSlack);
}

// Returns half of the step between the numbers of e4m3 around x, times their scale: 3 bits follow the first one, and
// the least exponent is -6.
double half_step(double x, double scale) {
  const int exponent = x == 0.0 ? -6 : std::max(std::ilogb(x / scale), -6);
  return std::ldexp(scale, exponent - 4);
}

}  // namespace

int32_t channels_per_scale(const ModelConfig& model) {
  for (int32_t channels : {128, 64, 32})
    if (model.d_v() % channels == 0) return channels;
  return 0;
}

int64_t Epilogue::memory_needed(const ModelConfig& model, int64_t tokens) {
  const int64_t scales = model.d_v() / channels_per_scale(model);
  return tokens * model.num_attention_heads * (model.d_v() + scales * static_cast<int64_t>(sizeof(float)));
}

int64_t Epilogue::heads_per_group() const { return std::gcd(model_.num_attention_heads, kHeadsPerGroup); }

TensorView Epilogue::grouped(const void* values, DType dtype, int64_t n) const {
  const int64_t heads = heads_per_group();
  TensorView view = contiguous(values, dtype, {model_.num_attention_heads / heads, num_tokens_, heads, n});
  std::swap(view.shape[0], view.shape[1]);
  std::swap(view.stride[0], view.stride[1]);
  return view;
}

Status Epilogue::run(Operations& operations, const TensorView& o, std::span<const int64_t> positions, Phase phase,
                     Recorder* recorder) {
  const int64_t d_v = model_.d_v(), scales = d_v / channels_per_scale(model_);
  num_tokens_ = o.shape[0];
  const auto rows = static_cast<size_t>(num_tokens_ * model_.num_attention_heads);
  out_.resize(rows * static_cast<size_t>(d_v));
  scale_.resize(rows * static_cast<size_t>(scales));
  FinishOutputParams params;
  params.o = o;
  if (angles_.cos_sin().given()) {
    params.finish.cos_sin = angles_.cos_sin();
    params.finish.positions = contiguous(positions.data(), DType::kI64, {num_tokens_});
  }
  params.finish.scale = grouped(scale_.data(), DType::kF32, scales);
  params.out = grouped(out_.data(), DType::kE4M3, d_v);
  return operations.run(params, phase, recorder);
}

double Epilogue::error(int64_t token, int64_t head, std::span<const double> truth) const {
  const int64_t d_v = model_.d_v(), channels = channels_per_scale(model_), heads = heads_per_group();
  const int64_t row = (head / heads * num_tokens_ + token) * heads + head % heads;
  double excess = 0.0, norm = 0.0;
  for (int64_t first = 0; first < d_v; first += channels) {
    const auto group = truth.subspan(static_cast<size_t>(first), static_cast<size_t>(channels));
    double largest = 0.0;
    for (double x : group) largest = std::max(largest, std::abs(x));
    const double scale = static_cast<double>(scale_[static_cast<size_t>((row * d_v + first) / channels)]);
    if (!is_scale_of(scale, largest)) return std::numeric_limits<double>::infinity();
    for (size_t c = 0; c < group.size(); ++c) {
      const uint8_t code = out_[static_cast<size_t>(row * d_v + first) + c];
      const double got = static_cast<double>(e4m3_to_f32(code)) * scale;
      const double beyond = std::abs(got - group[c]) - half_step(group[c], scale);
      if (!(beyond <= 0.0)) excess += beyond * beyond;
      norm += group[c] * group[c];
    }
  }
  if (excess == 0.0) return 0.0;
  return std::isfinite(excess) ? std::sqrt(excess / norm) : std::numeric_limits<double>::infinity();
}

}  // namespace mla::cli::replay

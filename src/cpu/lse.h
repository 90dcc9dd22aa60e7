// SPDX-License-Identifier: Apache-2.0
// Sums of exponentials, by their logarithms to base 2.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace mla::cpu {

/// Turns n partial lse values (base 2, `stride` apart) into the weights with which their outputs are summed, in place,
/// and returns the merged lse. All -inf: weights 0, lse -inf.
float merge_weights(float* lse, int64_t stride, int32_t n);

/// By what the sink (natural logarithm; null: none) shrinks the output of a head whose lse is known.
float sink_factor(const float* attn_sink, int32_t head, float lse_log2);

/// log2(2^a + 2^b + ...) of values added one by one. NaN in, NaN out; nothing but -inf gives -inf.
class LogSum {
 public:
  /// The largest value must be known before the sum: feed all to `see`, then all to `add`.
  void see(float value) { top_ = value > top_ || std::isnan(value) ? value : top_; }
  void add(float value) { sum_ += std::exp2(value - top_); }
  bool empty() const { return top_ == -std::numeric_limits<float>::infinity(); }
  float value() const { return empty() ? top_ : top_ + std::log2(sum_); }

 private:
  float top_ = -std::numeric_limits<float>::infinity();
  float sum_ = 0.0F;
};

}  // namespace mla::cpu

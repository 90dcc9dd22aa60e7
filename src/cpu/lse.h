// SPDX-License-Identifier: Apache-2.0
// This file computes sums of exponentials, which are given and returned as their logarithms to base 2.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/lse_form.h"

namespace mla::cpu {

/// Replaces n partial lse values (base 2, `stride` apart) by the factors with which their outputs are summed, and
/// returns the merged lse. If all are -inf, the factors are 0 and the lse is -inf.
float merge_factors(float* lse, int64_t stride, int32_t n);

/// Returns the factor by which a head's sink (a natural-log logit; null for none) shrinks an output with this lse.
float sink_factor(const float* attn_sink, int32_t head, float lse_log2);

/// Returns an lse, to base 2, in the form in which it is written.
float written_lse(float lse_log2, core::LseForm form);

/// Computes log2(2^a + 2^b + ...) of values that are added one by one. It is NaN if a value is NaN, and -inf if all
/// values are -inf.
class LogSum {
 public:
  /// The largest value must be known before the sum: pass all values to `see` first, and then all to `add`.
  void see(float value) { top_ = value > top_ || std::isnan(value) ? value : top_; }
  void add(float value) { sum_ += std::exp2(value - top_); }
  bool empty() const { return top_ == -std::numeric_limits<float>::infinity(); }
  float value() const { return empty() ? top_ : top_ + std::log2(sum_); }

 private:
  float top_ = -std::numeric_limits<float>::infinity();
  float sum_ = 0.0F;
};

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// These functions turn a row's softmax state into its outputs; the attention kernels' epilogues and combine share them.
// A state is what the online softmax holds: the maximum in base-2 logits (-inf without a visible key), the sum of
// 2^(score - max), and accumulators, the sum of 2^(score - max) * v.
#pragma once

#include <cstdint>
#include <limits>
#include <numbers>

#include "core/args.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr float kNoKey = -std::numeric_limits<float>::infinity();

/// Holds the result of finish_row() for a row's state.
struct FinishedRow {
  float o_factor;  // o = accumulator * o_factor
  float lse;       // in the requested form; excludes the sink
};

/// Returns what is subtracted from logits before exponentiation: the maximum, or 0 if the maximum is infinite. So
/// 2^-inf is 0 and 2^+inf is infinite, and no difference of infinities gives NaN.
MLA_DEVICE float finite_or_zero(float max_log2) { return max_log2 > kNoKey && max_log2 < -kNoKey ? max_log2 : 0.0F; }

/// Returns the factor by which the sink (a natural-log logit; -inf for none) shrinks the output of a row with this lse.
MLA_DEVICE float sink_factor(float sink, float lse_log2) {
  if (sink == kNoKey) return 1.0F;
  if (sink == -kNoKey) return 0.0F;
  return 1.0F / (1.0F + ptx::exp2_approx(sink * std::numbers::log2e_v<float> - lse_log2));
}

/// Finishes a row. `o_factor` holds the other factors of the outputs: the value scale of the cache and 1 / o_scale.
MLA_DEVICE FinishedRow finish_row(float max_log2, float sum, float sink, float o_factor, core::LseForm lse_form) {
  if (max_log2 == kNoKey && sum == 0.0F) return {0.0F, lse_form.without_keys()};
  const float lse_log2 = finite_or_zero(max_log2) + ptx::log2_approx(sum);
  return {sink_factor(sink, lse_log2) * o_factor / sum,
          lse_form.base == LseBase::kE ? lse_log2 * std::numbers::ln2_v<float> : lse_log2};
}

/// Returns a head's sink; -inf if the operation has none.
MLA_DEVICE float load_sink(const core::Options& options, int32_t head) {
  return options.attn_sink != nullptr ? options.attn_sink[head] : kNoKey;
}

/// Returns 1 / o_scale, which only e4m3 outputs have; 1 for all others.
MLA_DEVICE float inverse_o_scale(const float* o_scale) { return o_scale != nullptr ? 1.0F / *o_scale : 1.0F; }

/// Converts a row's maximum from base 2 to the natural logit that max_logits holds.
MLA_DEVICE float natural_logit(float max_log2) { return max_log2 * std::numbers::ln2_v<float>; }

}  // namespace mla::MLA_CUDA_NAMESPACE

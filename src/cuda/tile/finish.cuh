// SPDX-License-Identifier: Apache-2.0
// From a row's softmax state to its outputs: the arithmetic that the attention kernels' epilogues and combine share.
// A state is what the online softmax holds: max in base-2 logits (-inf without a visible key), sum of 2^(score - max),
// and accumulators sum of 2^(score - max) * v.
#pragma once

#include <cstdint>
#include <limits>
#include <numbers>

#include "core/args.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr float kNoKey = -std::numeric_limits<float>::infinity();

/// What becomes of a row.
struct FinishedRow {
  float o_factor;  // o = accumulator * o_factor
  float lse;       // in the base that was asked for; without the sink
};

/// What the exponents of a state are relative to: its maximum, unless that is infinite. Then 2^-inf is 0 and 2^+inf
/// infinite as they should be.
MLA_DEVICE float finite_or_zero(float max_log2) { return max_log2 > kNoKey && max_log2 < -kNoKey ? max_log2 : 0.0F; }

/// By how much the sink (natural logarithm; -inf: none) shrinks the output of a row whose lse is known.
MLA_DEVICE float sink_factor(float sink, float lse_log2) {
  if (sink == kNoKey) return 1.0F;
  if (sink == -kNoKey) return 0.0F;
  return 1.0F / (1.0F + ptx::exp2_approx(sink * std::numbers::log2e_v<float> - lse_log2));
}

/// `o_factor` is what outputs are multiplied by besides: the value scale of the cache, 1 / o_scale.
MLA_DEVICE FinishedRow finish_row(float max_log2, float sum, float sink, float o_factor, LseBase lse_base) {
  if (max_log2 == kNoKey && sum == 0.0F) return {0.0F, kNoKey};
  const float lse_log2 = finite_or_zero(max_log2) + ptx::log2_approx(sum);
  return {sink_factor(sink, lse_log2) * o_factor / sum,
          lse_base == LseBase::kE ? lse_log2 * std::numbers::ln2_v<float> : lse_log2};
}

/// A head's sink, -inf if the operation has none.
MLA_DEVICE float load_sink(const core::Options& options, int32_t head) {
  return options.attn_sink != nullptr ? options.attn_sink[head] : kNoKey;
}

/// 1 / o_scale, for e4m3 outputs; 1 for all others.
MLA_DEVICE float inverse_o_scale(const float* o_scale) { return o_scale != nullptr ? 1.0F / *o_scale : 1.0F; }

/// The natural max_logits of a row.
MLA_DEVICE float natural_logit(float max_log2) { return max_log2 * std::numbers::ln2_v<float>; }

}  // namespace mla::MLA_CUDA_NAMESPACE

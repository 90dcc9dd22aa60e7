// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row of scores: what every attention kernel keeps of the keys it has seen.
#pragma once

#include "cuda/ptx/ptx.h"
#include "cuda/tile/finish.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// How far logits may exceed what exponents are relative to, as a power of two, before sums and outputs are rescaled: a
/// probability of 2^8 is as exact as one of 1 and fits f16, and after a few steps hardly any rescaling is left. Kernels
/// whose caller asks for the maximum itself, and those that rescale in every step, go without.
inline constexpr float kHeadroom = 8.0F;

/// Logits are in base 2; probabilities are 2^(logit - base()).
struct ScoreState {
  float max = kNoKey;  // what exponents are relative to: the largest logit so far, or up to kHeadroom below it
  float sum = 0.0F;    // of the probabilities: of the whole row, or of the keys that one lane has

  /// What is subtracted from logits.
  MLA_DEVICE float base() const { return finite_or_zero(max); }
  /// Whether exponents would become too large for a step whose largest logit this is.
  MLA_DEVICE bool is_outgrown_by(float largest, float headroom) const { return largest > max + headroom; }
  /// Makes exponents relative to `largest`. Returns what outputs so far are to be multiplied by, as the sum is: 0
  /// before the first key, when there is nothing to rescale however far below 0 the largest logit is.
  MLA_DEVICE float raise(float largest) {
    const float factor = max == kNoKey ? 0.0F : ptx::exp2_approx(finite_or_zero(max) - finite_or_zero(largest));
    max = largest;
    sum *= factor;
    return factor;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// This file has the state of one row's online softmax: what every attention kernel keeps of the scores of earlier
// steps.
#pragma once

#include "cuda/ptx/ptx.h"
#include "cuda/tile/finish.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says by how much a row's largest logit (base 2) may exceed ScoreState::max before the sum and the outputs are
/// rescaled. A P of 2^8 is as exact as one of 1 and fits f16, and after a few steps hardly any rescaling is left. It
/// was chosen without a recorded measurement of its own. Kernels that rescale in every step have no headroom; others
/// have none where the caller asks for the maximum itself, or only in a unit's last step then.
inline constexpr float kHeadroom = 8.0F;

/// Logits are in base 2, and P is 2^(logit - base()).
struct ScoreState {
  float max = kNoKey;  // the largest logit so far, or up to kHeadroom less
  float sum = 0.0F;    // sum of P over the whole row, or over the keys that one lane has

  /// Returns what is subtracted from logits.
  MLA_DEVICE float base() const { return finite_or_zero(max); }
  /// Returns whether a step whose largest logit is `largest` exceeds the headroom, so that the state must be raised.
  MLA_DEVICE bool is_outgrown_by(float largest, float headroom) const { return largest > max + headroom; }
  /// Makes exponents relative to `largest`, and rescales the sum. Returns the factor by which the outputs so far must
  /// be multiplied too. It is 0 before the first key, when there is nothing to rescale, however far below 0 the largest
  /// logit is.
  MLA_DEVICE float raise(float largest) {
    const float factor = max == kNoKey ? 0.0F : ptx::exp2_approx(finite_or_zero(max) - finite_or_zero(largest));
    max = largest;
    sum *= factor;
    return factor;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

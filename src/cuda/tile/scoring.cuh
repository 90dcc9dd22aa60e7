// SPDX-License-Identifier: Apache-2.0
// These functions apply the options of attention that turn products of queries and keys into logits.
#pragma once

#include <numbers>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/reciprocal.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns whether logits are products times the scale, without a soft cap and slopes. Kernels have faster code for
/// this case.
constexpr bool needs_only_scale(const core::Options& options) {
  return options.logits_soft_cap == 0.0F && options.alibi_slopes == nullptr;
}

/// Returns cap * tanh(x) by tanh(x) = 1 - 2 / (e^(2x) + 1), which saturates where the exponential over- or underflows.
/// A soft cap is that of x = logit / cap; `exponent` is kSoftCapExponent * x.
MLA_DEVICE float soft_capped(float exponent, float cap) {
  return cap - 2.0F * cap * ptx::reciprocal_approx(ptx::exp2_approx(exponent) + 1.0F);
}
inline constexpr float kSoftCapExponent = 2.0F * std::numbers::log2e_v<float>;

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// From products of queries and keys to logits: what the options of attention ask for.
#pragma once

#include <numbers>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/reciprocal.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Whether logits are products times the scale, without a soft cap and slopes. Kernels have their fast ways for these.
constexpr bool needs_only_scale(const core::Options& options) {
  return options.logits_soft_cap == 0.0F && options.alibi_slopes == nullptr;
}

/// cap * tanh(x), by tanh(x) = 1 - 2 / (e^(2x) + 1), which saturates where the exponential over- or underflows. Soft
/// caps are that of x = logit / cap; the exponent is kSoftCapExponent * x.
MLA_DEVICE float soft_capped(float exponent, float cap) {
  return cap - 2.0F * cap * ptx::reciprocal_approx(ptx::exp2_approx(exponent) + 1.0F);
}
inline constexpr float kSoftCapExponent = 2.0F * std::numbers::log2e_v<float>;

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
#include "cpu/lse.h"

#include <numbers>

namespace mla::cpu {

float merge_factors(float* lse, int64_t stride, int32_t n) {
  LogSum sum;
  for (int32_t i = 0; i < n; ++i) sum.see(lse[i * stride]);
  if (!sum.empty())
    for (int32_t i = 0; i < n; ++i) sum.add(lse[i * stride]);
  const float merged = sum.value();
  for (int32_t i = 0; i < n; ++i) lse[i * stride] = sum.empty() ? 0.0F : std::exp2(lse[i * stride] - merged);
  return merged;
}

float sink_factor(const float* attn_sink, int32_t head, float lse_log2) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (attn_sink == nullptr || attn_sink[head] == -kInfinity) return 1.0F;
  if (attn_sink[head] == kInfinity) return 0.0F;
  return 1.0F / (1.0F + std::exp2(attn_sink[head] * std::numbers::log2e_v<float> - lse_log2));
}

float written_lse(float lse_log2, core::LseForm form) {
  if (lse_log2 == -std::numeric_limits<float>::infinity()) return form.without_keys();
  return form.base == LseBase::kE ? lse_log2 * std::numbers::ln2_v<float> : lse_log2;
}

}  // namespace mla::cpu

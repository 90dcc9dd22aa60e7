// SPDX-License-Identifier: Apache-2.0
#include "reference/top_k.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Returns an integer that orders as the operation orders logits: NaN is lowest, then -inf ... +inf; both zeros are
/// equal.
uint32_t rank(float logit) {
  if (std::isnan(logit)) return 0;
  if (logit == 0) logit = 0;
  const uint32_t bits = std::bit_cast<uint32_t>(logit);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

}  // namespace

void select_top_k(const float* logits, int64_t n, int32_t k, int32_t* indices) {
  const auto count = [&](uint32_t at_least) {
    return std::count_if(logits, logits + n, [&](float logit) { return rank(logit) >= at_least; });
  };
  // The loop finds the rank of the k-th largest logit bit by bit: it is the greatest rank that at least k logits reach.
  uint32_t least = 0;
  for (uint32_t bit = 0x80000000U; bit != 0; bit >>= 1)
    if (count(least | bit) >= k) least |= bit;
  int64_t ties = k - count(least + 1);
  int32_t* out = indices;
  for (int64_t i = 0; i < n && out < indices + k; ++i) {
    const uint32_t r = rank(logits[i]);
    if (r < least || (r == least && ties-- <= 0)) continue;
    *out++ = static_cast<int32_t>(i);
  }
  std::fill(out, indices + k, -1);
}

void top_k(const core::TopKArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t n =
        args.lengths != nullptr ? std::clamp<int64_t>(args.lengths[token], 0, args.num_logits) : args.num_logits;
    select_top_k(args.logits + token * args.logits_stride_token, n, args.k,
                 args.indices + token * args.indices_stride_token);
  }
}

}  // namespace mla::reference

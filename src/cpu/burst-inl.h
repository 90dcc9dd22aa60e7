// SPDX-License-Identifier: Apache-2.0
// Measures how fast a thread multiplies with an instruction of AVX-512. Included by the instruction sets that have it.
#pragma once

#include <hwy/highway.h>  // includes the intrinsics without their warnings

#include <chrono>

namespace mla::cpu {
namespace {

/// Returns the rate of a burst of some 10 us, in 10^9 operations a second. step(sum, ones) returns the sum of 16 floats
/// plus `products` products for each. The compiler cannot see the values, so that it neither folds nor merges sums.
template <class Step>
double burst(int products, const Step& step) {
  constexpr int kIterations = 2000;
  constexpr int kSums = 12;  // they hide the latency: at most two instructions a clock, each of up to six clocks
  volatile float hidden = 1.0F;
  const __m512 ones = _mm512_set1_ps(hidden);
  __m512 sums[kSums];
  for (__m512& sum : sums) sum = _mm512_set1_ps(hidden);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kIterations; ++i)
#pragma GCC unroll 12
    for (__m512& sum : sums) sum = step(sum, ones);
  __m512 total = _mm512_setzero_ps();
  for (const __m512& sum : sums) total = _mm512_add_ps(total, sum);
  hidden = _mm512_cvtss_f32(total);
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
  return double{kIterations} * kSums * 16 * 2 * products / time.count();
}

}  // namespace
}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// Measures how fast a thread multiplies with an instruction of AVX-512 or NEON. Included by the instruction sets that
// have it.
#pragma once

#include <hwy/highway.h>  // includes the intrinsics without their warnings

#include <chrono>

namespace mla::cpu {
namespace {

#if defined(__aarch64__)
using BurstVec = float32x4_t;
inline BurstVec burst_set(float x) { return vdupq_n_f32(x); }
inline BurstVec burst_add(BurstVec a, BurstVec b) { return vaddq_f32(a, b); }
inline float burst_first(BurstVec x) { return vgetq_lane_f32(x, 0); }
#else
using BurstVec = __m512;
inline BurstVec burst_set(float x) { return _mm512_set1_ps(x); }
inline BurstVec burst_add(BurstVec a, BurstVec b) { return _mm512_add_ps(a, b); }
inline float burst_first(BurstVec x) { return _mm512_cvtss_f32(x); }
#endif

/// Returns the rate of a burst of some 10 us, in 10^9 operations a second. step(sum, ones) returns the sum of a
/// vector's floats plus `products` products for each. The compiler cannot see the values, so that it neither folds nor
/// merges sums.
template <class Step>
double burst(int products, const Step& step) {
  // They hide the latency: at most two instructions a clock, each of up to six clocks; four of up to six on Arm.
  constexpr int kSums = sizeof(BurstVec) == 16 ? 24 : 12;
  constexpr int kIterations = 24000 / kSums;
  volatile float hidden = 1.0F;
  const BurstVec ones = burst_set(hidden);
  BurstVec sums[kSums];
  for (BurstVec& sum : sums) sum = burst_set(hidden);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kIterations; ++i)
#pragma GCC unroll 24
    for (BurstVec& sum : sums) sum = step(sum, ones);
  BurstVec total = burst_set(0.0F);
  for (const BurstVec& sum : sums) total = burst_add(total, sum);
  hidden = burst_first(total);
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
  constexpr int kFloats = sizeof(BurstVec) / sizeof(float);
  return double{kIterations} * kSums * kFloats * 2 * products / time.count();
}

}  // namespace
}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// These row kernels pool tokens into latents, for compress, and normalize and gate rows. This file is included as
// tile_kernels-inl.h is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/row_kernels.h"
#include "cpu/vectors-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

/// Does what `pool` does for channels c to c + count - 1. kWhole says that there are kPooledTokens tokens of f32, and a
/// vector of channels, so that all scores stay in registers.
template <bool kWhole>
HWY_INLINE void pool_channels(const PooledToken* tokens, int32_t num_tokens, int32_t c, int32_t count, bool first,
                              Pool* pool) {
  const FloatVec log2_e = hn::Set(kFloats, 1.44269504F);
  // Instead of -inf, whose difference with itself is NaN. No finite score is lower.
  const FloatVec lowest = hn::Set(kFloats, hwy::LowestValue<float>());
  const auto load = [&](const void* from, DType dtype) {
    return kWhole ? hn::LoadU(kFloats, static_cast<const float*>(from) + c)
                  : load_some(advance(from, dtype, c), dtype, count);
  };
  const int32_t end = kWhole ? kPooledTokens : num_tokens;
  FloatVec scores[kPooledTokens];
  MLA_UNROLL for (FloatVec& score : scores) score = lowest;  // of tokens that there are not
  const FloatVec old_max = first ? lowest : hn::LoadU(kFloats, pool->max + c);
  FloatVec max = old_max;
  MLA_UNROLL for (int32_t i = 0; i < end; ++i) {
    scores[i] = load(tokens[i].score, tokens[i].dtype);
    if (tokens[i].bias != nullptr) scores[i] = scores[i] + load(tokens[i].bias, DType::kF32);
    max = hn::Max(max, scores[i]);
  }
  FloatVec weights = hn::Zero(kFloats), values = hn::Zero(kFloats);
  if (!first) {
    const FloatVec rescale = exp2_nonpositive((old_max - max) * log2_e);
    weights = hn::LoadU(kFloats, pool->weights + c) * rescale;
    values = hn::LoadU(kFloats, pool->values + c) * rescale;
  }
  MLA_UNROLL for (int32_t i = 0; i < end; ++i) {
    const FloatVec weight = exp2_nonpositive((scores[i] - max) * log2_e);
    weights = weights + weight;
    values = hn::MulAdd(weight, load(tokens[i].kv, tokens[i].dtype), values);
  }
  hn::StoreU(max, kFloats, pool->max + c);
  hn::StoreU(weights, kFloats, pool->weights + c);
  hn::StoreU(values, kFloats, pool->values + c);
}

void pool(const PooledToken* tokens, int32_t num_tokens, int32_t n, bool first, Pool* pool) {
  const bool all_f32 = std::all_of(tokens, tokens + num_tokens, [](const auto& t) { return t.dtype == DType::kF32; });
  int32_t c = 0;
  if (num_tokens == kPooledTokens && all_f32)
    for (; c + kLanes <= n; c += kLanes) pool_channels<true>(tokens, num_tokens, c, kLanes, first, pool);
  for (; c < n; c += kLanes) pool_channels<false>(tokens, num_tokens, c, HWY_MIN(kLanes, n - c), first, pool);
}
void finish_pool(const Pool& pool, int32_t n, float* latent) {
  for (int32_t c = 0; c < n; c += kLanes)
    hn::StoreU(hn::LoadU(kFloats, pool.values + c) / hn::LoadU(kFloats, pool.weights + c), kFloats, latent + c);
}

#if HWY_TARGET != HWY_SCALAR
/// Returns the sums of neighbours: those of `low`, then those of `high`.
HWY_INLINE FloatVec sum_neighbours(FloatVec low, FloatVec high) {
  return hn::ConcatEven(kFloats, high, low) + hn::ConcatOdd(kFloats, high, low);
}
#endif

constexpr int32_t kSquares = 256;  // that are summed together

/// Returns the sum of kSquares squares: of neighbours, of neighbours of these sums, and so on.
float sum_squares(const float* x) {
  alignas(64) float sums[kSquares];
  int32_t width = kSquares;
#if HWY_TARGET != HWY_SCALAR
  for (; width >= 2 * kLanes; width /= 2)
    for (int32_t i = 0; i < width; i += 2 * kLanes) {
      FloatVec low = hn::LoadU(kFloats, (width == kSquares ? x : sums) + i);
      FloatVec high = hn::LoadU(kFloats, (width == kSquares ? x : sums) + i + kLanes);
      if (width == kSquares) {
        low = low * low;
        high = high * high;
      }
      hn::Store(sum_neighbours(low, high), kFloats, sums + i / 2);
    }
#else
  for (int32_t i = 0; i < kSquares; ++i) sums[i] = x[i] * x[i];
#endif
  for (width /= 2; width > 0; width /= 2)
    for (int32_t i = 0; i < width; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return sums[0];
}

float norm_factor(const float* x, int32_t n, float epsilon) {
  float sums[kMaxLatent / kSquares] = {};
  for (int32_t first = 0; first < n; first += kSquares) {
    if (n - first >= kSquares) {
      sums[first / kSquares] = sum_squares(x + first);
      continue;
    }
    alignas(64) float rest[kSquares] = {};
    std::copy_n(x + first, n - first, rest);
    sums[first / kSquares] = sum_squares(rest);
  }
  for (int32_t width = kMaxLatent / kSquares / 2; width > 0; width /= 2)
    for (int32_t i = 0; i < width; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return 1.0F / std::sqrt(sums[0] / static_cast<float>(n) + epsilon);
}

void scale_channels(const float* x, int32_t n, float factor, const float* weight, void* dst, DType dtype) {
  const FloatVec factors = hn::Set(kFloats, factor);
  for_each_vector(x, DType::kF32, n, [&](FloatVec v, int64_t i, int64_t lanes) {
    const auto count = static_cast<int32_t>(lanes);
    v = v * factors;
    if (weight != nullptr) v = v * load_some(weight + i, DType::kF32, count);
    v = hn::IfThenElse(hn::IsNaN(v), hn::Set(kFloats, std::numeric_limits<float>::quiet_NaN()), v);
    if (count == kLanes) return store_from_f32(v, advance(dst, dtype, i), dtype);
    alignas(64) unsigned char rest[kLanes * sizeof(float)];
    store_from_f32(v, rest, dtype);
    std::memcpy(advance(dst, dtype, i), rest, static_cast<size_t>(count) * size_of(dtype));
  });
}

void apply_gate(float* x, const float* gate, int32_t n) {
  const FloatVec one = hn::Set(kFloats, 1.0F);
  for_each_vector(gate, DType::kF32, n, [&](FloatVec g, int64_t i, int64_t lanes) {
    const auto count = static_cast<int32_t>(lanes);
    // 1 / (1 + e^-g) is e^g / (e^g + 1): of the two powers the one below 1.
    const FloatVec power = exp2_nonpositive(hn::Abs(g) * hn::Set(kFloats, -1.44269504F));
    const FloatVec share = hn::IfThenElse(g < hn::Zero(kFloats), power, one) / (one + power);
    const FloatVec product = load_some(x + i, DType::kF32, count) * share;
    if (count == kLanes) return hn::StoreU(product, kFloats, x + i);
    alignas(64) float rest[kLanes];
    hn::Store(product, kFloats, rest);
    std::copy_n(rest, count, x + i);
  });
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

// SPDX-License-Identifier: Apache-2.0
// These row kernels pool tokens into latents, for compress. This file is included as tile_kernels-inl.h is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

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

void normalize(const float* x, int32_t n, const float* weight, float epsilon, void* dst, DType dtype) {
  float factor = 1.0F;
  if (weight != nullptr) {
    FloatVec squares = hn::Zero(kFloats);
    for_each_vector(x, DType::kF32, n, [&](FloatVec v, int64_t, int64_t) { squares = hn::MulAdd(v, v, squares); });
    factor = 1.0F / std::sqrt(hn::GetLane(hn::SumOfLanes(kFloats, squares)) / static_cast<float>(n) + epsilon);
  }
  for_each_vector(x, DType::kF32, n, [&](FloatVec v, int64_t i, int64_t lanes) {
    const auto count = static_cast<int32_t>(lanes);
    if (weight != nullptr) v = v * hn::Set(kFloats, factor) * load_some(weight + i, DType::kF32, count);
    if (count == kLanes) return store_from_f32(v, advance(dst, dtype, i), dtype);
    alignas(64) unsigned char rest[kLanes * sizeof(float)];
    store_from_f32(v, rest, dtype);
    std::memcpy(advance(dst, dtype, i), rest, static_cast<size_t>(count) * size_of(dtype));
  });
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

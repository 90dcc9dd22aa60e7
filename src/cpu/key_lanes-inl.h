// SPDX-License-Identifier: Apache-2.0
// This file has AMX's kernels for many query rows (KeyLaneKernels). It is included like tile_unit-inl.h.
#pragma once

#include "cpu/block_parts-inl.h"
#include "cpu/tile_prefetch-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

void pack_rows_as_tiles(const void* const* rows, int32_t d, uint32_t* q) {
  for (int32_t t = 0; t < d / kPack; t += kTileWords)
    for (int32_t row = 0; row < kTileRows; ++row, q += kTileWords) {
      const WordVec words =
          rows[row] != nullptr ? hn::LoadU(kWords, static_cast<const uint32_t*>(rows[row]) + t) : hn::Zero(kWords);
      hn::StoreU(words, kWords, q);
    }
}

void pack_keys(const void* const* rows, int32_t num_keys, int32_t steps, uint32_t* keys) {
  for (int32_t key = 0; key < num_keys; key += kTileRows)
    for (int32_t t = 0; t < steps; t += kTileWords, keys += kTileSize) {
      WordVec words[kTileRows];
      MLA_UNROLL for (int32_t i = 0; i < kTileRows; ++i) words[i] =
          hn::LoadU(kWords, static_cast<const uint32_t*>(rows[key + i]) + t);
      transpose(words);
      MLA_UNROLL for (int32_t i = 0; i < kTileRows; ++i) hn::StoreU(words[i], kWords, keys + i * kTileWords);
    }
}

/// A row tile has 32 channels of 16 queries as they lie, and a column tile the same 16 steps of 16 keys.
void score_rows(const uint32_t* q, int32_t num_groups, int32_t steps, const uint32_t* keys, int32_t num_keys, float* s,
                int64_t s_stride, const Prefetch& prefetch) {
  const SumPlaces places = {
      .down = kTileRows * s_stride, .right = kLanes, .row_bytes = s_stride * static_cast<int64_t>(sizeof(float))};
  const int64_t stride = int64_t{steps} * kTileRows;  // of the tiles of 16 queries or keys
  TilePrefetcher prefetcher(prefetch, prefetch.num_rows);
  const int32_t prefetches = share(prefetcher, (num_keys + kTileKeys - 1) / kTileKeys * steps / kTileWords);
  for (int32_t key = 0; key < num_keys; key += kTileKeys, keys += 2 * stride)
    with_tiles(num_groups > 1, num_keys - key > kTileRows, [&](auto groups, auto key_tiles) {
      zero_sums<groups, key_tiles>();
      for (int64_t at = 0; at < stride; at += kTileSize) {
        add_products<groups, key_tiles>({{q + at, kTileBytes}, {q + stride + at, kTileBytes}},
                                        {{keys + at, kTileBytes}, {keys + stride + at, kTileBytes}});
        some(prefetcher, prefetches);
      }
      store_sums<groups, key_tiles>(s + key, places);
    });
}

void shape_score_rows(float* s, int64_t s_stride, int32_t num_keys, float scale, float cap, const float* slope,
                      const int32_t* query_position, const int32_t* key_position) {
  const bool capped = cap != 0.0F;
  const FloatVec before = hn::Set(kFloats, capped ? scale / cap : scale);
  for (int32_t row = 0; row < kTileRows; ++row, s += s_stride) {
    const FloatVec row_slope = hn::Set(kFloats, slope != nullptr ? slope[row] : 0.0F);
    const auto position = hn::Set(kInts, query_position[row]);
    for (int32_t key = 0; key < num_keys; key += kLanes) {
      FloatVec x = hn::LoadU(kFloats, s + key) * before;
      if (capped) x = tanh(x) * hn::Set(kFloats, cap);
      if (slope != nullptr)
        x = hn::MulAdd(row_slope, hn::ConvertTo(kFloats, hn::LoadU(kInts, key_position + key) - position), x);
      hn::StoreU(x, kFloats, s + key);
    }
  }
}

/// Transposes 16 vectors and combines them, so that lane i has what combines the lanes of vector i.
template <class F>
HWY_INLINE FloatVec combine_each(const FloatVec* vectors, const F& combine) {
  WordVec words[kLanes];
  MLA_UNROLL for (int32_t i = 0; i < kLanes; ++i) words[i] = hn::BitCast(kWords, vectors[i]);
  transpose(words);
  FloatVec result = hn::BitCast(kFloats, words[0]);
  MLA_UNROLL for (int32_t i = 1; i < kLanes; ++i) result = combine(result, hn::BitCast(kFloats, words[i]));
  return result;
}
FloatVec largest_of_each(const FloatVec* vectors) {
  return combine_each(vectors, [](FloatVec a, FloatVec b) { return hn::Max(a, b); });
}
FloatVec sum_of_each(const FloatVec* vectors) {
  return combine_each(vectors, [](FloatVec a, FloatVec b) { return a + b; });
}

template <bool kMasked>
void softmax_of_rows(const SoftmaxBlock& block) {
  const auto lane = hn::Iota(kInts, 0);
  const auto score = [&](int32_t row, int32_t key) {
    const FloatVec x = hn::LoadU(kFloats, block.s + row * block.s_stride + key);
    if constexpr (!kMasked) return x;
    const int32_t limit = block.limit != nullptr ? HWY_MIN(block.limit[row], block.num_keys) : block.num_keys;
    const auto visible = hn::RebindMask(kFloats, hn::Lt(lane, hn::Set(kInts, limit - key)));
    return hn::IfThenElse(visible, x, hn::Set(kFloats, -HUGE_VALF));
  };
  FloatVec of_row[kTileRows];
  for (int32_t row = 0; row < kTileRows; ++row) {
    FloatVec top[kPack] = {hn::Set(kFloats, -HUGE_VALF), hn::Set(kFloats, -HUGE_VALF)};
    for (int32_t key = 0; key < block.num_keys; key += kTileKeys)
      MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) top[i] = hn::Max(top[i], score(row, key + i * kLanes));
    of_row[row] = hn::Max(top[0], top[1]);
  }
  const NewBase chosen = choose_base(block, largest_of_each(of_row));
  alignas(64) float base[kTileRows];
  hn::Store(chosen.base, kFloats, base);
  const FloatVec scale = hn::Set(kFloats, block.scale_log2);
  for (int32_t row = 0; row < kTileRows; ++row) {
    const FloatVec row_base = hn::Set(kFloats, base[row]);
    FloatVec sum[kPack] = {hn::Zero(kFloats), hn::Zero(kFloats)};
    uint32_t* p = block.p + row * kTileWords;
    for (int32_t key = 0; key < block.num_keys; key += kTileKeys, p += kTileSize) {
      FloatVec e[kPack];
      MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) {
        e[i] = exp2_nonpositive(hn::MulSub(score(row, key + i * kLanes), scale, row_base));
        sum[i] = sum[i] + e[i];
      }
      hn::StoreU(step_of(e), kWords, p);
    }
    of_row[row] = sum[0] + sum[1];
  }
  hn::StoreU(hn::MulAdd(hn::LoadU(kFloats, block.sum), chosen.alpha, sum_of_each(of_row)), kFloats, block.sum);
}

void softmax_rows(const SoftmaxBlock& block) {
  if (block.limit != nullptr || block.num_keys % kTileKeys != 0)
    softmax_of_rows<true>(block);
  else
    softmax_of_rows<false>(block);
}

constexpr KeyLaneKernels kKeyLanes = {.pack_queries = pack_rows_as_tiles,
                                      .pack_keys = pack_keys,
                                      .scores = score_rows,
                                      .shape_scores = shape_score_rows,
                                      .softmax = softmax_rows};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

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

/// Returns a row's scores with 16 keys from `key` on, -inf where the row does not see a key.
template <bool kMasked>
HWY_INLINE FloatVec row_scores(const SoftmaxBlock& block, int32_t row, int32_t key) {
  const FloatVec x = hn::LoadU(kFloats, block.s + row * block.s_stride + key);
  if constexpr (!kMasked) return x;
  const int32_t limit = block.limit != nullptr ? HWY_MIN(block.limit[row], block.num_keys) : block.num_keys;
  const auto visible = hn::RebindMask(kFloats, hn::Lt(hn::Iota(kInts, key), hn::Set(kInts, limit)));
  return hn::IfThenElse(visible, x, hn::Set(kFloats, -HUGE_VALF));
}

/// Returns the largest score of each row.
template <bool kMasked>
FloatVec largest_scores(const SoftmaxBlock& block) {
  FloatVec top[kTileRows];
  for (int32_t row = 0; row < kTileRows; ++row) {
    top[row] = hn::Set(kFloats, -HUGE_VALF);
    for (int32_t key = 0; key < block.num_keys; key += kLanes)
      top[row] = hn::Max(top[row], row_scores<kMasked>(block, row, key));
  }
  return largest_of_each(top);
}

/// Holds a number for each of 16 rows.
struct RowSums {
  FloatVec top, sum;  // of the scores, and of P
};

/// Computes P of one row.
class RowExponentials {
 public:
  RowExponentials(const SoftmaxBlock& block, int32_t row, float base)
      : block_(block), row_(row), base_(hn::Set(kFloats, base)), p_(block.p + row * kTileWords) {}

  /// Takes kTiles times 32 keys. Their vectors go through each instruction together: with one after another the
  /// processor's scheduler is full of instructions that wait (a softmax took 1.3 times as long).
  template <bool kMasked, int32_t kTiles>
  HWY_INLINE void add(int32_t key) {
    constexpr int32_t kVectors = kTiles * kPack;
    const FloatVec scale = hn::Set(kFloats, block_.scale_log2);
    FloatVec x[kVectors];
    MLA_UNROLL for (int32_t i = 0; i < kVectors; ++i) x[i] = row_scores<kMasked>(block_, row_, key + i * kLanes);
    MLA_UNROLL for (int32_t i = 0; i < kVectors; ++i) top_[i % kPack] = hn::Max(top_[i % kPack], x[i]);
    MLA_UNROLL for (int32_t i = 0; i < kVectors; ++i) x[i] = hn::MulSub(x[i], scale, base_);
    exp2_nonpositive(x);
    MLA_UNROLL for (int32_t i = 0; i < kVectors; ++i) sum_[i % kPack] = sum_[i % kPack] + x[i];
    MLA_UNROLL for (int32_t i = 0; i < kTiles; ++i) hn::StoreU(step_of(x + i * kPack), kWords, p_ + i * kTileSize);
    p_ += kTiles * kTileSize;
  }
  FloatVec top() const { return hn::Max(top_[0], top_[1]); }
  FloatVec sum() const { return sum_[0] + sum_[1]; }

 private:
  const SoftmaxBlock& block_;
  const int32_t row_;
  const FloatVec base_;
  uint32_t* p_;
  FloatVec top_[kPack] = {hn::Set(kFloats, -HUGE_VALF), hn::Set(kFloats, -HUGE_VALF)};
  FloatVec sum_[kPack] = {hn::Zero(kFloats), hn::Zero(kFloats)};
};

/// Computes P for given bases.
template <bool kMasked>
RowSums exponentiate(const SoftmaxBlock& block, FloatVec bases) {
  alignas(64) float base[kTileRows];
  hn::Store(bases, kFloats, base);
  FloatVec tops[kTileRows], sums[kTileRows];
  for (int32_t row = 0; row < kTileRows; ++row) {
    RowExponentials exponentials(block, row, base[row]);
    int32_t key = 0;
    for (; key + kTileKeys < block.num_keys; key += 2 * kTileKeys) exponentials.template add<kMasked, 2>(key);
    if (key < block.num_keys) exponentials.template add<kMasked, 1>(key);
    tops[row] = exponentials.top();
    sums[row] = exponentials.sum();
  }
  return {.top = largest_of_each(tops), .sum = sum_of_each(sums)};
}

/// Computes P for the old bases first, since these seldom move once a row has seen keys.
template <bool kMasked>
void softmax_of_rows(const SoftmaxBlock& block) {
  const FloatVec old_base = hn::LoadU(kFloats, block.base);
  const bool begun = hn::AllTrue(kFloats, hn::Gt(old_base, hn::Set(kFloats, -HUGE_VALF)));
  RowSums rows;
  if (begun) rows = exponentiate<kMasked>(block, old_base);
  const NewBase chosen = choose_base(block, begun ? rows.top : largest_scores<kMasked>(block));
  if (!begun || !hn::AllTrue(kFloats, hn::Eq(chosen.base, old_base))) rows = exponentiate<kMasked>(block, chosen.base);
  hn::StoreU(hn::MulAdd(hn::LoadU(kFloats, block.sum), chosen.alpha, rows.sum), kFloats, block.sum);
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

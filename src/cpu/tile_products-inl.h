// SPDX-License-Identifier: Apache-2.0
// This file has the scores, the softmax and the products with values of AMX, on panels of up to four groups of rows. It
// is included like tile_unit-inl.h.
//
// Of the eight tiles, 0 ... 3 hold the sums of as many groups, 4 and 5 what is multiplied. Fewer tiles in use leave the
// processor more to rename: where the core's other thread is busy, two by two sums and four operands took 1.6 times as
// long (Intel, Emerald Rapids, 2026-11-28; docs/notebook/2026-11-28-amx.md).
#pragma once

#include <type_traits>

#include "cpu/block_parts-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

/// Calls f(integral constant n) for n = 1 ... kPanelGroups.
template <class F>
HWY_INLINE void with_groups(int32_t n, const F& f) {
  static_assert(kPanelGroups == 4);
  switch (n) {
    case 1: return f(std::integral_constant<int32_t, 1>());
    case 2: return f(std::integral_constant<int32_t, 2>());
    case 3: return f(std::integral_constant<int32_t, 3>());
    default: return f(std::integral_constant<int32_t, 4>());
  }
}

template <int32_t kGroups, int32_t kTile = 0>
HWY_INLINE void zero_sums() {
  if constexpr (kTile < kGroups) {
    zero_tile<kTile>();
    zero_sums<kGroups, kTile + 1>();
  }
}
template <int32_t kGroups, int32_t kTile = 0>
HWY_INLINE void load_sums(const float* sums, int64_t group_stride, int64_t row_bytes) {
  if constexpr (kTile < kGroups) {
    load_tile<kTile>(sums, row_bytes);
    load_sums<kGroups, kTile + 1>(sums + group_stride, group_stride, row_bytes);
  }
}
template <int32_t kGroups, int32_t kTile = 0>
HWY_INLINE void store_sums(float* sums, int64_t group_stride, int64_t row_bytes) {
  if constexpr (kTile < kGroups) {
    store_tile<kTile>(sums, row_bytes);
    store_sums<kGroups, kTile + 1>(sums + group_stride, group_stride, row_bytes);
  }
}

enum class Order : uint8_t { kGroupSecond, kGroupFirst };

/// Adds to each group's sums the product of tile 4 and a tile of the group, in this order or the other.
template <int32_t kGroups, Order kOrder, int32_t kTile = 0>
HWY_INLINE void multiply_groups(const uint32_t* group, int64_t group_stride) {
  if constexpr (kTile < kGroups) {
    load_tile<5>(group, kTileBytes);
    if constexpr (kOrder == Order::kGroupFirst)
      multiply_tiles<kTile, 5, 4>();
    else
      multiply_tiles<kTile, 4, 5>();
    multiply_groups<kGroups, kOrder, kTile + 1>(group + group_stride, group_stride);
  }
}

// ---- softmax ----

/// Computes softmax in small steps of some 100 instructions.
class SoftmaxWork {
 public:
  SoftmaxWork(const SoftmaxBlock* blocks, int32_t num_blocks) : block_(blocks) {
    for (int32_t i = 0; i < num_blocks; ++i) remaining_ += max_steps(blocks[i]) + kTileSteps * num_tiles(blocks[i]);
  }

  int32_t remaining() const { return remaining_; }

  void step() {
    --remaining_;
    if (block_->limit != nullptr)
      step_as<true>();
    else
      step_as<false>();
  }

 private:
  static constexpr int32_t kMaxKeys = 64;                                    // whose maximum a step takes
  static constexpr int32_t kStepPairs = 4;                                   // pairs of keys of a step
  static constexpr int32_t kTileSteps = kTileKeys / kPack / kStepPairs + 1;  // and one that transposes
  // The base of the powers of two follows the largest score only where that exceeds it by more than this, so that few
  // blocks rescale the outputs. P is then at most 2^8.
  static constexpr float kBaseSlack = 8.0F;

  static int32_t max_steps(const SoftmaxBlock& block) { return (block.num_keys + kMaxKeys - 1) / kMaxKeys; }
  static int32_t num_tiles(const SoftmaxBlock& block) { return (block.num_keys + kTileKeys - 1) / kTileKeys; }

  template <bool kMasked>
  void step_as() {
    if (key_ < block_->num_keys) return find_max<kMasked>();
    if (part_ < kTileSteps - 1) return add_pairs<kMasked>();
    store_tile_of_p();
  }

  template <bool kMasked>
  void find_max() {
    const auto limit = kMasked ? hn::LoadU(kInts, block_->limit) : hn::Zero(kInts);
    FloatVec top[2] = {top_, top_};
    const int32_t end = HWY_MIN(key_ + kMaxKeys, block_->num_keys);
    for (int32_t key = key_; key < end; key += 2)
      MLA_UNROLL for (int32_t i = 0; i < 2; ++i) top[i] =
          hn::Max(top[i], load_score<kMasked>(block_->s, key + i, limit));
    top_ = hn::Max(top[0], top[1]);
    key_ = end;
    if (key_ == block_->num_keys) choose_base();
  }

  void choose_base() {
    const FloatVec lowest = hn::Set(kFloats, -HUGE_VALF);
    const FloatVec max = hn::Max(hn::LoadU(kFloats, block_->max), top_ * hn::Set(kFloats, block_->scale_log2));
    hn::StoreU(max, kFloats, block_->max);
    const FloatVec old_base = hn::LoadU(kFloats, block_->base);
    const FloatVec base = hn::IfThenElse(hn::Gt(max, old_base + hn::Set(kFloats, kBaseSlack)), max, old_base);
    hn::StoreU(base, kFloats, block_->base);
    // Because -inf - -inf would be NaN.
    base_ = hn::IfThenElse(hn::Eq(base, lowest), hn::Zero(kFloats), base);
    alpha_ = exp2_nonpositive(old_base - base_);
    hn::StoreU(alpha_, kFloats, block_->alpha);
  }

  template <bool kMasked>
  void add_pairs() {
    const auto limit = kMasked ? hn::LoadU(kInts, block_->limit) : hn::Zero(kInts);
    const FloatVec scale = hn::Set(kFloats, block_->scale_log2);
    FloatVec sum[kPack] = {sum_[0], sum_[1]};
    MLA_UNROLL for (int32_t pair = 0; pair < kStepPairs; ++pair) {
      const int32_t index = part_ * kStepPairs + pair, key = tile_ * kTileKeys + kPack * index;
      WordVec word = hn::Zero(kWords);
      if (key < block_->num_keys) {
        FloatVec e[kPack];
        MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) {
          e[i] = exp2_nonpositive(hn::MulSub(load_score<kMasked>(block_->s, key + i, limit), scale, base_));
          sum[i] = sum[i] + e[i];
        }
        word = step_of(e);
      }
      hn::StoreU(word, kWords, words_[index]);
    }
    sum_[0] = sum[0];
    sum_[1] = sum[1];
    ++part_;
  }

  void store_tile_of_p() {
    WordVec words[kTileWords];
    MLA_UNROLL for (int32_t i = 0; i < kTileWords; ++i) words[i] = hn::LoadU(kWords, words_[i]);
    transpose(words);
    uint32_t* p = block_->p + tile_ * kTileSize;
    MLA_UNROLL for (int32_t row = 0; row < kTileRows; ++row) hn::StoreU(words[row], kWords, p + row * kTileWords);
    part_ = 0;
    if (++tile_ < num_tiles(*block_)) return;
    hn::StoreU(hn::MulAdd(hn::LoadU(kFloats, block_->sum), alpha_, sum_[0] + sum_[1]), kFloats, block_->sum);
    ++block_;
    key_ = tile_ = 0;
    top_ = hn::Set(kFloats, -HUGE_VALF);
    sum_[0] = sum_[1] = hn::Zero(kFloats);
  }

  alignas(64) uint32_t words_[kTileWords][kLanes];
  FloatVec top_ = hn::Set(kFloats, -HUGE_VALF), base_ = hn::Zero(kFloats), alpha_ = hn::Zero(kFloats);
  FloatVec sum_[kPack] = {hn::Zero(kFloats), hn::Zero(kFloats)};
  const SoftmaxBlock* block_;
  int32_t remaining_ = 0, key_ = 0, tile_ = 0, part_ = 0;
};

void softmax(const SoftmaxBlock& block) {
  for (SoftmaxWork work(&block, 1); work.remaining() > 0;) work.step();
}

// ---- work beside the multiplies ----

/// Does its work in equal shares at each of `calls` calls of `step`, and what is left in `finish`.
class BackgroundWork {
 public:
  BackgroundWork(const Background& background, int32_t calls)
      : copier_(background.copies),
        packer_(background.v != nullptr ? background.slab : SlabSource{}, background.v),
        softmax_(background.softmax, background.num_softmax),
        copies_(share(copier_, calls)),
        packed_(share(packer_, calls)),
        scored_(share(softmax_, calls)) {}

  HWY_INLINE void step() {
    if (copier_.remaining() > 0)
      some(copier_, copies_);
    else  // whose source may be a copy
      some(packer_, packed_);
    some(softmax_, scored_);
  }
  void finish() {
    some(copier_, INT32_MAX);
    some(packer_, INT32_MAX);
    some(softmax_, INT32_MAX);
  }

 private:
  template <class Work>
  static int32_t share(const Work& work, int32_t calls) {
    return (work.remaining() + calls - 1) / HWY_MAX(calls, 1);
  }
  template <class Work>
  static HWY_INLINE void some(Work& work, int32_t steps) {
    for (; steps > 0 && work.remaining() > 0; --steps) work.step();
  }

  RowCopier copier_;
  SlabPacker packer_;
  SoftmaxWork softmax_;
  const int32_t copies_, packed_, scored_;
};

/// Prefetches whole rows into L2, one after another, in equal shares at each of `calls` calls of `step`.
class RowPrefetcher {
 public:
  RowPrefetcher(const Prefetch& prefetch, int32_t num_rows, int32_t calls)
      : prefetch_(prefetch), end_(prefetch.lines[0] > 0 ? HWY_MIN(num_rows, prefetch.num_rows) : 0) {
    per_call_ = (end_ + calls - 1) / HWY_MAX(calls, 1);
  }

  HWY_INLINE void step() {
    constexpr int kIntoL2 = 2;
    for (const int32_t last = HWY_MIN(row_ + per_call_, end_); row_ < last; ++row_)
      for (int32_t list = 0; list < 2; ++list)
        for (int32_t line = 0; line < prefetch_.lines[list]; ++line)
          __builtin_prefetch(static_cast<const char*>(prefetch_.rows[list][row_]) + 64 * line, 0, kIntoL2);
  }

 private:
  const Prefetch& prefetch_;
  int32_t row_ = 0, end_, per_call_;
};

// ---- scores ----

/// A tile of keys has the rows of 16 keys as they lie, and a tile of queries the same 16 steps of a group.
void scores(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments,
            int32_t num_segments, const Prefetch& prefetch, int32_t key_begin, int32_t key_end, float* s,
            int64_t s_group_stride, const Background& background) {
  int32_t chunks = 0;
  for (int32_t i = 0; i < num_segments; ++i) chunks += segments[i].steps / kStepChunk;
  const int32_t calls = (key_end - key_begin + kTileRows - 1) / kTileRows * chunks;
  BackgroundWork work(background, calls);
  RowPrefetcher prefetcher(prefetch, key_end - key_begin, calls);
  with_groups(num_groups, [&](auto groups) {
    for (int32_t key = key_begin; key < key_end; key += kTileRows) {
      zero_sums<groups>();
      const uint32_t* queries = q;
      for (int32_t i = 0; i < num_segments; ++i) {
        const auto* const* rows = reinterpret_cast<const char* const*>(segments[i].rows) + key;
        const char* row = rows[0];
        const int64_t stride = rows[1] - rows[0];
        for (int32_t step = 0; step < segments[i].steps; step += kStepChunk, row += kTileBytes, queries += kTileSize) {
          load_tile<4>(row, stride);
          multiply_groups<groups, Order::kGroupSecond>(queries, q_group_stride);
          prefetcher.step();
          work.step();
        }
      }
      store_sums<groups>(s + static_cast<int64_t>(key) * kLanes, s_group_stride, kTileBytes);
    }
  });
  work.finish();
}

// ---- values ----

/// Multiplies 16 rows of a slab of o by factors, unless all of them are 1.
HWY_INLINE void rescale_rows(const float* alpha, float* o) {
  if (hn::AllTrue(kFloats, hn::Eq(hn::LoadU(kFloats, alpha), hn::Set(kFloats, 1.0F)))) return;
  for (int32_t row = 0; row < kTileRows; ++row, o += kSlab) {
    const FloatVec factor = hn::Set(kFloats, alpha[row]);
    MLA_UNROLL for (int32_t c = 0; c < kSlab; c += kLanes)
        hn::StoreU(factor * hn::LoadU(kFloats, o + c), kFloats, o + c);
  }
}

void accumulate(const ValueProducts& products, const Background& background) {
  constexpr int64_t kRowBytes = kSlab * sizeof(float), kGroupSize = kTileRows * kSlab;
  const int32_t num_groups = (products.num_rows + kTileRows - 1) / kTileRows;
  int32_t steps = 0;  // P of groups with fewer is 0 from their last step on
  for (int32_t group = 0; group < num_groups; ++group) steps = HWY_MAX(steps, products.key_steps[group]);
  const int32_t num_tiles = (steps + kTileWords - 1) / kTileWords;
  BackgroundWork work(background, num_tiles * products.num_slabs * (kSlab / kTileWords));
  for (int32_t slab = 0; slab < products.num_slabs && (num_tiles > 0 || products.first); ++slab) {
    float* const o = products.o + slab * products.o_stride;
    for (int32_t group = 0; group < num_groups && !products.first; ++group)
      rescale_rows(products.alpha + group * kTileRows, o + group * kGroupSize);
    with_groups(num_groups, [&](auto groups) {
      for (int32_t half = 0; half < kSlab; half += kTileWords) {
        if (products.first)
          zero_sums<groups>();
        else
          load_sums<groups>(o + half, kGroupSize, kRowBytes);
        const uint32_t* v = products.v + slab * products.v_stride + half;
        const uint32_t* p = products.p;
        for (int32_t i = 0; i < num_tiles; ++i, v += kGroupSize, p += kTileSize) {
          load_tile<4>(v, kRowBytes);
          multiply_groups<groups, Order::kGroupFirst>(p, products.p_group_stride);
          work.step();
        }
        store_sums<groups>(o + half, kGroupSize, kRowBytes);
      }
    });
  }
  work.finish();
}

/// Puts the channels of a slab, which lie as kSlabPositions says, in order.
HWY_INLINE void order_slab(FloatVec* values) {
  alignas(64) static constexpr int64_t kLow[8] = {0, 1, 8, 9, 2, 3, 10, 11};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
  const __m512d a = _mm512_castps_pd(values[0].raw), b = _mm512_castps_pd(values[1].raw);
  values[0].raw = _mm512_castpd_ps(_mm512_permutex2var_pd(a, low, b));
  values[1].raw = _mm512_castpd_ps(_mm512_permutex2var_pd(a, high, b));
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

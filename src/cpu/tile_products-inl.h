// SPDX-License-Identifier: Apache-2.0
// This file has the scores, the softmax and the products with values of AMX, on panels of one or two groups of rows. It
// is included like tile_unit-inl.h.
#pragma once

#include "cpu/block_parts-inl.h"
#include "cpu/tile_prefetch-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

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

  static int32_t max_steps(const SoftmaxBlock& block) { return (block.num_keys + kMaxKeys - 1) / kMaxKeys; }
  static int32_t num_tiles(const SoftmaxBlock& block) { return (block.num_keys + kTileKeys - 1) / kTileKeys; }

  template <bool kMasked>
  void step_as() {
    if (key_ < block_->num_keys) return find_max<kMasked>();
    if (part_ == kTileSteps - 1) return store_tile_of_p();
    if ((tile_ + 1) * kTileKeys <= block_->num_keys)
      add_pairs<kMasked, true>();
    else
      add_pairs<kMasked, false>();
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
    const NewBase chosen = cpu::MLA_CPU_ISA::choose_base(*block_, top_);
    base_ = chosen.base;
    alpha_ = chosen.alpha;
  }

  template <bool kMasked, bool kWholeTile>
  void add_pairs() {
    const auto limit = kMasked ? hn::LoadU(kInts, block_->limit) : hn::Zero(kInts);
    const FloatVec scale = hn::Set(kFloats, block_->scale_log2);
    FloatVec sum[kPack] = {sum_[0], sum_[1]};
    MLA_UNROLL for (int32_t pair = 0; pair < kStepPairs; ++pair) {
      const int32_t index = part_ * kStepPairs + pair;
      FloatVec e[kPack];
      MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) {
        const int32_t key = tile_ * kTileKeys + i * kTileWords + index;
        e[i] = kWholeTile || key < block_->num_keys
                   ? exp2_nonpositive(hn::MulSub(load_score<kMasked>(block_->s, key, limit), scale, base_))
                   : hn::Zero(kFloats);
        sum[i] = sum[i] + e[i];
      }
      hn::StoreU(step_of(e), kWords, words_[index]);
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
  BackgroundWork(const Background& background, const TilePrefetcher& prefetcher, int32_t calls)
      : packer_(background.v != nullptr ? background.slab : SlabSource{}, background.v),
        softmax_(background.softmax, background.num_softmax),
        prefetcher_(prefetcher),
        packed_(share(packer_, calls)),
        scored_(share(softmax_, calls)),
        prefetches_(share(prefetcher_, calls)) {}

  HWY_INLINE void step() {
    some(packer_, packed_);
    some(softmax_, scored_);
    some(prefetcher_, prefetches_);
  }
  void finish() {
    some(packer_, INT32_MAX);
    some(softmax_, INT32_MAX);
  }

 private:
  SlabPacker packer_;
  SoftmaxWork softmax_;
  TilePrefetcher prefetcher_;
  const int32_t packed_, scored_, prefetches_;
};

/// Is the work beside multiplies that have none.
struct NoWork {
  static void step() {}
};

/// Calls multiply(work), which calls work.step() `calls` times, and does all of the background's work meanwhile.
template <class F>
HWY_INLINE void multiply_beside(const Background& background, const TilePrefetcher& prefetcher, int32_t calls,
                                const F& multiply) {
  if (background.v == nullptr && background.num_softmax == 0 && prefetcher.remaining() == 0) {
    NoWork none;
    return multiply(none);
  }
  BackgroundWork work(background, prefetcher, calls);
  multiply(work);
  work.finish();
}

// ---- scores ----

/// A row tile has 32 channels of 16 keys as they lie, and a column tile the same 16 steps of a group of queries.
template <class Work>
void score(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments, int32_t num_segments,
           int32_t key_begin, int32_t key_end, float* s, int64_t s_group_stride, Work& work) {
  const SumPlaces places = {.down = kTileSize, .right = s_group_stride, .row_bytes = kTileBytes};
  const bool two_groups = num_groups == 2;
  for (int32_t key = key_begin; key < key_end; key += 2 * kTileRows) {
    const bool two_tiles = key_end - key > kTileRows;
    with_tiles(two_tiles, two_groups, [&](auto key_tiles, auto groups) {
      zero_sums<key_tiles, groups>();
      const uint32_t* queries = q;
      for (int32_t i = 0; i < num_segments; ++i) {
        const auto* const* rows = reinterpret_cast<const char* const*>(segments[i].rows) + key;
        TileRows keys[2];
        for (int32_t tile = 0; tile < key_tiles; ++tile, rows += kTileRows) keys[tile] = {rows[0], rows[1] - rows[0]};
        for (int32_t step = 0; step < segments[i].steps; step += kStepChunk, queries += kTileSize) {
          add_products<key_tiles, groups>(keys, {{queries, kTileBytes}, {queries + q_group_stride, kTileBytes}});
          for (int32_t tile = 0; tile < key_tiles; ++tile)
            keys[tile].rows = static_cast<const char*>(keys[tile].rows) + kTileBytes;
          work.step();
        }
      }
      store_sums<key_tiles, groups>(s + static_cast<int64_t>(key) * kLanes, places);
    });
  }
}

void scores(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments,
            int32_t num_segments, const Prefetch& prefetch, int32_t key_begin, int32_t key_end, float* s,
            int64_t s_group_stride, const Background& background) {
  int32_t chunks = 0;
  for (int32_t i = 0; i < num_segments; ++i) chunks += segments[i].steps / kStepChunk;
  const int32_t calls = (key_end - key_begin + 2 * kTileRows - 1) / (2 * kTileRows) * chunks;
  multiply_beside(background, TilePrefetcher(prefetch, key_end - key_begin), calls, [&](auto& work) {
    score(q, q_group_stride, num_groups, segments, num_segments, key_begin, key_end, s, s_group_stride, work);
  });
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

/// A row tile has P of a group of rows and 32 keys, and a column tile the values of these keys in 16 channels.
template <class Work>
void add_values(const ValueProducts& products, int32_t num_groups, int32_t num_tiles, Work& work) {
  constexpr int64_t kRowBytes = kSlab * sizeof(float), kGroupSize = kTileRows * kSlab;
  constexpr SumPlaces kPlaces = {.down = kGroupSize, .right = kTileWords, .row_bytes = kRowBytes};
  static_assert(kSlab == 2 * kTileWords);
  for (int32_t slab = 0; slab < products.num_slabs; ++slab) {
    float* const o = products.o + slab * products.o_stride;
    for (int32_t group = 0; group < num_groups && !products.first; ++group)
      rescale_rows(products.alpha + group * kTileRows, o + group * kGroupSize);
    with_tiles(num_groups > 1, true, [&](auto groups, auto halves) {
      if (products.first)
        zero_sums<groups, halves>();
      else
        load_sums<groups, halves>(o, kPlaces);
      const uint32_t* v = products.v + slab * products.v_stride;
      const uint32_t* p = products.p;
      for (int32_t i = 0; i < num_tiles; ++i, v += kGroupSize, p += kTileSize) {
        add_products<groups, halves>({{p, kTileBytes}, {p + products.p_group_stride, kTileBytes}},
                                     {{v, kRowBytes}, {v + kTileWords, kRowBytes}});
        work.step();
      }
      store_sums<groups, halves>(o, kPlaces);
    });
  }
}

void accumulate(const ValueProducts& products, const Background& background) {
  const int32_t num_groups = (products.num_rows + kTileRows - 1) / kTileRows;
  int32_t steps = 0;  // P of groups with fewer is 0 from their last step on
  for (int32_t group = 0; group < num_groups; ++group) steps = HWY_MAX(steps, products.key_steps[group]);
  const int32_t num_tiles = (steps + kTileWords - 1) / kTileWords;
  multiply_beside(background, TilePrefetcher({}, 0), num_tiles * products.num_slabs, [&](auto& work) {
    if (num_tiles > 0 || products.first) add_values(products, num_groups, num_tiles, work);
  });
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

// SPDX-License-Identifier: Apache-2.0
// This file has the scores, the softmax and the products with values of the instruction sets that multiply vectors. It
// is included like vectors-inl.h.
//
// The register tiles (docs/kernels/cpu.md) are kScoreVectors x kKeyTile in `scores` and kRowTile x kValueVectors in
// `accumulate`.
#pragma once

#include "cpu/block_parts-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

// AVX-512 has 32 vector registers, the other instruction sets 16.
constexpr bool kManyRegisters = kLanes == 16;
constexpr int32_t kScoreVectors = kPanelGroups;
constexpr int32_t kScoreKeys = kManyRegisters ? kKeyTile : kKeyTile / 2;  // keys of a register tile
constexpr int32_t kValueVectors = 2;
constexpr int32_t kRowTile = HWY_MIN(kManyRegisters ? 8 : 4, kLanes);  // all rows of a tile lie in one group

// ---- scores ----

/// Prefetches the lines that belong to one key tile, a few at each call.
class TilePrefetcher {
 public:
  TilePrefetcher(const Prefetch& prefetch, int32_t key, int32_t chunks)
      : prefetch_(prefetch),
        key_(key),
        total_(prefetch.lines[0] + prefetch.lines[1]),
        per_call_((total_ + chunks - 1) / chunks) {}

  HWY_INLINE void step() {
    // Rows are prefetched into L2, since a tile's rows and queries already fill L1. L2 instead of L1 gained 4 points of
    // the peak at 32k keys (AMD EPYC, Zen 4, 2026-11-20).
    constexpr int kIntoL2 = 2;
    for (int32_t end = HWY_MIN(line_ + per_call_, total_); line_ < end; ++line_) {
      const int32_t list = line_ < prefetch_.lines[0] ? 0 : 1;
      const int64_t byte = int64_t{64} * (list == 0 ? line_ : line_ - prefetch_.lines[0]);
      const void* const* rows = prefetch_.rows[list] + key_;
      MLA_UNROLL for (int32_t j = 0; j < kKeyTile; ++j)
          __builtin_prefetch(static_cast<const char*>(rows[j]) + byte, 0, kIntoL2);
    }
  }

 private:
  const Prefetch& prefetch_;
  int32_t key_, total_, per_call_, line_ = 0;
};

template <int32_t kRows>
HWY_INLINE void score_tile(const uint32_t* q, int64_t q_group_stride, const Segment* segments, int32_t num_segments,
                           TilePrefetcher prefetcher, int32_t key, float* s, int64_t s_group_stride) {
  FloatVec sum[kRows][kScoreKeys];
  MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j) sum[r][j] =
      hn::Zero(kFloats);

  for (int32_t i = 0; i < num_segments; ++i) {
    const void* const* rows = segments[i].rows + key;
    const int64_t steps = segments[i].steps;
    const uint32_t* end[kScoreKeys];  // indices count from -steps up to 0, so that all keys share one index register
    MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j) end[j] = static_cast<const uint32_t*>(rows[j]) + steps;
    for (int64_t chunk = -steps; chunk < 0; chunk += kStepChunk) {
      prefetcher.step();
      for (int64_t t = chunk; t < chunk + kStepChunk; ++t) {
        Operand queries[kRows];
        MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) queries[r] = load_operand(q + r * q_group_stride);
        q += kLanes;
        MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j) {
          const Operand k = broadcast(end[j] + t);
          MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) sum[r][j] = multiply_add(queries[r], k, sum[r][j]);
        }
      }
    }
  }
  MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j)
      hn::StoreU(sum[r][j], kFloats, s + r * s_group_stride + static_cast<int64_t>(key + j) * kLanes);
}

void scores(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments,
            int32_t num_segments, const Prefetch& prefetch, int32_t key_begin, int32_t key_end, float* s,
            int64_t s_group_stride, const Background& /*background*/) {
  const Prefetch nothing;
  int32_t chunks = 0;
  for (int32_t i = 0; i < num_segments; ++i) chunks += segments[i].steps / kStepChunk;
  for (int32_t key = key_begin; key < round_up(key_end, kKeyTile); key += kScoreKeys) {
    for (int32_t g = 0; g < num_groups;) {
      const bool prefetching = g == 0 && key % kKeyTile == 0 && key < prefetch.num_rows;
      const TilePrefetcher prefetcher(prefetching ? prefetch : nothing, key, chunks);
      const uint32_t* queries = q + g * q_group_stride;
      float* out = s + g * s_group_stride;
      if (num_groups - g >= kScoreVectors) {
        score_tile<kScoreVectors>(queries, q_group_stride, segments, num_segments, prefetcher, key, out,
                                  s_group_stride);
        g += kScoreVectors;
      } else {
        score_tile<1>(queries, q_group_stride, segments, num_segments, prefetcher, key, out, s_group_stride);
        g += 1;
      }
    }
  }
}

// ---- softmax ----

template <bool kMasked>
HWY_INLINE void softmax_block(const SoftmaxBlock& block) {
  const FloatVec lowest = hn::Set(kFloats, -HUGE_VALF);
  const FloatVec scale = hn::Set(kFloats, block.scale_log2);
  const auto limit = kMasked ? hn::LoadU(kInts, block.limit) : hn::Zero(kInts);
  FloatVec top[kPack];
  MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) top[i] = lowest;
  for (int32_t key = 0; key < block.num_keys; key += kPack)
    MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) top[i] =
        hn::Max(top[i], load_score<kMasked>(block.s, key + i, limit));

  const FloatVec old_max = hn::LoadU(kFloats, block.max);
  const FloatVec new_max = hn::Max(old_max, hn::Max(top[0], top[kPack - 1]) * scale);
  // Because -inf - -inf would be NaN.
  const FloatVec base = hn::IfThenElse(hn::Eq(new_max, lowest), hn::Zero(kFloats), new_max);
  const FloatVec rescale = exp2_nonpositive(old_max - base);
  hn::StoreU(new_max, kFloats, block.max);
  hn::StoreU(new_max, kFloats, block.base);
  hn::StoreU(rescale, kFloats, block.alpha);

  FloatVec sum[kPack];
  MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) sum[i] = hn::Zero(kFloats);
  for (int32_t key = 0; key < block.num_keys; key += kPack) {
    FloatVec e[kPack];
    MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) {
      e[i] = exp2_nonpositive(hn::MulSub(load_score<kMasked>(block.s, key + i, limit), scale, base));
      sum[i] = sum[i] + e[i];
    }
    hn::StoreU(step_of(e), kWords, block.p + static_cast<int64_t>(key / kPack) * kLanes);
  }
  const FloatVec total = kPack == 2 ? sum[0] + sum[kPack - 1] : sum[0];
  hn::StoreU(hn::MulAdd(hn::LoadU(kFloats, block.sum), rescale, total), kFloats, block.sum);
}

void softmax(const SoftmaxBlock& block) {
  if (block.limit != nullptr) {
    softmax_block<true>(block);
  } else {
    softmax_block<false>(block);
  }
}

// ---- values ----

/// Calls `between` after each step along the keys, to do a little other work there.
template <class Between>
HWY_INLINE void accumulate_tile(const uint32_t* p, const uint32_t* v, int32_t key_steps, const float* alpha, bool first,
                                float* o, const Between& between) {
  FloatVec sum[kRowTile][kValueVectors];
  bool rescaled = false;  // seldom true after the first few blocks, when the maximum stays
  MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) rescaled |= alpha[r] != 1.0F;
  MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) sum[r][c] =
      first ? hn::Zero(kFloats) : hn::LoadU(kFloats, o + r * kSlab + c * kLanes);
  if (rescaled && !first) {
    MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) {
      const FloatVec scale = hn::Set(kFloats, alpha[r]);
      MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) sum[r][c] = scale * sum[r][c];
    }
  }
  for (int32_t t = 0; t < key_steps; ++t, p += kLanes, v += kSlab) {
    Operand values[kValueVectors];
    MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) values[c] = load_operand(v + c * kLanes);
    MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) {
      const Operand probability = broadcast(p + r);
      MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) sum[r][c] =
          multiply_add(probability, values[c], sum[r][c]);
    }
    between();
  }
  MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c)
      hn::StoreU(sum[r][c], kFloats, o + r * kSlab + c * kLanes);
}

void accumulate(const ValueProducts& products, const Background& background) {
  const uint32_t *const p = products.p, *const v = products.v;
  const int64_t p_group_stride = products.p_group_stride;
  const int32_t *const key_steps = products.key_steps, num_rows = products.num_rows;
  const float* const alpha = products.alpha;
  const bool first = products.first;
  float* const o = products.o;
#if MLA_CPU_BF16_PAIRS
  RowCopier copier(background.copies);
  SlabPacker packer(background.v != nullptr ? background.slab : SlabSource{}, background.v);
  const auto finish = [](auto& work) {
    while (work.remaining() > 0) work.step();
  };
#else
  static_cast<void>(background);
#endif
  for (int32_t c = 0; c < kSlab; c += kValueVectors * kLanes)
    for (int32_t row = 0; row < num_rows; row += kRowTile) {
      const int32_t group = row / kLanes;
      const int32_t steps = key_steps[group];
      if (steps == 0 && !first) continue;
      const uint32_t* p_row = p + group * p_group_stride + row % kLanes;
      float* o_row = o + static_cast<int64_t>(row) * kSlab + c;
#if MLA_CPU_BF16_PAIRS
      const auto beside = [&](auto& work) {
        if (work.remaining() < steps) {
          finish(work);
          return false;
        }
        accumulate_tile(p_row, v + c, steps, alpha + row, first, o_row, [&] { work.step(); });
        return true;
      };
      if (beside(copier) || beside(packer)) continue;
#endif
      accumulate_tile(p_row, v + c, steps, alpha + row, first, o_row, [] {});
    }
#if MLA_CPU_BF16_PAIRS
  finish(copier);
  finish(packer);
#endif
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

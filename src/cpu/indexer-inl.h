// SPDX-License-Identifier: Apache-2.0
// This file has the indexer's products of queries and keys, of vectors or of AMX's tiles. It is included like
// vectors-inl.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/dequantize-inl.h"
#include "cpu/e4m3-inl.h"
#include "cpu/row_kernels.h"
#include "cpu/vectors-inl.h"
#if MLA_CPU_TILES
#include "cpu/tile_unit-inl.h"
#endif

namespace mla::cpu::MLA_CPU_ISA {
namespace {

constexpr int32_t kHeadDim = kIndexerLayout.head_dim;
constexpr int32_t kHeadSteps = kHeadDim / kPack;
constexpr int32_t kGroupWords = kHeadSteps * kLanes;       // 32-bit words of one group of packed queries
constexpr int32_t kGroupsTogether = kLanes == 16 ? 2 : 1;  // groups whose products with 8 keys fill the registers
constexpr int32_t kKeysTogether = 8;

/// Loads a row of kHeadDim elements as steps: bf16 pairs or f32.
HWY_INLINE void load_steps(const void* row, DType dtype, [[maybe_unused]] const Dequantizer& unscaled,
                           uint32_t* steps) {
#if MLA_CPU_BF16_PAIRS
  if (dtype == DType::kE4M3)
    unscaled(static_cast<const uint8_t*>(row), kHeadDim, reinterpret_cast<uint16_t*>(steps));
  else
    std::memcpy(steps, row, kHeadDim * sizeof(uint16_t));
#else
  for (int32_t i = 0; i < kHeadSteps; i += kLanes) {
    const FloatVec values = dtype == DType::kE4M3 ? e4m3_to_f32(static_cast<const uint8_t*>(row) + i)
                                                  : load_as_f32(advance(row, dtype, i), dtype);
    hn::StoreU(hn::BitCast(kWords, values), kWords, steps + i);
  }
#endif
}

void pack_indexer_queries(const void* q, DType dtype, int64_t head_stride, int32_t num_heads, uint32_t* packed) {
  Dequantizer unscaled(1.0F);
  for (int32_t group = 0; group * kLanes < num_heads; ++group, packed += kGroupWords) {
    alignas(64) uint32_t rows[kLanes][kHeadSteps] = {};
    for (int32_t lane = 0; lane < kLanes && group * kLanes + lane < num_heads; ++lane)
      load_steps(advance(q, dtype, (group * kLanes + lane) * head_stride), dtype, unscaled, rows[lane]);
    for (int32_t step = 0; step < kHeadSteps; step += kLanes) {
      WordVec words[kLanes];
      for (int32_t lane = 0; lane < kLanes; ++lane) words[lane] = hn::LoadU(kWords, rows[lane] + step);
      transpose(words);
      for (int32_t i = 0; i < kLanes; ++i) hn::StoreU(words[i], kWords, packed + (step + i) * kLanes);
    }
  }
}

/// Returns max(0, x); NaN stays NaN.
HWY_INLINE FloatVec positive_part(FloatVec x) { return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(kFloats)), x); }

#if !MLA_CPU_TILES
/// Adds to sums[j] the weighted products of kGroups groups of heads with key j, for kKeysTogether keys. A lane is a
/// head of a group.
template <int32_t kGroups>
HWY_INLINE void indexer_tile(const uint32_t* q, const float* weights, const uint32_t* keys, FloatVec* sums) {
  FloatVec dots[kGroups][kKeysTogether];
  MLA_UNROLL for (int32_t g = 0; g < kGroups; ++g) MLA_UNROLL for (int32_t j = 0; j < kKeysTogether; ++j) dots[g][j] =
      hn::Zero(kFloats);
  for (int32_t step = 0; step < kHeadSteps; ++step) {
    Operand queries[kGroups];
    MLA_UNROLL for (int32_t g = 0; g < kGroups; ++g) queries[g] = load_operand(q + g * kGroupWords + step * kLanes);
    MLA_UNROLL for (int32_t j = 0; j < kKeysTogether; ++j) {
      const Operand key = broadcast(keys + j * kHeadSteps + step);
      MLA_UNROLL for (int32_t g = 0; g < kGroups; ++g) dots[g][j] = multiply_add(queries[g], key, dots[g][j]);
    }
  }
  MLA_UNROLL for (int32_t g = 0; g < kGroups; ++g) {
    const FloatVec weight = hn::LoadU(kFloats, weights + g * kLanes);
    MLA_UNROLL for (int32_t j = 0; j < kKeysTogether; ++j) sums[j] =
        hn::MulAdd(weight, positive_part(dots[g][j]), sums[j]);
  }
}
#endif

/// Converts a key of MXFP4 to bf16.
HWY_INLINE void dequantize_mxfp4(const uint8_t* elements, const uint8_t* ue8m0, uint16_t* bf16) {
  constexpr IndexerLayout kLayout = indexer_layout(IndexerFormat::kMXFP4);
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  static_assert(kLayout.codec.channels_per_scale == 32);
  if (HWY_LIKELY(dequantize_e2m1_by_exponents<kLayout.num_scales()>(elements, ue8m0, bf16))) return;
#endif
  float scales[kLayout.num_scales()];
  for (int32_t g = 0; g < kLayout.num_scales(); ++g) scales[g] = ue8m0_to_f32(ue8m0[g]);
  dequantize_row({.element = kLayout.codec.element,
                  .elements = elements,
                  .scales = scales,
                  .num_groups = kLayout.num_scales(),
                  .group = kLayout.codec.channels_per_scale},
                 bf16);
}

/// Loads keys of MXFP4, times their scales, as steps.
HWY_INLINE void load_scaled_keys(const IndexerKeys& keys, int32_t num_keys, uint32_t* steps) {
  constexpr IndexerLayout kLayout = indexer_layout(IndexerFormat::kMXFP4);
  for (int32_t j = 0; j < num_keys; ++j, steps += kHeadSteps) {
    const uint8_t* const elements = keys.elements + j * int64_t{kLayout.key_bytes};
    const uint8_t* const scales = keys.scales + j * int64_t{kLayout.scale_bytes};
#if MLA_CPU_BF16_PAIRS
    dequantize_mxfp4(elements, scales, reinterpret_cast<uint16_t*>(steps));
#else
    alignas(64) uint16_t bf16[kHeadDim];
    dequantize_mxfp4(elements, scales, bf16);
    for (int32_t i = 0; i < kHeadSteps; i += kLanes)
      hn::StoreU(hn::BitCast(kWords, load_as_f32(bf16 + i, DType::kBF16)), kWords, steps + i);
#endif
  }
}

#if MLA_CPU_TILES
/// Converts 32 elements of e4m3 to bf16. On processors with AMX a table of 128 values, which Dequantizer looks up,
/// takes more instructions than this: bits move to their places, and eight subnormal magnitudes and NaN are looked up.
class E4M3Decoder {
 public:
  HWY_INLINE __m512i operator()(const uint8_t* elements) const {
    const __m512i e4m3 = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements)));
    const __m512i magnitude = _mm512_and_si512(e4m3, _mm512_set1_epi16(0x7F));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    // Neither subnormal nor NaN: 8 ... 0x7E.
    const __mmask32 other =
        _mm512_cmpge_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(8)), _mm512_set1_epi16(0x77));
    const __m512i bits = _mm512_mask_permutexvar_epi16(normal, other, magnitude, others_);
    constexpr int kOr = 0xF8;  // A | (b & c)
    return _mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(e4m3, 8), _mm512_set1_epi16(-0x8000), kOr);
  }

 private:
  // The lookup takes five bits of a magnitude: 0 ... 7, and 31 for NaN.
  static constexpr MagnitudeTable<uint16_t> kOthers = [] {
    MagnitudeTable<uint16_t> table = kBF16Magnitudes;
    table.value[31] = table.value[127];
    return table;
  }();
  const __m512i others_ = _mm512_load_si512(kOthers.value);
};

/// Loads keys of e4m3 as steps, without their scales.
HWY_INLINE void load_unscaled_keys(const IndexerKeys& keys, int32_t num_keys, uint32_t* steps) {
  const E4M3Decoder decode;
  constexpr int32_t kElements = 32;
  const uint8_t* elements = keys.elements;
  for (int32_t j = 0; j < num_keys; ++j)
    MLA_UNROLL for (int32_t i = 0; i < kHeadDim; i += kElements, elements += kElements, steps += kElements / kPack)
        _mm512_storeu_si512(steps, decode(elements));
}
#else
/// Loads keys of e4m3 as steps, without their scales.
HWY_INLINE void load_unscaled_keys(const IndexerKeys& keys, int32_t num_keys, uint32_t* steps) {
  Dequantizer unscaled(1.0F);
  for (int32_t j = 0; j < num_keys; ++j)
    load_steps(keys.elements + j * int64_t{kHeadDim}, DType::kE4M3, unscaled, steps + j * kHeadSteps);
}
#endif

/// Loads keys as steps, without their scale if they have one, and zeros behind them up to a multiple of kMultiple keys.
template <int32_t kMultiple>
HWY_INLINE void load_keys(const IndexerKeys& keys, int32_t num_keys, uint32_t* steps) {
  if (indexer_layout(keys.format).num_scales() == 1)
    load_unscaled_keys(keys, num_keys, steps);
  else
    load_scaled_keys(keys, num_keys, steps);
  const int32_t padded = (num_keys + kMultiple - 1) / kMultiple * kMultiple;
  std::fill(steps + num_keys * kHeadSteps, steps + padded * kHeadSteps, 0U);
}

#if MLA_CPU_TILES
/// Stores the products of one or two groups of heads with one or two times 16 keys as [group][key][head].
template <int32_t kKeyTiles, int32_t kGroups>
HWY_INLINE void multiply_heads(const uint32_t* q, const uint32_t* keys, float* dots) {
  constexpr int64_t kKeyBytes = kHeadSteps * sizeof(uint32_t);
  zero_sums<kKeyTiles, kGroups>();
  MLA_UNROLL for (int32_t step = 0; step < kHeadSteps; step += kTileWords, q += kTileSize, keys += kTileWords)
      add_products<kKeyTiles, kGroups>({{keys, kKeyBytes}, {keys + kTileRows * kHeadSteps, kKeyBytes}},
                                       {{q, kTileBytes}, {q + kGroupWords, kTileBytes}});
  store_sums<kKeyTiles, kGroups>(dots, {.down = kTileSize, .right = kTileKeys * kLanes, .row_bytes = kTileBytes});
}

/// Returns the sums of the lanes of 16 vectors.
HWY_INLINE FloatVec sums_of_lanes(const FloatVec* vectors) {
  __m512 fours[4];
  MLA_UNROLL for (int32_t i = 0; i < 4; ++i) {
    const auto pair = [&](int32_t first) HWY_ATTR {
      const __m512 a = vectors[first].raw, b = vectors[first + 1].raw;
      return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const __m512d low = pair(4 * i), high = pair(4 * i + 2);
    fours[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  __m512 eights[2];
  MLA_UNROLL for (int32_t i = 0; i < 2; ++i) {
    const __m512 a = fours[2 * i], b = fours[2 * i + 1];
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  return FloatVec{_mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                                _mm512_shuffle_f32x4(eights[0], eights[1], 0xDD))};
}

/// Does what indexer_sums does, for at most kTileKeys keys: these, their products and the queries, 16 KiB, fit L1
/// together.
void sums_of_tile(const uint32_t* packed, int32_t num_groups, const float* weights, const IndexerKeys& keys,
                  int32_t num_keys, bool add, float* sums) {
  alignas(64) uint32_t steps[kTileKeys * kHeadSteps];
  alignas(64) float dots[kIndexerHeads / kLanes][kTileKeys][kLanes];
  load_keys<kTileRows>(keys, num_keys, steps);
  for (int32_t group = 0; group < num_groups; group += 2)
    with_tiles(num_keys > kTileRows, group + 1 < num_groups, [&](auto key_tiles, auto groups) {
      multiply_heads<key_tiles, groups>(packed + group * kGroupWords, steps, dots[group][0]);
    });
  for (int32_t first = 0; first < num_keys; first += kTileRows) {
    FloatVec by_lane[kTileRows];
    MLA_UNROLL for (int32_t j = 0; j < kTileRows; ++j) by_lane[j] = hn::Zero(kFloats);
    for (int32_t group = 0; group < num_groups; ++group) {
      const FloatVec weight = hn::LoadU(kFloats, weights + group * kLanes);
      MLA_UNROLL for (int32_t j = 0; j < kTileRows; ++j) by_lane[j] =
          hn::MulAdd(weight, positive_part(hn::LoadU(kFloats, dots[group][first + j])), by_lane[j]);
    }
    const FloatVec totals = sums_of_lanes(by_lane);
    const auto some = hn::FirstN(kFloats, static_cast<size_t>(num_keys - first));
    const FloatVec before = add ? hn::MaskedLoad(some, kFloats, sums + first) : hn::Zero(kFloats);
    hn::BlendedStore(before + totals, some, kFloats, sums + first);
  }
}

void indexer_sums(const uint32_t* packed, int32_t num_heads, const float* weights, const IndexerKeys& keys,
                  int32_t num_keys, bool add, float* sums) {
  const IndexerLayout layout = indexer_layout(keys.format);
  IndexerKeys tile = keys;
  for (int32_t key = 0; key < num_keys; key += kTileKeys) {
    sums_of_tile(packed, (num_heads + kLanes - 1) / kLanes, weights, tile, HWY_MIN(num_keys - key, kTileKeys), add,
                 sums + key);
    tile.elements += kTileKeys * layout.key_bytes;
    tile.scales += kTileKeys * layout.scale_bytes;
  }
}
#else
void indexer_sums(const uint32_t* packed, int32_t num_heads, const float* weights, const IndexerKeys& keys,
                  int32_t num_keys, bool add, float* sums) {
  alignas(64) uint32_t steps[kIndexerKeys * kHeadSteps];
  load_keys<kKeysTogether>(keys, num_keys, steps);
  for (int32_t first = 0; first < num_keys; first += kKeysTogether) {
    FloatVec by_lane[kKeysTogether];
    MLA_UNROLL for (int32_t j = 0; j < kKeysTogether; ++j) by_lane[j] = hn::Zero(kFloats);
    const int32_t num_groups = (num_heads + kLanes - 1) / kLanes;
    int32_t g = 0;
    for (; g + kGroupsTogether <= num_groups; g += kGroupsTogether)
      indexer_tile<kGroupsTogether>(packed + g * kGroupWords, weights + g * kLanes, steps + first * kHeadSteps,
                                    by_lane);
    for (; g < num_groups; ++g)
      indexer_tile<1>(packed + g * kGroupWords, weights + g * kLanes, steps + first * kHeadSteps, by_lane);
    for (int32_t j = 0; j < kKeysTogether && first + j < num_keys; ++j) {
      const float sum = hn::GetLane(hn::SumOfLanes(kFloats, by_lane[j]));
      sums[first + j] = add ? sums[first + j] + sum : sum;
    }
  }
}
#endif

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

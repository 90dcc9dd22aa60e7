// SPDX-License-Identifier: Apache-2.0
// This file converts quantized rows to bf16: every element times its scale, rounded once. Results have the bits of
// dequantize_e4m3 and dequantize_e2m1 of numeric.h, under the conditions of e4m3-inl.h. The file is included like
// vectors-inl.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/e4m3-inl.h"
#include "cpu/quantized_row.h"
#include "cpu/vectors-inl.h"
#include "mla/kv_layout.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

/// Holds both elements of a byte of e2m1 as e4m3, which has all values of e2m1. The even channel is in the low half of
/// the byte.
constexpr std::array<std::array<uint8_t, 2>, 256> kE2M1Pairs = [] {
  std::array<std::array<uint8_t, 2>, 256> pairs = {};
  for (uint32_t byte = 0; byte < 256; ++byte)
    pairs[byte] = {e2m1_to_e4m3(static_cast<uint8_t>(byte & 0xFU)), e2m1_to_e4m3(static_cast<uint8_t>(byte >> 4))};
  return pairs;
}();

/// Converts one group of e4m3. It is a function of its own because loops over groups load all that a Dequantizer may
/// need before they begin, of which one scale needs a part.
[[gnu::noinline]] void dequantize_group(const void* e4m3, int32_t n, float scale, uint16_t* bf16) {
  Dequantizer dequantizer(scale);
  dequantizer(static_cast<const uint8_t*>(e4m3), n, bf16);
}

/// Converts groups of e4m3, one at a time.
[[gnu::noinline]] void dequantize_e4m3(const QuantizedRow& given, uint16_t* bf16) {
  const QuantizedRow row = given;  // which stores cannot change, as far as the compiler knows
  const auto* from = static_cast<const uint8_t*>(row.elements);
  for (int32_t g = 0; g < row.num_groups; ++g, from += row.group, bf16 += row.group) {
    Dequantizer dequantizer(row.scales[g]);
    dequantizer(from, row.group, bf16);
  }
}

/// Converts groups of e2m1, one at a time.
[[gnu::noinline]] void dequantize_e2m1_as_e4m3(const QuantizedRow& given, uint16_t* bf16) {
  const QuantizedRow row = given;
  const auto* from = static_cast<const uint8_t*>(row.elements);
  for (int32_t g = 0; g < row.num_groups; ++g, bf16 += row.group) {
    uint8_t e4m3[kMostE2M1Group];
    for (int32_t i = 0; i < row.group / 2; ++i) std::memcpy(e4m3 + 2 * i, kE2M1Pairs[*from++].data(), 2);
    Dequantizer dequantizer(row.scales[g]);
    dequantizer(e4m3, row.group, bf16);
  }
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
alignas(64) constexpr float kE2M1Values[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                               -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

/// Calls f(scales, mask) for vectors of the row's scales, and returns whether all calls did.
template <class F>
HWY_INLINE bool all_scales(const QuantizedRow& row, const F& f) {
  bool all = true;
  for (int32_t g = 0; g < row.num_groups; g += kLanes) {
    const auto mask = static_cast<__mmask16>((1U << std::min(row.num_groups - g, kLanes)) - 1);
    all &= f(_mm512_maskz_loadu_ps(mask, row.scales + g), mask);
  }
  return all;
}

/// Returns whether products of all scales with any e4m3 or e2m1 are 0 or normal floats.
HWY_INLINE bool have_normal_products(const QuantizedRow& row) {
  return all_scales(row, [](__m512 scales, __mmask16 mask) {
    const __mmask16 large = _mm512_mask_cmp_ps_mask(mask, scales, _mm512_set1_ps(0x1p-117F), _CMP_GE_OQ);
    return _mm512_mask_cmp_ps_mask(large, scales, _mm512_set1_ps(0x1p118F), _CMP_LE_OQ) == mask;
  });
}

HWY_INLINE bool are_powers_of_two(const QuantizedRow& row) {
  return all_scales(row, [](__m512 scales, __mmask16 mask) {
    return _mm512_mask_testn_epi32_mask(mask, _mm512_castps_si512(scales), _mm512_set1_epi32(0x7FFFFF)) == mask;
  });
}

/// Converts e2m1 in groups of 16, or of multiples of 32, whose scales have normal products. All 16 products with each
/// of two scales are a table of 32 words, in which 32 elements are looked up.
[[gnu::noinline]] void dequantize_e2m1(const QuantizedRow& given, uint16_t* bf16) {
  const QuantizedRow row = given;  // which stores cannot change, as far as the compiler knows
  const __m512 values = _mm512_load_ps(kE2M1Values);
  const __m512i upper_table = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  const auto* from = static_cast<const uint8_t*>(row.elements);
  const auto convert = [&](float first, float second) {
    const __m512i table = round_to_bf16(_mm512_mul_ps(values, _mm512_set1_ps(first)),
                                        _mm512_mul_ps(values, _mm512_set1_ps(second)), true);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    constexpr int kAndThenOr = 0xEA;  // (a & b) | c
    const __m512i codes = _mm512_ternarylogic_epi32(both, _mm512_set1_epi16(0xF), upper_table, kAndThenOr);
    _mm512_storeu_si512(bf16, _mm512_permutexvar_epi16(codes, table));
    from += 16, bf16 += 32;
  };
  if (row.group == 16)
    for (int32_t g = 0; g < row.num_groups; g += 2) convert(row.scales[g], row.scales[g + 1]);
  else
    for (int32_t g = 0; g < row.num_groups; ++g)
      for (int32_t i = 0; i < row.group; i += 32) convert(row.scales[g], row.scales[g]);
}

/// Converts e4m3 in groups of multiples of 32 whose scales are powers of two with normal products. One table of
/// unscaled values serves all groups.
[[gnu::noinline]] void dequantize_by_exponents(const QuantizedRow& given, uint16_t* bf16) {
  const QuantizedRow row = given;  // which stores cannot change, as far as the compiler knows
  Dequantizer unscaled(1.0F);
  const auto* from = static_cast<const uint8_t*>(row.elements);
  for (int32_t g = 0; g < row.num_groups; ++g) {
    const auto exponent = static_cast<int32_t>(load_unaligned<uint32_t>(row.scales + g) >> 23) - 127;
    const __m512i shift = _mm512_set1_epi16(static_cast<int16_t>(exponent * 128));
    for (int32_t i = 0; i < row.group; i += 32, from += 32, bf16 += 32)
      _mm512_storeu_si512(bf16, unscaled.decode(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), shift));
  }
}
/// Holds the 16 values of e2m1 as bf16, twice.
struct E2M1Words {
  alignas(64) uint16_t value[32];
};
constexpr E2M1Words kE2M1Words = [] {
  E2M1Words words = {};
  for (uint32_t i = 0; i < 32; ++i) words.value[i] = f32_to_bf16(mla::e2m1_to_f32(static_cast<uint8_t>(i % 16)));
  return words;
}();

/// Converts kGroups groups of 32 e2m1 with UE8M0 scales, whose exponents are added to those of the values. Returns
/// false and converts nothing if a product would be no normal number, or NaN.
template <int32_t kGroups>
HWY_INLINE bool dequantize_e2m1_by_exponents(const uint8_t* e2m1, const uint8_t* scales, uint16_t* bf16) {
  constexpr uint8_t kLeast = 2, kMost = 252;  // 0.5 * 2^(2 - 127) is normal, and 6 * 2^(252 - 127) is finite
  bool normal = true;
  for (int32_t g = 0; g < kGroups; ++g) normal &= static_cast<uint8_t>(scales[g] - kLeast) <= kMost - kLeast;
  if (HWY_UNLIKELY(!normal)) return false;
  const __m512i values = _mm512_load_si512(kE2M1Words.value);
  constexpr __mmask32 kNotZero = 0xFEFEFEFEU;
  MLA_UNROLL for (int32_t g = 0; g < kGroups; ++g) {
    const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>((scales[g] - 127) * 128));
    const __m512i table = _mm512_mask_add_epi16(values, kNotZero, values, exponent);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(e2m1 + 16 * g)));
    // The instruction looks at the five lowest bits. Of the fifth the table does not care.
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_storeu_si512(bf16 + 32 * g, _mm512_permutexvar_epi16(codes, table));
  }
  return true;
}
#elif HWY_TARGET == HWY_AVX2
/// Converts e2m1 in groups of multiples of 8. The products of a scale with the eight magnitudes, rounded, are a table.
[[gnu::noinline]] void dequantize_e2m1(const QuantizedRow& given, uint16_t* bf16) {
  const QuantizedRow row = given;
  const hn::Rebind<uint16_t, Floats> halves;
  alignas(32) static constexpr float kMagnitudes[kLanes] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  alignas(32) static constexpr uint32_t kShifts[kLanes] = {0, 4, 8, 12, 16, 20, 24, 28};
  const FloatVec magnitudes = hn::Load(kFloats, kMagnitudes);
  const WordVec shifts = hn::Load(kWords, kShifts);
  const auto* from = static_cast<const uint8_t*>(row.elements);
  for (int32_t g = 0; g < row.num_groups; ++g) {
    const WordVec table = round_to_bf16(magnitudes * hn::Set(kFloats, row.scales[g]));
    for (int32_t i = 0; i < row.group; i += kLanes, from += kLanes / 2, bf16 += kLanes) {
      const WordVec codes = hn::Set(kWords, load_unaligned<uint32_t>(from)) >> shifts;
      const auto indices = hn::IndicesFromVec(kWords, hn::And(codes, hn::Set(kWords, 7U)));
      // A scale in a cache may be negative: the sign is flipped and not set.
      const WordVec sign = hn::And(hn::ShiftLeft<12>(codes), hn::Set(kWords, 0x8000U));
      const WordVec bits = hn::Xor(hn::TableLookupLanes(table, indices), sign);
      hn::StoreU(hn::DemoteTo(halves, hn::BitCast(kInts, bits)), halves, bf16);
    }
  }
}
#endif

/// Converts all elements of a row. The functions that convert copy its description, which stores might change for all
/// that the compiler knows. They are not inlined: the one for e4m3 needs no stack frame, which the others would give
/// it.
HWY_INLINE void dequantize_row(const QuantizedRow& row, uint16_t* bf16) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  constexpr int32_t kFewElements = 64;  // a table of their own is not worth its cost for groups of as many
  if (row.element == DType::kE2M1) {
    const bool fits = row.group == 16 ? row.num_groups % 2 == 0 : row.group % 32 == 0;
    if (fits && have_normal_products(row)) return dequantize_e2m1(row, bf16);
  } else if (row.num_groups > 1 && row.group <= kFewElements && row.group % 32 == 0 && are_powers_of_two(row) &&
             have_normal_products(row)) {
    return dequantize_by_exponents(row, bf16);
  }
#elif HWY_TARGET == HWY_AVX2
  if (row.element == DType::kE2M1 && row.group % kLanes == 0) return dequantize_e2m1(row, bf16);
#endif
  if (row.element == DType::kE2M1) return dequantize_e2m1_as_e4m3(row, bf16);
  if (row.num_groups == 1) return dequantize_group(row.elements, row.group, row.scales[0], bf16);
  dequantize_e4m3(row, bf16);
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

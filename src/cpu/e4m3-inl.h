// SPDX-License-Identifier: Apache-2.0
// This file converts between e4m3 or e2m1 and vectors of floats. Every function gives the bits of its scalar namesake
// in numeric.h, on every instruction set, also where the processor is set to treat subnormal floats as zero: no step
// uses or gives a subnormal float that would show in an e4m3 element, or in a product with a scale of at least 2^-117.
// The file is included like vectors-inl.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vectors-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

using Bytes = hn::Rebind<uint8_t, Floats>;
constexpr Bytes kBytes;

/// Converts kLanes elements to f32.
HWY_INLINE FloatVec e4m3_to_f32(const uint8_t* e4m3) {
  const WordVec words = hn::PromoteTo(kWords, hn::LoadU(kBytes, e4m3));
  const WordVec magnitude = hn::And(words, hn::Set(kWords, 0x7FU));
  const WordVec shifted = hn::ShiftLeft<20>(magnitude);
  const WordVec normal = shifted + hn::Set(kWords, 120U << 23);
  // The bits m < 8 stand for m units of 2^-9, that is (1 + m / 8) * 2^-6 minus 2^-6.
  const FloatVec small = hn::BitCast(kFloats, shifted + hn::Set(kWords, 121U << 23)) - hn::Set(kFloats, 0x1p-6F);
  const auto is_small = hn::RebindMask(kWords, hn::Lt(hn::BitCast(kInts, magnitude), hn::Set(kInts, 8)));
  WordVec bits = hn::IfThenElse(is_small, hn::BitCast(kWords, small), normal);
  bits = hn::IfThenElse(hn::Eq(magnitude, hn::Set(kWords, 0x7FU)), hn::Set(kWords, 0x7FC00000U), bits);
  return hn::BitCast(kFloats, hn::Or(bits, hn::ShiftLeft<24>(hn::Xor(words, magnitude))));
}

/// Rounds magnitudes, ties to even, to a type of kMantissa bits of mantissa whose least normal number is
/// 2^(kLeastExponent - 127), and returns its codes in the low bits. No magnitude rounds beyond the type's exponents.
///
/// Adding 2^(e + 23 - kMantissa) to a magnitude below 2^(e + 1) rounds it to units of 2^(e - kMantissa) and leaves
/// their number in the low bits. With e of at least that of the least normal number this holds for subnormal results
/// too.
template <int kMantissa, uint32_t kLeastExponent>
HWY_INLINE WordVec rounded_codes(FloatVec magnitude) {
  constexpr int kShift = 23 - kMantissa;
  const WordVec exponent = hn::Max(hn::And(hn::BitCast(kWords, magnitude), hn::Set(kWords, 0x7F800000U)),
                                   hn::Set(kWords, kLeastExponent << 23));
  const FloatVec big = hn::BitCast(kFloats, exponent + hn::Set(kWords, uint32_t{kShift} << 23));
  // Exponent e + 127 + kShift, then 2^kMantissa ... 2^(kMantissa + 1) units, or fewer if subnormal.
  const WordVec sum = hn::BitCast(kWords, magnitude + big);
  return sum + hn::ShiftRight<kShift>(sum) - hn::Set(kWords, (kLeastExponent + kShift) << kMantissa);
}

/// Converts floats to e4m3, in the low byte of each lane.
HWY_INLINE WordVec f32_to_e4m3(FloatVec x) {
  const WordVec sign = hn::And(hn::ShiftRight<24>(hn::BitCast(kWords, x)), hn::Set(kWords, 0x80U));
  const auto nan = hn::RebindMask(kWords, hn::IsNaN(x));
  const WordVec codes = rounded_codes<3, 121>(hn::Min(hn::Abs(x), hn::Set(kFloats, 480.0F)));
  const WordVec rounded = hn::And(codes, hn::Set(kWords, 0xFFU));
  return hn::Or(sign, hn::IfThenElse(nan, hn::Set(kWords, 0x7FU), hn::Min(rounded, hn::Set(kWords, 0x7EU))));
}

/// Converts floats to e2m1, in the low byte of each lane.
HWY_INLINE WordVec f32_to_e2m1(FloatVec x) {
  const WordVec sign = hn::And(hn::ShiftRight<28>(hn::BitCast(kWords, x)), hn::Set(kWords, 8U));
  const auto nan = hn::RebindMask(kWords, hn::IsNaN(x));
  const WordVec codes = rounded_codes<1, 127>(hn::Min(hn::Abs(x), hn::Set(kFloats, kE2M1Max)));
  return hn::IfThenElse(nan, hn::Set(kWords, 0x7U), hn::Or(sign, hn::And(codes, hn::Set(kWords, 0x7U))));
}

HWY_INLINE void store_low_bytes(WordVec words, uint8_t* to) { hn::StoreU(hn::U8FromU32(words), kBytes, to); }

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
/// Holds the values of the magnitudes 0 ... 127 of e4m3.
template <class T>
struct MagnitudeTable {
  alignas(64) T value[128];
};
constexpr MagnitudeTable<float> kF32Magnitudes = [] {
  MagnitudeTable<float> table = {};
  for (int32_t i = 0; i < 128; ++i) table.value[i] = mla::e4m3_to_f32(static_cast<uint8_t>(i));
  return table;
}();
constexpr MagnitudeTable<uint16_t> kBF16Magnitudes = [] {
  MagnitudeTable<uint16_t> table = {};
  for (int32_t i = 0; i < 128; ++i) table.value[i] = f32_to_bf16(kF32Magnitudes.value[i]);
  return table;
}();

/// Rounds 32 floats to bf16. `normal` says that none is subnormal.
HWY_INLINE __m512i round_to_bf16(__m512 low, __m512 high, [[maybe_unused]] bool normal) {
#ifdef __AVX512BF16__
  // The instruction treats subnormal floats as zero.
  if (HWY_LIKELY(normal)) return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#endif
  const __m256i halves[2] = {_mm512_cvtepi32_epi16(round_to_bf16(FloatVec{low}).raw),
                             _mm512_cvtepi32_epi16(round_to_bf16(FloatVec{high}).raw)};
  return _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
}
#endif

/// Converts rows of e4m3 with one scale, of any number of channels, to bf16. AVX-512 looks up 32 channels at a time in
/// a table of all 128 products with the scale. The table is worth its cost from 64 channels on (chosen without a
/// recorded measurement).
///
/// GCC 12 keeps the table in registers only if the object is not const (it leaves what it stores into a const object in
/// memory), if loops over the table are unrolled, and if nothing is called while the table is in use. A table in memory
/// made gather 3 to 15 % slower (AMD EPYC, Zen 4, 2026-11-23; docs/notebook/2026-11-23-cpu-gather.md).
class Dequantizer {
 public:
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  static constexpr int32_t kElements = 32;  // elements that are decoded at a time

  explicit Dequantizer(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    const bool power_of_two = (bits & 0x7FFFFFU) == 0;
    if (power_of_two && has_normal_products(scale)) {
      // The scale's exponent is added to those of the values; zero and NaN stay.
      const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>((static_cast<int32_t>(bits >> 23) - 127) * 128));
      MLA_UNROLL for (int32_t i = 0; i < 4; ++i) {
        const __m512i unscaled = _mm512_load_si512(kBF16Magnitudes.value + 32 * i);
        const __mmask32 finite = (i == 0 ? ~1U : ~0U) & (i == 3 ? ~0U >> 1 : ~0U);
        table_[i] = _mm512_mask_add_epi16(unscaled, finite, unscaled, exponent);
      }
    } else {
      MLA_UNROLL for (int32_t i = 0; i < 4; ++i) {
        const float* unscaled = kF32Magnitudes.value + 32 * i;
        table_[i] = round_to_bf16(_mm512_mul_ps(_mm512_load_ps(unscaled), _mm512_set1_ps(scale)),
                                  _mm512_mul_ps(_mm512_load_ps(unscaled + 16), _mm512_set1_ps(scale)),
                                  has_normal_products(scale));
      }
    }
  }

  /// Returns kElements elements as bf16.
  HWY_INLINE __m512i decode(__m256i elements) const {
    const __m512i e4m3 = _mm512_cvtepu8_epi16(elements);
    return with_signs(magnitudes(e4m3), e4m3);
  }

  /// Returns them times a power of two, whose exponent, in the place of that of bf16, is `exponent`. The products must
  /// be normal.
  HWY_INLINE __m512i decode(__m256i elements, __m512i exponent) const {
    const __m512i e4m3 = _mm512_cvtepu8_epi16(elements);
    const __m512i magnitude = magnitudes(e4m3);
    // Neither zero nor NaN: 1 ... 0x7FBF.
    const __mmask32 scaled =
        _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7FBF));
    return with_signs(_mm512_mask_add_epi16(magnitude, scaled, magnitude, exponent), e4m3);
  }

  /// The last elements are read and written under a mask, since memcpy would be a call.
  HWY_INLINE void operator()(const uint8_t* e4m3, int64_t n, uint16_t* bf16) const {
    int64_t i = 0;
    for (; i + kElements <= n; i += kElements)
      _mm512_storeu_si512(bf16 + i, decode(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(e4m3 + i))));
    if (i == n) return;
    const auto rest = static_cast<__mmask32>((1U << (n - i)) - 1);
    _mm512_mask_storeu_epi16(bf16 + i, rest, decode(_mm256_maskz_loadu_epi8(rest, e4m3 + i)));
  }

 private:
  /// Returns what the table has for the magnitudes of e4m3, in 16-bit words.
  HWY_INLINE __m512i magnitudes(__m512i e4m3) const {
    const __mmask32 upper = _mm512_test_epi16_mask(e4m3, _mm512_set1_epi16(0x40));
    const __m512i lower_half = _mm512_mask2_permutex2var_epi16(table_[0], e4m3, _knot_mask32(upper), table_[1]);
    return _mm512_mask2_permutex2var_epi16(table_[2], lower_half, upper, table_[3]);
  }

  static HWY_INLINE __m512i with_signs(__m512i magnitude, __m512i e4m3) {
    // A ^ (b & c): flips the sign and does not set it, since a scale in a cache may be negative.
    constexpr int kFlip = 0x78;
    return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(e4m3, 8), _mm512_set1_epi16(-0x8000), kFlip);
  }

  /// Returns whether the products of the scale with 2^-9 (the least magnitude of e4m3) to 448 are normal floats.
  static bool has_normal_products(float scale) { return scale >= 0x1p-117F && scale <= 0x1p118F; }

  __m512i table_[4];
#else
  explicit Dequantizer(float scale) : scale_(scale) {}

  void operator()(const uint8_t* e4m3, int64_t n, uint16_t* bf16) const {
    const FloatVec scale = hn::Set(kFloats, scale_);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store_from_f32(e4m3_to_f32(e4m3 + i) * scale, bf16 + i, DType::kBF16);
    for (; i < n; ++i) bf16[i] = dequantize_e4m3(e4m3[i], scale_);
  }

 private:
  float scale_;
#endif
};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

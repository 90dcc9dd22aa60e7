// SPDX-License-Identifier: Apache-2.0
// e4m3 and vectors. Every function gives the bits of its scalar namesake in numeric.h, on every instruction set, also
// where the processor is told to treat subnormal floats as zero: no step takes or makes one that would show in a code,
// or in a product with a scale of at least 2^-117. Included like vectors-inl.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vectors-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

using Bytes = hn::Rebind<uint8_t, Floats>;
constexpr Bytes kBytes;

/// kLanes codes.
HWY_INLINE FloatVec e4m3_to_f32(const uint8_t* codes) {
  const WordVec words = hn::PromoteTo(kWords, hn::LoadU(kBytes, codes));
  const WordVec magnitude = hn::And(words, hn::Set(kWords, 0x7FU));
  const WordVec shifted = hn::ShiftLeft<20>(magnitude);
  const WordVec normal = shifted + hn::Set(kWords, 120U << 23);
  // Code m < 8 is m units of 2^-9: (1 + m / 8) * 2^-6 less 2^-6.
  const FloatVec small = hn::BitCast(kFloats, shifted + hn::Set(kWords, 121U << 23)) - hn::Set(kFloats, 0x1p-6F);
  const auto is_small = hn::RebindMask(kWords, hn::Lt(hn::BitCast(kInts, magnitude), hn::Set(kInts, 8)));
  WordVec bits = hn::IfThenElse(is_small, hn::BitCast(kWords, small), normal);
  bits = hn::IfThenElse(hn::Eq(magnitude, hn::Set(kWords, 0x7FU)), hn::Set(kWords, 0x7FC00000U), bits);
  return hn::BitCast(kFloats, hn::Or(bits, hn::ShiftLeft<24>(hn::Xor(words, magnitude))));
}

/// Codes in the low byte of each lane.
///
/// Adding 2^(e + 20) to a magnitude below 2^(e + 1) rounds it to units of 2^(e - 3), ties to even, and leaves the
/// number of units in the low bits; with e of at least -6 that holds for normal and subnormal codes alike.
HWY_INLINE WordVec f32_to_e4m3(FloatVec x) {
  const WordVec bits = hn::BitCast(kWords, x);
  const WordVec sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(kWords, 0x80U));
  const auto nan = hn::RebindMask(kWords, hn::IsNaN(x));
  const FloatVec magnitude = hn::Min(hn::Abs(x), hn::Set(kFloats, 480.0F));
  const WordVec exponent =
      hn::Max(hn::And(hn::BitCast(kWords, magnitude), hn::Set(kWords, 0x7F800000U)), hn::Set(kWords, 121U << 23));
  const FloatVec big = hn::BitCast(kFloats, exponent + hn::Set(kWords, 20U << 23));
  const WordVec sum = hn::BitCast(kWords, magnitude + big);  // exponent e + 147, then 8 ... 16 units, or 0 ... 8
  const WordVec code = hn::And(sum + hn::ShiftRight<20>(sum) - hn::Set(kWords, 141U << 3), hn::Set(kWords, 0xFFU));
  return hn::Or(sign, hn::IfThenElse(nan, hn::Set(kWords, 0x7FU), hn::Min(code, hn::Set(kWords, 0x7EU))));
}

HWY_INLINE void store_codes(WordVec codes, uint8_t* to) { hn::StoreU(hn::U8FromU32(codes), kBytes, to); }

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
/// The values of codes 0 ... 127.
template <class T>
struct MagnitudeTable {
  alignas(64) T value[128];
};
constexpr MagnitudeTable<float> kF32Magnitudes = [] {
  MagnitudeTable<float> table = {};
  for (int32_t code = 0; code < 128; ++code) table.value[code] = mla::e4m3_to_f32(static_cast<uint8_t>(code));
  return table;
}();
constexpr MagnitudeTable<uint16_t> kBF16Magnitudes = [] {
  MagnitudeTable<uint16_t> table = {};
  for (int32_t code = 0; code < 128; ++code) table.value[code] = f32_to_bf16(kF32Magnitudes.value[code]);
  return table;
}();
#endif

/// Makes bf16 of codes with one scale: rows of any number of channels. AVX-512 looks 32 of them up at a time in a table
/// of all products, which even 64 codes are worth.
class Dequantizer {
 public:
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  static constexpr int32_t kCodes = 32;  // decoded at a time

  explicit Dequantizer(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    const bool power_of_two = (bits & 0x7FFFFFU) == 0;
    if (power_of_two && has_normal_products(scale)) {
      // Exponents grow by the scale's; zero and NaN stay.
      const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>((static_cast<int32_t>(bits >> 23) - 127) * 128));
      for (int32_t i = 0; i < 4; ++i) {
        const __m512i unscaled = _mm512_load_si512(kBF16Magnitudes.value + 32 * i);
        const __mmask32 finite = (i == 0 ? ~1U : ~0U) & (i == 3 ? ~0U >> 1 : ~0U);
        table_[i] = _mm512_mask_add_epi16(unscaled, finite, unscaled, exponent);
      }
    } else {
      for (int32_t i = 0; i < 4; ++i) {
        const float* unscaled = kF32Magnitudes.value + 32 * i;
        table_[i] =
            round(_mm512_mul_ps(_mm512_load_ps(unscaled), _mm512_set1_ps(scale)),
                  _mm512_mul_ps(_mm512_load_ps(unscaled + 16), _mm512_set1_ps(scale)), has_normal_products(scale));
      }
    }
  }

  /// The bf16 of kCodes codes.
  HWY_INLINE __m512i decode(const uint8_t* from) const {
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __m512i lower_half = _mm512_mask2_permutex2var_epi16(table_[0], codes, _knot_mask32(upper), table_[1]);
    const __m512i magnitude = _mm512_mask2_permutex2var_epi16(table_[2], lower_half, upper, table_[3]);
    constexpr int kFlip = 0x78;  // a ^ (b & c); what a cache holds as a scale may be negative
    return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16(-0x8000), kFlip);
  }

  void operator()(const uint8_t* codes, int64_t n, uint16_t* bf16) const {
    int64_t i = 0;
    for (; i + kCodes <= n; i += kCodes) _mm512_storeu_si512(bf16 + i, decode(codes + i));
    if (i == n) return;
    alignas(64) uint8_t rest[kCodes] = {};
    std::memcpy(rest, codes + i, static_cast<size_t>(n - i));
    alignas(64) uint16_t values[kCodes];
    _mm512_store_si512(values, decode(rest));
    std::memcpy(bf16 + i, values, static_cast<size_t>(n - i) * sizeof(uint16_t));
  }

 private:
  /// Those of 2^-9, the least code, to 448.
  static bool has_normal_products(float scale) { return scale >= 0x1p-117F && scale <= 0x1p118F; }

  static HWY_INLINE __m512i round(__m512 low, __m512 high, [[maybe_unused]] bool normal) {
#if MLA_CPU_BF16_PAIRS
    // The instruction takes subnormal floats for zero.
    if (HWY_LIKELY(normal)) return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#endif
    const __m256i halves[2] = {_mm512_cvtepi32_epi16(round_to_bf16(FloatVec{low}).raw),
                               _mm512_cvtepi32_epi16(round_to_bf16(FloatVec{high}).raw)};
    return _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
  }

  __m512i table_[4];
#else
  explicit Dequantizer(float scale) : scale_(scale) {}

  void operator()(const uint8_t* codes, int64_t n, uint16_t* bf16) const {
    const FloatVec scale = hn::Set(kFloats, scale_);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store_from_f32(e4m3_to_f32(codes + i) * scale, bf16 + i, DType::kBF16);
    for (; i < n; ++i) bf16[i] = dequantize_e4m3(codes[i], scale_);
  }

 private:
  float scale_;
#endif
};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

// SPDX-License-Identifier: Apache-2.0
// This file defines the vectors of one instruction set, and the operations on them that all kernels share: the
// multiply, conversions, powers of two, a transposition. As tile_kernels-inl.h, this file is included in one
// translation unit per instruction set, and everything has internal linkage.
#pragma once

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "cpu/tile_kernels.h"
#include "mla/numeric.h"

#define MLA_UNROLL _Pragma("GCC unroll 32")

namespace mla::cpu::MLA_CPU_ISA {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kMaxLanes>;
using Words = hn::RebindToUnsigned<Floats>;
using Ints = hn::RebindToSigned<Floats>;
using FloatVec = hn::Vec<Floats>;
using WordVec = hn::Vec<Words>;

constexpr Floats kFloats;
constexpr Words kWords;
constexpr Ints kInts;
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(Floats()));

template <class T>
HWY_INLINE T load_unaligned(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// ---- the multiply of one step ----

#if MLA_CPU_TILES
constexpr int32_t kPack = 2;  // tile_unit-inl.h multiplies
#elif MLA_CPU_BF16_PAIRS
constexpr int32_t kPack = 2;
using Operand = WordVec;
HWY_INLINE Operand load_operand(const uint32_t* from) { return hn::LoadU(kWords, from); }
HWY_INLINE Operand broadcast(const void* from) { return hn::Set(kWords, load_unaligned<uint32_t>(from)); }
HWY_INLINE FloatVec multiply_add(Operand a, Operand b, FloatVec sum) {
#if HWY_ARCH_ARM
  return FloatVec{vbfdotq_f32(sum.raw, vreinterpretq_bf16_u32(a.raw), vreinterpretq_bf16_u32(b.raw))};
#else
  return FloatVec{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<__m512bh>(a.raw), reinterpret_cast<__m512bh>(b.raw))};
#endif
}
#else
constexpr int32_t kPack = 1;
using Operand = FloatVec;
HWY_INLINE Operand load_operand(const uint32_t* from) { return hn::BitCast(kFloats, hn::LoadU(kWords, from)); }
HWY_INLINE Operand broadcast(const void* from) { return hn::Set(kFloats, load_unaligned<float>(from)); }
HWY_INLINE FloatVec multiply_add(Operand a, Operand b, FloatVec sum) { return hn::MulAdd(a, b, sum); }
#endif

// ---- conversions ----

/// Rounds to bf16, ties to even, with the result in the low half of each lane; NaN stays NaN.
HWY_INLINE WordVec round_to_bf16(FloatVec x) {
  const WordVec bits = hn::BitCast(kWords, x);
  const WordVec odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kWords, 1U));
  const WordVec rounded = hn::ShiftRight<16>(bits + hn::Set(kWords, 0x7FFFU) + odd);
  const WordVec quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(kWords, 0x40U));
  return hn::IfThenElse(hn::RebindMask(kWords, hn::IsNaN(x)), quiet, rounded);
}

HWY_INLINE FloatVec load_as_f32(const void* from, DType dtype) {
  const hn::Rebind<uint16_t, Floats> halves;
  switch (dtype) {
    case DType::kBF16: {
      const auto bits = hn::LoadU(halves, static_cast<const uint16_t*>(from));
      return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(kWords, bits)));
    }
    case DType::kF16: {
#if defined(__F16C__) || HWY_ARCH_ARM_A64
      const hn::Rebind<hwy::float16_t, Floats> f16;
      return hn::PromoteTo(kFloats, hn::BitCast(f16, hn::LoadU(halves, static_cast<const uint16_t*>(from))));
#else
      float values[kLanes];
      for (int32_t i = 0; i < kLanes; ++i) values[i] = f16_to_f32(static_cast<const uint16_t*>(from)[i]);
      return hn::LoadU(kFloats, values);
#endif
    }
    default: return hn::LoadU(kFloats, static_cast<const float*>(from));
  }
}

HWY_INLINE void store_from_f32(FloatVec x, void* to, DType dtype) {
  const hn::Rebind<uint16_t, Floats> halves;
  switch (dtype) {
    case DType::kBF16:
      hn::StoreU(hn::DemoteTo(halves, hn::BitCast(kInts, round_to_bf16(x))), halves, static_cast<uint16_t*>(to));
      return;
    case DType::kF16: {
#if defined(__F16C__) || HWY_ARCH_ARM_A64
      const hn::Rebind<hwy::float16_t, Floats> f16;
      hn::StoreU(hn::BitCast(halves, hn::DemoteTo(f16, x)), halves, static_cast<uint16_t*>(to));
#else
      float values[kLanes];
      hn::StoreU(x, kFloats, values);
      for (int32_t i = 0; i < kLanes; ++i) static_cast<uint16_t*>(to)[i] = f32_to_f16(values[i]);
#endif
      return;
    }
    default: hn::StoreU(x, kFloats, static_cast<float*>(to)); return;
  }
}

HWY_INLINE const void* advance(const void* base, DType dtype, int64_t elements) {
  return static_cast<const char*>(base) + elements * static_cast<int64_t>(size_of(dtype));
}
HWY_INLINE void* advance(void* base, DType dtype, int64_t elements) {
  return static_cast<char*>(base) + elements * static_cast<int64_t>(size_of(dtype));
}

/// Loads `count` floats, at most a vector, without reading behind them; the other lanes are 0.
HWY_INLINE FloatVec load_some(const void* from, DType dtype, int32_t count) {
  if (count == kLanes) return load_as_f32(from, dtype);
  alignas(64) unsigned char rest[kLanes * sizeof(float)] = {};
  std::memcpy(rest, from, static_cast<size_t>(count) * size_of(dtype));
  return load_as_f32(rest, dtype);
}

/// Calls f(vector, i, count) for vectors of `count` floats from element i on. The last vector is filled up with zeros.
template <class F>
HWY_INLINE void for_each_vector(const void* src, DType dtype, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(load_as_f32(advance(src, dtype, i), dtype), i, int64_t{kLanes});
  if (kLanes == 1 || i == n) return;
  f(load_some(advance(src, dtype, i), dtype, static_cast<int32_t>(n - i)), i, n - i);
}

// ---- powers of two ----

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3                    // better targets have lower numbers: AVX3 and better
HWY_INLINE FloatVec exponent_floor(FloatVec x) { return x; }  // scalef takes any exponent
// Returns x - floor(x), and 0 for infinities.
HWY_INLINE FloatVec fraction(FloatVec x) { return FloatVec{_mm512_reduce_ps(x.raw, 0x09)}; }
HWY_INLINE FloatVec times_exp2_floor(FloatVec y, FloatVec x) { return FloatVec{_mm512_scalef_ps(y.raw, x.raw)}; }
#else
/// Returns the larger of `least` and x; NaN where x is NaN.
HWY_INLINE FloatVec at_least(FloatVec least, FloatVec x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  return hn::Max(least, x);  // is the second operand if either is NaN
#else
  return hn::IfThenElse(x < least, least, x);  // Max of 64-bit Arm returns the number if the other is NaN
#endif
}

HWY_INLINE FloatVec exponent_floor(FloatVec x) {
  return at_least(hn::Set(kFloats, -127.0F), x);  // 2^-127 has an exponent field of 0, so that the factor is 0
}
HWY_INLINE FloatVec fraction(FloatVec x) { return x - hn::Floor(x); }
HWY_INLINE FloatVec times_exp2_floor(FloatVec y, FloatVec x) {
  return y * hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::ConvertTo(kInts, hn::Floor(x)) + hn::Set(kInts, 127)));
}
#endif

/// Returns 2^x for x <= 0 with a relative error below 2^-22. The result is exactly 1 for 0 and exactly 0 for -inf; NaN
/// stays NaN.
HWY_INLINE FloatVec exp2_nonpositive(FloatVec x) {
  x = exponent_floor(x);
  const FloatVec f = fraction(x);  // the coefficients are minimax for 2^f on [0, 1), among polynomials with p(0) = 1
  FloatVec y = hn::Set(kFloats, 1.86713021e-3F);
  y = hn::MulAdd(y, f, hn::Set(kFloats, 9.01703002e-3F));
  y = hn::MulAdd(y, f, hn::Set(kFloats, 5.57999133e-2F));
  y = hn::MulAdd(y, f, hn::Set(kFloats, 2.4016445e-1F));
  y = hn::MulAdd(y, f, hn::Set(kFloats, 6.93151312e-1F));
  y = hn::MulAdd(y, f, hn::Set(kFloats, 1.0F));
  return times_exp2_floor(y, x);
}

/// Returns tanh(x) with an absolute error below 2^-21.
HWY_INLINE FloatVec tanh(FloatVec x) {
  const FloatVec e = exp2_nonpositive(hn::Abs(x) * hn::Set(kFloats, -2.88539008F));  // -2 log2(e)
  const FloatVec one = hn::Set(kFloats, 1.0F);
  return hn::CopySign((one - e) / (one + e), x);
}

// ---- transposition ----

/// Transposes kLanes rows of kLanes words.
HWY_INLINE void transpose(WordVec* rows) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  alignas(64) static constexpr uint32_t kLane[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i lane = _mm512_load_si512(kLane);
  MLA_UNROLL for (int32_t bit = 1; bit < kLanes; bit *= 2) {  // swaps the off-diagonal blocks of each size
    const __mmask16 high = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(bit));
    const __m512i step = _mm512_set1_epi32(bit);
    const __m512i from_low = _mm512_mask_add_epi32(lane, high, _mm512_sub_epi32(lane, step), _mm512_set1_epi32(kLanes));
    const __m512i from_high =
        _mm512_mask_add_epi32(_mm512_add_epi32(lane, step), high, lane, _mm512_set1_epi32(kLanes));
    MLA_UNROLL for (int32_t i = 0; i < kLanes; ++i) {
      if ((i & bit) != 0) continue;
      const __m512i a = rows[i].raw;
      const __m512i b = rows[i | bit].raw;
      rows[i].raw = _mm512_permutex2var_epi32(a, from_low, b);
      rows[i | bit].raw = _mm512_permutex2var_epi32(a, from_high, b);
    }
  }
#else
  uint32_t words[kLanes][kLanes];
  for (int32_t i = 0; i < kLanes; ++i) hn::StoreU(rows[i], kWords, words[i]);
  for (int32_t i = 0; i < kLanes; ++i)
    for (int32_t j = 0; j < i; ++j) {
      const uint32_t word = words[i][j];
      words[i][j] = words[j][i];
      words[j][i] = word;
    }
  for (int32_t i = 0; i < kLanes; ++i) rows[i] = hn::LoadU(kWords, words[i]);
#endif
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

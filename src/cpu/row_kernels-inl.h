// SPDX-License-Identifier: Apache-2.0
// This is the one source of all row kernels. It is included as tile_kernels-inl.h is.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/dequantize-inl.h"
#include "cpu/e4m3-inl.h"
#include "cpu/indexer-inl.h"
#include "cpu/pool-inl.h"
#include "cpu/row_kernels.h"
#include "cpu/vectors-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

// It is aligned so that its loop does not cross a line of 64 bytes, where append of bf16 rows took 60 us instead of 57
// (AMD EPYC, Zen 4, 2026-11-23; docs/notebook/2026-11-23-cpu-gather.md).
[[gnu::aligned(64)]] void copy(const void* src, void* dst, int64_t bytes) {
  const auto* from = static_cast<const char*>(src);
  auto* to = static_cast<char*>(dst);
  constexpr int64_t kVectorBytes = kLanes * sizeof(uint32_t);
  int64_t i = 0;
  for (; i + kVectorBytes <= bytes; i += kVectorBytes)
    hn::StoreU(hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(from + i)), kWords,
               reinterpret_cast<uint32_t*>(to + i));
  if (i < bytes) std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

// ---- quantized elements ----

/// Converts bf16 to another type.
HWY_INLINE void widen(const uint16_t* values, int64_t n, void* dst, DType dtype) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store_from_f32(load_as_f32(values + i, DType::kBF16), advance(dst, dtype, i), dtype);
  for (; i < n; ++i) {
    const float value = bf16_to_f32(values[i]);
    const uint16_t half = f32_to_f16(value);
    std::memcpy(advance(dst, dtype, i), dtype == DType::kF16 ? static_cast<const void*>(&half) : &value,
                size_of(dtype));
  }
}

void dequantize(const QuantizedRow& row, void* dst, DType dtype) {
  if (dtype == DType::kBF16) return dequantize_row(row, static_cast<uint16_t*>(dst));
  constexpr int32_t kChunk = 1024;
  alignas(64) uint16_t values[kChunk];
  const int32_t together = HWY_MAX(kChunk / HWY_MAX(row.group, 1), 1);  // groups
  for (int32_t g = 0; g < row.num_groups; g += together)
    for (int32_t i = 0; i < row.group; i += kChunk) {  // once, unless a group is longer than a chunk
      const int64_t first = int64_t{g} * row.group + i;
      const QuantizedRow chunk{.element = row.element,
                               .elements = static_cast<const char*>(row.elements) + bytes_of(row.element, first),
                               .scales = row.scales + g,
                               .num_groups = HWY_MIN(together, row.num_groups - g),
                               .group = HWY_MIN(row.group - i, kChunk)};
      dequantize_row(chunk, values);
      widen(values, int64_t{chunk.num_groups} * chunk.group, advance(dst, dtype, first), dtype);
    }
}

/// Returns whether multiplying by the reciprocal of `scale` gives the same e4m3 elements as dividing by `scale`.
HWY_INLINE bool has_exact_reciprocal(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  return (bits & 0x7FFFFFU) == 0 && scale >= 0x1p-100F && scale <= 0x1p100F;
}

template <class Divide>
HWY_INLINE void quantize_vectors(const void* src, DType dtype, int64_t n, uint8_t* e4m3, const Divide& divide) {
  for_each_vector(src, dtype, n, [&](FloatVec x, int64_t i, int64_t count) {
    const WordVec quotient = f32_to_e4m3(divide(x));
    if (count == kLanes) return store_low_bytes(quotient, e4m3 + i);
    uint8_t rest[kLanes];
    store_low_bytes(quotient, rest);
    std::memcpy(e4m3 + i, rest, static_cast<size_t>(count));
  });
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
/// Returns f32_to_e4m3 of 32 bf16 magnitudes divided by `divisor`, in 16-bit words, without the limit of 0x7E.
HWY_INLINE __m512i divide_words(__m512i magnitudes, __m512 divisor) {
  const auto rounded = [&](__m512i bits) {
    const __m512 quotient = _mm512_min_ps(_mm512_div_ps(_mm512_castsi512_ps(bits), divisor), _mm512_set1_ps(480.0F));
    const __m512i exponent = _mm512_max_epu32(
        _mm512_and_si512(_mm512_castps_si512(quotient), _mm512_set1_epi32(0x7F800000)), _mm512_set1_epi32(121 << 23));
    const __m512 big = _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23)));
    const __m512i sum = _mm512_castps_si512(_mm512_add_ps(quotient, big));  // rounds as f32_to_e4m3 does
    return _mm512_add_epi32(sum, _mm512_srli_epi32(sum, 20));
  };
  const __m512i even = rounded(_mm512_slli_epi32(magnitudes, 16));
  const __m512i odd = rounded(_mm512_and_si512(magnitudes, _mm512_set1_epi32(-0x10000)));
  const __m512i e4m3 = _mm512_mask_blend_epi16(0xAAAAAAAAU, even, _mm512_slli_epi32(odd, 16));
  return _mm512_sub_epi16(e4m3, _mm512_set1_epi16(141 << 3));
}

/// Returns f32_to_e4m3 of 32 bf16 magnitudes divided by a power of two, in 16-bit words, without the limit of 0x7E.
/// `bias` is (the power's exponent + 120) << 7.
HWY_INLINE __m512i quantize_words(__m512i magnitudes, __m512i bias) {
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i quotients = _mm512_sub_epi16(magnitudes, bias);  // the e4m3 magnitude with 4 more bits of mantissa
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(quotients, 4), one);
  const __m512i e4m3 = _mm512_srai_epi16(_mm512_add_epi16(_mm512_add_epi16(quotients, _mm512_set1_epi16(7)), odd), 4);
  const __mmask32 subnormal = _mm512_cmplt_epi16_mask(quotients, _mm512_set1_epi16(0x80));
  if (HWY_LIKELY(subnormal == 0)) return e4m3;
  const __m512i mantissa =
      _mm512_or_si512(_mm512_and_si512(magnitudes, _mm512_set1_epi16(0x7F)), _mm512_set1_epi16(0x80));
  const __m512i shift =
      _mm512_min_epi16(_mm512_sub_epi16(_mm512_set1_epi16(5), _mm512_srai_epi16(quotients, 7)), _mm512_set1_epi16(14));
  const __m512i half = _mm512_sllv_epi16(one, _mm512_sub_epi16(shift, one));
  const __m512i odd_unit = _mm512_and_si512(_mm512_srlv_epi16(mantissa, shift), one);
  const __m512i rounded = _mm512_add_epi16(mantissa, _mm512_add_epi16(_mm512_sub_epi16(half, one), odd_unit));
  return _mm512_mask_srlv_epi16(e4m3, subnormal, rounded, shift);
}

/// Quantizes bf16, 64 at a time, where quotients(magnitudes, i) turns the magnitudes of 32 elements from i on into
/// words of e4m3. Returns how many elements it has quantized; the caller quantizes the rest.
template <class Quotients>
HWY_INLINE int64_t quantize_bf16(const uint16_t* src, int64_t n, uint8_t* e4m3, const Quotients& quotients) {
  const __m512i unsign = _mm512_set1_epi16(0x7FFF);
  // Undoes the order of the pack instructions, which work on 128 bits at a time.
  const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i low = _mm512_loadu_si512(src + i);
    const __m512i high = _mm512_loadu_si512(src + i + 32);
    const __m512i low_magnitudes = _mm512_and_si512(low, unsign);
    const __m512i high_magnitudes = _mm512_and_si512(high, unsign);
    __m512i bytes = _mm512_packus_epi16(quotients(low_magnitudes, i), quotients(high_magnitudes, i + 32));
    bytes = _mm512_min_epu8(bytes, _mm512_set1_epi8(0x7E));
    constexpr int kOrIfThird = 0xF8;  // a | (b & c): inserts the signs
    bytes = _mm512_ternarylogic_epi32(bytes, _mm512_packs_epi16(low, high), _mm512_set1_epi8(-0x80), kOrIfThird);
    bytes = _mm512_permutexvar_epi64(in_order, bytes);
    const auto above = [&](__m512i bound) {
      return _mm512_kunpackd(_mm512_cmpgt_epi16_mask(high_magnitudes, bound),
                             _mm512_cmpgt_epi16_mask(low_magnitudes, bound));
    };
    // An infinity counts as 2^128 here, which may be as little as 256 times the scale and would not saturate.
    const __mmask64 special = above(_mm512_set1_epi16(0x7F7F));
    if (HWY_UNLIKELY(special != 0)) {
      const __mmask64 nan = above(_mm512_set1_epi16(0x7F80));
      const __m512i sign = _mm512_and_si512(bytes, _mm512_set1_epi8(-0x80));
      bytes = _mm512_mask_blend_epi8(special, bytes, _mm512_or_si512(sign, _mm512_set1_epi8(0x7E)));
      bytes = _mm512_mask_blend_epi8(nan, bytes, _mm512_or_si512(sign, _mm512_set1_epi8(0x7F)));
    }
    _mm512_storeu_si512(e4m3 + i, bytes);
  }
  return i;
}
#endif

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
/// Returns the bias with which quantize_words divides by 2^(exponent - 127).
HWY_INLINE int16_t bias_of(int32_t exponent) { return static_cast<int16_t>((exponent - 7) * 128); }

/// Returns the bits of the largest finite magnitude of n bf16, where n is a multiple of 32. Magnitudes order as their
/// bits do.
HWY_INLINE uint32_t finite_amax_bits(const uint16_t* src, int64_t n) {
  const __m512i largest = _mm512_set1_epi16(0x7F7F);
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 32) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(src + i), _mm512_set1_epi16(0x7FFF));
    top = _mm512_mask_max_epi16(top, _mm512_cmple_epi16_mask(magnitude, largest), top, magnitude);
  }
  const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
  const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return 0xFFFFU ^ static_cast<uint32_t>(_mm_extract_epi16(least, 0));
}

/// Returns the biased exponent of e4m3_power_of_two_scale of a bf16: the exponent of the bf16 minus 8, one more if its
/// mantissa is above 1.75, which is that of 448; and at least the one for 1e-4.
HWY_INLINE int32_t scale_exponent(uint32_t amax_bits) {
  constexpr int32_t kLeast = static_cast<int32_t>(std::bit_cast<uint32_t>(e4m3_power_of_two_scale(0.0F)) >> 23);
  return HWY_MAX(static_cast<int32_t>((amax_bits + 31U) >> 7) - 8, kLeast);
}
#endif

/// Quantizes the first elements, as many as are a multiple of 64, if they are bf16. Returns how many it has quantized.
HWY_INLINE int64_t quantize_most(const void* src, DType dtype, float scale, int64_t n, uint8_t* e4m3) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if (dtype != DType::kBF16) return 0;
  const auto* from = static_cast<const uint16_t*>(src);
  if (!has_exact_reciprocal(scale))
    return quantize_bf16(from, n, e4m3,
                         [&](__m512i magnitudes, int64_t) { return divide_words(magnitudes, _mm512_set1_ps(scale)); });
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  const __m512i bias = _mm512_set1_epi16(bias_of(static_cast<int32_t>(bits >> 23)));
  return quantize_bf16(from, n, e4m3, [&](__m512i magnitudes, int64_t) { return quantize_words(magnitudes, bias); });
#else
  static_cast<void>(src), static_cast<void>(dtype), static_cast<void>(scale), static_cast<void>(n);
  static_cast<void>(e4m3);
  return 0;
#endif
}

HWY_INLINE void quantize_inline(const void* src, DType dtype, float scale, int64_t n, uint8_t* e4m3) {
  const int64_t done = quantize_most(src, dtype, scale, n, e4m3);
  if (done == n) return;
  src = advance(src, dtype, done);
  if (has_exact_reciprocal(scale)) {
    const FloatVec reciprocal = hn::Set(kFloats, 1.0F / scale);
    quantize_vectors(src, dtype, n - done, e4m3 + done, [&](FloatVec x) { return x * reciprocal; });
  } else {
    const FloatVec divisor = hn::Set(kFloats, scale);
    quantize_vectors(src, dtype, n - done, e4m3 + done, [&](FloatVec x) { return x / divisor; });
  }
}

void quantize(const void* src, DType dtype, float scale, int64_t n, uint8_t* e4m3) {
  quantize_inline(src, dtype, scale, n, e4m3);
}

HWY_INLINE float finite_amax(const void* src, DType dtype, int64_t n) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if (dtype == DType::kBF16 && n % 32 == 0)
    return bf16_to_f32(static_cast<uint16_t>(finite_amax_bits(static_cast<const uint16_t*>(src), n)));
#endif
  const FloatVec infinity = hn::Set(kFloats, HUGE_VALF);
  FloatVec top = hn::Zero(kFloats);
  for_each_vector(src, dtype, n, [&](FloatVec x, int64_t, int64_t) {
    const FloatVec magnitude = hn::Abs(x);
    top = hn::Max(top, hn::IfThenElseZero(hn::Lt(magnitude, infinity), magnitude));
  });
  return hn::GetLane(hn::MaxOfLanes(kFloats, top));
}

void finite_amaxes(const void* src, DType dtype, int32_t num_groups, int32_t group, float* amaxes) {
  for (int32_t i = 0; i < num_groups; ++i)
    amaxes[i] = finite_amax(advance(src, dtype, int64_t{i} * group), dtype, group);
}

/// Packs n e2m1, one in the low half of each byte, two into a byte.
HWY_INLINE void pack_e2m1(const uint8_t* codes, int32_t n, uint8_t* e2m1) {
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t bytes = load_unaligned<uint64_t>(codes + i);
    bytes = (bytes | bytes >> 4) & 0x00FF00FF00FF00FFU;
    bytes = (bytes | bytes >> 8) & 0x0000FFFF0000FFFFU;
    const auto packed = static_cast<uint32_t>(bytes | bytes >> 16);
    std::memcpy(e2m1 + i / 2, &packed, sizeof packed);
  }
  for (; i < n; i += 2) e2m1[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
}

void quantize_e2m1(const void* src, DType dtype, int32_t num_groups, int32_t group, const float* scales,
                   uint8_t* e2m1) {
  for (int32_t g = 0; g < num_groups; ++g, e2m1 += group / 2) {
    uint8_t codes[kMostE2M1Group + kLanes];
    const FloatVec divisor = hn::Set(kFloats, scales[g]);
    for_each_vector(advance(src, dtype, int64_t{g} * group), dtype, group,
                    [&](FloatVec x, int64_t i, int64_t) { store_low_bytes(f32_to_e2m1(x / divisor), codes + i); });
    pack_e2m1(codes, group, e2m1);
  }
}

void quantize_groups(const void* src, DType dtype, int32_t num_groups, int32_t group, bool power_of_two, float least,
                     float* scales, uint8_t* e4m3) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  constexpr int32_t kMostBiases = 32;
  const bool in_words = group % 64 == 0 || (group == 32 && num_groups % 2 == 0);
  if (dtype == DType::kBF16 && power_of_two && in_words && num_groups <= kMostBiases) {
    const auto* from = static_cast<const uint16_t*>(src);
    const auto least_exponent = static_cast<int32_t>(load_unaligned<uint32_t>(&least) >> 23);
    int16_t biases[kMostBiases];
    for (int32_t i = 0; i < num_groups; ++i) {
      const int32_t exponent = HWY_MAX(scale_exponent(finite_amax_bits(from + i * group, group)), least_exponent);
      const uint32_t bits = static_cast<uint32_t>(exponent) << 23;
      std::memcpy(scales + i, &bits, sizeof bits);
      biases[i] = bias_of(exponent);
    }
    const int32_t piece = HWY_MAX(group, 64);
    const int32_t together = piece / group;
    for (int32_t i = 0; i < num_groups; i += together, from += piece, e4m3 += piece) {
      const __m512i even = _mm512_set1_epi16(biases[i]), odd = _mm512_set1_epi16(biases[i + together - 1]);
      quantize_bf16(from, piece, e4m3, [&](__m512i magnitudes, int64_t first) {
        return quantize_words(magnitudes, first % 64 == 0 ? even : odd);
      });
    }
    return;
  }
#endif
  for (int32_t i = 0; i < num_groups; ++i) {
    const float amax = finite_amax(advance(src, dtype, int64_t{i} * group), dtype, group);
    scales[i] = HWY_MAX(power_of_two ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax), least);
  }
  for (int32_t i = 0; i < num_groups; ++i)
    quantize_inline(advance(src, dtype, int64_t{i} * group), dtype, scales[i], group, e4m3 + int64_t{i} * group);
}

// ---- rotation ----

HWY_INLINE float scalar_as_f32(const void* src, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBF16: return bf16_to_f32(load_unaligned<uint16_t>(advance(src, dtype, i)));
    case DType::kF16: return f16_to_f32(load_unaligned<uint16_t>(advance(src, dtype, i)));
    default: return load_unaligned<float>(advance(src, dtype, i));
  }
}

/// Products and sums are rounded separately, since the build forbids fusing them.
void rotate(const void* x, const void* second, DType dtype, const float* own, const float* partner, int32_t n,
            float* out) {
  if (second == nullptr) {
    int32_t i = 0;
#if HWY_TARGET != HWY_SCALAR
    for (; i + kLanes <= 2 * n; i += kLanes) {
      const FloatVec channels = load_as_f32(advance(x, dtype, i), dtype);
      hn::StoreU(channels * hn::LoadU(kFloats, own + i) + hn::Shuffle2301(channels) * hn::LoadU(kFloats, partner + i),
                 kFloats, out + i);
    }
#endif
    for (; i < 2 * n; ++i) out[i] = scalar_as_f32(x, dtype, i) * own[i] + scalar_as_f32(x, dtype, i ^ 1) * partner[i];
    return;
  }
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const FloatVec a = load_as_f32(advance(x, dtype, i), dtype);
    const FloatVec b = load_as_f32(advance(second, dtype, i), dtype);
    hn::StoreU(a * hn::LoadU(kFloats, own + i) + b * hn::LoadU(kFloats, partner + i), kFloats, out + i);
    hn::StoreU(b * hn::LoadU(kFloats, own + n + i) + a * hn::LoadU(kFloats, partner + n + i), kFloats, out + n + i);
  }
  for (; i < n; ++i) {
    const float a = scalar_as_f32(x, dtype, i);
    const float b = scalar_as_f32(second, dtype, i);
    out[i] = a * own[i] + b * partner[i];
    out[n + i] = b * own[n + i] + a * partner[n + i];
  }
}

// ---- logits of 16 bits ----

void store_logits(const float* logits, int64_t n, void* dst, DType dtype) {
  const FloatVec most = hn::Set(kFloats, dtype == DType::kF16 ? 65504.0F : 0x1.FEp127F);
  const FloatVec infinity = hn::Set(kFloats, HUGE_VALF);
  for_each_vector(logits, DType::kF32, n, [&](FloatVec x, int64_t i, int64_t count) {
    const FloatVec magnitude = hn::Abs(x);
    const auto beyond = hn::And(hn::Lt(most, magnitude), hn::Lt(magnitude, infinity));
    const FloatVec finite = hn::IfThenElse(beyond, hn::CopySign(most, x), x);
    if (count == kLanes) return store_from_f32(finite, advance(dst, dtype, i), dtype);
    alignas(64) float rest[kLanes];  // room for any type
    store_from_f32(finite, rest, dtype);
    std::memcpy(advance(dst, dtype, i), rest, static_cast<size_t>(count) * size_of(dtype));
  });
}

void load_logits(const void* src, DType dtype, int64_t n, float* logits) {
  for_each_vector(src, dtype, n, [&](FloatVec x, int64_t i, int64_t count) {
    if (count == kLanes) return hn::StoreU(x, kFloats, logits + i);
    alignas(64) float rest[kLanes];
    hn::Store(x, kFloats, rest);
    std::copy_n(rest, count, logits + i);
  });
}

// ---- top-k ----

/// Returns the ranks of logits, as RankRange defines them.
HWY_INLINE WordVec rank_of(FloatVec logits) {
  WordVec bits = hn::BitCast(kWords, logits);
  const WordVec sign = hn::Set(kWords, 0x80000000U);
  bits = hn::IfThenZeroElse(hn::Eq(bits, sign), bits);  // -0 becomes 0
  const WordVec negative = hn::BitCast(kWords, hn::ShiftRight<31>(hn::BitCast(kInts, bits)));
  const WordVec rank = hn::Xor(bits, hn::Or(negative, sign));
  return hn::IfThenZeroElse(hn::RebindMask(kWords, hn::IsNaN(logits)), rank);
}

/// Returns the lanes where a <= b, unsigned.
HWY_INLINE auto not_above(WordVec a, WordVec b) { return hn::Eq(hn::Max(a, b), b); }

/// Calls f(ranks, lanes that exist, i) for vectors of logits from logit i on.
template <class F>
HWY_INLINE void for_each_rank(const float* logits, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(rank_of(hn::LoadU(kFloats, logits + i)), int64_t{kLanes}, i);
  if (kLanes == 1 || i == n) return;
  alignas(64) float rest[kLanes] = {};
  std::copy(logits + i, logits + n, rest);
  f(rank_of(hn::Load(kFloats, rest)), n - i, i);
}

/// Returns the lanes of `mask` moved to the front.
template <class Tag, class Vec, class Mask>
HWY_INLINE Vec compress(Tag tag, Vec values, Mask mask) {
// On these targets Compress needs Highway's library, which is not linked.
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  alignas(64) hn::TFromD<Tag> value[kLanes];
  alignas(64) hn::TFromD<Tag> chosen[kLanes];
  hn::Store(values, tag, value);
  hn::Store(hn::VecFromMask(tag, mask), tag, chosen);
  int32_t count = 0;
  for (int32_t lane = 0; lane < kLanes; ++lane)
    if (chosen[lane] != 0) value[count++] = value[lane];
  return hn::Load(tag, value);
#else
  static_cast<void>(tag);
  return hn::Compress(values, mask);
#endif
}

void count_ranks(const float* logits, int64_t n, const RankRange& range, int32_t shift, uint32_t* counts) {
  constexpr int64_t kChunk = 512;
  alignas(64) uint32_t ranks[kChunk + kLanes];
  const WordVec first = hn::Set(kWords, range.first);
  const WordVec last = hn::Set(kWords, range.last);
  const bool all = range.first == 0 && range.last == UINT32_MAX;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    size_t count = 0;
    for_each_rank(logits + begin, std::min(kChunk, n - begin), [&](WordVec rank, int64_t lanes, int64_t) {
      const auto exists = hn::FirstN(kWords, static_cast<size_t>(lanes));
      const auto inside = hn::And(exists, hn::And(not_above(first, rank), not_above(rank, last)));
      hn::StoreU(all ? rank : compress(kWords, rank, inside), kWords, ranks + count);
      count += all ? static_cast<size_t>(lanes) : hn::CountTrue(kWords, inside);
    });
    for (size_t i = 0; i < count; ++i) ++counts[(ranks[i] >> shift) % kMaxDigits];
  }
}

int64_t select_ranks(const float* logits, int64_t n, uint32_t rank, int64_t ties, int64_t room, int32_t* indices) {
  const WordVec bound = hn::Set(kWords, rank);
  const auto lane = hn::Iota(kInts, 0);
  int64_t taken = 0;
  for_each_rank(logits, n, [&](WordVec ranks, int64_t lanes, int64_t i) {
    const auto exists = hn::FirstN(kWords, static_cast<size_t>(lanes));
    auto take = hn::And(exists, hn::Not(not_above(ranks, bound)));
    const auto tied = hn::And(exists, hn::Eq(ranks, bound));
    if (ties > 0 && !hn::AllFalse(kWords, tied)) {
      const auto count = static_cast<int64_t>(hn::CountTrue(kWords, tied));
      if (count <= ties) {
        take = hn::Or(take, tied);
        ties -= count;
      } else {  // there is room only for the lowest of them
        alignas(64) uint32_t chosen[kLanes];
        hn::Store(hn::VecFromMask(kWords, tied), kWords, chosen);
        for (uint32_t& one : chosen)
          if (one != 0 && ties-- <= 0) one = 0;
        ties = 0;
        take = hn::Or(take, hn::MaskFromVec(hn::Load(kWords, chosen)));
      }
    }
    const auto count = static_cast<int64_t>(hn::CountTrue(kWords, take));
    if (count == 0) return;
    const auto index = compress(kInts, lane + hn::Set(kInts, static_cast<int32_t>(i)), hn::RebindMask(kInts, take));
    if (taken + kLanes <= room) {
      hn::StoreU(index, kInts, indices + taken);
    } else {
      alignas(64) int32_t some[kLanes];
      hn::Store(index, kInts, some);
      std::copy_n(some, std::min(count, room - taken), indices + taken);
    }
    taken += count;
  });
  return taken;
}

constexpr RowKernels kRowTable = {
    .copy = copy,
    .dequantize = dequantize,
    .quantize = quantize,
    .finite_amaxes = finite_amaxes,
    .quantize_e2m1 = quantize_e2m1,
    .quantize_groups = quantize_groups,
    .rotate = rotate,
    .pool = pool,
    .finish_pool = finish_pool,
    .norm_factor = norm_factor,
    .scale_channels = scale_channels,
    .apply_gate = apply_gate,
#if MLA_CPU_TILES
    .begin = configure_tiles,
    .end = release_tiles,
#else
    .begin = nullptr,
    .end = nullptr,
#endif
    .pack_indexer_queries = pack_indexer_queries,
    .multiplies_pairs = kPack == 2,
    .indexer_sums = indexer_sums,
    .store_logits = store_logits,
    .load_logits = load_logits,
    .count_ranks = count_ranks,
    .select_ranks = select_ranks,
};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

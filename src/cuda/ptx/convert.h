// SPDX-License-Identifier: Apache-2.0
// These functions convert between pairs of floats, multiply pairs, and compute fast transcendental functions (PTX ISA:
// cvt, mul, fma, ex2, lg2). The payloads of NaN differ from those of mla/numeric.h, which is to be used for bytes that
// must equal the reference.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/ptx/machine.h"
#include "mla/numeric.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

#if MLA_EMULATED
namespace detail {
inline uint32_t join(uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; }
inline uint16_t low_half(uint32_t pair) { return static_cast<uint16_t>(pair); }
inline uint16_t high_half(uint32_t pair) { return static_cast<uint16_t>(pair >> 16); }
/// cvt and mul give a single NaN.
inline uint16_t canonical_f16(float x) { return x != x ? uint16_t{0x7FFF} : f32_to_f16(x); }
inline uint16_t canonical_bf16(float x) { return x != x ? uint16_t{0x7FFF} : f32_to_bf16(x); }
/// std::fmin and std::fmax give NaN for a signaling one and a number; the instructions give the number.
inline float quiet(float x) { return x != x ? std::numeric_limits<float>::quiet_NaN() : x; }
inline float flush(float x) { return std::abs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x; }
}  // namespace detail
#endif

/// cvt.rn.bf16x2.f32: packs two floats as bf16, `low` in bits 0 ... 15.
MLA_DEVICE uint32_t pack_bf16x2(float low, float high) {
#if MLA_EMULATED
  return detail::join(detail::canonical_bf16(low), detail::canonical_bf16(high));
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

/// cvt.rn.f16x2.f32: packs two floats as f16, `low` in bits 0 ... 15.
MLA_DEVICE uint32_t pack_f16x2(float low, float high) {
#if MLA_EMULATED
  return detail::join(detail::canonical_f16(low), detail::canonical_f16(high));
#else
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

/// Unpacks two bf16 exactly, by a shift and a mask: there is no instruction for it.
MLA_DEVICE void unpack_bf16x2(uint32_t pair, float& low, float& high) {
  low = std::bit_cast<float>(pair << 16);
  high = std::bit_cast<float>(pair & 0xFFFF0000U);
}

/// cvt.f32.f16: unpacks two f16 exactly.
MLA_DEVICE void unpack_f16x2(uint32_t pair, float& low, float& high) {
#if MLA_EMULATED
  low = f16_to_f32(detail::low_half(pair));
  high = f16_to_f32(detail::high_half(pair));
#else
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
#endif
}

/// mul.rn.f16x2: multiplies two pairs of f16.
MLA_DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
#if MLA_EMULATED
  return detail::join(detail::canonical_f16(f16_to_f32(detail::low_half(a)) * f16_to_f32(detail::low_half(b))),
                      detail::canonical_f16(f16_to_f32(detail::high_half(a)) * f16_to_f32(detail::high_half(b))));
#else
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#endif
}

/// fma.rn.bf16x2 with -0 as addend: multiplies two pairs of bf16. mul.bf16x2 came only with SM90.
MLA_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#if MLA_EMULATED
  return detail::join(detail::canonical_bf16(bf16_to_f32(detail::low_half(a)) * bf16_to_f32(detail::low_half(b))),
                      detail::canonical_bf16(bf16_to_f32(detail::high_half(a)) * bf16_to_f32(detail::high_half(b))));
#else
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000U));
  return product;
#endif
}

/// fma.rn.bf16x2 with 1 as factor: adds two pairs of bf16. add.bf16x2 came only with SM90.
MLA_DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) {
#if MLA_EMULATED
  // A double holds the sum of two bf16 whose exponents matter to each other.
  const auto add = [](uint16_t x, uint16_t y) {
    return detail::canonical_bf16(static_cast<float>(double{bf16_to_f32(x)} + double{bf16_to_f32(y)}));
  };
  return detail::join(add(detail::low_half(a), detail::low_half(b)), add(detail::high_half(a), detail::high_half(b)));
#else
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3F803F80U), "r"(b));
  return sum;
#endif
}

/// min.bf16x2 and max.bf16x2: return the smaller and the larger numbers of two pairs; of a number and a NaN the number.
MLA_DEVICE uint32_t min_bf16x2(uint32_t a, uint32_t b) {
#if MLA_EMULATED
  const auto least = [](uint16_t x, uint16_t y) {
    return detail::canonical_bf16(std::fmin(detail::quiet(bf16_to_f32(x)), detail::quiet(bf16_to_f32(y))));
  };
  return detail::join(least(detail::low_half(a), detail::low_half(b)),
                      least(detail::high_half(a), detail::high_half(b)));
#else
  uint32_t result;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#endif
}
MLA_DEVICE uint32_t max_bf16x2(uint32_t a, uint32_t b) {
#if MLA_EMULATED
  const auto largest = [](uint16_t x, uint16_t y) {
    return detail::canonical_bf16(std::fmax(detail::quiet(bf16_to_f32(x)), detail::quiet(bf16_to_f32(y))));
  };
  return detail::join(largest(detail::low_half(a), detail::low_half(b)),
                      largest(detail::high_half(a), detail::high_half(b)));
#else
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#endif
}

/// Converts two e4m3 to two f16 exactly; NaN stays NaN. It is cvt.rn.f16x2.e4m3x2 from SM89 on. Before SM89 it shifts
/// the bits into those of f16, which are then the value times 2^-8, subnormals included.
MLA_DEVICE uint32_t e4m3x2_to_f16x2(uint16_t pair) {
  if constexpr (kHasE4M3) {
#if MLA_EMULATED
    return detail::join(detail::canonical_f16(e4m3_to_f32(static_cast<uint8_t>(pair & 0xFFU))),
                        detail::canonical_f16(e4m3_to_f32(static_cast<uint8_t>(pair >> 8))));
#else
    uint32_t result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
    return result;
#endif
  } else {
    const uint32_t spread = (static_cast<uint32_t>(pair & 0xFF00U) << 16) | (static_cast<uint32_t>(pair & 0xFFU) << 8);
    const uint32_t magnitude = (spread & 0x7F007F00U) >> 1;
    const uint32_t nan = (magnitude + 0x00800080U) & 0x40004000U;  // bit 14 is set where the magnitude is 0x3F80, a NaN
    return mul_f16x2(magnitude | (spread & 0x80008000U), 0x5C005C00U) | nan | (nan - (nan >> 14));
  }
}

/// Converts four e4m3 to f16: `low` gets the lower two and `high` the upper two.
MLA_DEVICE void e4m3x4_to_f16x2(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (kHasE4M3) {
#if MLA_EMULATED
    low = e4m3x2_to_f16x2(detail::low_half(four));
    high = e4m3x2_to_f16x2(detail::high_half(four));
#else
    // ptxas needs no shift for the upper half if it comes from a mov that splits the word.
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
#endif
  } else {
    low = e4m3x2_to_f16x2(static_cast<uint16_t>(four));
    high = e4m3x2_to_f16x2(static_cast<uint16_t>(four >> 16));
  }
}

/// mov.b32 {half, half}: returns twice the lower half of a pair, or the upper one. Arithmetic on pairs reads a half as
/// an operand, so that this takes no instruction of its own there.
MLA_DEVICE uint32_t twice_half(uint32_t pair, bool upper) {
#if MLA_EMULATED
  const uint16_t half = upper ? detail::high_half(pair) : detail::low_half(pair);
  return detail::join(half, half);
#else
  uint32_t low, high;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\nmov.b32 %0, {lo, lo};\nmov.b32 %1, {hi, hi};\n}"
      : "=r"(low), "=r"(high)
      : "r"(pair));
  return upper ? high : low;
#endif
}

/// lop3.b32: returns the bits of `set` where those of `mask` are 1, and the bits of `clear` elsewhere. From the
/// operators of C++ nvcc 13.0 makes two instructions, where it finds that some of these bits are masked out later.
MLA_DEVICE uint32_t choose_bits(uint32_t mask, uint32_t set, uint32_t clear) {
#if MLA_EMULATED
  return (set & mask) | (clear & ~mask);
#else
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(set), "r"(clear), "r"(mask));
  return result;
#endif
}

/// prmt.b32 of one word: byte i of the result is the byte of `word` whose number stands in bits 4 i ... 4 i + 2 of
/// `which`.
MLA_DEVICE uint32_t permute_bytes(uint32_t word, uint32_t which) {
#if MLA_EMULATED
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (word >> ((which >> (4 * i) & 3U) * 8) & 0xFFU) << (8 * i);
  return result;
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(word), "r"(which));
  return result;
#endif
}

/// prmt.b32 of two words: does the same with bytes 0 ... 3 from `low` and 4 ... 7 from `high`.
MLA_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t which) {
#if MLA_EMULATED
  const uint64_t words = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(words >> ((which >> (4 * i) & 7U) * 8) & 0xFFU) << (8 * i);
  return result;
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(which));
  return result;
#endif
}

/// max.u16x2: returns the larger ones of both halves. Only SM90 and later have it.
template <int kOn = kArch>
MLA_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  static_assert(kOn >= 90, "max.u16x2 needs SM90");
#if MLA_EMULATED
  const uint32_t low_a = a & 0xFFFFU, low_b = b & 0xFFFFU, high_a = a >> 16, high_b = b >> 16;
  return (low_a > low_b ? low_a : low_b) | (high_a > high_b ? high_a : high_b) << 16;
#else
  uint32_t result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#endif
}

/// ex2.approx.ftz.f32: returns 2^x with a relative error of up to 2^-22; subnormals become 0.
MLA_DEVICE float exp2_approx(float x) {
#if MLA_EMULATED
  return detail::flush(std::exp2(detail::flush(x)));
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

/// lg2.approx.ftz.f32: returns the base-2 logarithm; -inf for 0 and subnormals.
MLA_DEVICE float log2_approx(float x) {
#if MLA_EMULATED
  return std::log2(detail::flush(x));
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

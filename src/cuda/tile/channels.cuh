// SPDX-License-Identifier: Apache-2.0
// A lane loads, converts and stores eight neighbouring channels of one row: with accesses of 16 bytes where the address
// allows, and conversions two values at a time. The results have the bits of those of scalar.cuh.
#pragma once

#include "cuda/ptx/arithmetic.h"
#include "cuda/ptx/e4m3.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr int kVector = 8;

/// Holds the bits of eight elements. Elements of one byte are in w[0] and w[1], those of two bytes in w[0] ... w[3],
/// those of four bytes in all words.
struct Bits8 {
  uint32_t w[8];
};

MLA_DEVICE bool is_aligned(const void* at, uint32_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; }

template <class T>
MLA_DEVICE const T* as(const std::byte* at) {
  return reinterpret_cast<const T*>(at);
}
template <class T>
MLA_DEVICE T* as(std::byte* at) {
  return reinterpret_cast<T*>(at);
}

/// Loads eight elements. `at` must be aligned to the element.
MLA_DEVICE Bits8 load_bits8(const std::byte* at, int32_t element_bytes) {
  Bits8 bits = {};
  if (element_bytes == 2) {
    if (is_aligned(at, 16)) {
      const ptx::Vec4 v = ptx::load_once(as<ptx::Vec4>(at));
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[i] = v.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        bits.w[i] = static_cast<uint32_t>(as<uint16_t>(at)[2 * i]) | static_cast<uint32_t>(as<uint16_t>(at)[2 * i + 1])
                                                                         << 16;
    }
  } else if (element_bytes == 4) {
    if (is_aligned(at, 16)) {
      const ptx::Vec4 low = ptx::load_once(as<ptx::Vec4>(at)), high = ptx::load_once(as<ptx::Vec4>(at) + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[i] = low.x[i];
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[4 + i] = high.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) bits.w[i] = as<uint32_t>(at)[i];
    }
  } else if (is_aligned(at, 8)) {
    const uint64_t v = ptx::load_once(as<uint64_t>(at));
    bits.w[0] = static_cast<uint32_t>(v);
    bits.w[1] = static_cast<uint32_t>(v >> 32);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) bits.w[i / 4] |= static_cast<uint32_t>(as<uint8_t>(at)[i]) << (8 * (i % 4));
  }
  return bits;
}

MLA_DEVICE void store_bits8(std::byte* at, int32_t element_bytes, const Bits8& bits) {
  if (element_bytes == 2) {
    if (is_aligned(at, 16)) {
      *as<ptx::Vec4>(at) = {bits.w[0], bits.w[1], bits.w[2], bits.w[3]};
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) as<uint16_t>(at)[i] = static_cast<uint16_t>(bits.w[i / 2] >> (16 * (i % 2)));
    }
  } else if (element_bytes == 4) {
    if (is_aligned(at, 16)) {
      as<ptx::Vec4>(at)[0] = {bits.w[0], bits.w[1], bits.w[2], bits.w[3]};
      as<ptx::Vec4>(at)[1] = {bits.w[4], bits.w[5], bits.w[6], bits.w[7]};
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) as<uint32_t>(at)[i] = bits.w[i];
    }
  } else if (is_aligned(at, 8)) {
    *as<uint64_t>(at) = bits.w[0] | static_cast<uint64_t>(bits.w[1]) << 32;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) as<uint8_t>(at)[i] = static_cast<uint8_t>(bits.w[i / 4] >> (8 * (i % 4)));
  }
}

/// Converts eight e2m1 elements, the first in the lowest bits, to e4m3; every value of e2m1 is one of e4m3.
MLA_DEVICE Bits8 e2m1x8_to_e4m3(uint32_t codes) {
  constexpr uint32_t kBelow2 = 0x3C383000U, kFrom2 = 0x4C484440U;  // 0, 0.5, 1, 1.5 and 2, 3, 4, 6 as e4m3
  constexpr uint32_t kSigns = 0x8000U;                             // the sign bits of bytes 0 and 1
  Bits8 bits = {};
#pragma unroll
  for (int i = 0; i < 2; ++i, codes >>= 16)
    bits.w[i] =
        ptx::permute_bytes(kBelow2, kFrom2, codes & 0x7777U) | ptx::permute_bytes(kSigns, 0, codes >> 3 & 0x1111U);
  return bits;
}

/// Converts eight e2m1 elements to bf16, and multiplies each pair by a pair of bf16.
MLA_DEVICE ptx::Vec4 e2m1x8_to_bf16(uint32_t codes, uint32_t factors) {
  // The upper and the lower bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 as bf16.
  constexpr uint32_t kUpperBelow2 = 0x3F3F3F00U, kUpperFrom2 = 0x40404040U;
  constexpr uint32_t kLowerBelow2 = 0xC0800000U, kLowerFrom2 = 0xC0804000U;
  constexpr uint32_t kSigns = 0x8000U;  // the sign bits of bytes 0 and 1
  ptx::Vec4 values;
#pragma unroll
  for (int i = 0; i < 2; ++i, codes >>= 16) {
    const uint32_t magnitudes = codes & 0x7777U;
    const uint32_t lower = ptx::permute_bytes(kLowerBelow2, kLowerFrom2, magnitudes);
    const uint32_t upper =
        ptx::permute_bytes(kUpperBelow2, kUpperFrom2, magnitudes) | ptx::permute_bytes(kSigns, 0, codes >> 3 & 0x1111U);
    values.x[2 * i] = ptx::mul_bf16x2(ptx::permute_bytes(lower, upper, 0x5140U), factors);
    values.x[2 * i + 1] = ptx::mul_bf16x2(ptx::permute_bytes(lower, upper, 0x7362U), factors);
  }
  return values;
}

/// Rounds two bf16 that are not negative to e2m1, to nearest even, and saturates. The codes are in bits 0 ... 2 of the
/// halves of the result.
MLA_DEVICE uint32_t bf16x2_to_e2m1(uint32_t pair) {
  constexpr uint32_t kOne = 0x3F803F80U, kSix = 0x40C040C0U, kExponents = 0x7F807F80U;
  constexpr uint32_t kAligns = 0x03400340U;  // times 1.5 * 2^6, whose last bit is half of the power of two's
  const uint32_t bounded = ptx::min_bf16x2(pair, kSix);
  // Neighbours of e2m1 are half of a number's power of two apart, and of numbers below 1 half of 1.
  const uint32_t powers = ptx::max_bf16x2(bounded, kOne) & kExponents, aligner = powers + kAligns;
  return ptx::add_bf16x2(bounded, aligner) - aligner + ((powers - kOne) >> 6);
}

/// Loads elements c ... c + 7 of a row, where c is a multiple of eight. Elements of e2m1 are converted to e4m3.
MLA_DEVICE Bits8 load_elements8(const std::byte* row, DType dtype, int32_t c) {
  if (dtype == DType::kE2M1) {
    const std::byte* at = row + c / 2;
    return e2m1x8_to_e4m3(is_aligned(at, 4) ? ptx::load_once(as<uint32_t>(at))
                                            : std::bit_cast<uint32_t>(load_f32_anywhere(at)));
  }
  const auto bytes = static_cast<int32_t>(size_of(dtype));
  return load_bits8(row + int64_t{c} * bytes, bytes);
}

MLA_DEVICE uint16_t half_of(const Bits8& bits, int i) { return static_cast<uint16_t>(bits.w[i / 2] >> (16 * (i % 2))); }
MLA_DEVICE uint8_t byte_of(const Bits8& bits, int i) { return static_cast<uint8_t>(bits.w[i / 4] >> (8 * (i % 4))); }

/// Converts eight elements to floats; e4m3 elements without their scale.
MLA_DEVICE void decode8(const Bits8& bits, DType dtype, float (&values)[kVector]) {
  if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = std::bit_cast<float>(bits.w[i]);
  } else if (dtype == DType::kBF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::unpack_bf16x2(bits.w[i], values[2 * i], values[2 * i + 1]);
  } else if (dtype == DType::kE4M3) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::unpack_f16x2(ptx::e4m3x2_to_f16x2(half_of(bits, i)), values[2 * i], values[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kVector; ++i)  // restores the sign of a NaN, which cvt loses
      if (values[i] != values[i]) values[i] = std::bit_cast<float>((byte_of(bits, i) & 0x80U) << 24 | 0x7FC00000U);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::unpack_f16x2(bits.w[i], values[2 * i], values[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {  // restores the payload of a NaN, which cvt loses
      const uint32_t half = half_of(bits, i);
      const uint32_t nan = (half & 0x8000U) << 16 | 0x7F800000U | (half & 0x3FFU) << 13;
      if (values[i] != values[i]) values[i] = std::bit_cast<float>(nan);
    }
  }
}

/// Converts eight floats to bf16, f16 or f32.
MLA_DEVICE Bits8 encode8(const float (&values)[kVector], DType dtype) {
  Bits8 bits = {};
  if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) bits.w[i] = std::bit_cast<uint32_t>(values[i]);
    return bits;
  }
  const bool bf16 = dtype == DType::kBF16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bits.w[i] =
        bf16 ? ptx::pack_bf16x2(values[2 * i], values[2 * i + 1]) : ptx::pack_f16x2(values[2 * i], values[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {  // restores the payload of a NaN, which cvt loses
    if (values[i] == values[i]) continue;
    const uint32_t value = std::bit_cast<uint32_t>(values[i]) >> 16;
    const uint32_t nan = bf16 ? value | 0x40U : (value & 0x8000U) | 0x7E00U;
    bits.w[i / 2] = (bits.w[i / 2] & (0xFFFF0000U >> (16 * (i % 2)))) | nan << (16 * (i % 2));
  }
  return bits;
}

/// Divides by one scale, exactly as far as e4m3 can tell: quotients from 2^-11 to 1024 are those of IEEE division.
/// Smaller ones become 0 as e4m3, and larger ones 448, in any case.
class ScaleDivisor {
 public:
  MLA_DEVICE explicit ScaleDivisor(float scale)
      : factor_(scale > 0x1p60F    ? 0x1p-80F
                : scale < 0x1p-60F ? 0x1p80F
                                   : 1.0F) {
    scale_ = scale * factor_;
    reciprocal_ = 1.0F / scale_;
  }

  MLA_DEVICE float operator()(float value) const {
    // Multiplying by a power of two keeps the next steps from overflow and underflow for all quotients that matter.
    const float dividend = ptx::mul_rn(value, factor_);
    const float estimate = ptx::mul_rn(dividend, reciprocal_);
    // There are two Newton steps. The first gives a neighbour of the quotient, from which the second, by Markstein's
    // theorem, gives the correctly rounded one ("Handbook of Floating-Point Arithmetic", division algorithms).
    const float better = ptx::fma_rn(ptx::fma_rn(-estimate, scale_, dividend), reciprocal_, estimate);
    const float quotient = ptx::fma_rn(ptx::fma_rn(-better, scale_, dividend), reciprocal_, better);
    const bool matters = magnitude(estimate) >= 0x1p-11F && magnitude(estimate) < 1024.0F;
    return matters ? quotient : estimate;
  }

 private:
  float factor_, scale_, reciprocal_;
};

/// Does what quantize_e4m3 does, with eight values.
MLA_DEVICE Bits8 quantize8(const float (&values)[kVector], const ScaleDivisor& divide) {
  Bits8 bits = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const uint32_t pair = ptx::pack_e4m3x2(divide(values[i]), divide(values[i + 1]));
    // A quotient has the sign of its value; only a NaN may have lost it.
    const uint32_t signs =
        (std::bit_cast<uint32_t>(values[i]) >> 24 & 0x80U) | (std::bit_cast<uint32_t>(values[i + 1]) >> 16 & 0x8000U);
    bits.w[i / 4] |= (pair | signs) << (8 * (i % 4));
  }
  return bits;
}

/// Does what quantize8 does to finite values where the scale is a power of two from 2^-126 to 2^126. Products with its
/// reciprocal are the quotients then, and take a fifth of the instructions.
MLA_DEVICE Bits8 quantize8_by_power_of_two(const float (&values)[kVector], float scale) {
  const float reciprocal = std::bit_cast<float>(0x7F000000U - std::bit_cast<uint32_t>(scale));
  Bits8 bits = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const uint32_t pair = ptx::pack_e4m3x2(ptx::mul_rn(values[i], reciprocal), ptx::mul_rn(values[i + 1], reciprocal));
    bits.w[i / 4] |= pair << (8 * (i % 4));
  }
  return bits;
}

/// Quantizes eight values, and stores them as elements c ... c + 7 of a row, where c is a multiple of eight.
MLA_DEVICE void store_codes8(std::byte* row, DType dtype, int32_t c, const float (&values)[kVector],
                             const ScaleDivisor& divide) {
  if (dtype != DType::kE2M1) return store_bits8(row + c, 1, quantize8(values, divide));
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) codes |= static_cast<uint32_t>(f32_to_e2m1(divide(values[i]))) << (4 * i);
  store_f32_anywhere(row + c / 2, std::bit_cast<float>(codes));
}

/// Does what dequantize_e4m3 does, with eight elements. The result is bf16, in w[0] ... w[3].
MLA_DEVICE Bits8 dequantize8(const Bits8& codes, float scale) {
  Bits8 bits = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    ptx::unpack_f16x2(ptx::e4m3x2_to_f16x2(half_of(codes, i)), low, high);
    bits.w[i] = ptx::pack_bf16x2(ptx::mul_rn(low, scale), ptx::mul_rn(high, scale));
  }
  const auto has_nan = [](uint32_t w) { return (((w & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U) != 0; };
  if (!has_nan(codes.w[0]) && !has_nan(codes.w[1]) && is_finite(scale)) return bits;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {  // a NaN gets the bits that scalar.cuh gives it
    const uint32_t code = byte_of(codes, i), product = half_of(bits, i) & 0x7FFFU;
    const uint32_t nan = (code & 0x7FU) == 0x7FU ? (code & 0x80U) << 8 | 0x7FC0U
                         : is_nan(scale)         ? std::bit_cast<uint32_t>(scale) >> 16 | 0x40U
                                                 : 0xFFC0U;
    if (product > 0x7F80U) bits.w[i / 2] = (bits.w[i / 2] & (0xFFFF0000U >> (16 * (i % 2)))) | nan << (16 * (i % 2));
  }
  return bits;
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// These are the operations on pairs of 16-bit floats whose instruction depends on the type, bf16 or f16.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Computes c += a b as m16n8k16.
template <DType kType>
MLA_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16)
    ptx::mma_bf16(c, a, b0, b1);
  else
    ptx::mma_f16(c, a, b0, b1);
}

/// Packs two floats, each rounded to nearest even; `low` goes to the lower address.
template <DType kType>
MLA_DEVICE uint32_t pack(float low, float high) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  return kType == DType::kBF16 ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}

template <DType kType>
inline constexpr uint32_t kInfinityBits = kType == DType::kBF16 ? 0x7F80U : 0x7C00U;

template <DType kType>
MLA_DEVICE void unpack(uint32_t pair, float& low, float& high) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16)
    ptx::unpack_bf16x2(pair, low, high);
  else
    ptx::unpack_f16x2(pair, low, high);
}

/// Returns a word that is not 0 if an element of the pair is infinite or NaN.
template <DType kType>
MLA_DEVICE uint32_t not_finite(uint32_t pair) {
  // Where all bits of an exponent are set, adding 1 to it carries into the place of the sign, which was cleared.
  constexpr uint32_t kExponents = kInfinityBits<kType> * 0x10001U, kOnes = 0x80008000U - kExponents;
  return ((pair & kExponents) + kOnes) & 0x80008000U;
}

/// Returns whether both elements of the pair are finite.
template <DType kType>
MLA_DEVICE bool both_finite(uint32_t pair) {
  return not_finite<kType>(pair) == 0;
}

/// Returns the pair with 0 in place of each infinite or NaN element.
template <DType kType>
MLA_DEVICE uint32_t finite_or_zero(uint32_t pair) {
  constexpr uint32_t kLow = kInfinityBits<kType>, kHigh = kLow << 16;
  return ((pair & kLow) != kLow ? pair & 0xFFFFU : 0U) | ((pair & kHigh) != kHigh ? pair & 0xFFFF0000U : 0U);
}

/// Returns, for each element of the pair, 1 if it is NaN or +inf, else 0.
template <DType kType>
MLA_DEVICE uint32_t not_below_infinity(uint32_t pair) {
  constexpr uint32_t kLow = kInfinityBits<kType>, kHigh = kLow << 16;
  constexpr uint32_t kOne = kType == DType::kBF16 ? 0x3F80U : 0x3C00U;
  const uint32_t low = pair & 0xFFFFU, high = pair & 0xFFFF0000U;
  const bool low_found = (low & 0x7FFFU) > kLow || low == kLow;
  const bool high_found = (high & 0x7FFF0000U) > kHigh || high == kHigh;
  return (low_found ? kOne : 0U) | (high_found ? kOne << 16 : 0U);
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// Rows of e4m3 with one scale for all latent channels and one for all rotary ones lie in tiles as they lie in the
// cache. A warp converts what it multiplies, on its way into the operand.
//
// A cache stands for e4m3 x scale rounded to bf16. The power of two in a scale multiplies queries and outputs. If what
// is left, the mantissa, is short, and the same for both scales, then the rounding changes nothing, and the mantissa
// multiplies scores and outputs. The keys are then *plain*: no scale touches them, and they are multiplied as f16,
// which holds every number of e4m3 and to which a pair is converted by one instruction. Else every element that is
// converted is multiplied by the mantissa and rounded to bf16, which takes six.
//
// An operand takes what a lane can load at once. Of the scores' operand that is 16 neighbouring channels of a key, so
// that 64 channels are summed in another order than they are stored in: channel 16 t + 4 i + 2 h + e of them belongs to
// lane t of four, and is element e of half h of the operand of multiply i. Queries are stored in that order. Of the
// values' operand a lane has two neighbouring channels, which go to two tiles of outputs.
#pragma once

#include "cuda/attention/absorbed_keys.cuh"

namespace mla::MLA_CUDA_NAMESPACE::portable {

/// Says where two neighbouring channels of a query, in f16, lie among those that are multiplied together: in which
/// chunk of 16 bytes, and at which byte of it.
struct PairPlace {
  int chunk, byte;
};
/// Returns the place of pair `pair` of 64 latent channels.
MLA_DEVICE PairPlace latent_pair(int pair) { return {pair % 8, pair / 8 * 4}; }
/// Returns the place of pair `pair` of 16 rotary channels, of which a lane has four neighbours.
MLA_DEVICE PairPlace rope_pair(int pair) { return {pair % 2, pair / 2 * 4}; }

/// Returns the power of two that brings the magnitude of a query row into the upper range of f16, where it meets plain
/// keys. Those values of bf16 are exact then that are not 2^30 times smaller than the row's largest.
MLA_DEVICE float query_factor(float largest) {
  constexpr uint32_t kLargest = 13 + 2 * 127;  // the sum of both exponents, with their biases
  const uint32_t exponent = std::bit_cast<uint32_t>(largest) >> 23;
  // Beyond the clamped exponents neither the factor nor its reciprocal would be a normal number.
  return std::bit_cast<float>((kLargest - std::clamp(exponent, 20U, 240U)) << 23);
}

/// Is a scale of keys, power x mantissa. The mantissa is from 1 to 2, smaller only where the scale is subnormal.
struct SplitScale {
  float power, mantissa;
};
MLA_DEVICE SplitScale split(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale), exponent = bits >> 23 & 0xFFU;
  if (exponent == 0xFFU) return {1.0F, scale};
  if (exponent == 0) return {0x1p-126F, scale * 0x1p126F};
  return {std::bit_cast<float>(bits & 0xFF800000U), std::bit_cast<float>((bits & 0x007FFFFFU) | 0x3F800000U)};
}

/// Plain keys are operands in this unit. Before SM89 no instruction converts e4m3, and shifting its bits into those of
/// f16 gives the value times 2^-8.
inline constexpr float kPlainUnit = kHasE4M3 ? 1.0F : 0x1p-8F;

/// Says what the scales of a cache multiply: `latent_power` and `rope_power` the queries, `latent_power` also the
/// outputs, `of_scores` scores and outputs. Unless the keys are plain, `latent` and `rope` multiply the keys.
struct alignas(8) CodeScales {
  float latent_power, rope_power, of_scores, latent, rope;
  bool plain;

  CodeScales() = default;
  MLA_DEVICE CodeScales(float latent_scale, float rope_scale) {
    const SplitScale a = split(latent_scale), b = split(rope_scale);
    // A product of two numbers of four significant bits is exact in bf16.
    constexpr uint32_t kBeyondFourBits = 0x000FFFFFU;
    plain = a.mantissa == b.mantissa && is_finite(a.mantissa) &&
            (std::bit_cast<uint32_t>(a.mantissa) & kBeyondFourBits) == 0;
    latent_power = a.power;
    rope_power = b.power;
    latent = a.mantissa;
    rope = b.mantissa;
    of_scores = plain ? a.mantissa / kPlainUnit : 1.0F;
  }
};

/// Is the type of operands that meet plain keys, or keys that are not.
template <bool kPlain>
inline constexpr DType kCodeType = kPlain ? DType::kF16 : DType::kBF16;

/// Converts two e4m3 elements, in the upper bytes of both halves of `pair`, to f16 in units of 2^-8, subnormals
/// included. A NaN becomes a finite number.
MLA_DEVICE uint32_t shifted_to_f16(uint32_t pair) { return (pair & 0x7F007F00U) >> 1 | (pair & 0x80008000U); }

/// Converts four codes of a key to half operands, of which each has two neighbours. If keys are not plain, elements are
/// multiplied by the mantissa.
template <bool kPlain>
MLA_DEVICE void score_operand(uint32_t codes, float mantissa, uint32_t& low, uint32_t& high) {
  if constexpr (!kPlain) {
    ptx::e4m3x4_to_f16x2(codes, low, high);
    low = scale_to_bf16(low, mantissa, mantissa);
    high = scale_to_bf16(high, mantissa, mantissa);
  } else if constexpr (kHasE4M3) {
    ptx::e4m3x4_to_f16x2(codes, low, high);
  } else {
    low = shifted_to_f16(ptx::permute_bytes(codes, 0x1000U));
    high = shifted_to_f16(ptx::permute_bytes(codes, 0x3020U));
    const bool has_nan = (((codes & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U) != 0;
    if (has_nan) low = 0x7FFF7FFFU;  // one NaN makes the score NaN
  }
}

/// Converts the codes of two neighbouring channels of two neighbouring keys, as ldmatrix with .trans gives them. The
/// results are the half operands of the first channel and of the second. If plain keys are shifted, a NaN need not be
/// one here: where the row sees the key, P is NaN already.
template <bool kPlain>
MLA_DEVICE void value_operand(uint32_t codes, float mantissa, uint32_t& first, uint32_t& second) {
  if constexpr (kPlain && !kHasE4M3) {
    first = shifted_to_f16(codes << 8);
    second = shifted_to_f16(codes);
  } else {
    score_operand<kPlain>(ptx::permute_bytes(codes, 0x3120U), mantissa, first, second);
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

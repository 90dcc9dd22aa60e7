// SPDX-License-Identifier: Apache-2.0
// This file has the layout of rows of e2m1 in a stage, and how warps convert them while they load operands. A row is as
// it was copied: codes, scales of e4m3 for 16 channels each, and rotary channels.
#pragma once

#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

inline constexpr int kE2m1Group = 16;  // channels that share a scale

/// An e2m1 element times an e4m3 scale times this is exact in f16: both are integers times 2^-1 and 2^-9, and the
/// product has at most six significant bits. Sums are divided by it.
inline constexpr float kE2m1Unit = 0x1p-14F;

/// Holds the operands that a word of eight codes becomes: pairs of f16, one code of the lower half of the word and one
/// of the upper half in each. even[i] has codes 2 i and 2 i + 4, odd[i] those behind them.
struct E2m1Pairs {
  uint32_t even[2], odd[2];
};

/// Converts eight codes, times a pair of scales in f16, times kE2m1Unit. A code whose sign, exponent and mantissa are
/// moved to those of f16 is that number times kE2m1Unit, zero and 0.5, which is subnormal in both, included.
MLA_DEVICE E2m1Pairs e2m1x8_to_f16(uint32_t codes, uint32_t scales) {
  constexpr uint32_t kSigns = 0x80808080U;  // in every byte, as in that of an f16 which is not 0 here
  constexpr uint32_t kUsed = 0x8E008E00U;   // by a sign, an exponent below 4 and one bit of mantissa
  const uint32_t even = ptx::choose_bits(kSigns, codes << 4, codes << 1);
  const uint32_t odd = ptx::choose_bits(kSigns, codes, codes >> 3);
  return {{ptx::mul_f16x2(even << 8 & kUsed, scales), ptx::mul_f16x2(even & kUsed, scales)},
          {ptx::mul_f16x2(odd << 8 & kUsed, scales), ptx::mul_f16x2(odd & kUsed, scales)}};
}

/// Tells where the parts of a row lie, in bytes from the row's begin.
struct E2m1Row {
  MLA_DEVICE explicit E2m1Row(const cuda::KeyPool& pool)
      : scales_at(static_cast<uint32_t>(pool.ckv_bytes)),
        rope_at(static_cast<uint32_t>(pool.cache.kpe.base - pool.cache.ckv.base)),
        rope_scale_at(static_cast<uint32_t>(pool.cache.kpe_scale_at)),
        quantized_rope(pool.quantized_kpe) {}

  uint32_t scales_at, rope_at, rope_scale_at;
  bool quantized_rope;
};

/// Returns the scale that multiplies all others.
MLA_DEVICE float outer_scale(const cuda::AbsorbedArgs& args) {
  const float* scale = args.pools[0].cache.outer_scale;
  return scale != nullptr ? *scale : 1.0F;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

// SPDX-License-Identifier: Apache-2.0
// These are parts of kernels of up-projected prefill of e4m3: P of a run of keys in units of a row's largest one, and
// stores of outputs, of which a lane has four neighbours of 16 channels (tile/e4m3_pairs.cuh).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/softmax.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns what products of elements must be multiplied by to be scores.
MLA_DEVICE float e4m3_score_scale(const core::PrefillArgs& args) {
  return args.sm_scale * *args.q_scale * *args.k_scale;
}

/// Returns the logit whose P is a unit, where `largest` is the largest of the row and run. In a run of which the row
/// sees nothing it is so low that a unit is 0.
MLA_DEVICE float logit_of_unit(float largest) {
  constexpr float kLowest = -0x1p100F, kLog2E4M3Max = 8.807354922F;
  return (largest < -kNoKey ? std::fmax(largest, kLowest) : 0.0F) - kLog2E4M3Max;
}

/// Holds what a unit of P is in a run, the row's largest P / 448, for a lane's two rows.
struct RunUnits {
  float logit[2];   // whose P is a unit
  float in_sum[2];  // a unit in the rows' sums
  float in_o[2];    // a unit in outputs
};

/// Returns the units of a run where the rows' largest scores are `largest` and the states have been raised. Up to the
/// rounding of `logit`, which sums have as well, exponentials of the difference are P in units, and no P is multiplied.
MLA_DEVICE RunUnits units_of_run(const float (&largest)[2], float scale_log2, const SoftmaxRows& rows) {
  RunUnits units;
  MLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    units.logit[i] = logit_of_unit(largest[i] * scale_log2);
    units.in_sum[i] = ptx::exp2_approx(units.logit[i] - rows.of[i].base());
    units.in_o[i] =
        ptx::exp2_approx(ptx::fma_rn(largest[i], scale_log2, -units.logit[i])) * units.in_sum[i] * (1.0F / kE4M3Max);
  }
  return units;
}

/// Turns scores into P in units, and adds them to the sums.
template <int kColTiles>
MLA_DEVICE void exponentiate_in_units(float (&s)[kColTiles][4], const RunUnits& units, float scale_log2,
                                      SoftmaxRows& rows) {
  MLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    float sum = 0.0F;
    MLA_UNROLL
    for (int n = 0; n < kColTiles; ++n) MLA_UNROLL
    for (int e = 2 * i; e < 2 * i + 2; ++e) {
      s[n][e] = ptx::exp2_approx(ptx::fma_rn(s[n][e], scale_log2, -units.logit[i]));
      sum += s[n][e];
    }
    rows.of[i].sum += sum * units.in_sum[i];
  }
}

/// Packs P into A operands of e4m3, of 32 keys each.
template <int kColTiles>
MLA_DEVICE void pack_e4m3_p(const float (&s)[kColTiles][4], uint32_t (&p)[kColTiles / 4][4]) {
  MLA_UNROLL
  for (int n = 0; n < kColTiles; n += 2) MLA_UNROLL
  for (int i = 0; i < 2; ++i)
    p[n / 4][i + n % 4] = ptx::pack_e4m3x4(s[n][2 * i], s[n][2 * i + 1], s[n + 1][2 * i], s[n + 1][2 * i + 1]);
}

/// Stores four elements, which words hold, by one store if rows are aligned.
template <class Element, int kWords>
MLA_DEVICE void store_words(bool aligned, Element* to, const uint32_t (&words)[kWords]) {
  struct alignas(4 * kWords) Four {
    uint32_t words[kWords];
  };
  constexpr int kWordElements = 4 / kWords;
  if (aligned) {
    Four four;
    MLA_UNROLL
    for (int i = 0; i < kWords; ++i) four.words[i] = words[i];
    *reinterpret_cast<Four*>(to) = four;
    return;
  }
  MLA_UNROLL
  for (int i = 0; i < 4; ++i)
    to[i] = static_cast<Element>(words[i / kWordElements] >> i % kWordElements * (32 / kWordElements));
}

/// Stores a lane's outputs of a row times `factor`, from where the row begins in o. `aligned` says whether rows begin
/// at multiples of four outputs.
template <int kOutTiles>
MLA_DEVICE void store_outputs(const core::PrefillArgs& args, bool aligned, int64_t offset,
                              const float (&o)[kOutTiles][4], int i, float factor) {
  const auto store_fours = [&]<class Element>(Element* row, const auto& pack) {
    row += offset + (ptx::lane() & 3) * 4;
    MLA_UNROLL
    for (int n = 0; n < kOutTiles; n += 2) {
      const float(&even)[4] = o[n], (&odd)[4] = o[n + 1];
      pack(row + n * 8, {even[2 * i] * factor, odd[2 * i] * factor, even[2 * i + 1] * factor, odd[2 * i + 1] * factor});
    }
  };
  using Four = float[4];
  switch (args.o_dtype) {
    case DType::kE4M3:
      store_fours(static_cast<uint8_t*>(args.o), [&](uint8_t* to, const Four& v) {
        store_words(aligned, to, {ptx::pack_e4m3x4(v[0], v[1], v[2], v[3])});
      });
      break;
    case DType::kBF16:
      store_fours(static_cast<uint16_t*>(args.o), [&](uint16_t* to, const Four& v) {
        store_words(aligned, to, {ptx::pack_bf16x2(v[0], v[1]), ptx::pack_bf16x2(v[2], v[3])});
      });
      break;
    default:
      store_fours(static_cast<uint32_t*>(args.o), [&](uint32_t* to, const Four& v) {
        store_words(aligned, to,
                    {std::bit_cast<uint32_t>(v[0]), std::bit_cast<uint32_t>(v[1]), std::bit_cast<uint32_t>(v[2]),
                     std::bit_cast<uint32_t>(v[3])});
      });
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// Online softmax on accumulator fragments of m16n8k16: of each 16-row tile a lane holds two rows (accumulator_row() and
// eight below), a fourth of their columns; four neighbouring lanes hold a row.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "cuda/ptx/ptx.h"
#include "cuda/ptx/reciprocal.h"
#include "cuda/tile/element16.cuh"
#include "cuda/tile/finish.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Of a lane's two rows of a tile. Weights are 2^(scale_log2 * (score - max)).
struct SoftmaxRows {
  float max[2] = {kNoKey, kNoKey};  // of the scores seen, not scaled; equal in the four lanes of a row
  float sum[2] = {0.0F, 0.0F};      // of the lane's own weights
};

MLA_DEVICE float quad_max(float value) {
  value = std::fmax(value, ptx::shuffle_xor(value, 1));
  return std::fmax(value, ptx::shuffle_xor(value, 2));
}
MLA_DEVICE float quad_sum(float value) {
  value += ptx::shuffle_xor(value, 1);
  return value + ptx::shuffle_xor(value, 2);
}

/// What is subtracted from scaled scores: the scaled maximum, unless that is infinite. Then 2^-inf is 0 and 2^+inf
/// infinite as they should be.
MLA_DEVICE float exponent_offset(float max, float scale_log2) {
  return std::fabs(max) < -kNoKey ? max * scale_log2 : 0.0F;
}

/// The maxima of a lane's rows in a score tile, and of `max`; the same in all lanes of a row.
template <int kColTiles>
MLA_DEVICE void row_max(const float (&s)[kColTiles][4], float (&max)[2]) {
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    max[0] = std::fmax(max[0], std::fmax(s[n][0], s[n][1]));
    max[1] = std::fmax(max[1], std::fmax(s[n][2], s[n][3]));
  }
  max[0] = quad_max(max[0]);
  max[1] = quad_max(max[1]);
}

/// Scores become weights, and are added to the sums.
template <int kColTiles>
MLA_DEVICE void exponentiate(float (&s)[kColTiles][4], float scale_log2, SoftmaxRows& rows) {
  const float offset[2] = {exponent_offset(rows.max[0], scale_log2), exponent_offset(rows.max[1], scale_log2)};
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      s[n][e] = ptx::exp2_approx(s[n][e] * scale_log2 - offset[e / 2]);
      rows.sum[e / 2] += s[n][e];
    }
  }
}

template <int kColTiles>
MLA_DEVICE void scale_rows(float (&tile)[kColTiles][4], const float (&factor)[2]) {
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e) tile[n][e] *= factor[e / 2];
  }
}

/// How far scores may exceed the maximum that weights go by, as a power of two, before accumulators are rescaled: a
/// weight of 2^8 is as exact as one of 1, fits f16, and after a few tiles hardly any rescaling is left.
inline constexpr float kRescaleThreshold = 8.0F;

/// One step of the online softmax for a warp: s (16 * kRowTiles queries) becomes weights, `rows` takes them in, and
/// earlier accumulators `o` are rescaled where maxima have grown too far.
template <int kRowTiles, int kColTiles, int kOutTiles>
MLA_DEVICE void online_softmax(float (&s)[kRowTiles][kColTiles][4], float scale_log2, SoftmaxRows (&rows)[kRowTiles],
                               float (&o)[kRowTiles][kOutTiles][4]) {
  float max[kRowTiles][2];
  bool grown = false;
  MLA_UNROLL
  for (int r = 0; r < kRowTiles; ++r) {
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) max[r][i] = rows[r].max[i];
    row_max(s[r], max[r]);
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) grown |= (max[r][i] - rows[r].max[i]) * scale_log2 > kRescaleThreshold;
  }
  if (ptx::any(grown)) {
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      float factor[2];
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        factor[i] = rows[r].max[i] == kNoKey ? 0.0F
                                             : ptx::exp2_approx(exponent_offset(rows[r].max[i], scale_log2) -
                                                                exponent_offset(max[r][i], scale_log2));
        rows[r].max[i] = max[r][i];
        rows[r].sum[i] *= factor[i];
      }
      scale_rows(o[r], factor);
    }
  }
  MLA_UNROLL
  for (int r = 0; r < kRowTiles; ++r) exponentiate(s[r], scale_log2, rows[r]);
}

/// Two neighbouring column tiles of weights as the A operand of the next product, where they are the k dimension: the
/// accumulator's layout is the operand's.
template <DType kType>
MLA_DEVICE void pack_weights(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
  a[0] = pack<kType>(left[0], left[1]);
  a[1] = pack<kType>(left[2], left[3]);
  a[2] = pack<kType>(right[0], right[1]);
  a[3] = pack<kType>(right[2], right[3]);
}

/// Raw scores become cap * tanh(sm_scale * score / cap), by tanh(x) = 1 - 2 / (e^(2x) + 1), which saturates where the
/// exponential over- or underflows.
template <int kColTiles>
MLA_DEVICE void cap_scores(float (&s)[kColTiles][4], float sm_scale, float cap) {
  const float exponent_scale = 2.0F * std::numbers::log2e_v<float> * sm_scale / cap;
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e)
      s[n][e] = cap - 2.0F * cap * ptx::reciprocal_approx(ptx::exp2_approx(s[n][e] * exponent_scale) + 1.0F);
  }
}

/// s = s * scale + slope * (position of the key - position of the query); `distance` is that difference of the lane's
/// first element.
template <int kColTiles>
MLA_DEVICE void add_slope(float (&s)[kColTiles][4], float scale, float slope, int distance) {
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int of_element = distance + n * 8 + e % 2 - e / 2 * 8;
      s[n][e] = s[n][e] * scale + slope * static_cast<float>(of_element);
    }
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE

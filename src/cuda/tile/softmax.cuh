// SPDX-License-Identifier: Apache-2.0
// These functions compute the online softmax on accumulator fragments of m16n8k16. Of each 16-row tile a lane holds a
// fourth of the columns of two rows (accumulator_row() and eight below); four neighbouring lanes hold a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/element16.cuh"
#include "cuda/tile/score_state.cuh"
#include "cuda/tile/scoring.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds the states of a lane's two rows of a tile. Maxima are equal in the four lanes of a row; sums are over the
/// lane's own columns.
struct SoftmaxRows {
  ScoreState of[2];
};

MLA_DEVICE float quad_max(float value) {
  value = std::fmax(value, ptx::shuffle_xor(value, 1));
  return std::fmax(value, ptx::shuffle_xor(value, 2));
}
MLA_DEVICE float quad_sum(float value) {
  value += ptx::shuffle_xor(value, 1);
  return value + ptx::shuffle_xor(value, 2);
}

/// Finds the largest scores of the lane's two rows in a score tile. The four lanes of a row get the same.
template <int kColTiles>
MLA_DEVICE void row_max(const float (&s)[kColTiles][4], float (&max)[2]) {
  max[0] = max[1] = kNoKey;
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    max[0] = std::fmax(max[0], std::fmax(s[n][0], s[n][1]));
    max[1] = std::fmax(max[1], std::fmax(s[n][2], s[n][3]));
  }
  max[0] = quad_max(max[0]);
  max[1] = quad_max(max[1]);
}

/// Turns scores into P, and adds them to the sums.
template <int kColTiles>
MLA_DEVICE void exponentiate(float (&s)[kColTiles][4], float scale_log2, SoftmaxRows& rows) {
  const float base[2] = {rows.of[0].base(), rows.of[1].base()};
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e) {
      s[n][e] = ptx::exp2_approx(s[n][e] * scale_log2 - base[e / 2]);
      rows.of[e / 2].sum += s[n][e];
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

/// Takes the largest scores of a step into the states. Returns true, in the whole warp, if some row has exceeded its
/// headroom: then earlier accumulators must be multiplied by `factor`.
template <int kRowTiles>
MLA_DEVICE bool raise_rows(const float (&largest)[kRowTiles][2], float scale_log2, SoftmaxRows (&rows)[kRowTiles],
                           float (&factor)[kRowTiles][2]) {
  bool outgrown = false;
  MLA_UNROLL
  for (int r = 0; r < kRowTiles; ++r) MLA_UNROLL
  for (int i = 0; i < 2; ++i) outgrown |= rows[r].of[i].is_outgrown_by(largest[r][i] * scale_log2, kHeadroom);
  if (!ptx::any(outgrown)) return false;
  MLA_UNROLL
  for (int r = 0; r < kRowTiles; ++r) MLA_UNROLL
  for (int i = 0; i < 2; ++i)
    factor[r][i] = rows[r].of[i].raise(std::fmax(rows[r].of[i].max, largest[r][i] * scale_log2));
  return true;
}

/// Computes one step of the online softmax for a warp: turns s (16 * kRowTiles queries) into P, updates `rows`, and
/// rescales the earlier accumulators `o` where maxima have exceeded the headroom.
template <int kRowTiles, int kColTiles, int kOutTiles>
MLA_DEVICE void online_softmax(float (&s)[kRowTiles][kColTiles][4], float scale_log2, SoftmaxRows (&rows)[kRowTiles],
                               float (&o)[kRowTiles][kOutTiles][4]) {
  float largest[kRowTiles][2], factor[kRowTiles][2];
  MLA_UNROLL
  for (int r = 0; r < kRowTiles; ++r) row_max(s[r], largest[r]);
  if (raise_rows(largest, scale_log2, rows, factor)) {
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) scale_rows(o[r], factor[r]);
  }
  MLA_UNROLL
  for (int r = 0; r < kRowTiles; ++r) exponentiate(s[r], scale_log2, rows[r]);
}

/// Packs two neighbouring column tiles of P into the A operand of the next product, whose k dimension the columns are.
/// The layout of the accumulator is that of the operand.
template <DType kType>
MLA_DEVICE void pack_p(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
  a[0] = pack<kType>(left[0], left[1]);
  a[1] = pack<kType>(left[2], left[3]);
  a[2] = pack<kType>(right[0], right[1]);
  a[3] = pack<kType>(right[2], right[3]);
}

/// Turns products into soft-capped logits.
template <int kColTiles>
MLA_DEVICE void cap_scores(float (&s)[kColTiles][4], float sm_scale, float cap) {
  const float exponent_scale = kSoftCapExponent * sm_scale / cap;
  MLA_UNROLL
  for (int n = 0; n < kColTiles; ++n) {
    MLA_UNROLL
    for (int e = 0; e < 4; ++e) s[n][e] = soft_capped(s[n][e] * exponent_scale, cap);
  }
}

/// Computes s = s * scale + slope * (position of the key - position of the query). `distance` is this difference for
/// the lane's first element.
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

// SPDX-License-Identifier: Apache-2.0
// This base of the math role turns a step's P into e4m3, in units of a row's largest one. In the rows of a tile of P,
// bytes 4 t ... 4 t + 3 of 16 have keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of these 16: those that a lane has the scores
// of, and those that ldmatrix gives a lane of the values (MathRole::load_values()).
#pragma once

#include <limits>

#include "cuda/backends/sm90_fp8/queries.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

class QuantizedP : protected QueryRows {
 public:
  using QueryRows::QueryRows;

 protected:
  static constexpr int kLaneKeys = kScores / 2;  // of a row

  /// Returns which of the lane's scores is that of its key i, for one of its rows.
  static constexpr int score_of(int r, int i) { return i / 2 * 4 + r * 2 + i % 2; }

  /// Stores P of step n times the keys' scales, in units of each row's largest product / 448, once for each of the
  /// keys' `num_scales` scales.
  MLA_DEVICE void store_scaled_p(uint32_t n, int num_scales, const float (&p)[kScores]) const {
    bool finite = true;
    MLA_NO_UNROLL
    for (int scale = 0; scale < num_scales; ++scale) finite &= scale_p<false>(n, scale, p);
    if (ptx::any(!finite)) [[unlikely]] {
      MLA_NO_UNROLL
      for (int scale = 0; scale < num_scales; ++scale) scale_p<true>(n, scale, p);
    }
  }

  /// Stores P of step n, which is in units of its own for each row.
  MLA_DEVICE void store_p(uint32_t n, const float (&p)[kScores], const float (&units)[2]) const {
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      float of_row[kLaneKeys];
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) of_row[i] = p[score_of(r, i)];
      store_row(n, 0, r, of_row);
    }
    store_units(n, 0, units);
  }

  /// Loads a scale of the lane's keys of step n.
  MLA_DEVICE void load_scales(float (&to)[kLaneKeys], uint32_t n, int scale) const {
    const ptx::SharedAddress from = key_scales(n, scale) + static_cast<uint32_t>(lane_column() * 4);
    MLA_UNROLL
    for (int j = 0; j < kLaneKeys / 2; ++j) {
      const auto two = ptx::load_shared<uint64_t>(from + static_cast<uint32_t>(j * 8 * 4));
      to[2 * j] = std::bit_cast<float>(static_cast<uint32_t>(two));
      to[2 * j + 1] = std::bit_cast<float>(static_cast<uint32_t>(two >> 32));
    }
  }

 private:
  /// A row of smaller P counts as 0: its reciprocal would overflow.
  static constexpr float kSmallestP = 0x1p-110F;

  MLA_DEVICE void store_row(uint32_t n, int scale, int r, const float (&p)[kLaneKeys]) const {
    const int t = lane_column() / 2, row = lane_row(), swizzle = row >> 1 & 3;
    const ptx::SharedAddress at =
        p_tile(n, scale) + static_cast<uint32_t>((row + r * kLaneRowStep) * Config::kPRowBytes + t * 4);
    MLA_UNROLL
    for (int chunk = 0; chunk < kLaneKeys / 4; ++chunk)
      ptx::store_shared(at + static_cast<uint32_t>((chunk ^ swizzle) * kChunkBytes),
                        ptx::pack_e4m3x4(p[4 * chunk], p[4 * chunk + 1], p[4 * chunk + 2], p[4 * chunk + 3]));
  }

  /// Stores the units of the lane's rows. Two of a row's four lanes store that of one row, two that of the other.
  MLA_DEVICE void store_units(uint32_t n, int scale, const float (&units)[2]) const {
    const bool second = (lane_column() & 2) != 0;
    ptx::store_shared(p_scales(n, scale) + static_cast<uint32_t>((second ? lane_row() + kLaneRowStep : lane_row()) * 4),
                      second ? units[1] : units[0]);
  }

  /// Stores P times a scale of the keys. Returns false if a product that the lane knows of is not finite, be it of a
  /// key that the row does not see, whose scale may be anything: with kCarefully such keys count as nothing.
  template <bool kCarefully>
  MLA_DEVICE bool scale_p(uint32_t n, int scale, const float (&p)[kScores]) const {
    const auto larger = [](float a, float b) { return kCarefully ? std::fmax(a, b) : ptx::max_or_nan(a, b); };
    float units[2], of_key[kLaneKeys];
    load_scales(of_key, n, scale);
    bool finite = true;
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      float x[kLaneKeys], largest[4] = {};
      MLA_UNROLL
      for (int i = 0; i < kLaneKeys; ++i) {
        const float of_p = p[score_of(r, i)];
        x[i] = kCarefully && of_p == 0.0F ? 0.0F : of_p * of_key[i];
        largest[i % 4] = larger(largest[i % 4], x[i]);
      }
      float of_row = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
      of_row = larger(of_row, ptx::shuffle_xor(of_row, 1));
      of_row = larger(of_row, ptx::shuffle_xor(of_row, 2));
      finite = finite && of_row < std::numeric_limits<float>::infinity();
      const bool counts = of_row >= kSmallestP;
      const float factor = counts ? kE4M3Max * ptx::reciprocal_approx(of_row) : 0.0F;
      units[r] = counts ? of_row * (1.0F / kE4M3Max) : 0.0F;
      MLA_UNROLL
      for (float& value : x) value *= factor;
      store_row(n, scale, r, x);
    }
    store_units(n, scale, units);
    return finite;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

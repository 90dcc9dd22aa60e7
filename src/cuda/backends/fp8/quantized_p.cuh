// SPDX-License-Identifier: Apache-2.0
// This base of the block (absorbed.cuh) has its softmax: P of 32 keys times their scales becomes e4m3, in units of the
// largest product, once for every scale that a key has. A lane has eight keys of its row, whose P lie side by side in
// an operand (AbsorbedBlock::add_latents()).
#pragma once

#include <limits>

#include "cuda/attention/grouped_scores.cuh"
#include "cuda/backends/fp8/config.cuh"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {

template <class Config>
class QuantizedP : public GroupedScores<Config> {
 public:
  using GroupedScores<Config>::GroupedScores;

 protected:
  using Base = GroupedScores<Config>;
  using Base::args_, Base::memory_, Base::shared_, Base::lane, Base::group;

  /// Returns the scale of a key of step n that belongs to a group of channels.
  MLA_DEVICE float key_scale(uint32_t n, bool ue8m0, int key, int scale_index) const {
    const std::byte* scales = memory_ + Base::scale_offset(n) + key * Config::kKeyScaleBytes;
    return ue8m0 ? ue8m0_to_f32(static_cast<uint8_t>(scales[scale_index])) : as<float>(scales)[scale_index];
  }

  /// Returns where P for the scales of a group of channels lies.
  MLA_DEVICE ptx::SharedAddress p_tile(int scale_index) const {
    return shared_ +
           static_cast<uint32_t>(Config::kPOffset + group() * Config::kGroupPBytes + scale_index * Config::kPTileBytes);
  }
  MLA_DEVICE ptx::SharedAddress rope_p_tile() const { return p_tile(Config::kMostScales); }
  /// Returns where a 16-byte chunk of a row of e4m3 P lies in its tile, and of a row of 16-bit P. Chunks are permuted
  /// so that ldmatrix meets no bank conflicts.
  MLA_DEVICE static uint32_t p_chunk(int row, int chunk) {
    return static_cast<uint32_t>(row * Config::kPRowBytes + (chunk ^ (row >> 2 & 1)) * kChunkBytes);
  }
  MLA_DEVICE static uint32_t rope_p_chunk(int row, int chunk) {
    return static_cast<uint32_t>(row * Config::kRopePRowBytes + (chunk ^ (row >> 1 & 3)) * kChunkBytes);
  }
  /// Returns the scales that P of a group of channels has, one for each of the group's rows.
  MLA_DEVICE float* p_scales(int scale_index) const {
    return as<float>(memory_ + Config::kPScaleOffset) + scale_index * Config::kRows + group() * Config::kGroupRows;
  }

  /// Computes P of step n, whose keys are of pool `of`. Returns what exponentiate() does.
  MLA_DEVICE bool softmax(uint32_t n, const cuda::KeyPool& of) const {
    return Base::exponentiate(n, [&](const float(&p)[8]) {
      bool finite;
      if (of.ue8m0)
        finite = quantize_finite<1, true>(n, of, p);
      else if (of.cache.num_scales % 4 == 0)
        finite = quantize_finite<4, false>(n, of, p);
      else
        finite = quantize_finite<1, false>(n, of, p);
      if (ptx::any(!finite)) [[unlikely]] {
        ptx::sync_warp();  // other lanes have stored the scales that are replaced
        MLA_NO_UNROLL
        for (int i = 0; i < of.cache.num_scales; ++i) quantize_p(n, of.ue8m0, i, p);
      }
      if (of.cache.d_ckv < args_.d_v) store_rope_p(p);
    });
  }

 private:
  /// Quantizes P for all scales of the keys, kTogether at a time. Returns false if a product that the lane knows of is
  /// not finite, be it of a key that the row does not see, whose scale may be anything: the warp must do all of it
  /// again then, by quantize_p(). Looking at P before each product would take more than the rest.
  template <int kTogether, bool kUe8m0>
  MLA_DEVICE bool quantize_finite(uint32_t n, const cuda::KeyPool& of, const float (&p)[8]) const {
    ptx::SharedAddress scales =
        shared_ + Base::scale_offset(n) + static_cast<uint32_t>(Base::first_lane_key() * Config::kKeyScaleBytes);
    const int row = Base::group_row(), quarter = lane() >> 3;
    ptx::SharedAddress to = p_tile(0) + p_chunk(row, quarter >> 1) + static_cast<uint32_t>((quarter & 1) * 8);
    const int of_lane = kTogether == 4 ? (quarter & 1) * 2 + (quarter >> 1) : 0;  // the scale of P that the lane makes
    ptx::SharedAddress scale_to =
        ptx::shared_address(p_scales(0)) + static_cast<uint32_t>((of_lane * Config::kRows + row) * 4);
    const ptx::SharedAddress end = to + static_cast<uint32_t>(of.cache.num_scales * Config::kPTileBytes);
    bool finite = true;
    MLA_NO_UNROLL
    do {
      float x[kTogether][8], largest[kTogether];
      MLA_UNROLL
      for (int i = 0; i < 8; ++i) {
        const ptx::SharedAddress from = scales + static_cast<uint32_t>(Base::behind_first(i) * Config::kKeyScaleBytes);
        if constexpr (kTogether == 4) {
          const auto four = ptx::load_shared<ptx::Vec4>(from);
          MLA_UNROLL
          for (int j = 0; j < 4; ++j) x[j][i] = p[i] * std::bit_cast<float>(four.x[j]);
        } else if constexpr (kUe8m0) {
          x[0][i] = p[i] * std::bit_cast<float>(uint32_t{ptx::load_shared<uint8_t>(from)} << 23);
        } else {
          x[0][i] = p[i] * ptx::load_shared<float>(from);
        }
      }
      MLA_UNROLL
      for (int j = 0; j < kTogether; ++j) {
        largest[j] = ptx::max_or_nan(x[j][0], x[j][1]);
        MLA_UNROLL
        for (int i = 2; i < 8; ++i) largest[j] = ptx::max_or_nan(largest[j], x[j][i]);
      }
      float of_row;
      if constexpr (kTogether == 4) {
        // Each half of the row's lanes goes on with two scales, then each lane with one.
        const bool first = (quarter & 1) != 0, second = quarter >> 1 != 0;
        const float a =
            ptx::max_or_nan(first ? largest[2] : largest[0], ptx::shuffle_xor(first ? largest[0] : largest[2], 8));
        const float b =
            ptx::max_or_nan(first ? largest[3] : largest[1], ptx::shuffle_xor(first ? largest[1] : largest[3], 8));
        of_row = ptx::max_or_nan(second ? b : a, ptx::shuffle_xor(second ? a : b, 16));
      } else {
        of_row = ptx::max_or_nan(largest[0], ptx::shuffle_xor(largest[0], 8));
        of_row = ptx::max_or_nan(of_row, ptx::shuffle_xor(of_row, 16));
      }
      finite = finite && of_row < std::numeric_limits<float>::infinity();
      const bool counts = of_row >= kSmallestP;
      const float factor = counts ? kE4M3Max * ptx::reciprocal_approx(of_row) : 0.0F;
      ptx::store_shared(scale_to, counts ? of_row * (1.0F / kE4M3Max) : 0.0F);
      MLA_UNROLL
      for (int j = 0; j < kTogether; ++j) {
        const float of_scale =
            kTogether == 4 ? ptx::shuffle(factor, (lane() & 7) | (j >> 1) << 3 | (j & 1) << 4) : factor;
        MLA_UNROLL
        for (int i = 0; i < 8; ++i) x[j][i] *= of_scale;
        ptx::store_shared(to + static_cast<uint32_t>(j * Config::kPTileBytes), packed_p(x[j]));
      }
      to += kTogether * Config::kPTileBytes;
      scales += kTogether * size_of(kUe8m0 ? ScaleType::kUE8M0 : ScaleType::kF32);
      scale_to += kTogether * Config::kRows * 4;
    } while (to != end);
    return finite;
  }

  /// Returns the lane's P of one scale as they lie in their tile.
  MLA_DEVICE static uint64_t packed_p(const float (&x)[8]) {
    const uint32_t low = ptx::pack_e4m3x4(x[0], x[1], x[4], x[5]), high = ptx::pack_e4m3x4(x[2], x[3], x[6], x[7]);
    return uint64_t{high} << 32 | low;
  }

  /// Quantizes P for one scale of the keys, whatever the scales are.
  MLA_DEVICE void quantize_p(uint32_t n, bool ue8m0, int scale_index, const float (&p)[8]) const {
    float x[8], largest = 0.0F;
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) {
      // The scale of a key that the row does not see may be anything.
      x[i] =
          p[i] == 0.0F ? 0.0F : p[i] * key_scale(n, ue8m0, Base::first_lane_key() + Base::behind_first(i), scale_index);
      largest = std::fmax(largest, x[i]);
    }
    largest = Base::max_of_row(largest);
    const float factor = largest >= kSmallestP ? kE4M3Max * ptx::reciprocal_approx(largest) : 0.0F;
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) x[i] *= factor;
    const int row = Base::group_row(), quarter = lane() >> 3;
    ptx::store_shared(p_tile(scale_index) + p_chunk(row, quarter >> 1) + static_cast<uint32_t>((quarter & 1) * 8),
                      packed_p(x));
    if (quarter == 0) p_scales(scale_index)[row] = largest >= kSmallestP ? largest * (1.0F / kE4M3Max) : 0.0F;
  }
  /// A run of smaller P counts as 0: its reciprocal would overflow.
  static constexpr float kSmallestP = 0x1p-110F;

  MLA_DEVICE void store_rope_p(const float (&p)[8]) const {
    const int row = Base::group_row(), first = Base::first_lane_key();
    MLA_UNROLL
    for (int run = 0; run < 2; ++run) {
      const uint32_t low = ptx::pack_bf16x2(p[run * 4], p[run * 4 + 1]);
      const uint32_t high = ptx::pack_bf16x2(p[run * 4 + 2], p[run * 4 + 3]);
      ptx::store_shared(rope_p_tile() + rope_p_chunk(row, first / 8 + run) + static_cast<uint32_t>(first % 8 * 2),
                        uint64_t{high} << 32 | low);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

// SPDX-License-Identifier: Apache-2.0
// The score warps of rows of e4m3 multiply queries and keys.
#pragma once

#include "cuda/backends/bulk/e4m3_rows.cuh"
#include "cuda/backends/bulk/quantized_scores.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// A value of a quantized cache is e4m3 times scale, rounded to bf16. Scores are computed in one of two ways:
///   Short scales have at most four significant bits, as powers of two have. The rounding then changes nothing, so that
///   elements and queries are multiplied in f16, and the sums are multiplied by the scale.
///   Long scales have more bits. Elements are converted to bf16 with the rounding, and multiplied by queries in bf16.
/// A warp computes the first way until it meets a long scale, and from there to the end of the unit's pool the second
/// way.
template <class Config>
class E4m3ScoreRole : QuantizedScoreRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Scores = QuantizedScoreRole<Config>;
  using Block::args_, Scores::compute_scores, Scores::d_ckv, Scores::first_channel, Scores::first_key, Scores::has_rope,
      Scores::kSteps, Scores::kTiles, Scores::next_, Scores::queries_, Scores::rope_queries_, Scores::row_factor_,
      Scores::rows_of, Scores::slice, Scores::wait_for_rows;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit E4m3ScoreRole(const cuda::AbsorbedArgs& args) : Scores(args) {}

  MLA_DEVICE void compute() {
    bool long_scales = false;
    MLA_NO_UNROLL
    while (next_ < Block::end_of_pool(1)) {
      const int pool = next_ < Block::end_of_pool(0) ? 0 : 1;
      const uint32_t end = Block::end_of_pool(pool);
      const bool quantized_rope = landed_rows<Config>(args_.pools, opaque(pool)).quantized_rope;
      Scores::load_queries(quantized_rope, long_scales);
      if (has_ue8m0())
        steps_with_short_scales<true, false>(pool, end);
      else if (quantized_rope)
        long_scales ? steps_with_long_scales<true>(pool, end) : steps_with_short_scales<false, true>(pool, end);
      else
        long_scales ? steps_with_long_scales<false>(pool, end) : steps_with_short_scales<false, false>(pool, end);
      long_scales = next_ < end;
    }
    Block::leave_unit();
  }

 private:
  static constexpr int kHalfSteps = kSteps / 2, kHalfDims = Config::kSliceDims / 2;

  using Scales = float[2][2];  // [j][i]: the scale of key 8 j + 2 t + i of a tile, for lane 4 g + t

  /// Returns its argument by a shuffle, which the compiler does not see through. So it does not compute what depends on
  /// the pool earlier than it is needed, which would cost registers.
  MLA_DEVICE static int opaque(int pool) { return ptx::shuffle(pool, 0); }
  MLA_DEVICE bool has_ue8m0() const { return args_.pools[0].ue8m0; }  // the same in both pools

  /// Computes the scores of the steps up to `end`. Stops before the first step in which the warp has a long scale.
  template <bool kUe8m0, bool kQuantizedRope>
  MLA_DEVICE void steps_with_short_scales(int pool, uint32_t end) {
    const Places at(*this, landed_rows<Config>(args_.pools, opaque(pool)));
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      const ptx::SharedAddress stage = wait_for_rows(next_);
      Scales scales[kTiles];
      if constexpr (!kUe8m0) {
        MLA_UNROLL
        for (int tile = 0; tile < kTiles; ++tile) load_scales<kUe8m0>(scales[tile], stage, at, tile, 0);
        if (any_is_long(scales)) [[unlikely]]
          return;
      }
      compute_scores(at.scores, [&](float(&s)[2][4], int tile) {
        multiply_e4m3<kUe8m0>(s, scales[tile], stage, at, tile);
        if (has_rope()) add_rope<kQuantizedRope>(s, stage + at.rope + rows_of(tile), at.rope_scale);
      });
    }
  }

  /// Computes the scores of the steps up to `end`, with scales of any length.
  template <bool kQuantizedRope>
  MLA_DEVICE void steps_with_long_scales(int pool, uint32_t end) {
    const Places at(*this, landed_rows<Config>(args_.pools, opaque(pool)));
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      const ptx::SharedAddress stage = wait_for_rows(next_);
      compute_scores(at.scores, [&](float(&s)[2][4], int tile) {
        multiply_bf16(s, stage, at, tile);
        if (has_rope()) add_rope<kQuantizedRope>(s, stage + at.rope + rows_of(tile), at.rope_scale);
      });
    }
  }

  /// Tells where the lane reads its operands, in bytes from a stage's begin, and where it writes scores.
  struct Places {
    MLA_DEVICE Places(const E4m3ScoreRole& role, const LandedRows& rows)
        : latents(static_cast<uint32_t>((first_key() + (ptx::lane() & 15)) * Config::kKeyPitch + first_channel() +
                                        (ptx::lane() >> 4) * kChunkBytes)),
          rope(latents - static_cast<uint32_t>(first_channel()) + rows.rope_at +
               static_cast<uint32_t>(slice() * 16 * (rows.quantized_rope ? 1 : 2))),
          scales(rows.scales_at + static_cast<uint32_t>(first_key() + (ptx::lane() & 3) * 2) * rows.scale_pitch +
                 rows.scale_offset(rows.group_of(first_channel()))),
          scale_pitch(rows.scale_pitch),
          scores(role.first_score()),
          rope_scale(rows.rope_scale) {}

    uint32_t latents, rope;        // for ldmatrix: key `lane & 15` and chunk `lane >> 4`
    uint32_t scales, scale_pitch;  // the scale of key 2 t, and the distance to that of the next key
    ptx::SharedAddress scores;     // row g and key 2 t
    float rope_scale;
  };

  /// Loads the scales of the lane's keys, for one half of the warp's channels. Half a K slice has one UE8M0 scale; an
  /// f32 scale is that of a whole K slice at least.
  template <bool kUe8m0>
  MLA_DEVICE static void load_scales(Scales& scales, ptx::SharedAddress stage, const Places& at, int tile, int half) {
    MLA_UNROLL
    for (int j = 0; j < 2; ++j) MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const ptx::SharedAddress of_key =
          stage + at.scales + static_cast<uint32_t>(tile * 16 + j * 8 + i) * at.scale_pitch;
      scales[j][i] = kUe8m0 ? ue8m0_to_f32(ptx::load_shared<uint8_t>(of_key + static_cast<uint32_t>(half)))
                            : ptx::load_shared<float>(of_key);
    }
  }

  /// Returns whether a scale of the warp has more than four significant bits. Its product with an e4m3 element, which
  /// has four, may then have more than the eight bits of bf16.
  MLA_DEVICE static bool any_is_long(const Scales (&scales)[kTiles]) {
    constexpr uint32_t kBeyondFourBits = 0x000FFFFFU;  // of an f32's 24 significant bits, of which the first is implied
    uint32_t bits = 0;
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) MLA_UNROLL
    for (int i = 0; i < 4; ++i) bits |= std::bit_cast<uint32_t>(scales[tile][i / 2][i % 2]);
    return ptx::any((bits & kBeyondFourBits) != 0);
  }

  /// Adds the products of rotary channels, which are bf16, or e4m3 with one scale for all.
  template <bool kQuantizedRope>
  MLA_DEVICE void add_rope(float (&s)[2][4], ptx::SharedAddress from, float scale) const {
    if constexpr (!kQuantizedRope) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, from);
      ptx::mma_bf16(s[0], rope_queries_, words[0], words[2]);
      ptx::mma_bf16(s[1], rope_queries_, words[1], words[3]);
    } else {
      uint32_t words[2];
      ptx::ldmatrix_x2(words, from);  // uses the addresses of lanes 0 to 15, which are those of the first chunks
      MLA_UNROLL
      for (int j = 0; j < 2; ++j) {
        uint32_t low, high;
        ptx::e4m3x4_to_f16x2(words[j], low, high);
        ptx::mma_bf16(s[j], rope_queries_, scale_to_bf16(low, scale, scale), scale_to_bf16(high, scale, scale));
      }
    }
  }

  /// Computes the scores of 16 keys whose scales are short.
  template <bool kUe8m0>
  MLA_DEVICE void multiply_e4m3(float (&s)[2][4], Scales& scales, ptx::SharedAddress stage, const Places& at,
                                int tile) const {
    constexpr int kHalves = kUe8m0 ? 2 : 1;
    MLA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (half == 1 && first_channel() + kHalfDims >= d_ckv()) break;
      if constexpr (kUe8m0) load_scales<kUe8m0>(scales, stage, at, tile, half);
      float unscaled[2][4] = {};
      MLA_UNROLL
      for (int step = half * kHalfSteps; step < (half + 2 / kHalves) * kHalfSteps; step += 2) {
        uint32_t words[4];  // keys 0-7 and 8-15 of 16 channels, then of the next 16
        ptx::ldmatrix_x4(words, stage + at.latents + rows_of(tile) + static_cast<uint32_t>(step * 16));
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint32_t low, high;
          ptx::e4m3x4_to_f16x2(words[i], low, high);
          ptx::mma_f16(unscaled[i % 2], queries_[step + i / 2], low, high);
        }
      }
      MLA_UNROLL
      for (int j = 0; j < 2; ++j) MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float scaled = unscaled[j][i] * scales[j][i % 2];
        s[j][i] = half == 0 ? scaled * row_factor_[i / 2] : s[j][i] + scaled * row_factor_[i / 2];
      }
    }
  }

  /// Computes the scores of 16 keys whose scales may be long.
  MLA_DEVICE void multiply_bf16(float (&s)[2][4], ptx::SharedAddress stage, const Places& at, int tile) const {
    const int key =
        tile * 16 + (ptx::lane() >> 2) - (ptx::lane() & 3) * 2;  // counted from the key that at.scales is of
    float scale[2];
    MLA_UNROLL
    for (int j = 0; j < 2; ++j)
      scale[j] = ptx::load_shared<float>(stage + at.scales + static_cast<uint32_t>(key + j * 8) * at.scale_pitch);
    MLA_UNROLL
    for (int j = 0; j < 2; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) s[j][i] = 0.0F;
    MLA_UNROLL
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, stage + at.latents + rows_of(tile) + static_cast<uint32_t>(step * 16));
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t low, high;
        ptx::e4m3x4_to_f16x2(words[i], low, high);
        ptx::mma_bf16(s[i % 2], queries_[step + i / 2], scale_to_bf16(low, scale[i % 2], scale[i % 2]),
                      scale_to_bf16(high, scale[i % 2], scale[i % 2]));
      }
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

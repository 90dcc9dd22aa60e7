// SPDX-License-Identifier: Apache-2.0
// The score warps of rows of e2m1 multiply queries and keys.
#pragma once

#include "cuda/backends/bulk/e2m1_rows.cuh"
#include "cuda/backends/bulk/quantized_scores.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// A value of the cache is e2m1 times the scale of its 16 channels times the outer scale, rounded to bf16. The first
/// product is exact in f16 and has at most six significant bits. If the outer scale has at most two, the rounding
/// changes nothing, so that these products and queries are multiplied in f16, and the sums are multiplied by the outer
/// scale. Otherwise the products become bf16, with the rounding, and are multiplied by queries in bf16.
template <class Config>
class E2m1ScoreRole : QuantizedScoreRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Scores = QuantizedScoreRole<Config>;
  using Block::args_, Scores::first_channel, Scores::first_key, Scores::kTiles, Scores::next_, Scores::queries_,
      Scores::rope_queries_, Scores::row_factor_, Scores::rows_of, Scores::slice;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit E2m1ScoreRole(const cuda::AbsorbedArgs& args) : Scores(args) {}

  MLA_DEVICE void compute() {
    const float outer = outer_scale(args_);
    constexpr uint32_t kBeyondTwoBits = 0x003FFFFFU;  // of an f32's 24 significant bits, of which the first is implied
    const bool long_scale = (std::bit_cast<uint32_t>(outer) & kBeyondTwoBits) != 0;
    Scores::load_queries(args_.pools[0].quantized_kpe, long_scale);
    if (long_scale)
      steps<true>(outer);
    else
      steps<false>(outer);
    Block::leave_unit();
  }

 private:
  static constexpr int kChunks = Config::kSliceDims / 32;  // of 32 channels, which are 16 bytes and two K steps
  static_assert(Config::kSliceDims == 128, "eight scales of a key, one load, belong to a K slice");

  /// Tells where the lane 4 g + t reads its operands, in bytes from a stage's begin.
  struct Places {
    MLA_DEVICE explicit Places(const E2m1Row& row)
        : codes(of_key(ptx::lane() & 15) + static_cast<uint32_t>(first_channel() / 2 + (ptx::lane() >> 4) * 16)),
          rope(of_key(ptx::lane() & 15) + row.rope_at +
               static_cast<uint32_t>(row.quantized_rope ? slice() * 16 : slice() * 32 + (ptx::lane() >> 4) * 16)),
          scales(of_key(ptx::lane() >> 2) + row.scales_at + static_cast<uint32_t>(first_channel() / kE2m1Group)),
          rope_scale(of_key(ptx::lane() >> 2) + row.rope_scale_at) {}
    MLA_DEVICE static uint32_t of_key(int key) {
      return static_cast<uint32_t>((first_key() + key) * Config::kKeyPitch);
    }

    uint32_t codes, rope;         // for ldmatrix: key `lane & 15` and chunk `lane >> 4`
    uint32_t scales, rope_scale;  // of key g
  };

  /// Computes the scores of the unit's steps.
  template <bool kLong>
  MLA_DEVICE void steps(float outer) {
    const Places at(E2m1Row(args_.pools[0]));
    const ptx::SharedAddress to = Scores::first_score();
    const float factor = outer / kE2m1Unit;
    MLA_NO_UNROLL
    for (; next_ < unit_end(); ++next_) {
      const ptx::SharedAddress stage = Scores::wait_for_rows(next_);
      Scores::compute_scores(to, [&](float(&s)[2][4], int tile) {
        multiply<kLong>(s, stage + rows_of(tile), at, factor);
        if (Scores::has_rope()) add_rope(s, stage + rows_of(tile), at);
      });
    }
  }
  MLA_DEVICE uint32_t unit_end() const { return Block::unit().steps.end; }

  /// Loads the scales of a key as pairs of twice the same f16: those of the lane's 8 channels in each chunk.
  MLA_DEVICE static void load_scales(uint32_t (&scales)[kChunks], ptx::SharedAddress from) {
    const auto eight = ptx::load_shared<uint64_t>(from);
    const uint32_t which = (ptx::lane() & 2) == 0 ? 0x6420U : 0x7531U;  // a chunk has the channels of two scales
    const uint32_t four = ptx::permute_bytes(static_cast<uint32_t>(eight), static_cast<uint32_t>(eight >> 32), which);
    uint32_t pairs[2];
    ptx::e4m3x4_to_f16x2(four, pairs[0], pairs[1]);
    MLA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) scales[chunk] = ptx::twice_half(pairs[chunk / 2], chunk % 2 == 1);
  }

  /// Computes the scores of the latent channels of 16 keys.
  template <bool kLong>
  MLA_DEVICE void multiply(float (&s)[2][4], ptx::SharedAddress rows, const Places& at, float factor) const {
    uint32_t scales[2][kChunks];  // of keys g and 8 + g
    MLA_UNROLL
    for (int j = 0; j < 2; ++j) {
      load_scales(scales[j], rows + at.scales + static_cast<uint32_t>(j * 8 * Config::kKeyPitch));
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] = 0.0F;
    }
    MLA_UNROLL
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      uint32_t words[4];  // keys 0-7 and 8-15 of a chunk, then of the next
      ptx::ldmatrix_x4(words, rows + at.codes + static_cast<uint32_t>(chunk * 16));
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int of = chunk + i / 2;
        const E2m1Pairs keys = e2m1x8_to_f16(words[i], scales[i % 2][of]);
        if constexpr (kLong) {
          const auto bf16 = [&](uint32_t pair) { return scale_to_bf16(pair, factor, factor); };
          ptx::mma_bf16(s[i % 2], queries_[2 * of], bf16(keys.even[0]), bf16(keys.even[1]));
          ptx::mma_bf16(s[i % 2], queries_[2 * of + 1], bf16(keys.odd[0]), bf16(keys.odd[1]));
        } else {
          ptx::mma_f16(s[i % 2], queries_[2 * of], keys.even[0], keys.even[1]);
          ptx::mma_f16(s[i % 2], queries_[2 * of + 1], keys.odd[0], keys.odd[1]);
        }
      }
    }
    if constexpr (!kLong) {
      MLA_UNROLL
      for (int j = 0; j < 2; ++j) MLA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] *= row_factor_[i / 2] * factor;
    }
  }

  /// Adds the products of rotary channels, which are bf16, or e4m3 with a scale in each row.
  MLA_DEVICE void add_rope(float (&s)[2][4], ptx::SharedAddress rows, const Places& at) const {
    if (!args_.pools[0].quantized_kpe) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, rows + at.rope);
      ptx::mma_bf16(s[0], rope_queries_, words[0], words[2]);
      ptx::mma_bf16(s[1], rope_queries_, words[1], words[3]);
      return;
    }
    uint32_t words[2];
    ptx::ldmatrix_x2(words, rows + at.rope);  // uses the addresses of lanes 0 to 15
    MLA_UNROLL
    for (int j = 0; j < 2; ++j) {
      const auto scale =
          ptx::load_shared<float>(rows + at.rope_scale + static_cast<uint32_t>(j * 8 * Config::kKeyPitch));
      uint32_t low, high;
      ptx::e4m3x4_to_f16x2(words[j], low, high);
      ptx::mma_bf16(s[j], rope_queries_, scale_to_bf16(low, scale, scale), scale_to_bf16(high, scale, scale));
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

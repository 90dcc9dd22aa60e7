// SPDX-License-Identifier: Apache-2.0
// The score warps of quantized rows multiply queries and keys. Each has a K slice of a quarter of the channels, and
// half of a step's keys.
#pragma once

#include "cuda/backends/bulk/e4m3_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// A value of a quantized cache is e4m3 times scale, rounded to bf16. Scores are computed in one of two ways:
///   Short scales have at most four significant bits, as powers of two have. The rounding then changes nothing, so that
///   elements and queries are multiplied in f16, and the sums are multiplied by the scale.
///   Long scales have more bits. Elements are converted to bf16 with the rounding, and multiplied by queries in bf16.
/// A warp computes the first way until it meets a long scale, and from there to the end of the unit's pool the second
/// way.
template <class Config>
class E4m3ScoreRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit E4m3ScoreRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    bool long_scales = false;
    MLA_NO_UNROLL
    while (next_ < Block::end_of_pool(1)) {
      const int pool = next_ < Block::end_of_pool(0) ? 0 : 1;
      const uint32_t end = Block::end_of_pool(pool);
      const bool quantized_rope = landed_rows<Config>(args_.pools, opaque(pool)).quantized_rope;
      load_queries(quantized_rope, long_scales);
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
  static constexpr int kSteps = Config::kLatentSteps, kHalfSteps = kSteps / 2, kHalfDims = Config::kSliceDims / 2;
  static_assert(Config::kRows == 16 && Config::kWarpKeys % 16 == 0 && Config::kRopeSteps == 1);

  static constexpr int kTiles = Config::kWarpKeys / 16;  // tiles of 16 keys

  using Scales = float[2][2];  // [j][i]: the scale of key 8 j + 2 t + i of a tile, for lane 4 g + t

  MLA_DEVICE static int score_warp() { return ptx::warp() - Config::kFirstScoreWarp; }
  MLA_DEVICE static int slice() { return score_warp() % Config::kSlices; }
  MLA_DEVICE static int first_channel() { return slice() * Config::kSliceDims; }
  MLA_DEVICE static int first_key() { return score_warp() / Config::kSlices * Config::kWarpKeys; }

  /// Returns its argument by a shuffle, which the compiler does not see through. So it does not compute what depends on
  /// the pool earlier than it is needed, which would cost registers.
  MLA_DEVICE static int opaque(int pool) { return ptx::shuffle(pool, 0); }
  MLA_DEVICE bool has_ue8m0() const { return args_.pools[0].ue8m0; }   // the same in both pools
  MLA_DEVICE int d_ckv() const { return args_.pools[0].cache.d_ckv; }  // the same in both pools

  MLA_DEVICE bool has_rope() const { return d_ckv() < args_.d_qk; }

  // Queries. A word of e4m3 holds four neighbouring channels of a key, which become the two words of a B operand. So
  // the two words of a row of an A operand hold four neighbouring channels of a query, too.

  MLA_DEVICE void load_queries(bool quantized_rope, bool long_scales) {
    const bool aligned = args_.q_dtype == DType::kBF16 &&
                         is_word_aligned(args_.q_nope, args_.q_nope_stride_token, args_.q_nope_stride_head) &&
                         is_word_aligned(args_.q_pe, args_.q_pe_stride_token, args_.q_pe_stride_head);
    if (aligned)
      read_queries(quantized_rope);
    else
      convert_queries(quantized_rope);
    if (long_scales) return;
    normalize(0);
    normalize(1);
  }

  /// An A operand has two words of each row. These return the channel, among 16, at which the first word begins, and by
  /// how many channels the second word begins later.
  MLA_DEVICE static int latent_word() { return (ptx::lane() & 3) * 4; }
  MLA_DEVICE static int rope_word(bool quantized_rope) { return (ptx::lane() & 3) * (quantized_rope ? 4 : 2); }
  MLA_DEVICE static int rope_words_apart(bool quantized_rope) { return quantized_rope ? 2 : 8; }

  /// Loads aligned bf16 queries from global memory into registers.
  MLA_DEVICE void read_queries(bool quantized_rope) {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const QueryRow row = unit().rows.row(args_, half * 8 + (ptx::lane() >> 2));
      const auto* latents = static_cast<const uint16_t*>(args_.q_nope) +
                            int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head +
                            first_channel() + latent_word();
      MLA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const bool valid = row.token >= 0 && first_channel() + step * 16 < d_ckv();
        const uint64_t four = valid ? *reinterpret_cast<const uint64_t*>(latents + step * 16) : 0;
        queries_[step][half] = static_cast<uint32_t>(four);
        queries_[step][2 + half] = static_cast<uint32_t>(four >> 32);
      }
      const bool valid = row.token >= 0 && d_ckv() < args_.d_qk;
      const auto* rope = static_cast<const uint16_t*>(args_.q_pe) + int64_t{row.token} * args_.q_pe_stride_token +
                         row.head * args_.q_pe_stride_head + slice() * 16 + rope_word(quantized_rope);
      rope_queries_[half] = valid ? *reinterpret_cast<const uint32_t*>(rope) : 0;
      rope_queries_[2 + half] = valid ? *reinterpret_cast<const uint32_t*>(rope + rope_words_apart(quantized_rope)) : 0;
    }
  }

  /// Returns whether all rows of a query tensor of 16-bit elements begin at multiples of 8 bytes.
  MLA_DEVICE static bool is_word_aligned(const void* from, int64_t stride_token, int64_t stride_head) {
    return ((reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(stride_token * 2) |
             static_cast<uint64_t>(stride_head * 2)) &
            7) == 0;
  }

  /// Loads queries of another type or alignment: they become bf16 in the warp's own shared memory first, eight rows at
  /// a time.
  MLA_DEVICE void convert_queries(bool quantized_rope) {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      ptx::sync_warp();
      convert_rows(half * 8);
      ptx::sync_warp();
      const ptx::SharedAddress row = converted_rows() + static_cast<uint32_t>((ptx::lane() >> 2) * Config::kQueryPitch);
      MLA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const auto four = ptx::load_shared<uint64_t>(row + static_cast<uint32_t>((step * 16 + latent_word()) * 2));
        queries_[step][half] = static_cast<uint32_t>(four);
        queries_[step][2 + half] = static_cast<uint32_t>(four >> 32);
      }
      const ptx::SharedAddress rope = row + static_cast<uint32_t>((Config::kSliceDims + rope_word(quantized_rope)) * 2);
      rope_queries_[half] = ptx::load_shared<uint32_t>(rope);
      rope_queries_[2 + half] =
          ptx::load_shared<uint32_t>(rope + static_cast<uint32_t>(rope_words_apart(quantized_rope) * 2));
    }
  }
  /// Returns the warp's own shared memory for eight rows of queries.
  MLA_DEVICE ptx::SharedAddress converted_rows() const {
    return shared_ + static_cast<uint32_t>(Config::kQueryOffset + score_warp() * 8 * Config::kQueryPitch);
  }

  /// Converts eight rows: the latent channels of the warp's K slice, then its rotary channels.
  MLA_DEVICE void convert_rows(int first_row) const {
    constexpr int kPairs = Config::kQueryPitch / 4;  // pairs of channels, of which the last ones are padding
    MLA_NO_UNROLL
    for (int i = ptx::lane(); i < 8 * kPairs; i += kWarpSize) {
      const QueryRow row = unit().rows.row(args_, first_row + i / kPairs);
      const int pair = i % kPairs * 2;
      const bool rope = pair >= Config::kSliceDims;
      const int c = rope ? slice() * 16 + pair - Config::kSliceDims : first_channel() + pair;
      const bool valid =
          row.token >= 0 && pair < Config::kSliceDims + 16 && c < (rope ? args_.d_qk - d_ckv() : d_ckv());
      const int64_t at = rope
                             ? int64_t{row.token} * args_.q_pe_stride_token + row.head * args_.q_pe_stride_head + c
                             : int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head + c;
      const void* from = rope ? args_.q_pe : args_.q_nope;
      const float low = valid ? load_element(from, args_.q_dtype, at) : 0.0F;
      const float high = valid ? load_element(from, args_.q_dtype, at + 1) : 0.0F;
      ptx::store_shared(converted_rows() + static_cast<uint32_t>(i * 4), ptx::pack_bf16x2(low, high));
    }
  }

  /// Converts the latent channels of a row to f16, divided by a power of two that makes the largest about 2^4. Then all
  /// channels down to 2^-21 of the largest are exact, and no sum overflows before it is multiplied by the scale.
  MLA_DEVICE void normalize(int half) {
    uint32_t largest = 0;  // the bits of its magnitude
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) MLA_UNROLL
    for (int i = half; i < 4; i += 2) {
      const uint32_t high = queries_[step][i] & 0x7FFF0000U, low = queries_[step][i] << 16 & 0x7FFF0000U;
      largest = std::max(largest, std::max(high < kInfinity ? high : 0, low < kInfinity ? low : 0));
    }
    largest = std::max(largest, ptx::shuffle_xor(largest, 1));
    largest = std::max(largest, ptx::shuffle_xor(largest, 2));
    // The exponent is biased. Queries below 2^(8 - 127) are negligible, and the bound keeps both factors finite.
    const uint32_t exponent = std::max(largest >> 23, 8U);
    const float factor = std::bit_cast<float>((257U - exponent) << 23);
    row_factor_[half] = std::bit_cast<float>((exponent - 3U) << 23);
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) MLA_UNROLL
    for (int i = half; i < 4; i += 2) {
      float low, high;
      ptx::unpack_bf16x2(queries_[step][i], low, high);
      queries_[step][i] = ptx::pack_f16x2(low * factor, high * factor);
    }
  }
  static constexpr uint32_t kInfinity = 0x7F800000U;

  // Scores.

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
      compute_scores(at, [&](float(&s)[2][4], int tile) {
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
      compute_scores(at, [&](float(&s)[2][4], int tile) {
        multiply_bf16(s, stage, at, tile);
        if (has_rope()) add_rope<kQuantizedRope>(s, stage + at.rope + rows_of(tile), at.rope_scale);
      });
    }
  }

  /// Returns the bytes from a stage's begin to the rows of a tile.
  MLA_DEVICE static constexpr uint32_t rows_of(int tile) {
    return static_cast<uint32_t>(tile * 16 * Config::kKeyPitch);
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
          scores(role.score_row(slice(), ptx::lane() >> 2) +
                 static_cast<uint32_t>((first_key() + (ptx::lane() & 3) * 2) * 4)),
          rope_scale(rows.rope_scale) {}

    uint32_t latents, rope;        // for ldmatrix: key `lane & 15` and chunk `lane >> 4`
    uint32_t scales, scale_pitch;  // the scale of key 2 t, and the distance to that of the next key
    ptx::SharedAddress scores;     // row g and key 2 t
    float rope_scale;
  };

  /// Waits for the rows of step n and returns their stage.
  MLA_DEVICE ptx::SharedAddress wait_for_rows(uint32_t n) const {
    ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));
    return Block::stage(n);
  }

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

  /// Computes and stores the scores of the next step. multiply(s, tile) computes those of 16 keys.
  template <class F>
  MLA_DEVICE void compute_scores(const Places& at, const F& multiply) const {
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float s[2][4];
      multiply(s, tile);
      if (tile == 0 && next_ > 0) ptx::mbarrier_wait(Block::s_empty(0), Block::s_parity(next_ - 1));
      store_scores(s, at.scores + static_cast<uint32_t>(tile * 64));
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::s_full(0));
  }

  MLA_DEVICE static void store_scores(const float (&s)[2][4], ptx::SharedAddress to) {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint64_t two =
          uint64_t{std::bit_cast<uint32_t>(s[j][2 * half + 1])} << 32 | std::bit_cast<uint32_t>(s[j][2 * half]);
      ptx::store_shared(to + static_cast<uint32_t>(half * 8 * Config::kScorePitch + j * 32), two);
    }
  }

  uint32_t next_ = 0;            // number of the next step
  uint32_t queries_[kSteps][4];  // latent channels of the slice
  uint32_t rope_queries_[4];     // rotary channels of the slice
  float row_factor_[2];          // the powers of two by which the rows of queries_ were divided
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

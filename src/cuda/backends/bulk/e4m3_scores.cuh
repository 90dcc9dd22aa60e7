// SPDX-License-Identifier: Apache-2.0
// The score warps of quantized rows: each has a quarter of the channels and half of a step's keys.
#pragma once

#include "cuda/backends/bulk/e4m3_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// Two ways. Where scales are short (powers of two, mostly), a scale times a code is exact in bf16, so that codes may
/// be multiplied by queries in f16 and the products by the scale. Others are decoded to bf16 and multiplied by queries
/// as they are. A warp goes the first way until it meets a long scale in a unit.
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
    while (next_ < Block::last_step_of_pool(1)) {
      const int pool = next_ < Block::last_step_of_pool(0) ? 0 : 1;
      const uint32_t end = Block::last_step_of_pool(pool);
      const bool coded_rope = landed_rows<Config>(args_.pools, kept(pool)).coded_rope;
      load_queries(coded_rope, long_scales);
      if (has_ue8m0())
        short_steps<true, false>(pool, end);
      else if (coded_rope)
        long_scales ? long_steps<true>(pool, end) : short_steps<false, true>(pool, end);
      else
        long_scales ? long_steps<false>(pool, end) : short_steps<false, false>(pool, end);
      long_scales = next_ < end;
    }
    Block::leave_unit();
  }

 private:
  static constexpr int kSteps = Config::kLatentSteps, kHalfSteps = kSteps / 2, kHalfDims = Config::kPartDims / 2;
  static_assert(Config::kRows == 16 && Config::kPartKeys % 16 == 0 && Config::kRopeSteps == 1);

  static constexpr int kTiles = Config::kPartKeys / 16;  // of keys

  using Scales = float[2][2];  // of a tile's keys 8 j + 2t and the next

  MLA_DEVICE static int score_warp() { return ptx::warp() - Config::kFirstScoreWarp; }
  MLA_DEVICE static int part() { return score_warp() % Config::kParts; }
  MLA_DEVICE static int first_channel() { return part() * Config::kPartDims; }
  MLA_DEVICE static int first_key() { return score_warp() / Config::kParts * Config::kPartKeys; }

  /// By a shuffle, so that nothing that follows from it is computed before it is needed: registers are short.
  MLA_DEVICE static int kept(int pool) { return ptx::shuffle(pool, 0); }
  MLA_DEVICE bool has_ue8m0() const { return args_.pools[0].ue8m0; }   // both pools
  MLA_DEVICE int d_ckv() const { return args_.pools[0].cache.d_ckv; }  // of both pools

  MLA_DEVICE bool has_rope() const { return d_ckv() < args_.d_qk; }

  // Queries. A word of codes is four neighbouring channels of a key, so in an operand's two words of a row there are
  // four neighbouring channels too.

  MLA_DEVICE void load_queries(bool coded_rope, bool long_scales) {
    const bool whole = args_.q_dtype == DType::kBF16 &&
                       is_in_words(args_.q_nope, args_.q_nope_stride_token, args_.q_nope_stride_head) &&
                       is_in_words(args_.q_pe, args_.q_pe_stride_token, args_.q_pe_stride_head);
    if (whole)
      read_queries(coded_rope);
    else
      convert_queries(coded_rope);
    if (long_scales) return;
    normalize(0);
    normalize(1);
  }

  /// Of two words of an operand's row: the channel of the first among 16, and how far behind the second is.
  MLA_DEVICE static int latent_word() { return (ptx::lane() & 3) * 4; }
  MLA_DEVICE static int tail_word(bool coded_rope) { return (ptx::lane() & 3) * (coded_rope ? 4 : 2); }
  MLA_DEVICE static int tail_apart(bool coded_rope) { return coded_rope ? 2 : 8; }

  /// From global memory into registers.
  MLA_DEVICE void read_queries(bool coded_rope) {
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
      const auto* tail = static_cast<const uint16_t*>(args_.q_pe) + int64_t{row.token} * args_.q_pe_stride_token +
                         row.head * args_.q_pe_stride_head + part() * 16 + tail_word(coded_rope);
      tail_[half] = valid ? *reinterpret_cast<const uint32_t*>(tail) : 0;
      tail_[2 + half] = valid ? *reinterpret_cast<const uint32_t*>(tail + tail_apart(coded_rope)) : 0;
    }
  }

  MLA_DEVICE static bool is_in_words(const void* from, int64_t stride_token, int64_t stride_head) {
    return ((reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(stride_token * 2) |
             static_cast<uint64_t>(stride_head * 2)) &
            7) == 0;
  }

  /// Queries that are not bf16, or lie anyhow, become bf16 in the warp's own shared memory first, eight rows at a time.
  MLA_DEVICE void convert_queries(bool coded_rope) {
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
      const ptx::SharedAddress tail = row + static_cast<uint32_t>((Config::kPartDims + tail_word(coded_rope)) * 2);
      tail_[half] = ptx::load_shared<uint32_t>(tail);
      tail_[2 + half] = ptx::load_shared<uint32_t>(tail + static_cast<uint32_t>(tail_apart(coded_rope) * 2));
    }
  }
  MLA_DEVICE ptx::SharedAddress converted_rows() const {
    return shared_ + static_cast<uint32_t>(Config::kQueryOffset + score_warp() * 8 * Config::kQueryPitch);
  }

  /// Eight rows: the part's latent channels, then its rotary ones.
  MLA_DEVICE void convert_rows(int first_row) const {
    constexpr int kPairs = Config::kQueryPitch / 4;  // of channels, with a few to spare
    MLA_NO_UNROLL
    for (int i = ptx::lane(); i < 8 * kPairs; i += kWarpSize) {
      const QueryRow row = unit().rows.row(args_, first_row + i / kPairs);
      const int pair = i % kPairs * 2;
      const bool tail = pair >= Config::kPartDims;
      const int c = tail ? part() * 16 + pair - Config::kPartDims : first_channel() + pair;
      const bool valid = row.token >= 0 && pair < Config::kPartDims + 16 && c < (tail ? args_.d_qk - d_ckv() : d_ckv());
      const int64_t at = tail
                             ? int64_t{row.token} * args_.q_pe_stride_token + row.head * args_.q_pe_stride_head + c
                             : int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head + c;
      const void* from = tail ? args_.q_pe : args_.q_nope;
      const float low = valid ? load_element(from, args_.q_dtype, at) : 0.0F;
      const float high = valid ? load_element(from, args_.q_dtype, at + 1) : 0.0F;
      ptx::store_shared(converted_rows() + static_cast<uint32_t>(i * 4), ptx::pack_bf16x2(low, high));
    }
  }

  /// The row's latent channels become f16, over a power of two that makes the largest about 2^4: all that is within
  /// 2^-21 of it is exact then, and no sum of products overflows for want of the scale.
  MLA_DEVICE void normalize(int half) {
    uint32_t largest = 0;  // magnitude's bits
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) MLA_UNROLL
    for (int i = half; i < 4; i += 2) {
      const uint32_t high = queries_[step][i] & 0x7FFF0000U, low = queries_[step][i] << 16 & 0x7FFF0000U;
      largest = std::max(largest, std::max(high < kInfinity ? high : 0, low < kInfinity ? low : 0));
    }
    largest = std::max(largest, ptx::shuffle_xor(largest, 1));
    largest = std::max(largest, ptx::shuffle_xor(largest, 2));
    const uint32_t exponent = std::max(largest >> 23, 8U);  // biased; smaller ones are as good as 0 beside any other
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

  /// Steps up to `end`, or up to one with long scales.
  template <bool kUe8m0, bool kCodedRope>
  MLA_DEVICE void short_steps(int pool, uint32_t end) {
    const Places at(*this, landed_rows<Config>(args_.pools, kept(pool)));
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      const ptx::SharedAddress stage = wait_for_rows(next_);
      Scales scales[kTiles];
      if constexpr (!kUe8m0) {
        MLA_UNROLL
        for (int tile = 0; tile < kTiles; ++tile) load_scales<kUe8m0>(scales[tile], stage, at, tile, 0);
        if (has_long(scales)) [[unlikely]]
          return;
      }
      compute_scores(at, [&](float(&s)[2][4], int tile) {
        multiply_codes<kUe8m0>(s, scales[tile], stage, at, tile);
        if (has_rope()) add_rope<kCodedRope>(s, stage + at.rope + rows_of(tile), at.rope_scale);
      });
    }
  }

  template <bool kCodedRope>
  MLA_DEVICE void long_steps(int pool, uint32_t end) {
    const Places at(*this, landed_rows<Config>(args_.pools, kept(pool)));
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      const ptx::SharedAddress stage = wait_for_rows(next_);
      compute_scores(at, [&](float(&s)[2][4], int tile) {
        multiply_values(s, stage, at, tile);
        if (has_rope()) add_rope<kCodedRope>(s, stage + at.rope + rows_of(tile), at.rope_scale);
      });
    }
  }

  /// From a stage's begin on.
  MLA_DEVICE static constexpr uint32_t rows_of(int tile) {
    return static_cast<uint32_t>(tile * 16 * Config::kKeyPitch);
  }

  /// What the lane reads of a stage, by bytes from the stage's begin on, and where it writes scores.
  struct Places {
    MLA_DEVICE Places(const E4m3ScoreRole& role, const LandedRows& rows)
        : codes(static_cast<uint32_t>((first_key() + (ptx::lane() & 15)) * Config::kKeyPitch + first_channel() +
                                      (ptx::lane() >> 4) * kChunkBytes)),
          rope(codes - static_cast<uint32_t>(first_channel()) + rows.rope_at +
               static_cast<uint32_t>(part() * 16 * (rows.coded_rope ? 1 : 2))),
          scales(rows.scales_at + static_cast<uint32_t>(first_key() + (ptx::lane() & 3) * 2) * rows.scale_pitch +
                 rows.scale_offset(rows.group_of(first_channel()))),
          scale_pitch(rows.scale_pitch),
          scores(role.score_row(part(), ptx::lane() >> 2) +
                 static_cast<uint32_t>((first_key() + (ptx::lane() & 3) * 2) * 4)),
          rope_scale(rows.rope_scale) {}

    uint32_t codes, rope;          // of key `lane & 15`, and of chunk `lane >> 4`
    uint32_t scales, scale_pitch;  // of keys 8 j + 2t and the next
    ptx::SharedAddress scores;     // of row g and key 2t
    float rope_scale;
  };

  MLA_DEVICE ptx::SharedAddress wait_for_rows(uint32_t n) const {
    ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));
    return Block::stage(n);
  }

  /// Of the lane's keys, and of half the warp's channels: UE8M0 scales are of half a part each, f32 ones of a part at
  /// least.
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

  /// Whether a scale has more than four bits: products with codes, which have four, may have more than the eight of
  /// bf16.
  MLA_DEVICE static bool has_long(const Scales (&scales)[kTiles]) {
    uint32_t bits = 0;
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) MLA_UNROLL
    for (int i = 0; i < 4; ++i) bits |= std::bit_cast<uint32_t>(scales[tile][i / 2][i % 2]);
    return ptx::any((bits & 0x000FFFFFU) != 0);
  }

  /// Rotary channels: bf16, or codes with one scale for all.
  template <bool kCoded>
  MLA_DEVICE void add_rope(float (&s)[2][4], ptx::SharedAddress from, float scale) const {
    if constexpr (!kCoded) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, from);
      ptx::mma_bf16(s[0], tail_, words[0], words[2]);
      ptx::mma_bf16(s[1], tail_, words[1], words[3]);
    } else {
      uint32_t words[2];
      ptx::ldmatrix_x2(words, from);  // the first chunks' addresses count
      MLA_UNROLL
      for (int j = 0; j < 2; ++j) {
        uint32_t low, high;
        ptx::e4m3x4_to_f16x2(words[j], low, high);
        ptx::mma_bf16(s[j], tail_, scale_to_bf16(low, scale, scale), scale_to_bf16(high, scale, scale));
      }
    }
  }

  /// The short way.
  template <bool kUe8m0>
  MLA_DEVICE void multiply_codes(float (&s)[2][4], Scales& scales, ptx::SharedAddress stage, const Places& at,
                                 int tile) const {
    constexpr int kHalves = kUe8m0 ? 2 : 1;
    MLA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      if (half == 1 && first_channel() + kHalfDims >= d_ckv()) break;
      if constexpr (kUe8m0) load_scales<kUe8m0>(scales, stage, at, tile, half);
      float products[2][4] = {};
      MLA_UNROLL
      for (int step = half * kHalfSteps; step < (half + 2 / kHalves) * kHalfSteps; step += 2) {
        uint32_t words[4];  // keys 0-7 and 8-15 of 16 channels, then of the next 16
        ptx::ldmatrix_x4(words, stage + at.codes + rows_of(tile) + static_cast<uint32_t>(step * 16));
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint32_t low, high;
          ptx::e4m3x4_to_f16x2(words[i], low, high);
          ptx::mma_f16(products[i % 2], queries_[step + i / 2], low, high);
        }
      }
      MLA_UNROLL
      for (int j = 0; j < 2; ++j) MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float scaled = products[j][i] * scales[j][i % 2];
        s[j][i] = half == 0 ? scaled * row_factor_[i / 2] : s[j][i] + scaled * row_factor_[i / 2];
      }
    }
  }

  /// The long way.
  MLA_DEVICE void multiply_values(float (&s)[2][4], ptx::SharedAddress stage, const Places& at, int tile) const {
    const int key = tile * 16 + (ptx::lane() >> 2) - (ptx::lane() & 3) * 2;  // from that of the lane's scales on
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
      ptx::ldmatrix_x4(words, stage + at.codes + rows_of(tile) + static_cast<uint32_t>(step * 16));
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t low, high;
        ptx::e4m3x4_to_f16x2(words[i], low, high);
        ptx::mma_bf16(s[i % 2], queries_[step + i / 2], scale_to_bf16(low, scale[i % 2], scale[i % 2]),
                      scale_to_bf16(high, scale[i % 2], scale[i % 2]));
      }
    }
  }

  /// Of the next step; `multiply(s, tile)` gives those of 16 keys.
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
  uint32_t queries_[kSteps][4];  // of the part's channels
  uint32_t tail_[4];             // of its rotary channels
  float row_factor_[2];          // what the queries were divided by
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

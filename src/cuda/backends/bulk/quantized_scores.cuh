// SPDX-License-Identifier: Apache-2.0
// The score warps of quantized rows, of whatever elements, have here what they share: queries in registers, as operands
// of mma.sync, and the way of scores to shared memory.
#pragma once

#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// A score warp has a K slice of a quarter of the channels, and half of a step's keys.
template <class Config>
class QuantizedScoreRole : protected AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;

 protected:
  using Block::args_, Block::shared_, Block::unit;

  MLA_DEVICE explicit QuantizedScoreRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  static constexpr int kSteps = Config::kLatentSteps;
  static constexpr int kTiles = Config::kWarpKeys / 16;  // tiles of 16 keys
  static_assert(Config::kRows == 16 && Config::kWarpKeys % 16 == 0 && Config::kRopeSteps == 1);

  MLA_DEVICE static int score_warp() { return ptx::warp() - Config::kFirstScoreWarp; }
  MLA_DEVICE static int slice() { return score_warp() % Config::kSlices; }
  MLA_DEVICE static int first_channel() { return slice() * Config::kSliceDims; }
  MLA_DEVICE static int first_key() { return score_warp() / Config::kSlices * Config::kWarpKeys; }

  MLA_DEVICE int d_ckv() const { return args_.pools[0].cache.d_ckv; }  // the same in both pools
  MLA_DEVICE bool has_rope() const { return d_ckv() < args_.d_qk; }

  // Queries. A word of e4m3 holds four neighbouring channels of a key, which become the two words of a B operand. So
  // the two words of a row of an A operand hold four neighbouring channels of a query, too. A word of e2m1 holds eight,
  // which become two B operands: channels 0, 4 and 2, 6, then 1, 5 and 3, 7 (E2m1Pairs).

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

  /// Waits for the rows of step n and returns their stage.
  MLA_DEVICE ptx::SharedAddress wait_for_rows(uint32_t n) const {
    ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));
    return Block::stage(n);
  }

  /// Returns the bytes from a stage's begin to the rows of a tile.
  MLA_DEVICE static constexpr uint32_t rows_of(int tile) {
    return static_cast<uint32_t>(tile * 16 * Config::kKeyPitch);
  }

  /// Returns where the lane writes scores: row g and key 2 t of the warp's keys, for lane 4 g + t.
  MLA_DEVICE ptx::SharedAddress first_score() const {
    return Block::score_row(slice(), ptx::lane() >> 2) +
           static_cast<uint32_t>((first_key() + (ptx::lane() & 3) * 2) * 4);
  }

  /// Computes the scores of the next step and stores them at `to`. multiply(s, tile) computes those of 16 keys.
  template <class F>
  MLA_DEVICE void compute_scores(ptx::SharedAddress to, const F& multiply) const {
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float s[2][4];
      multiply(s, tile);
      if (tile == 0 && next_ > 0) ptx::mbarrier_wait(Block::s_empty(0), Block::s_parity(next_ - 1));
      store_scores(s, to + static_cast<uint32_t>(tile * 64));
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::s_full(0));
  }

  uint32_t next_ = 0;            // number of the next step
  uint32_t queries_[kSteps][4];  // latent channels of the slice
  uint32_t rope_queries_[4];     // rotary channels of the slice
  float row_factor_[2];          // the powers of two by which the rows of queries_ were divided

 private:
  /// Loads the latent channels of one row of two K steps. four(c) returns channels c ... c + 3 of the slice.
  template <class Four>
  MLA_DEVICE void load_latents(int step, int half, const Four& four) {
    const int word = (ptx::lane() & 3) * (Config::kE2m1 ? 8 : 4);
    const uint64_t first = four(step * 16 + word), second = four(step * 16 + word + (Config::kE2m1 ? 4 : 16));
    const auto low = static_cast<uint32_t>(first), high = static_cast<uint32_t>(first >> 32);
    const auto next_low = static_cast<uint32_t>(second), next_high = static_cast<uint32_t>(second >> 32);
    constexpr uint32_t kLower = 0x5410, kUpper = 0x7632;  // halves of two words
    queries_[step][half] = Config::kE2m1 ? ptx::permute_bytes(low, next_low, kLower) : low;
    queries_[step][2 + half] = Config::kE2m1 ? ptx::permute_bytes(high, next_high, kLower) : high;
    queries_[step + 1][half] = Config::kE2m1 ? ptx::permute_bytes(low, next_low, kUpper) : next_low;
    queries_[step + 1][2 + half] = Config::kE2m1 ? ptx::permute_bytes(high, next_high, kUpper) : next_high;
  }

  /// An A operand has two words of each row. These return the rotary channel, among 16, at which the first word begins,
  /// and by how many channels the second word begins later.
  MLA_DEVICE static int rope_word(bool quantized_rope) { return (ptx::lane() & 3) * (quantized_rope ? 4 : 2); }
  MLA_DEVICE static int rope_words_apart(bool quantized_rope) { return quantized_rope ? 2 : 8; }

  /// Loads aligned bf16 queries from global memory into registers.
  MLA_DEVICE void read_queries(bool quantized_rope) {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const QueryRow row = unit().rows.row(args_, half * 8 + (ptx::lane() >> 2));
      const auto* latents = static_cast<const uint16_t*>(args_.q_nope) +
                            int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head +
                            first_channel();
      MLA_UNROLL
      for (int step = 0; step < kSteps; step += 2)
        load_latents(step, half, [&](int c) {
          const bool valid = row.token >= 0 && first_channel() + c < d_ckv();
          return valid ? *reinterpret_cast<const uint64_t*>(latents + c) : uint64_t{0};
        });
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
      for (int step = 0; step < kSteps; step += 2)
        load_latents(step, half, [&](int c) { return ptx::load_shared<uint64_t>(row + static_cast<uint32_t>(c * 2)); });
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

  MLA_DEVICE static void store_scores(const float (&s)[2][4], ptx::SharedAddress to) {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint64_t two =
          uint64_t{std::bit_cast<uint32_t>(s[j][2 * half + 1])} << 32 | std::bit_cast<uint32_t>(s[j][2 * half]);
      ptx::store_shared(to + static_cast<uint32_t>(half * 8 * Config::kScorePitch + j * 32), two);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

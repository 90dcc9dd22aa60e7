// SPDX-License-Identifier: Apache-2.0
// The warps that fetch quantized rows. Codes land in the stage that they are for, in the place of channels that are
// decoded later, and become bf16 from there. Loads into registers would be waited for at every turn, and short loops
// are faster than long ones (measured, H200).
#pragma once

#include <bit>

#include "cuda/sm90/absorbed_fetch.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Quantized rows.
template <class Config>
class WgmmaDecode : WgmmaKeys<Config> {
  using Block = WgmmaBlock<Config>;
  using Keys = WgmmaKeys<Config>;
  using Keys::args_, Keys::unit, Keys::place_, Keys::next_, Keys::first_row;

 public:
  using Keys::next_unit;

  MLA_DEVICE WgmmaDecode(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Keys(args, share) {}

  MLA_DEVICE void compute() {
    Keys::begin_unit();
    MLA_UNROLL
    for (int pool = 0; pool < 2; ++pool) plain_pools_[pool] = is_plain(args_.pools[pool]);
    Keys::find_next();
    begin_rows();
    const uint32_t end = unit().steps.end;
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      Keys::wait_for_room(next_);
      Keys::store_valid(next_);
      if (plain_) [[likely]] {
        decode(next_);
      } else {
        decode_slowly(next_, Keys::pool());
        Keys::find_next();
        begin_rows();
      }
    }
    Block::leave_unit();
  }

 private:
  // A lane sends for and decodes 16 channels of every piece of two rows: first_row() + lane / 4, and eight below. Eight
  // lanes that load or store together then meet all banks.
  static constexpr int kPairs = Config::kLatentPieces / 2;        // of pieces
  static constexpr int kTurns = (Config::kLatentPieces + 3) / 4;  // of a lane's scales, four pieces each
  static constexpr int kArrivalPairs = Config::kArrivalPieces / 2;
  static_assert(kPairs == Config::kArrivals * kArrivalPairs && kPairs * 2 == Config::kLatentPieces && kTurns <= 2);
  static constexpr int kLaneCodes = Config::kPieceDims / 4;
  static_assert(kLaneCodes == kChunkBytes);
  static constexpr int kWarpKeys = Keys::kWarpKeys;

  MLA_DEVICE static int lane_row() { return ptx::lane() >> 2; }
  MLA_DEVICE static int lane_codes() { return (ptx::lane() & 3) * kLaneCodes; }

  /// Whether rows go the fast way: 16 bytes at a time, and every piece has one scale.
  MLA_DEVICE static bool is_plain(const cuda::KeyPool& pool) {
    const core::Cache& cache = pool.cache;
    return pool.aligned && cache.d_ckv % Config::kPieceDims == 0 &&
           cache.d_ckv >= Config::kLatentDims - Config::kPieceDims && pool.scale_shift >= 3 && are_words(cache) &&
           (cache.d_kpe == 0 || cache.d_kpe == Config::kTailDims) &&
           (cache.layout.rope_element_bytes == 2 || cache.d_ckv == Config::kLatentDims);
  }

  MLA_DEVICE static bool are_words(const core::Cache& cache) {
    const core::Plane& scales = cache.scales;
    return is_ue8m0(cache.layout.scale_kind) ||
           ((reinterpret_cast<uint64_t>(scales.base) | static_cast<uint64_t>(scales.stride_page) |
             static_cast<uint64_t>(scales.stride_token)) &
            (sizeof(float) - 1)) == 0;
  }

  /// Rows are found: loads their scales.
  MLA_DEVICE void begin_rows() {
    plain_ = Keys::in_second_pool() ? plain_pools_[1] : plain_pools_[0];
    if (!plain_) [[unlikely]]
      return;
    const cuda::KeyPool& pool = Keys::pool();
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::byte* scales = row_of(place_.scales, half);
      MLA_UNROLL
      for (int turn = 0; turn < kTurns; ++turn)
        scales_[half][turn] = load_scale(pool, scales, turn * 4 + (ptx::lane() & 3));
    }
  }

  MLA_DEVICE static const std::byte* row_of(const std::byte* of_lanes, int half) {
    return Block::of_lane(of_lanes, half * 8 + lane_row());
  }

  /// The scale of a piece, as its bits in the cache: nothing waits for it yet.
  MLA_DEVICE static uint32_t load_scale(const cuda::KeyPool& pool, const std::byte* scales, int piece) {
    const int group = piece * (Config::kPieceDims / kVector) >> pool.scale_shift;
    if (scales == nullptr || group >= pool.cache.num_scales) return 0;
    if (is_ue8m0(pool.cache.layout.scale_kind)) return static_cast<uint8_t>(scales[group]);
    return *as<uint32_t>(scales + group * 4);
  }
  MLA_DEVICE static float scale_of(const core::Cache& cache, uint32_t bits) {
    return is_ue8m0(cache.layout.scale_kind) ? ue8m0_to_f32(static_cast<uint8_t>(bits)) : std::bit_cast<float>(bits);
  }

  /// Whether all pieces are of codes, or all but the last.
  MLA_DEVICE static bool last_is_coded(const core::Cache& cache) { return cache.d_ckv == Config::kLatentDims; }
  MLA_DEVICE static bool has_coded_tail(const core::Cache& cache) {
    return cache.d_kpe > 0 && cache.layout.rope_element_bytes == 1;
  }

  /// Where a pair of pieces lands: in the place of a piece that is decoded when it is in registers. The last pair goes
  /// elsewhere if the rotary channels land there.
  MLA_DEVICE static ptx::SharedAddress place_of(ptx::SharedAddress stage, int pair, bool last_coded) {
    const int piece = pair + 1 == kPairs && !last_coded ? Config::kLatentPieces : kPairs + pair;
    return stage + static_cast<uint32_t>(piece * Config::kPieceBytes);
  }
  /// There, the lane's codes of one of the pieces.
  MLA_DEVICE static ptx::SharedAddress landed(ptx::SharedAddress place, int half, int piece) {
    const int row = first_row() + half * 8 + lane_row();
    return place + static_cast<uint32_t>(row * Config::kPieceRowBytes + half_chunk(row, piece) * kChunkBytes);
  }
  /// A chunk of a half of a 128-byte row. Neighbouring rows have theirs in different banks.
  MLA_DEVICE static int half_chunk(int row, int half) { return (ptx::lane() & 3) | ((half ^ row) & 1) << 2; }

  /// Sends for the rows found: codes to where they land, rotary channels that are bf16 already to where they belong.
  MLA_DEVICE void send(ptx::SharedAddress stage, const core::Cache& cache) const {
    const bool last_coded = last_is_coded(cache);
    const std::byte* rows[2];
    bool valid[2];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      rows[half] = row_of(place_.ckv, half);
      valid[half] = rows[half] != nullptr;
      rows[half] += lane_codes();
    }
    MLA_NO_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const ptx::SharedAddress place = place_of(stage, pair, last_coded);
      MLA_UNROLL
      for (int i = 0; i < 4; ++i)
        if (i < 2 || pair + 1 < kPairs || last_coded)
          ptx::cp_async_16(landed(place, i % 2, i / 2), rows[i % 2] + i / 2 * Config::kPieceDims, valid[i % 2],
                           ptx::evict_first());
      MLA_UNROLL
      for (const std::byte*& row : rows) row += 2 * Config::kPieceDims;
    }
    if (has_coded_tail(cache)) {
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const std::byte* const row = row_of(place_.kpe, half);
        ptx::cp_async_16(landed(place_of(stage, kPairs, true), half, 0), row + lane_codes(), row != nullptr,
                         ptx::evict_first());
      }
    } else if (cache.d_kpe > 0) {
      copy_rotary(stage + static_cast<uint32_t>(cache.d_ckv / Config::kPieceDims * Config::kPieceBytes));
    }
    ptx::cp_async_commit();
  }
  MLA_DEVICE void copy_rotary(ptx::SharedAddress piece) const {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_row();
      const std::byte* from = row_of(place_.kpe, half);
      MLA_UNROLL
      for (int i = 0; i < 2; ++i)
        ptx::cp_async_16(piece + Block::chunk_offset(first_row() + row, half_chunk(row, i)),
                         from + half_chunk(row, i) * kChunkBytes, from != nullptr, ptx::evict_first());
    }
  }

  /// Step n, whose rows are found; then those of the next one are.
  MLA_DEVICE void decode(uint32_t n) {
    const core::Cache& cache = Keys::pool().cache;
    const bool last_coded = last_is_coded(cache), coded_tail = has_coded_tail(cache);
    const float* const kpe_scale = cache.kpe_scale;
    const ptx::SharedAddress stage = Block::stage(n);
    send(stage, cache);
    float scales[2][kTurns];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) scales[half][turn] = scale_of(cache, scales_[half][turn]);
    Keys::find_next();
    begin_rows();
    ptx::cp_async_wait<0>();
    MLA_NO_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const ptx::SharedAddress from = place_of(stage, pair, last_coded);
      ptx::Vec4 codes[2][2];
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) codes[i / 2][i % 2] = ptx::load_shared<ptx::Vec4>(landed(from, i % 2, i / 2));
      ptx::sync_warp();  // where they were there is room now
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i >= 2 && pair + 1 == kPairs && !last_coded) continue;
        const float scale = kTurns == 1 || pair < 2 ? scales[i % 2][0] : scales[i % 2][kTurns - 1];
        store_piece(stage + static_cast<uint32_t>(pair * 2 * Config::kPieceBytes), i / 2, i % 2, codes[i / 2][i % 2],
                    ptx::shuffle(scale, (ptx::lane() & ~3) | (pair * 2 + i / 2) % 4));
      }
      if ((pair + 1) % kArrivalPairs == 0 && pair + 1 < kPairs) arrive(n, pair / kArrivalPairs);
    }
    if (coded_tail) {
      ptx::Vec4 codes[2];
      MLA_UNROLL
      for (int half = 0; half < 2; ++half)
        codes[half] = ptx::load_shared<ptx::Vec4>(landed(place_of(stage, kPairs, true), half, 0));
      ptx::sync_warp();  // where they were there is room now
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) store_piece(stage, Config::kLatentPieces, half, codes[half], *kpe_scale);
    }
    arrive(n, Config::kArrivals - 1);
  }

  /// The lane's channels of a piece.
  MLA_DEVICE static void store_piece(ptx::SharedAddress stage, int piece, int half, const ptx::Vec4& codes,
                                     float scale) {
    const ptx::SharedAddress to = stage + Block::chunk_offset(first_row() + lane_row(), lane_codes() / kVector);
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const ptx::Vec4 values = decode_codes(uint64_t{codes.x[2 * i + 1]} << 32 | codes.x[2 * i], scale);
      ptx::store_shared((to ^ static_cast<uint32_t>(i * kChunkBytes)) +
                            static_cast<uint32_t>(piece * Config::kPieceBytes + half * Config::kGroupRowsBytes),
                        values);
    }
  }

  /// The warp's rows' pieces of an arrival are there. Who multiplies fences: it has to, for rows that nobody decodes.
  MLA_DEVICE void arrive(uint32_t n, int arrival) const {
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::full(n, arrival));
  }

  /// Rows that begin anywhere.
  MLA_DEVICE void decode_slowly(uint32_t n, const cuda::KeyPool& pool) const {
    const core::Cache& cache = pool.cache;
    const int num_chunks = args_.d_qk / kVector, latent_chunks = cache.d_ckv / kVector;
    const bool coded = cache.layout.rope_element_bytes == 1;
    const float kpe_scale = coded && cache.kpe_scale != nullptr ? *cache.kpe_scale : 1.0F;
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      const std::byte* ckv = Block::of_lane(place_.ckv, key);
      const std::byte* kpe = Block::of_lane(place_.kpe, key);
      const std::byte* scales = Block::of_lane(place_.scales, key);
      MLA_NO_UNROLL
      for (int chunk = ptx::lane(); chunk < num_chunks; chunk += kWarpSize) {
        ptx::Vec4 values = {};
        if (ckv != nullptr) {
          const bool latent = chunk < latent_chunks;
          const int bytes = latent || coded ? 1 : 2;
          const Bits8 bits =
              load_bits8(latent ? ckv + chunk * kVector : kpe + (chunk - latent_chunks) * kVector * bytes, bytes);
          values = {bits.w[0], bits.w[1], bits.w[2], bits.w[3]};
          if (bytes == 1)
            values = decode_codes(uint64_t{bits.w[1]} << 32 | bits.w[0],
                                  latent ? scale_of_chunk(pool, scales, chunk) : kpe_scale);
        }
        ptx::store_shared(Block::stage(n) + Block::chunk_offset(first_row() + key, chunk), values);
      }
    }
    MLA_UNROLL
    for (int arrival = 0; arrival < Config::kArrivals; ++arrival) arrive(n, arrival);
  }
  MLA_DEVICE static float scale_of_chunk(const cuda::KeyPool& pool, const std::byte* scales, int chunk) {
    const int group = chunk >> pool.scale_shift;
    return is_ue8m0(pool.cache.layout.scale_kind) ? ue8m0_to_f32(static_cast<uint8_t>(scales[group]))
                                                  : load_f32_anywhere(scales + group * 4);
  }

  // Of the rows found last:
  bool plain_;                  // whether they go the fast way
  uint32_t scales_[2][kTurns];  // of pieces 4 turn + lane % 4
  bool plain_pools_[2];         // whether rows of a pool go the fast way
};

}  // namespace mla::MLA_CUDA_NAMESPACE

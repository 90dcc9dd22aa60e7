// SPDX-License-Identifier: Apache-2.0
// The warps that fetch quantized rows: codes go through registers, where they become bf16. What a warp decodes first in
// a step it has loaded before there is room for it, so that no load stands between a free stage and a full one.
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
    Keys::find_next();
    begin_rows();
    const uint32_t end = unit().steps.end;
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      Keys::wait_for_room(next_);
      Keys::store_valid(next_);
      const cuda::KeyPool& pool = Keys::pool();
      if ((there_ & kPlain) != 0) [[likely]]
        decode(next_, pool);
      else
        decode_slowly(next_, pool);
      Keys::find_next();
      begin_rows();
    }
    Block::leave_unit();
  }

 private:
  // A lane decodes 16 channels of every piece of two rows: first_row() + lane / 4, and eight below. Eight lanes that
  // store together then meet all banks.
  static constexpr int kTurnPieces = 4;  // whose codes wait in registers
  static constexpr int kTurns = Config::kLatentPieces / kTurnPieces;
  static_assert(kTurns * kTurnPieces == Config::kLatentPieces);
  static constexpr int kLaneCodes = Config::kPieceDims / 4;
  static_assert(kLaneCodes == kChunkBytes);
  static constexpr int kLineBytes = 128, kWarpKeys = Keys::kWarpKeys;
  static constexpr uint32_t kPlain = 1U << 31;

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

  /// Rows are found: loads their scales and the codes of the first turn.
  MLA_DEVICE void begin_rows() {
    const cuda::KeyPool& pool = Keys::pool();
    there_ = is_plain(pool) ? ptx::ballot(place_.ckv != nullptr) >> lane_row() | kPlain : 0;
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      rows_[half] = row_of(place_.ckv, half) + lane_codes();
      const std::byte* scales = row_of(place_.scales, half);
      MLA_UNROLL
      for (int turn = 0; turn < kTurns; ++turn)
        scales_[half][turn] = load_scale(pool, is_there(half), scales, turn * kTurnPieces + (ptx::lane() & 3));
    }
    MLA_UNROLL
    for (int piece = 0; piece < kTurnPieces; ++piece) load_piece(pool.cache, piece);
    if (kTurns > 1 && place_.ckv != nullptr && there_ != 0) prefetch(pool.cache);
  }

  MLA_DEVICE static const std::byte* row_of(const std::byte* of_lanes, int half) {
    return Block::of_lane(of_lanes, half * 8 + lane_row());
  }
  MLA_DEVICE bool is_there(int half) const { return (there_ >> (half * 8) & 1U) != 0; }

  /// Brings what the second turn will load, and the rotary channels, into the L2 cache. Lanes l and l + 16 have a row.
  MLA_DEVICE void prefetch(const core::Cache& cache) const {
    const int upper = ptx::lane() / kWarpKeys;
    ptx::prefetch_l2(place_.ckv + kTurnPieces * Config::kPieceDims + upper * kLineBytes);
    if (cache.d_kpe > 0) ptx::prefetch_l2(place_.kpe + upper * (cache.d_kpe * cache.layout.rope_element_bytes - 1));
  }

  /// The scale of a piece, as its bits in the cache: nothing waits for it yet.
  MLA_DEVICE static uint32_t load_scale(const cuda::KeyPool& pool, bool valid, const std::byte* scales, int piece) {
    const int group = piece * (Config::kPieceDims / kVector) >> pool.scale_shift;
    if (!valid || group >= pool.cache.num_scales) return 0;
    if (is_ue8m0(pool.cache.layout.scale_kind)) return static_cast<uint8_t>(scales[group]);
    return *as<uint32_t>(scales + group * 4);
  }
  MLA_DEVICE static float scale_of(const core::Cache& cache, uint32_t bits) {
    return is_ue8m0(cache.layout.scale_kind) ? ue8m0_to_f32(static_cast<uint8_t>(bits)) : std::bit_cast<float>(bits);
  }

  /// Whether a piece is of codes; at most the last is not.
  MLA_DEVICE static bool has_codes(const core::Cache& cache, int piece) {
    return piece + 1 < Config::kLatentPieces || cache.d_ckv == Config::kLatentDims;
  }

  MLA_DEVICE void load_piece(const core::Cache& cache, int piece) {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half)
      codes_[piece % kTurnPieces][half] = ptx::load_once_if(is_there(half) && has_codes(cache, piece),
                                                            as<ptx::Vec4>(rows_[half] + piece * Config::kPieceDims));
  }
  MLA_DEVICE void load_tail() {
    MLA_UNROLL
    for (int half = 0; half < 2; ++half)
      codes_[0][half] = ptx::load_once_if(is_there(half), as<ptx::Vec4>(row_of(place_.kpe, half) + lane_codes()));
  }

  /// Step n, whose first codes are loaded.
  MLA_DEVICE void decode(uint32_t n, const cuda::KeyPool& pool) {
    const core::Cache& cache = pool.cache;
    const bool has_tail = cache.d_kpe > 0, coded_tail = has_tail && cache.layout.rope_element_bytes == 1;
    const ptx::SharedAddress to =
        Block::stage(n) + Block::chunk_offset(first_row() + lane_row(), lane_codes() / kVector);
    float scales[2][kTurns];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) scales[half][turn] = scale_of(cache, scales_[half][turn]);
    MLA_UNROLL
    for (int piece = 0; piece < Config::kLatentPieces; ++piece) {
      if (piece + kTurnPieces == Config::kLatentPieces && has_tail && !coded_tail)
        copy_rotary(Block::stage(n) + static_cast<uint32_t>(cache.d_ckv / Config::kPieceDims * Config::kPieceBytes));
      if (has_codes(cache, piece)) {
        MLA_UNROLL
        for (int half = 0; half < 2; ++half)
          store_piece(to, piece, half,
                      ptx::shuffle(scales[half][piece / kTurnPieces], (ptx::lane() & ~3) | piece % kTurnPieces));
      }
      if (piece + kTurnPieces < Config::kLatentPieces)
        load_piece(cache, piece + kTurnPieces);
      else if (piece + kTurnPieces == Config::kLatentPieces && coded_tail)
        load_tail();
      if ((piece + 1) % Config::kArrivalPieces == 0 && piece / Config::kArrivalPieces + 1 < Config::kArrivals)
        arrive(n, piece / Config::kArrivalPieces);
    }
    if (coded_tail) {
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) store_piece(to, Config::kLatentPieces, half, *cache.kpe_scale);
    }
    arrive(n, Config::kArrivals - 1);
  }

  /// The lane's channels of a piece whose codes are loaded.
  MLA_DEVICE void store_piece(ptx::SharedAddress to, int piece, int half, float scale) const {
    const ptx::Vec4& codes = codes_[piece % kTurnPieces][half];
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const ptx::Vec4 values = decode_codes(uint64_t{codes.x[2 * i + 1]} << 32 | codes.x[2 * i], scale);
      ptx::store_shared((to ^ static_cast<uint32_t>(i * kChunkBytes)) +
                            static_cast<uint32_t>(piece * Config::kPieceBytes + half * Config::kGroupRowsBytes),
                        values);
    }
  }

  /// Sends for rotary channels that are bf16 already: eight lanes copy a row's.
  MLA_DEVICE void copy_rotary(ptx::SharedAddress piece) const {
    const int chunk = ptx::lane() & 7;
    MLA_UNROLL
    for (int four = 0; four < kWarpKeys / 4; ++four) {
      const int row = four * 4 + (ptx::lane() >> 3);
      const std::byte* from = Block::of_lane(place_.kpe, row);
      ptx::cp_async_16(piece + Block::chunk_offset(first_row() + row, chunk), from + chunk * kChunkBytes,
                       from != nullptr);
    }
  }

  /// The warp has written or sent for its rows' pieces of an arrival.
  MLA_DEVICE void arrive(uint32_t n, int arrival) const {
    ptx::mbarrier_arrive_after_copies(Block::full(n, arrival));
    ptx::fence_async_proxy();
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
  const std::byte* rows_[2];         // where the lane's codes begin
  uint32_t there_;                   // bits 0 and 8: whether they do; kPlain: they go the fast way
  uint32_t scales_[2][kTurns];       // of pieces 4 turn + lane % 4
  ptx::Vec4 codes_[kTurnPieces][2];  // of pieces to be decoded next
};

}  // namespace mla::MLA_CUDA_NAMESPACE

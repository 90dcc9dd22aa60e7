// SPDX-License-Identifier: Apache-2.0
// The warps that fetch quantized rows. Codes land in the stage that they are for, in the place of channels that are
// decoded later, and become bf16 from there, in the other block of the cluster as well if it has the same keys. Loads
// into registers would be waited for at every turn, and short loops are faster than long ones (measured, H200).
#pragma once

#include <algorithm>
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

  /// shares_keys: the other block of the cluster has the same segments, and decodes half of the keys.
  MLA_DEVICE WgmmaDecode(const cuda::AbsorbedArgs& args, const cuda::Share& share, bool shares_keys)
      : Keys(args, share) {
    if (!shares_keys) return;
    to_other_ = ptx::map_shared(Block::shared_, ptx::cluster_rank() ^ 1) - Block::shared_;
  }

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
      offer_room(next_);
      Keys::store_valid(next_);
      if (plain_) [[likely]] {
        decode(next_);
      } else {
        wait_for_other(next_);
        decode_slowly(next_, Keys::pool());
        Keys::find_next();
        begin_rows();
      }
    }
    Block::leave_unit();
  }

 private:
  // A lane sends for and decodes 16 channels of every piece of two rows, first_row() + lane / 4 and eight below: of
  // both halves of its warp's rows. Eight lanes that load or store together then meet all banks. Where two blocks of a
  // cluster share the keys, each has one of the halves, of which the other one gets a copy.
  static constexpr int kPairs = Config::kLatentPieces / 2;  // of pieces
  // A lane has the scale of one of four pieces.
  static constexpr int kFours = Config::kLatentPieces / 4;
  static_assert(Config::kArrivals == 1 && kFours * 4 == Config::kLatentPieces && kFours <= 2);
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

  /// The halves of its rows that a warp decodes.
  MLA_DEVICE int first_half() const { return to_other_ == 0 ? 0 : ptx::cluster_rank(); }
  MLA_DEVICE int num_halves() const { return to_other_ == 0 ? 2 : 1; }

  /// There is room for step n in this block, which the other one waits for.
  MLA_DEVICE void offer_room(uint32_t n) const {
    if (to_other_ != 0 && ptx::lane() == 0)
      ptx::mbarrier_arrive_in_cluster(Block::room_in_other(n, ptx::warp()) + to_other_);
  }
  /// There is room in the other one, too. So it has what was copied of step n - kStages, and codes may land there.
  MLA_DEVICE void wait_for_other(uint32_t n) const {
    if (to_other_ != 0) ptx::mbarrier_wait(Block::room_in_other(n, ptx::warp()), Block::parity(n));
  }

  /// Rows are found: loads their scales.
  MLA_DEVICE void begin_rows() {
    plain_ = Keys::in_second_pool() ? plain_pools_[1] : plain_pools_[0];
    if (!plain_) [[unlikely]]
      return;
    const cuda::KeyPool& pool = Keys::pool();
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (i == num_halves()) break;
      const std::byte* scales = row_of(place_.scales, first_half() + i);
      MLA_UNROLL
      for (int four = 0; four < kFours; ++four)
        scales_[i][four] = load_scale(pool, scales, four * 4 + (ptx::lane() & 3));
    }
  }

  MLA_DEVICE static const std::byte* row_of(const std::byte* of_lanes, int half) {
    return Block::of_lane(of_lanes, half * 8 + lane_row());
  }

  /// The scale of a piece, as its bits in the cache: nothing waits for it yet.
  MLA_DEVICE static uint32_t load_scale(const cuda::KeyPool& pool, const std::byte* scales, int piece) {
    if (scales == nullptr) return 0;
    // Rotary channels have none: any will do.
    const int group = std::min(piece * (Config::kPieceDims / kVector) >> pool.scale_shift, pool.cache.num_scales - 1);
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

  /// In the tile, of the lane's row in a half.
  MLA_DEVICE static int tile_row(int half) { return first_row() + half * 8 + lane_row(); }
  MLA_DEVICE static uint32_t latent_at(int half, int piece) {
    return Block::row_offset(tile_row(half), 0) + static_cast<uint32_t>(piece * Config::kGroupRowsBytes);
  }
  MLA_DEVICE static uint32_t tail_at(int half) { return Block::row_offset(tile_row(half), Config::kLatentPieces); }

  /// Where the lane's codes of a piece land: those of two pieces in the place of one that is decoded when they are in
  /// registers, and never of the last, where rotary channels may land.
  MLA_DEVICE static uint32_t landed_at(int half, int piece) {
    return latent_at(half, kPairs - 1 + piece / 2) + static_cast<uint32_t>(chunk_of_half(piece % 2) * kChunkBytes);
  }
  MLA_DEVICE static uint32_t landed_tail_at(int half) {
    return tail_at(half) + static_cast<uint32_t>(chunk_of_half(0) * kChunkBytes);
  }
  /// The lane's of a half of a 128-byte row. Neighbouring rows have theirs in different banks.
  MLA_DEVICE static int chunk_of_half(int half) { return (ptx::lane() & 3) | ((half ^ lane_row()) & 1) << 2; }

  /// Sends for the rows found: their rotary channels, of both halves, whoever decodes them. Those that are bf16 already
  /// go where they belong.
  MLA_DEVICE void send_tails(ptx::SharedAddress stage, const core::Cache& cache) const {
    if (cache.d_kpe == 0) return;
    const int piece = cache.d_ckv / Config::kPieceDims;
    const bool coded = has_coded_tail(cache);
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::byte* const from = row_of(place_.kpe, half);
      if (coded) {
        ptx::cp_async_16(stage + landed_tail_at(half), from + lane_codes(), from != nullptr, ptx::evict_first());
        continue;
      }
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int chunk = chunk_of_half(i);
        ptx::cp_async_16(stage + Block::chunk_offset(tile_row(half), piece * 8 + chunk), from + chunk * kChunkBytes,
                         from != nullptr, ptx::evict_first());
      }
    }
  }
  /// And the codes of the halves that it decodes.
  MLA_DEVICE void send_latent(ptx::SharedAddress stage, const core::Cache& cache) const {
    const bool last_coded = last_is_coded(cache);
    MLA_NO_UNROLL
    for (int i = 0; i < num_halves(); ++i) {
      const int half = first_half() + i;
      const std::byte* const from = row_of(place_.ckv, half);
      MLA_UNROLL
      for (int piece = 0; piece < Config::kLatentPieces; ++piece)
        if (piece + 1 < Config::kLatentPieces || last_coded)
          ptx::cp_async_16(stage + landed_at(half, piece), from + lane_codes() + piece * Config::kPieceDims,
                           from != nullptr, ptx::evict_first());
    }
  }

  /// Step n, whose rows are found; then those of the next one are.
  MLA_DEVICE void decode(uint32_t n) {
    const core::Cache& cache = Keys::pool().cache;
    send_tails(Block::stage(n), cache);
    wait_for_other(n);
    send_latent(Block::stage(n), cache);
    ptx::cp_async_commit();
    float scales[2][kFours];
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) MLA_UNROLL
    for (int four = 0; four < kFours; ++four) scales[i][four] = scale_of(cache, scales_[i][four]);
    Keys::find_next();
    begin_rows();
    ptx::cp_async_wait<0>();
    const ptx::SharedAddress stage = Block::stage(n);
    const bool last_coded = last_is_coded(cache);
    if (to_other_ == 0)
      decode_latent<2>(stage, scales, last_coded);
    else
      decode_latent<1>(stage, scales, last_coded);
    if (has_coded_tail(cache)) decode_tail(stage, *cache.kpe_scale);
    if (to_other_ == 0)
      arrive(n);
    else
      share_half(n, Config::kLatentPieces - (last_coded ? 0 : 1));
  }

  /// A lane decodes two pieces a turn, of both halves of its rows or of the one that its block decodes. Four pieces of
  /// one half at once are not faster, and spill.
  template <int kHalves>
  MLA_DEVICE void decode_latent(ptx::SharedAddress stage, const float (&scales)[2][kFours], bool last_coded) const {
    constexpr int kTurnPieces = 2, kTurns = Config::kLatentPieces / kTurnPieces;
    const int first = kHalves == 2 ? 0 : ptx::cluster_rank();
    MLA_NO_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first_piece = turn * kTurnPieces;
      ptx::Vec4 codes[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) MLA_UNROLL
      for (int i = 0; i < kHalves; ++i)
        codes[j][i] = ptx::load_shared<ptx::Vec4>(stage + landed_at(first + i, first_piece + j));
      ptx::sync_warp();  // where they were there is room now
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) {
        if (j + 1 == kTurnPieces && turn + 1 == kTurns && !last_coded) continue;
        MLA_UNROLL
        for (int i = 0; i < kHalves; ++i) {
          const float scale = first_piece < 4 ? scales[i][0] : scales[i][kFours - 1];
          store_piece(stage + latent_at(first + i, first_piece + j), codes[j][i],
                      ptx::shuffle(scale, (ptx::lane() & ~3) | ((first_piece + j) & 3)));
        }
      }
    }
  }
  /// Of both halves, as sent for.
  MLA_DEVICE static void decode_tail(ptx::SharedAddress stage, float scale) {
    ptx::Vec4 codes[2];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) codes[half] = ptx::load_shared<ptx::Vec4>(stage + landed_tail_at(half));
    ptx::sync_warp();  // where they were there is room now
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) store_piece(stage + tail_at(half), codes[half], scale);
  }

  /// The lane's channels of a piece; `row` is where its row there begins.
  MLA_DEVICE static void store_piece(ptx::SharedAddress row, const ptx::Vec4& codes, float scale) {
    const int chunk = (lane_codes() / kVector ^ lane_row()) & 7;
    MLA_UNROLL
    for (int i = 0; i < 2; ++i)
      ptx::store_shared(row + static_cast<uint32_t>((chunk ^ i) * kChunkBytes),
                        decode_codes(uint64_t{codes.x[2 * i + 1]} << 32 | codes.x[2 * i], scale));
  }

  /// The warp's rows are there. Who multiplies fences: it has to, for rows that nobody decodes.
  MLA_DEVICE void arrive(uint32_t n) const {
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::full(n, 0));
  }
  /// The half that the warp has decoded is there: the other block gets a copy, and this one waits for the other half.
  MLA_DEVICE void share_half(uint32_t n, int pieces) const {
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    const auto bytes = static_cast<uint32_t>(pieces * Config::kGroupRowsBytes);
    const ptx::SharedAddress half = Block::stage(n) + Block::row_offset(first_row() + first_half() * 8, 0);
    ptx::bulk_copy_in_cluster(half + to_other_, half, bytes, Block::full(n, 0) + to_other_);
    ptx::mbarrier_arrive_expect_bytes(Block::full(n, 0), bytes);
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
    arrive(n);
  }
  MLA_DEVICE static float scale_of_chunk(const cuda::KeyPool& pool, const std::byte* scales, int chunk) {
    const int group = chunk >> pool.scale_shift;
    return is_ue8m0(pool.cache.layout.scale_kind) ? ue8m0_to_f32(static_cast<uint8_t>(scales[group]))
                                                  : load_f32_anywhere(scales + group * 4);
  }

  ptx::SharedAddress to_other_ = 0;  // how far behind this block's the other one's shared memory is; 0: no keys shared
  // Of the rows found last:
  bool plain_;                  // whether they go the fast way
  uint32_t scales_[2][kFours];  // of pieces 4 i + lane % 4, in the halves that are decoded
  bool plain_pools_[2];         // whether rows of a pool go the fast way
};

}  // namespace mla::MLA_CUDA_NAMESPACE

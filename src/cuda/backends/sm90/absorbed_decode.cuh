// SPDX-License-Identifier: Apache-2.0
// The warps that fetch quantized rows. Codes land in the stage that they are for, in the place of channels that are
// decoded later, and become bf16 from there, in the other block of the cluster as well if it has the same keys. Loads
// into registers would be waited for at every turn. These warps bound the kernel, by latencies and by how much code
// they run through (measured, H200): conditions are few bits of a register, loops are short, and what is always so is
// known to the compiler.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/backends/sm90/absorbed_load.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Quantized rows. kShared: the other block of the cluster has the same segments, and decodes half of the keys.
template <class Config, bool kShared>
class DecodeRole : AbsorbedKeys<Config> {
  using Block = AbsorbedBlock<Config>;
  using Keys = AbsorbedKeys<Config>;
  using Keys::args_, Keys::unit, Keys::place_, Keys::next_, Keys::first_row;

 public:
  using Keys::next_unit;

  MLA_DEVICE DecodeRole(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Keys(args, share) {
    if constexpr (kShared) to_other_ = ptx::map_shared(Block::shared_, ptx::cluster_rank() ^ 1) - Block::shared_;
  }

  MLA_DEVICE void compute() {
    Keys::begin_unit();
    of_pools_[0] = Traits(args_.pools[0]);
    if (args_.num_pools() == 2) of_pools_[1] = Traits(args_.pools[1]);
    Keys::find_next();
    begin_rows();
    MLA_NO_UNROLL
    // NOLINTNEXTLINE(bugprone-infinite-loop): a base's member grows
    for (const uint32_t end = unit().steps.end; next_ < end; ++next_) {
      Keys::wait_for_room(next_);
      offer_room(next_);
      Keys::store_valid(next_);
      if (traits_.is_plain()) [[likely]] {
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
  static constexpr int kHalves = kShared ? 1 : 2;
  static constexpr int kPairs = Config::kLatentPieces / 2;  // of pieces
  // A lane has the scale of one of four pieces.
  static constexpr int kFours = Config::kLatentPieces / 4;
  static_assert(Config::kArrivals == 1 && kFours * 4 == Config::kLatentPieces && kFours <= 2);
  static constexpr int kLaneCodes = Config::kPieceDims / 4;
  static_assert(kLaneCodes == kChunkBytes);
  static constexpr int kWarpKeys = Keys::kWarpKeys;
  // Pieces are copied to the other block in two parts: the first is on its way while others are decoded.
  static constexpr int kPartPieces = Config::kLatentPieces / 2;

  MLA_DEVICE static int first_half() { return kShared ? ptx::cluster_rank() : 0; }
  MLA_DEVICE static int lane_row() { return ptx::lane() >> 2; }
  MLA_DEVICE static int lane_codes() { return (ptx::lane() & 3) * kLaneCodes; }

  /// How a pool's rows are fetched, in one register: constants that are chosen by an index are slow to load.
  class Traits {
   public:
    Traits() = default;
    MLA_DEVICE explicit Traits(const cuda::KeyPool& pool) {
      const core::Cache& cache = pool.cache;
      bits_ = (DecodeRole::is_plain(pool) ? kPlain : 0U) | (pool.ue8m0 ? kUe8m0 : 0U) |
              (cache.d_ckv == Config::kLatentDims ? kLastCoded : 0U) | (cache.d_kpe > 0 ? kTail : 0U) |
              (pool.quantized_kpe ? kCodedTail : 0U);
      MLA_UNROLL
      for (int four = 0; four < kFours; ++four) {
        // Rotary channels have no scale: any will do.
        const int piece = four * 4 + (ptx::lane() & 3);
        const int group = std::min(piece * (Config::kPieceDims / kVector) >> pool.scale_shift, cache.num_scales - 1);
        bits_ |= static_cast<uint32_t>(has_ue8m0() ? group : group * 4) << (8 + 8 * four);
      }
    }
    /// Whether rows go the fast way: 16 bytes at a time, and every piece has one scale.
    MLA_DEVICE bool is_plain() const { return (bits_ & kPlain) != 0; }
    MLA_DEVICE bool has_ue8m0() const { return (bits_ & kUe8m0) != 0; }
    /// Whether all pieces are of codes, or all but the last.
    MLA_DEVICE bool last_is_coded() const { return (bits_ & kLastCoded) != 0; }
    MLA_DEVICE bool has_tail() const { return (bits_ & kTail) != 0; }
    MLA_DEVICE bool has_coded_tail() const { return (bits_ & kCodedTail) != 0; }
    /// Of the scale of piece 4 four + lane % 4, in bytes behind a row's first one.
    MLA_DEVICE uint32_t scale_offset(int four) const { return bits_ >> (8 + 8 * four) & 0xFFU; }

   private:
    static constexpr uint32_t kPlain = 1, kUe8m0 = 2, kLastCoded = 4, kTail = 8, kCodedTail = 16;
    uint32_t bits_;
  };

  MLA_DEVICE static bool is_plain(const cuda::KeyPool& pool) {
    const core::Cache& cache = pool.cache;
    return pool.common_e4m3 && pool.aligned && cache.d_ckv % Config::kPieceDims == 0 &&
           cache.d_ckv >= Config::kLatentDims - Config::kPieceDims && pool.scale_shift >= 3 && are_words(pool) &&
           (cache.d_kpe == 0 || cache.d_kpe == Config::kRopeDims) &&
           (!pool.quantized_kpe || cache.d_ckv == Config::kLatentDims);
  }

  MLA_DEVICE static bool are_words(const cuda::KeyPool& pool) {
    const core::Plane& scales = pool.cache.scales;
    return pool.ue8m0 || ((reinterpret_cast<uint64_t>(scales.base) | static_cast<uint64_t>(scales.stride_page) |
                           static_cast<uint64_t>(scales.stride_token)) &
                          (sizeof(float) - 1)) == 0;
  }

  /// There is room for step n in this block, which the other one waits for.
  MLA_DEVICE void offer_room(uint32_t n) const {
    if (kShared && ptx::lane() == 0) ptx::mbarrier_arrive_in_cluster(Block::room_in_other(n, ptx::warp()) + to_other_);
  }
  /// There is room in the other one, too. So it has what was copied of step n - kStages, and codes may land there.
  MLA_DEVICE void wait_for_other(uint32_t n) const {
    if constexpr (kShared) ptx::mbarrier_wait(Block::room_in_other(n, ptx::warp()), Block::parity(n));
  }

  /// Rows are found: loads their scales.
  MLA_DEVICE void begin_rows() {
    traits_ = Keys::in_second_pool() ? of_pools_[1] : of_pools_[0];
    if (!traits_.is_plain()) [[unlikely]]
      return;
    MLA_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const std::byte* scales = row_of(place_.scales, first_half() + i);
      MLA_UNROLL
      for (int four = 0; four < kFours; ++four) scales_[i][four] = load_scale_bits(scales, traits_, four);
    }
  }

  MLA_DEVICE static const std::byte* row_of(const std::byte* of_lanes, int half) {
    return Block::of_lane(of_lanes, half * 8 + lane_row());
  }

  /// A scale as its bits in the cache: nothing waits for it yet.
  MLA_DEVICE static uint32_t load_scale_bits(const std::byte* scales, Traits traits, int four) {
    if (scales == nullptr) return 0;
    const std::byte* const from = scales + traits.scale_offset(four);
    if (traits.has_ue8m0()) return static_cast<uint8_t>(*from);
    return *as<uint32_t>(from);
  }
  MLA_DEVICE static float scale_of(Traits traits, uint32_t bits) {
    return traits.has_ue8m0() ? ue8m0_to_f32(static_cast<uint8_t>(bits)) : std::bit_cast<float>(bits);
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
  MLA_DEVICE void send_tails(ptx::SharedAddress stage, Traits traits) const {
    if (!traits.has_tail()) return;
    const int chunk = chunk_of_half(0);
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::byte* const row = row_of(place_.kpe, half);
      if (traits.has_coded_tail()) {
        ptx::cp_async_16(stage + landed_tail_at(half), row + lane_codes(), row != nullptr, ptx::evict_first());
        continue;
      }
      const ptx::SharedAddress to =
          stage + (traits.last_is_coded() ? tail_at(half) : latent_at(half, Config::kLatentPieces - 1));
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int of_row = chunk ^ i * 4;
        ptx::cp_async_16(to + static_cast<uint32_t>((of_row ^ lane_row()) * kChunkBytes), row + of_row * kChunkBytes,
                         row != nullptr, ptx::evict_first());
      }
    }
  }
  /// And the codes of the halves that it decodes.
  MLA_DEVICE void send_latent(ptx::SharedAddress stage, Traits traits) const {
    MLA_NO_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const int half = first_half() + i;
      const std::byte* from = row_of(place_.ckv, half);
      const bool valid = from != nullptr;
      from += lane_codes();
      MLA_UNROLL
      for (int piece = 0; piece < Config::kLatentPieces; ++piece)
        if (piece + 1 < Config::kLatentPieces || traits.last_is_coded())
          ptx::cp_async_16(stage + landed_at(half, piece), from + piece * Config::kPieceDims, valid,
                           ptx::evict_first());
    }
  }

  /// Step n, whose rows are found; then those of the next one are.
  MLA_DEVICE void decode(uint32_t n) {
    const ptx::SharedAddress stage = Block::stage(n);
    const Traits traits = traits_;
    const float* const tail_scale = Keys::pool().cache.kpe_scale;
    send_tails(stage, traits);
    wait_for_other(n);
    send_latent(stage, traits);
    ptx::cp_async_commit();
    float scales[kHalves][kFours];
    MLA_UNROLL
    for (int i = 0; i < kHalves; ++i) MLA_UNROLL
    for (int four = 0; four < kFours; ++four) scales[i][four] = scale_of(traits, scales_[i][four]);
    Keys::find_next();
    begin_rows();
    ptx::cp_async_wait<0>();
    decode_latent(n, scales, traits.last_is_coded());
    // Before latent channels this would cost where it is not needed: 10 % without shared keys.
    if (traits.has_coded_tail()) decode_tail(stage, *tail_scale);
    arrive(n, traits.last_is_coded());
  }

  /// A lane decodes two pieces a turn, of both halves of its rows or of the one that its block decodes. Four pieces of
  /// one half at once are not faster, and spill; nor are codes loaded a turn ahead.
  MLA_DEVICE void decode_latent(uint32_t n, const float (&scales)[kHalves][kFours], bool last_is_coded) const {
    constexpr int kTurnPieces = 2, kTurns = Config::kLatentPieces / kTurnPieces;
    const ptx::SharedAddress stage = Block::stage(n);
    const int first = first_half();
    MLA_NO_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first_piece = turn * kTurnPieces, end_piece = first_piece + kTurnPieces;
      ptx::Vec4 codes[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) MLA_UNROLL
      for (int i = 0; i < kHalves; ++i)
        codes[j][i] = ptx::load_shared<ptx::Vec4>(stage + landed_at(first + i, first_piece + j));
      // All shuffles before any store, behind which they would wait.
      float of_piece[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) MLA_UNROLL
      for (int i = 0; i < kHalves; ++i)
        of_piece[j][i] = ptx::shuffle(first_piece < 4 ? scales[i][0] : scales[i][kFours - 1],
                                      (ptx::lane() & ~3) | ((first_piece + j) & 3));
      ptx::sync_warp();  // where they were there is room now
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) {
        if (j + 1 == kTurnPieces && turn + 1 == kTurns && !last_is_coded) continue;
        MLA_UNROLL
        for (int i = 0; i < kHalves; ++i)
          store_piece(stage + latent_at(first + i, first_piece + j), codes[j][i], of_piece[j][i]);
      }
      if (kShared && end_piece % kPartPieces == 0)
        copy_to_other(n, end_piece - kPartPieces, std::min(end_piece, coded_pieces(last_is_coded)));
    }
  }
  MLA_DEVICE static int coded_pieces(bool last_is_coded) { return Config::kLatentPieces - (last_is_coded ? 0 : 1); }

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

  /// The other block gets a copy of decoded pieces begin ... end - 1.
  MLA_DEVICE void copy_to_other(uint32_t n, int begin, int end) const {
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    const ptx::SharedAddress from = Block::stage(n) + Block::row_offset(first_row() + first_half() * 8, 0) +
                                    static_cast<uint32_t>(begin * Config::kGroupRowsBytes);
    ptx::bulk_copy_in_cluster(from + to_other_, from, static_cast<uint32_t>((end - begin) * Config::kGroupRowsBytes),
                              Block::kv_full(n, 0) + to_other_);
  }

  /// The warp's rows are there; where they are shared, the other block's half of them is waited for. Who multiplies
  /// fences: it has to, for rows that nobody decodes.
  MLA_DEVICE void arrive(uint32_t n, bool last_is_coded) const {
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    if constexpr (kShared)
      ptx::mbarrier_arrive_expect_bytes(Block::kv_full(n, 0),
                                        static_cast<uint32_t>(coded_pieces(last_is_coded) * Config::kGroupRowsBytes));
    else
      ptx::mbarrier_arrive(Block::kv_full(n, 0));
  }

  /// Rows that begin anywhere.
  MLA_DEVICE void decode_slowly(uint32_t n, const cuda::KeyPool& pool) const {
    const core::Cache& cache = pool.cache;
    const int num_chunks = args_.d_qk / kVector, latent_chunks = cache.d_ckv / kVector;
    const float kpe_scale = pool.quantized_kpe ? *cache.kpe_scale : 1.0F;
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
          const Bits8 bits = latent ? load_elements8(ckv, cache.ckv_dtype, chunk * kVector)
                                    : load_elements8(kpe, cache.kpe_dtype, (chunk - latent_chunks) * kVector);
          values = {bits.w[0], bits.w[1], bits.w[2], bits.w[3]};
          if (latent || pool.quantized_kpe)
            values =
                decode_codes(uint64_t{bits.w[1]} << 32 | bits.w[0],
                             latent ? load_scale(scales, cache.scale_type, chunk >> pool.scale_shift, cache.outer_scale)
                                    : kpe_scale);
        }
        ptx::store_shared(Block::stage(n) + Block::chunk_offset(first_row() + key, chunk), values);
      }
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_full(n, 0));
  }
  ptx::SharedAddress to_other_ = 0;  // how far behind this block's the shared memory of the other one is
  Traits of_pools_[2];
  // Of the rows found last:
  Traits traits_;
  uint32_t scales_[kHalves][kFours];  // of pieces 4 i + lane % 4, in the halves that are decoded
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

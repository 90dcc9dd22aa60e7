// SPDX-License-Identifier: Apache-2.0
// This is the load role for quantized caches. Its warps copy e4m3 rows into the stage that they are for, to the place
// of channels that are decoded later, and decode them to bf16 from there; if the other block of the cluster has the
// same keys, it gets a copy. Loads into registers would make the warp wait at every turn. These warps bound the kernel
// by latencies and by the amount of code that they run through (H200, 2026-11-22;
// docs/notebook/2026-11-22-sm90-quantized.md). So conditions are a few bits of one register, loops are short, and what
// never changes is known to the compiler.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/backends/sm90/absorbed_load.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Loads and decodes quantized rows. kShared says that the other block of the cluster has the same segments, so that
/// each of the two decodes half of the keys.
template <class Config, bool kShared>
class DecodeRole : LoadRoleBase<Config> {
  using Block = AbsorbedBlock<Config>;
  using Base = LoadRoleBase<Config>;
  using Base::args_, Base::unit, Base::place_, Base::next_, Base::first_row;

 public:
  using Base::next_unit;

  MLA_DEVICE DecodeRole(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Base(args, share) {
    if constexpr (kShared) to_other_ = ptx::map_shared(Block::shared_, ptx::cluster_rank() ^ 1) - Block::shared_;
  }

  MLA_DEVICE void compute() {
    Base::begin_unit();
    of_pools_[0] = Traits(args_.pools[0]);
    if (args_.num_pools() == 2) of_pools_[1] = Traits(args_.pools[1]);
    Base::find_next();
    begin_rows();
    MLA_NO_UNROLL
    // NOLINTNEXTLINE(bugprone-infinite-loop): a base's member grows
    for (const uint32_t end = unit().steps.end; next_ < end; ++next_) {
      Base::wait_for_room(next_);
      offer_room(next_);
      Base::store_valid(next_);
      if (traits_.is_fast()) [[likely]] {
        decode(next_);
      } else {
        wait_for_other(next_);
        decode_slowly(next_, Base::pool());
        Base::find_next();
        begin_rows();
      }
    }
    Block::leave_unit();
  }

 private:
  // A lane copies and decodes 16 channels of every piece of two rows, first_row() + lane / 4 and the row eight below:
  // one in each half of its warp's rows. Eight lanes that load or store together then use all banks. Where two blocks
  // of a cluster share the keys, each decodes one of the halves and copies it to the other.
  static constexpr int kHalves = kShared ? 1 : 2, kHalfRows = Base::kWarpKeys / 2;
  static constexpr int kPiecePairs = Config::kLatentPieces / 2;
  // Scale s of a lane is that of piece 4 s + lane % 4.
  static constexpr int kLaneScales = Config::kLatentPieces / 4;
  static_assert(Config::kArrivals == 1 && kLaneScales * 4 == Config::kLatentPieces && kLaneScales <= 2);
  static constexpr int kLaneChannels = Config::kPieceDims / 4;
  static_assert(kLaneChannels == kChunkBytes);
  static constexpr int kWarpKeys = Base::kWarpKeys;
  // The other block gets a half's latent pieces in two copies, the first of which is on its way while the other pieces
  // are decoded: 355 us, against 366 with one copy, 361 with copies of 6 and 2 or of 4, 2 and 2 pieces, and 366 with
  // four copies (fp8_ds_mla, 128 heads, batch 64, kv 8k; H200, 2026-11-22).
  static constexpr int kCopyPieces = Config::kLatentPieces / 2;

  /// Returns the first of the halves that this block decodes.
  MLA_DEVICE static int first_half() { return kShared ? ptx::cluster_rank() : 0; }
  MLA_DEVICE static int lane_row() { return ptx::lane() >> 2; }
  /// Returns the lane's first channel in a piece, which is also its first byte in an e4m3 row of the piece.
  MLA_DEVICE static int lane_channel() { return (ptx::lane() & 3) * kLaneChannels; }

  /// Says what a pool's rows are like, in bits of one register, because constants that are chosen by an index are slow
  /// to load.
  class Traits {
   public:
    Traits() = default;
    MLA_DEVICE explicit Traits(const cuda::KeyPool& pool) {
      const core::Cache& cache = pool.cache;
      bits_ = (DecodeRole::is_fast(pool) ? kFast : 0U) | (pool.ue8m0 ? kUe8m0 : 0U) |
              (cache.d_ckv == Config::kLatentDims ? kLastE4m3 : 0U) | (cache.d_kpe > 0 ? kRope : 0U) |
              (pool.quantized_kpe ? kE4m3Rope : 0U);
      MLA_UNROLL
      for (int s = 0; s < kLaneScales; ++s) {
        // Rotary channels have no scale, so that any group will do for their piece.
        const int piece = s * 4 + (ptx::lane() & 3);
        const int group = std::min(piece * (Config::kPieceDims / kVector) >> pool.scale_shift, cache.num_scales - 1);
        bits_ |= static_cast<uint32_t>(has_ue8m0() ? group : group * 4) << (8 + 8 * s);
      }
    }
    /// Returns whether rows can take the fast path: they are copied 16 bytes at a time, and every piece has one scale.
    MLA_DEVICE bool is_fast() const { return (bits_ & kFast) != 0; }
    MLA_DEVICE bool has_ue8m0() const { return (bits_ & kUe8m0) != 0; }
    /// Returns whether all latent pieces are e4m3. Otherwise all but the last are, in whose place the rotary channels
    /// lie.
    MLA_DEVICE bool last_is_e4m3() const { return (bits_ & kLastE4m3) != 0; }
    MLA_DEVICE bool has_rope() const { return (bits_ & kRope) != 0; }
    MLA_DEVICE bool has_e4m3_rope() const { return (bits_ & kE4m3Rope) != 0; }
    /// Returns where scale s of the lane lies, in bytes from a row's first scale.
    MLA_DEVICE uint32_t scale_offset(int s) const { return bits_ >> (8 + 8 * s) & 0xFFU; }

   private:
    // bits_ has these bits, and from bit 8 on a byte for each scale_offset().
    static constexpr uint32_t kFast = 1, kUe8m0 = 2, kLastE4m3 = 4, kRope = 8, kE4m3Rope = 16;
    uint32_t bits_;
  };

  /// Returns whether a pool's rows can take the fast path.
  MLA_DEVICE static bool is_fast(const cuda::KeyPool& pool) {
    const core::Cache& cache = pool.cache;
    return pool.common_e4m3 && pool.aligned && cache.d_ckv % Config::kPieceDims == 0 &&
           cache.d_ckv >= Config::kLatentDims - Config::kPieceDims && pool.scale_shift >= 3 && has_whole_scales(pool) &&
           (cache.d_kpe == 0 || cache.d_kpe == Config::kRopeDims) &&
           (!pool.quantized_kpe || cache.d_ckv == Config::kLatentDims);
  }

  /// Returns whether every scale can be loaded at once: scales of f32 begin at multiples of 4 bytes.
  MLA_DEVICE static bool has_whole_scales(const cuda::KeyPool& pool) {
    const core::Plane& scales = pool.cache.scales;
    return pool.ue8m0 || ((reinterpret_cast<uint64_t>(scales.base) | static_cast<uint64_t>(scales.stride_page) |
                           static_cast<uint64_t>(scales.stride_token)) &
                          (sizeof(float) - 1)) == 0;
  }

  /// Tells the other block, which waits for it, that there is room for step n in this one.
  MLA_DEVICE void offer_room(uint32_t n) const {
    if (kShared && ptx::lane() == 0) ptx::mbarrier_arrive_in_cluster(Block::room_in_other(n, ptx::warp()) + to_other_);
  }
  /// Waits until there is room for step n in the other block as well. That block then has what was copied to it of step
  /// n - kStages, so that e4m3 rows may land where the copy was read.
  MLA_DEVICE void wait_for_other(uint32_t n) const {
    if constexpr (kShared) ptx::mbarrier_wait(Block::room_in_other(n, ptx::warp()), Block::parity(n));
  }

  /// Loads the scales of the rows found last.
  MLA_DEVICE void begin_rows() {
    traits_ = Base::in_second_pool() ? of_pools_[1] : of_pools_[0];
    if (!traits_.is_fast()) [[unlikely]]
      return;
    MLA_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const std::byte* scales = row_of(place_.scales, first_half() + i);
      MLA_UNROLL
      for (int s = 0; s < kLaneScales; ++s) scales_[i][s] = load_scale_bits(scales, traits_, s);
    }
  }

  /// Returns the pointer to the lane's row in a half, where lane r of the warp has that of row r.
  MLA_DEVICE static const std::byte* row_of(const std::byte* of_lanes, int half) {
    return Block::shuffle_pointer(of_lanes, half * kHalfRows + lane_row());
  }

  /// Loads scale s of the lane as its bits in the cache, so that nothing waits for it yet.
  MLA_DEVICE static uint32_t load_scale_bits(const std::byte* scales, Traits traits, int s) {
    if (scales == nullptr) return 0;
    const std::byte* const from = scales + traits.scale_offset(s);
    if (traits.has_ue8m0()) return static_cast<uint8_t>(*from);
    return *as<uint32_t>(from);
  }
  MLA_DEVICE static float scale_of(Traits traits, uint32_t bits) {
    return traits.has_ue8m0() ? ue8m0_to_f32(static_cast<uint8_t>(bits)) : std::bit_cast<float>(bits);
  }

  /// Returns the row of the tile that is the lane's in a half.
  MLA_DEVICE static int tile_row(int half) { return first_row() + half * kHalfRows + lane_row(); }
  /// Returns where the bf16 channels of the lane's row in a half begin in a latent piece, and in the rotary one.
  MLA_DEVICE static uint32_t latent_at(int half, int piece) {
    return Block::row_offset(tile_row(half), 0) + static_cast<uint32_t>(piece * Config::kAtomBytes);
  }
  MLA_DEVICE static uint32_t rope_at(int half) { return Block::row_offset(tile_row(half), Config::kLatentPieces); }

  /// Returns where the lane's e4m3 channels of a piece land. Two pieces land in the place of one that is decoded when
  /// they are in registers already. None lands in the last piece, where rotary channels may land.
  MLA_DEVICE static uint32_t landed_at(int half, int piece) {
    return latent_at(half, kPiecePairs - 1 + piece / 2) + static_cast<uint32_t>(chunk_of_half(piece % 2) * kChunkBytes);
  }
  /// Returns where the lane's e4m3 rotary channels land.
  MLA_DEVICE static uint32_t landed_rope_at(int half) {
    return rope_at(half) + static_cast<uint32_t>(chunk_of_half(0) * kChunkBytes);
  }
  /// Returns which of the eight chunks of a 128-byte row is the lane's in a half of that row. Neighbouring rows have
  /// theirs in different banks.
  MLA_DEVICE static int chunk_of_half(int half) { return (ptx::lane() & 3) | ((half ^ lane_row()) & 1) << 2; }

  /// Issues the rotary channels of the rows found last, those of both halves whichever block decodes them. Channels
  /// that are bf16 already go to their places.
  MLA_DEVICE void issue_rope(ptx::SharedAddress stage, Traits traits) const {
    if (!traits.has_rope()) return;
    const int chunk = chunk_of_half(0);
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::byte* const row = row_of(place_.kpe, half);
      if (traits.has_e4m3_rope()) {
        ptx::cp_async_16(stage + landed_rope_at(half), row + lane_channel(), row != nullptr, ptx::evict_first());
        continue;
      }
      const ptx::SharedAddress to =
          stage + (traits.last_is_e4m3() ? rope_at(half) : latent_at(half, Config::kLatentPieces - 1));
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int of_row = chunk ^ i * 4;
        ptx::cp_async_16(to + static_cast<uint32_t>((of_row ^ lane_row()) * kChunkBytes), row + of_row * kChunkBytes,
                         row != nullptr, ptx::evict_first());
      }
    }
  }
  /// Issues the e4m3 latent channels of the halves that this block decodes.
  MLA_DEVICE void issue_latents(ptx::SharedAddress stage, Traits traits) const {
    MLA_NO_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const int half = first_half() + i;
      const std::byte* from = row_of(place_.ckv, half);
      const bool valid = from != nullptr;
      from += lane_channel();
      MLA_UNROLL
      for (int piece = 0; piece < Config::kLatentPieces; ++piece)
        if (piece + 1 < Config::kLatentPieces || traits.last_is_e4m3())
          ptx::cp_async_16(stage + landed_at(half, piece), from + piece * Config::kPieceDims, valid,
                           ptx::evict_first());
    }
  }

  /// Loads and decodes step n, whose rows are found, and meanwhile finds the rows of the next step. Rotary channels are
  /// issued before the wait for the other block: 383 instead of 395 us (fp8_ds_mla, 128 heads, batch 64, kv 8k; H200,
  /// 2026-11-22).
  MLA_DEVICE void decode(uint32_t n) {
    const ptx::SharedAddress stage = Block::stage(n);
    const Traits traits = traits_;
    const float* const rope_scale = Base::pool().cache.kpe_scale;
    issue_rope(stage, traits);
    wait_for_other(n);
    issue_latents(stage, traits);
    ptx::cp_async_commit();
    float scales[kHalves][kLaneScales];
    MLA_UNROLL
    for (int i = 0; i < kHalves; ++i) MLA_UNROLL
    for (int s = 0; s < kLaneScales; ++s) scales[i][s] = scale_of(traits, scales_[i][s]);
    Base::find_next();
    begin_rows();
    ptx::cp_async_wait<0>();
    decode_latents(n, scales, traits.last_is_e4m3());
    // Decoding rotary channels before the latent ones would slow caches down whose rotary channels are bf16: 230
    // instead of 207.5 us (fp8_ds_mla, 64 heads, batch 64, kv 8k; H200, 2026-11-22).
    if (traits.has_e4m3_rope()) decode_rope(stage, *rope_scale);
    arrive(n, traits.last_is_e4m3());
  }

  /// Decodes the latent channels of step n. A lane decodes two pieces in a turn, of both halves of its warp's rows or
  /// of the one that its block decodes: 466 instead of 485 us without a loop. Four pieces of one half in a turn spill
  /// (405 instead of 383 us), and e4m3 channels loaded a turn ahead took 421 instead of 361 us (fp8_ds_mla, 128 heads,
  /// batch 64, kv 8k; each pair of one kernel; H200, 2026-11-22).
  MLA_DEVICE void decode_latents(uint32_t n, const float (&scales)[kHalves][kLaneScales], bool last_is_e4m3) const {
    constexpr int kTurnPieces = 2, kTurns = Config::kLatentPieces / kTurnPieces;
    const ptx::SharedAddress stage = Block::stage(n);
    const int first = first_half();
    MLA_NO_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first_piece = turn * kTurnPieces, end_piece = first_piece + kTurnPieces;
      ptx::Vec4 e4m3[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) MLA_UNROLL
      for (int i = 0; i < kHalves; ++i)
        e4m3[j][i] = ptx::load_shared<ptx::Vec4>(stage + landed_at(first + i, first_piece + j));
      // All shuffles stand before any store, because they would wait for it otherwise: 366 instead of 377 us (same
      // shape and day).
      float of_piece[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) MLA_UNROLL
      for (int i = 0; i < kHalves; ++i)
        of_piece[j][i] = ptx::shuffle(first_piece < 4 ? scales[i][0] : scales[i][kLaneScales - 1],
                                      (ptx::lane() & ~3) | ((first_piece + j) & 3));
      ptx::sync_warp();  // all lanes have their channels in registers, so that their places may be overwritten
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) {
        if (j + 1 == kTurnPieces && turn + 1 == kTurns && !last_is_e4m3) continue;
        MLA_UNROLL
        for (int i = 0; i < kHalves; ++i)
          store_piece(stage + latent_at(first + i, first_piece + j), e4m3[j][i], of_piece[j][i]);
      }
      if (kShared && end_piece % kCopyPieces == 0)
        copy_to_other(n, end_piece - kCopyPieces, std::min(end_piece, e4m3_pieces(last_is_e4m3)));
    }
  }
  MLA_DEVICE static int e4m3_pieces(bool last_is_e4m3) { return Config::kLatentPieces - (last_is_e4m3 ? 0 : 1); }

  /// Decodes the e4m3 rotary channels of both halves.
  MLA_DEVICE static void decode_rope(ptx::SharedAddress stage, float scale) {
    ptx::Vec4 e4m3[2];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) e4m3[half] = ptx::load_shared<ptx::Vec4>(stage + landed_rope_at(half));
    ptx::sync_warp();  // all lanes have their channels in registers, so that their places may be overwritten
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) store_piece(stage + rope_at(half), e4m3[half], scale);
  }

  /// Decodes the lane's 16 channels of a piece and stores them in the piece's row that begins at `row`.
  MLA_DEVICE static void store_piece(ptx::SharedAddress row, const ptx::Vec4& e4m3, float scale) {
    const int chunk = (lane_channel() / kVector ^ lane_row()) & 7;
    MLA_UNROLL
    for (int i = 0; i < 2; ++i)
      ptx::store_shared(row + static_cast<uint32_t>((chunk ^ i) * kChunkBytes),
                        e4m3_to_bf16(uint64_t{e4m3.x[2 * i + 1]} << 32 | e4m3.x[2 * i], scale));
  }

  /// Copies decoded pieces begin ... end - 1 of this block's half to the other block.
  MLA_DEVICE void copy_to_other(uint32_t n, int begin, int end) const {
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    const ptx::SharedAddress from = Block::stage(n) + Block::row_offset(first_row() + first_half() * kHalfRows, 0) +
                                    static_cast<uint32_t>(begin * Config::kAtomBytes);
    ptx::bulk_copy_in_cluster(from + to_other_, from, static_cast<uint32_t>((end - begin) * Config::kAtomBytes),
                              Block::kv_full(n, 0) + to_other_);
  }

  /// Arrives for the warp's rows of step n. Where keys are shared, kv_full also expects the bytes that the other block
  /// copies here. The fence before the products stands in the score role, which needs it for rows that are not decoded
  /// anyway.
  MLA_DEVICE void arrive(uint32_t n, bool last_is_e4m3) const {
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    if constexpr (kShared)
      ptx::mbarrier_arrive_expect_bytes(Block::kv_full(n, 0),
                                        static_cast<uint32_t>(e4m3_pieces(last_is_e4m3) * Config::kAtomBytes));
    else
      ptx::mbarrier_arrive(Block::kv_full(n, 0));
  }

  /// Loads and decodes rows of any alignment and of any e4m3 cache, eight channels at a time.
  MLA_DEVICE void decode_slowly(uint32_t n, const cuda::KeyPool& pool) const {
    const core::Cache& cache = pool.cache;
    const int num_chunks = args_.d_qk / kVector, latent_chunks = cache.d_ckv / kVector;
    const float kpe_scale = pool.quantized_kpe ? *cache.kpe_scale : 1.0F;
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      const std::byte* ckv = Block::shuffle_pointer(place_.ckv, key);
      const std::byte* kpe = Block::shuffle_pointer(place_.kpe, key);
      const std::byte* scales = Block::shuffle_pointer(place_.scales, key);
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
                e4m3_to_bf16(uint64_t{bits.w[1]} << 32 | bits.w[0],
                             latent ? load_scale(scales, cache.scale_type, chunk >> pool.scale_shift, cache.outer_scale)
                                    : kpe_scale);
        }
        ptx::store_shared(Block::stage(n) + Block::chunk_offset(first_row() + key, chunk), values);
      }
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_full(n, 0));
  }

  ptx::SharedAddress to_other_ = 0;  // from this block's shared memory to the other block's, in bytes
  Traits of_pools_[2];
  // These describe the rows found last:
  Traits traits_;
  uint32_t scales_[kHalves][kLaneScales];  // bits of their scales, in the halves that are decoded here
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

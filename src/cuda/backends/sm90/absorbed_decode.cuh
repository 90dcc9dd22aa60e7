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
class DecodeRole : TileLoadRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Base = TileLoadRole<Config>;
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
      switch (traits_.decoding()) {
        [[likely]] case kPieceScales : decode<kPieceScales>(next_);
        break;
        case kHalfPieceScales: decode<kHalfPieceScales>(next_); break;
        case kE2m1: decode<kE2m1>(next_); break;
        case kE2m1HalfPieceScales: decode<kE2m1HalfPieceScales>(next_); break;
        case kSlowly:
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
  // Scale s of a lane is that of piece 4 s + lane % 4, or are those of that piece, a byte for 16 or 32 channels.
  static constexpr int kLaneScales = Config::kLatentPieces / 4;
  static_assert(Config::kArrivals == 1 && kLaneScales * 4 == Config::kLatentPieces && kLaneScales <= 2);
  static constexpr int kLaneChannels = Config::kPieceDims / 4;
  static_assert(kLaneChannels == kChunkBytes);
  static constexpr int kWarpKeys = Base::kWarpKeys;
  // The other block gets a half's latent pieces in two copies, the first of which is on its way while the other pieces
  // are decoded: 355 us, against 366 with one copy, 361 with copies of 6 and 2 or of 4, 2 and 2 pieces, and 366 with
  // four copies (fp8_ds_mla, 128 heads, batch 64, kv 8k; H200, 2026-11-22).
  static constexpr int kCopyPieces = Config::kLatentPieces / 2;

  /// Says how rows are decoded. All ways but the slow one copy 16 bytes at a time, of e2m1 eight, and each has a loop
  /// of its own, without a branch: with all in one, fp8_dsv41 took 57 instead of 47 us (decode_sparse of 64 heads,
  /// batch 64, 640 keys; H100, 2026-11-25).
  enum Decoding : uint32_t {
    kSlowly,
    kPieceScales,          ///< e4m3 whose scales, f32 or UE8M0, are those of a piece or more
    kHalfPieceScales,      ///< e4m3 with a UE8M0 for every 32 channels
    kE2m1,                 ///< with an e4m3 for every 16 channels, and no outer scale
    kE2m1HalfPieceScales,  ///< with a UE8M0 for every 32 channels
  };

  static constexpr bool is_e2m1(Decoding decoding) { return decoding == kE2m1 || decoding == kE2m1HalfPieceScales; }
  // A lane decodes so many pieces in a turn.
  static constexpr int kE4m3TurnPieces = 2, kE2m1TurnPieces = 4;

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
      bits_ = DecodeRole::decoding_of(pool) | (pool.ue8m0 ? kUe8m0 : 0U) |
              (cache.d_ckv == Config::kLatentDims ? kAllLatent : 0U) | (cache.d_kpe > 0 ? kRope : 0U) |
              (pool.quantized_kpe ? kE4m3Rope : 0U) | (cache.channels_per_scale == kLaneChannels ? kScaleOfLane : 0U);
      MLA_UNROLL
      for (int s = 0; s < kLaneScales; ++s) {
        // Rotary channels have no scale, so that any group will do for their piece.
        const int piece = s * 4 + (ptx::lane() & 3);
        const int channel = std::min(piece * Config::kPieceDims, cache.d_ckv - Config::kPieceDims);
        const int group = channel / kVector >> pool.scale_shift;
        bits_ |= static_cast<uint32_t>(group * size_of(cache.scale_type)) << (8 + 8 * s);
      }
    }
    MLA_DEVICE Decoding decoding() const { return static_cast<Decoding>(bits_ & kDecodings); }
    MLA_DEVICE bool has_ue8m0() const { return (bits_ & kUe8m0) != 0; }
    /// Returns whether all latent pieces are quantized. Otherwise all but the last are, in whose place the rotary
    /// channels lie.
    MLA_DEVICE bool all_latent() const { return (bits_ & kAllLatent) != 0; }
    MLA_DEVICE bool has_rope() const { return (bits_ & kRope) != 0; }
    MLA_DEVICE bool has_e4m3_rope() const { return (bits_ & kE4m3Rope) != 0; }
    /// Returns whether a lane's channels of a piece share their scale with no other lane's; two lanes' do otherwise.
    MLA_DEVICE bool has_scale_of_lane() const { return (bits_ & kScaleOfLane) != 0; }
    /// Returns where scale s of the lane lies, in bytes from a row's first scale.
    MLA_DEVICE uint32_t scale_offset(int s) const { return bits_ >> (8 + 8 * s) & 0xFFU; }

   private:
    // bits_ has a Decoding, these bits, and from bit 8 on a byte for each of two scale_offset().
    static constexpr uint32_t kDecodings = 7, kUe8m0 = 8, kAllLatent = 16, kRope = 32, kE4m3Rope = 64,
                              kScaleOfLane = 128;
    uint32_t bits_;
  };

  MLA_DEVICE static Decoding decoding_of(const cuda::KeyPool& pool) {
    const core::Cache& cache = pool.cache;
    const bool fast = pool.aligned && cache.d_ckv % Config::kPieceDims == 0 &&
                      cache.d_ckv >= Config::kLatentDims - Config::kPieceDims &&
                      (cache.d_kpe == 0 || cache.d_kpe == Config::kRopeDims) &&
                      (!pool.quantized_kpe || (cache.d_ckv == Config::kLatentDims && !pool.row_kpe_scale));
    if (!fast) return kSlowly;
    if (pool.common_e4m3 && pool.scale_shift >= 3) return pool.ue8m0 || has_whole_words(pool) ? kPieceScales : kSlowly;
    const bool of_two_lanes = pool.ue8m0 && cache.channels_per_scale == 2 * kLaneChannels;
    const bool of_lane = cache.scale_type == ScaleType::kE4M3 && cache.channels_per_scale == kLaneChannels;
    if (!has_whole_words(pool)) return kSlowly;
    if (pool.common_e2m1) return of_lane ? kE2m1 : of_two_lanes ? kE2m1HalfPieceScales : kSlowly;
    return of_two_lanes && pool.common_e4m3 ? kHalfPieceScales : kSlowly;
  }

  /// Returns whether the scales of a row begin at a multiple of 4 bytes, so that four bytes can be loaded at once.
  MLA_DEVICE static bool has_whole_words(const cuda::KeyPool& pool) {
    const core::Plane& scales = pool.cache.scales;
    return ((reinterpret_cast<uint64_t>(scales.base) | static_cast<uint64_t>(scales.stride_page) |
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
    if (traits_.decoding() == kSlowly) [[unlikely]]
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
    return shuffle_pointer(of_lanes, half * kHalfRows + lane_row());
  }

  /// Loads scale s of the lane as its bits in the cache, so that nothing waits for it yet.
  MLA_DEVICE static uint32_t load_scale_bits(const std::byte* scales, Traits traits, int s) {
    if (scales == nullptr) return 0;
    const std::byte* const from = scales + traits.scale_offset(s);
    if (traits.decoding() == kPieceScales)
      return traits.has_ue8m0() ? static_cast<uint8_t>(*from) : *as<uint32_t>(from);
    if (traits.has_scale_of_lane()) return *as<uint32_t>(from);
    return *as<uint16_t>(from);
  }
  /// Returns the scale of a piece.
  MLA_DEVICE static float scale_of(Traits traits, uint32_t bits) {
    return traits.has_ue8m0() ? ue8m0_to_f32(static_cast<uint8_t>(bits)) : std::bit_cast<float>(bits);
  }
  /// Returns the scales of the lane's channels of pieces 4 s ... 4 s + 3, a byte each. Four neighbouring lanes have
  /// those of all their channels of one of these pieces each, and exchange them: it is a transposition of 4 x 4 bytes.
  template <Decoding kDecoding>
  MLA_DEVICE static uint32_t lane_scales_of(uint32_t loaded) {
    const uint32_t of_piece = kDecoding == kE2m1 ? loaded : ptx::permute_bytes(loaded, 0x1100);
    const bool odd = (ptx::lane() & 1) != 0, upper = (ptx::lane() & 2) != 0;
    const uint32_t two = ptx::permute_bytes(of_piece, ptx::shuffle_xor(of_piece, 1), odd ? 0x3715U : 0x6240U);
    return ptx::permute_bytes(two, ptx::shuffle_xor(two, 2), upper ? 0x3276U : 0x5410U);
  }
  /// Converts the two scales in the lower half of a word.
  template <Decoding kDecoding>
  MLA_DEVICE static void convert_scales(uint32_t bits, float& first, float& second) {
    if constexpr (kDecoding != kE2m1) {
      first = ue8m0_to_f32(static_cast<uint8_t>(bits));
      second = ue8m0_to_f32(static_cast<uint8_t>(bits >> 8));
    } else {
      ptx::unpack_f16x2(ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(bits)), first, second);
    }
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
  /// Returns where a chunk of 32 e2m1 channels of the lane's rows lands, of which a piece has two. Four pieces have a
  /// row of one piece, which is decoded when they are in registers.
  MLA_DEVICE static uint32_t landed_e2m1_at(int half, int piece, int chunk) {
    constexpr int kPlaces = Config::kLatentPieces / kE2m1TurnPieces;
    const int at = ((piece ^ lane_row()) % kE2m1TurnPieces) * 2 + chunk;
    return latent_at(half, Config::kLatentPieces - 1 - kPlaces + piece / kE2m1TurnPieces) +
           static_cast<uint32_t>(at * kChunkBytes);
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
        ptx::cp_async_16(stage + landed_rope_at(half), row + lane_channel(), row != nullptr, row_policy(args_));
        continue;
      }
      const ptx::SharedAddress to =
          stage + (traits.all_latent() ? rope_at(half) : latent_at(half, Config::kLatentPieces - 1));
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int of_row = chunk ^ i * 4;
        ptx::cp_async_16(to + static_cast<uint32_t>((of_row ^ lane_row()) * kChunkBytes), row + of_row * kChunkBytes,
                         row != nullptr, row_policy(args_));
      }
    }
  }
  /// Issues the latent channels of the halves that this block decodes.
  template <Decoding kDecoding>
  MLA_DEVICE void issue_latents(ptx::SharedAddress stage, Traits traits) const {
    MLA_NO_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const int half = first_half() + i;
      const std::byte* const row = row_of(place_.ckv, half);
      const bool valid = row != nullptr;
      if constexpr (is_e2m1(kDecoding)) {
        const int lane = ptx::lane() & 3;
        const std::byte* const from = row + lane * kChunkBytes;
        MLA_UNROLL
        for (int turn = 0; turn < Config::kLatentPieces / 2; ++turn) {  // four lanes copy two pieces
          const int piece = turn * 2 + lane / 2;
          if (piece + 1 < Config::kLatentPieces || traits.all_latent())
            ptx::cp_async_16(stage + landed_e2m1_at(half, piece, lane % 2), from + turn * 4 * kChunkBytes, valid,
                             row_policy(args_));
        }
      } else {
        const std::byte* const from = row + lane_channel();
        MLA_UNROLL
        for (int piece = 0; piece < Config::kLatentPieces; ++piece)
          if (piece + 1 < Config::kLatentPieces || traits.all_latent())
            ptx::cp_async_16(stage + landed_at(half, piece), from + piece * Config::kPieceDims, valid,
                             row_policy(args_));
      }
    }
  }

  /// Loads and decodes step n, whose rows are found, and meanwhile finds the rows of the next step. Rotary channels are
  /// issued before the wait for the other block: 383 instead of 395 us (fp8_ds_mla, 128 heads, batch 64, kv 8k; H200,
  /// 2026-11-22).
  template <Decoding kDecoding>
  MLA_DEVICE void decode(uint32_t n) {
    const ptx::SharedAddress stage = Block::stage(n);
    const Traits traits = traits_;
    const float* const rope_scale = Base::pool().cache.kpe_scale;
    issue_rope(stage, traits);
    wait_for_other(n);
    issue_latents<kDecoding>(stage, traits);
    ptx::cp_async_commit();
    Scales<kDecoding> scales;
    MLA_UNROLL
    for (int i = 0; i < kHalves; ++i) MLA_UNROLL
    for (int s = 0; s < kLaneScales; ++s) {
      if constexpr (kDecoding == kPieceScales)
        scales.of_pieces[i][s] = scale_of(traits, scales_[i][s]);
      else
        scales.of_pieces[i][s] = lane_scales_of<kDecoding>(scales_[i][s]);
    }
    Base::find_next();
    begin_rows();
    ptx::cp_async_wait<0>();
    if constexpr (is_e2m1(kDecoding)) ptx::sync_warp();  // a lane decodes what other lanes have copied
    decode_latents(n, scales, traits);
    // Decoding rotary channels before the latent ones would slow caches down whose rotary channels are bf16: 230
    // instead of 207.5 us (fp8_ds_mla, 64 heads, batch 64, kv 8k; H200, 2026-11-22).
    if (traits.has_e4m3_rope()) decode_rope(stage, *rope_scale);
    arrive(n, traits.all_latent());
  }

  /// Holds the scales of a step's rows: of pieces, or of the lane's channels in four pieces, a byte each.
  template <Decoding kDecoding>
  struct Scales {
    std::conditional_t<kDecoding == kPieceScales, float, uint32_t> of_pieces[kHalves][kLaneScales];
  };

  /// Decodes the latent channels of step n. A lane decodes two pieces in a turn, of both halves of its warp's rows or
  /// of the one that its block decodes: 466 instead of 485 us without a loop. Four pieces of one half in a turn spill
  /// (405 instead of 383 us), and e4m3 channels loaded a turn ahead took 421 instead of 361 us (fp8_ds_mla, 128 heads,
  /// batch 64, kv 8k; each pair of one kernel; H200, 2026-11-22).
  template <Decoding kDecoding>
  MLA_DEVICE void decode_latents(uint32_t n, const Scales<kDecoding>& scales, Traits traits) const {
    constexpr int kTurnPieces = is_e2m1(kDecoding) ? kE2m1TurnPieces : kE4m3TurnPieces;
    constexpr int kTurns = Config::kLatentPieces / kTurnPieces;
    constexpr int kCopiedPieces = std::max(kCopyPieces, kTurnPieces);
    const ptx::SharedAddress stage = Block::stage(n);
    const int first = first_half();
    MLA_NO_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first_piece = turn * kTurnPieces, end_piece = first_piece + kTurnPieces;
      Codes<kDecoding> codes[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) MLA_UNROLL
      for (int i = 0; i < kHalves; ++i) codes[j][i] = load_codes<kDecoding>(stage, first + i, first_piece + j);
      // All shuffles stand before any store, because they would wait for it otherwise: 366 instead of 377 us (same
      // shape and day).
      float of_piece[kTurnPieces][kHalves];
      MLA_UNROLL
      for (int i = 0; i < kHalves; ++i) {
        const auto of_four = first_piece < 4 ? scales.of_pieces[i][0] : scales.of_pieces[i][kLaneScales - 1];
        MLA_UNROLL
        for (int j = 0; j < kTurnPieces; ++j) {
          if constexpr (kDecoding == kPieceScales)
            of_piece[j][i] = ptx::shuffle(of_four, (ptx::lane() & ~3) | ((first_piece + j) & 3));
          else if (j % 2 == 0)
            convert_scales<kDecoding>(of_four >> ((first_piece + j) % 4 * 8), of_piece[j][i], of_piece[j + 1][i]);
        }
      }
      ptx::sync_warp();  // all lanes have their channels in registers, so that their places may be overwritten
      MLA_UNROLL
      for (int j = 0; j < kTurnPieces; ++j) {
        if (j + 1 == kTurnPieces && turn + 1 == kTurns && !traits.all_latent()) continue;
        MLA_UNROLL
        for (int i = 0; i < kHalves; ++i) {
          const ptx::SharedAddress to = stage + latent_at(first + i, first_piece + j);
          if constexpr (is_e2m1(kDecoding))
            store_e2m1_piece(to, codes[j][i], of_piece[j][i]);
          else
            store_piece(to, codes[j][i], of_piece[j][i]);
        }
      }
      if (kShared && end_piece % kCopiedPieces == 0)
        copy_to_other(n, end_piece - kCopiedPieces, std::min(end_piece, quantized_pieces(traits.all_latent())));
    }
  }
  /// Is the lane's 16 channels of a piece, as they are in the cache.
  template <Decoding kDecoding>
  using Codes = std::conditional_t<is_e2m1(kDecoding), uint64_t, ptx::Vec4>;
  template <Decoding kDecoding>
  MLA_DEVICE static Codes<kDecoding> load_codes(ptx::SharedAddress stage, int half, int piece) {
    const int lane = ptx::lane() & 3;
    if constexpr (is_e2m1(kDecoding))
      return ptx::load_shared<uint64_t>(stage + landed_e2m1_at(half, piece, lane / 2) +
                                        static_cast<uint32_t>(lane % 2 * kChunkBytes / 2));
    else
      return ptx::load_shared<ptx::Vec4>(stage + landed_at(half, piece));
  }
  MLA_DEVICE static int quantized_pieces(bool all_latent) { return Config::kLatentPieces - (all_latent ? 0 : 1); }

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
    store_e4m3_as_bf16(row, (lane_channel() / kVector ^ lane_row()) & 7, e4m3, scale);
  }

  /// Does the same with channels of e2m1. The product of such a channel and its scale has at most six significant bits,
  /// and is exact in bf16.
  MLA_DEVICE static void store_e2m1_piece(ptx::SharedAddress row, uint64_t e2m1, float scale) {
    const int chunk = (lane_channel() / kVector ^ lane_row()) & 7;
    const uint32_t scales = ptx::pack_bf16x2(scale, scale);
    MLA_UNROLL
    for (int i = 0; i < 2; ++i)
      ptx::store_shared(row + static_cast<uint32_t>((chunk ^ i) * kChunkBytes),
                        e2m1x8_to_bf16(static_cast<uint32_t>(e2m1 >> 32 * i), scales));
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
  MLA_DEVICE void arrive(uint32_t n, bool all_latent) const {
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    if constexpr (kShared)
      ptx::mbarrier_arrive_expect_bytes(Block::kv_full(n, 0),
                                        static_cast<uint32_t>(quantized_pieces(all_latent) * Config::kAtomBytes));
    else
      ptx::mbarrier_arrive(Block::kv_full(n, 0));
  }

  /// Loads and decodes rows of any alignment and of any quantized cache, eight channels at a time.
  MLA_DEVICE void decode_slowly(uint32_t n, const cuda::KeyPool& pool) const {
    const core::Cache& cache = pool.cache;
    const int num_chunks = args_.d_qk / kVector, latent_chunks = cache.d_ckv / kVector;
    float kpe_scale = pool.quantized_kpe && !pool.row_kpe_scale ? *cache.kpe_scale : 1.0F;
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      const std::byte* ckv = shuffle_pointer(place_.ckv, key);
      if (pool.row_kpe_scale && ckv != nullptr) kpe_scale = load_f32_anywhere(ckv + cache.kpe_scale_at);
      const std::byte* kpe = shuffle_pointer(place_.kpe, key);
      const std::byte* scales = shuffle_pointer(place_.scales, key);
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

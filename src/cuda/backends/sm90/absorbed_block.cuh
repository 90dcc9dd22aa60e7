// SPDX-License-Identifier: Apache-2.0
// What the roles of the wgmma attention kernel share: the map of shared memory and the barriers.
#pragma once

#include "cuda/backends/sm90/absorbed_config.cuh"
#include "cuda/backends/sm90/wgmma.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Step n uses stage n % kStages.
template <class Config>
class AbsorbedBlock : protected AbsorbedUnits<Config> {
  using Units = AbsorbedUnits<Config>;

 public:
  using Units::Units, Units::next_unit;

  /// For all threads, once.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      for (int stage = 0; stage < Config::kStages; ++stage) {
        // Every fetching warp's ordinary stores; and every thread's copies, where nobody waits for these before.
        for (int arrival = 0; arrival < Config::kArrivals; ++arrival)
          ptx::mbarrier_init(kv_full(stage, arrival),
                             Config::kGroupWarps + (Config::kQuantized ? 0 : Config::kGroupThreads));
        for (int half = 0; half < 2; ++half) {
          ptx::mbarrier_init(p_full(stage, half), Config::kGroupWarps);
          ptx::mbarrier_init(kv_empty(stage, half), Config::kValueWarps);
        }
        if constexpr (Config::kCluster > 1) {
          for (int warp = 0; warp < Config::kGroupWarps; ++warp) ptx::mbarrier_init(room_in_other(stage, warp), 1);
          ptx::mbarrier_init(received_by_other(stage), Config::kGroupWarps);
        }
      }
      ptx::mbarrier_init(s_full(), Config::kGroupWarps);
      ptx::mbarrier_init(stats_full(), Config::kGroupWarps);
      Units::init_unit_barriers();
      ptx::fence_mbarrier_init();
    }
    for (int i = ptx::thread_index(); i < 2 * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    Units::init_unit_number();
    ptx::sync_block();
    if constexpr (Config::kCluster > 1) ptx::sync_cluster();
  }

  /// Whether this block and the other one of its cluster are lanes of one worker: both have rows of all of its segments
  /// then, and one copies to the other what it decodes.
  MLA_DEVICE static bool shares_keys(const cuda::AbsorbedArgs& args) {
    if constexpr (Config::kCluster == 1) {
      return false;
    } else {
      const cuda::Share* const shares = args.list.shares;
      const cuda::Share &here = shares[ptx::block_index_x()], &there = shares[ptx::block_index_x() ^ 1];
      return here.begin == there.begin && here.end == there.end;
    }
  }

 protected:
  using Units::args_, Units::memory_, Units::shared_;
  static constexpr int kScoreBarrier = 1, kValuesBarrier = 2;  // named

  /// Some pieces of a step's rows are there; the weights of a half of them are; every value warp is done with a half.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n, int arrival) const { return stage_barrier(n, arrival); }
  MLA_DEVICE ptx::SharedAddress p_full(uint32_t n, int half) const {
    return stage_barrier(n, Config::kArrivals + half);
  }
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n, int half) const {
    return stage_barrier(n, Config::kArrivals + 2 + half);
  }
  /// The other block of the cluster has room for the rows of a fetching warp.
  MLA_DEVICE ptx::SharedAddress room_in_other(uint32_t n, int warp) const {
    return stage_barrier(n, Config::kArrivals + 5 + warp);
  }
  /// The other block of the cluster has all of a step's rows, and so what it gets of them from here.
  MLA_DEVICE ptx::SharedAddress received_by_other(uint32_t n) const {
    return stage_barrier(n, Config::kArrivals + 5 + Config::kGroupWarps);
  }
  MLA_DEVICE static uint32_t parity(uint32_t n) { return n / Config::kStages & 1U; }
  /// All scores of a step are there; a phase for each step.
  MLA_DEVICE ptx::SharedAddress s_full() const { return stage_barrier(1, Config::kArrivals + 4); }
  /// The unit's last weights and its output factors are written.
  MLA_DEVICE ptx::SharedAddress stats_full() const { return stage_barrier(0, Config::kArrivals + 4); }
  MLA_DEVICE static uint32_t stats_parity(int unit) { return static_cast<uint32_t>(unit) & 1U; }

  MLA_DEVICE ptx::SharedAddress queries() const { return shared_ + Config::kQueryOffset; }
  MLA_DEVICE ptx::SharedAddress stage(uint32_t n) const {
    return shared_ + Config::kStageOffset + n % Config::kStages * Config::kTileBytes;
  }
  MLA_DEVICE ptx::SharedAddress p(uint32_t n, int half) const {
    return stage(n) + static_cast<uint32_t>(Config::kRopeOffset + half * Config::kHalfBytes);
  }
  /// Where a row of a tile's piece lies; and a 16-byte chunk of a row.
  MLA_DEVICE static uint32_t row_offset(int row, int piece) {
    const auto group = static_cast<uint32_t>(row) / 8, in_group = static_cast<uint32_t>(row) % 8;
    return (piece < Config::kLatentPieces
                ? group * Config::kGroupBytes + static_cast<uint32_t>(piece * Config::kGroupRowsBytes)
                : Config::kRopeOffset + group * Config::kGroupRowsBytes) +
           in_group * Config::kPieceRowBytes;
  }
  MLA_DEVICE static uint32_t chunk_offset(int row, int chunk) {
    return row_offset(row, chunk / 8) + static_cast<uint32_t>(((chunk ^ row) & 7) * kChunkBytes);
  }
  static constexpr int kWarpRows = 16;  // of a tile, that a warp copies
  static_assert(Config::kGroupWarps * kWarpRows == Config::kRows && Config::kRows == Config::kKeys);

  /// Sends for rows first_row ... first_row + 15 of a tile: eight lanes copy 128 bytes of a row, four rows at a time.
  /// Lanes r and r + 16 give where row r lies, null: zeros. kJoined: its rotary channels lie right behind the latent
  /// ones, of which else whole pieces come from `ckv`. After each piece done(piece) is called. Rows are read once, or
  /// by several blocks at the same time.
  template <bool kJoined, class Done>
  MLA_DEVICE void copy_rows(ptx::SharedAddress tile, int first_row, const std::byte* ckv, const std::byte* kpe,
                            int d_ckv, const Done& done) const {
    constexpr int kFours = kWarpRows / 4;
    const int of_four = ptx::lane() >> 3, chunk = ptx::lane() & 7;
    // As if all rows of their eight began at 0.
    const ptx::SharedAddress even = tile + chunk_offset(of_four, chunk), odd = tile + chunk_offset(4 + of_four, chunk);
    const bool has_tail = args_.d_qk > Config::kLatentDims;
    const std::byte *latent[kFours], *rotary[kFours];
    bool valid[kFours];
    MLA_UNROLL
    for (int four = 0; four < kFours; ++four) {
      latent[four] = of_lane(ckv, four * 4 + of_four);
      valid[four] = latent[four] != nullptr;
      latent[four] += chunk * kChunkBytes;
      if constexpr (!kJoined) rotary[four] = of_lane(kpe, four * 4 + of_four) + chunk * kChunkBytes;
    }
    MLA_UNROLL
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      MLA_UNROLL
      for (int four = 0; four < kFours; ++four) {
        if (piece >= Config::kLatentPieces && !has_tail) continue;
        const std::byte* from = kJoined || piece * Config::kPieceDims < d_ckv
                                    ? latent[four] + piece * Config::kPieceRowBytes
                                    : rotary[four] + (piece * Config::kPieceRowBytes - d_ckv * 2);
        ptx::cp_async_16((four % 2 == 0 ? even : odd) + row_offset(first_row + four / 2 * 8, piece), from, valid[four],
                         ptx::evict_first());
      }
      done(piece);
    }
  }

  MLA_DEVICE static const std::byte* of_lane(const std::byte* pointer, int lane) {
    const auto bits = reinterpret_cast<uint64_t>(pointer);
    const uint32_t low = ptx::shuffle(static_cast<uint32_t>(bits), lane);
    const uint32_t high = ptx::shuffle(static_cast<uint32_t>(bits >> 32), lane);
    return reinterpret_cast<const std::byte*>(uint64_t{high} << 32 | low);
  }

  /// A descriptor of a tile's rows for products over their channels, of the first 16 latent or rotary ones; the next 16
  /// of a piece lie 32 bytes on.
  MLA_DEVICE static uint64_t rows_of(ptx::SharedAddress tile) {
    return ptx::matrix_descriptor(tile, 0, Config::kGroupBytes, ptx::Swizzle::k128);
  }
  MLA_DEVICE static uint64_t tails_of(ptx::SharedAddress tile) {
    return ptx::matrix_descriptor(tile + Config::kRopeOffset, 0, Config::kGroupRowsBytes, ptx::Swizzle::k128);
  }
  /// By a sum of 64 bits: with the free advance() quantized rows are decoded 1.3 % slower (measured, H200; others as
  /// fast).
  MLA_DEVICE static uint64_t advance(uint64_t descriptor, int bytes) {
    return descriptor + static_cast<uint64_t>(bytes / 16);
  }

  /// 16 bits for each fetching warp's keys.
  MLA_DEVICE uint16_t* valid(uint32_t n) const {
    return as<uint16_t>(memory_ + Config::kValidOffset) + n % Config::kStages * Config::kGroupWarps;
  }
  /// Of the thread that describes units. It lies in shared memory: registers are short.
  MLA_DEVICE UnitWalk& walk() const { return *as<UnitWalk>(memory_ + Config::kWalkOffset); }
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    return PoisonMarks<Config::kKeys>(as<uint8_t>(memory_ + Config::kPoisonOffset + n % 2 * Config::kPoisonBytes));
  }
  /// What the outputs so far are to be multiplied by in step n; and in the end of a unit.
  MLA_DEVICE float* factors(uint32_t n) const {
    return as<float>(memory_ + Config::kFactorOffset) + n % 2 * Config::kRows;
  }
  MLA_DEVICE float* output_factors() const { return factors(0) + 2 * Config::kRows; }

 private:
  MLA_DEVICE ptx::SharedAddress stage_barrier(uint32_t n, int which) const {
    return shared_ + Config::kBarrierOffset +
           (static_cast<uint32_t>(which) * Config::kStages + n % Config::kStages) * 8;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

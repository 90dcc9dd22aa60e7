// SPDX-License-Identifier: Apache-2.0
// The roles of the wgmma kernel for absorbed attention share what is here: the map of shared memory, the barriers, and
// copies of rows into tiles.
#pragma once

#include "cuda/attention/absorbed_load.cuh"
#include "cuda/backends/sm90/absorbed_config.cuh"
#include "cuda/backends/sm90/wgmma.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// This is the base of all roles. Step n uses stage n % kStages.
template <class Config>
class AbsorbedBlock : protected AbsorbedUnits<Config> {
  using Units = AbsorbedUnits<Config>;

 public:
  using Units::Units, Units::next_unit;

  /// Initializes barriers and marks. All threads call it once, at the kernel's start.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      for (int stage = 0; stage < Config::kStages; ++stage) {
        // Every load warp arrives for its ordinary stores. With 16-bit rows every thread's copies arrive by themselves,
        // too; the threads that decode have waited for theirs.
        for (int arrival = 0; arrival < Config::kArrivals; ++arrival)
          ptx::mbarrier_init(kv_full(stage, arrival),
                             Config::kGroupWarps + (Config::kQuantized ? 0 : Config::kGroupThreads));
        for (int half = 0; half < 2; ++half) {
          ptx::mbarrier_init(p_full(stage, half), Config::kGroupWarps);
          ptx::mbarrier_init(kv_empty(stage, half), Config::kValueWarps);
        }
        if constexpr (Config::kCluster > 1) {
          for (int warp = 0; warp < Config::kGroupWarps; ++warp) ptx::mbarrier_init(room_in_other(stage, warp), 1);
          ptx::mbarrier_init(received_by_other(stage), 1);
        }
      }
      ptx::mbarrier_init(s_done(), Config::kGroupWarps);
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

  /// Returns whether this block and the other one of its cluster are row lanes of one worker. Both then compute the
  /// same segments for different rows, and each copies to the other what it decodes.
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

  /// Returns the barrier kv_full, a phase of which ends when the pieces of one arrival of step n are in the stage.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n, int arrival) const {
    return stage_barrier(Config::kKvFull + arrival * Config::kStages, n);
  }
  /// Returns the barrier p_full, a phase of which ends when P of a half of step n's keys and the factors of the rows
  /// are written.
  MLA_DEVICE ptx::SharedAddress p_full(uint32_t n, int half) const {
    return stage_barrier(Config::kPFull + half * Config::kStages, n);
  }
  /// Returns the barrier kv_empty, a phase of which ends when every value warp is done with a half of step n's keys and
  /// with P of them.
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n, int half) const {
    return stage_barrier(Config::kKvEmpty + half * Config::kStages, n);
  }
  /// Returns the barrier room_in_other, a phase of which ends when the other block of the cluster has room for the rows
  /// that this load warp decodes of step n.
  MLA_DEVICE ptx::SharedAddress room_in_other(uint32_t n, int warp) const {
    return stage_barrier(Config::kRoomInOther + warp * Config::kStages, n);
  }
  /// Returns the barrier received_by_other, a phase of which ends when the other block of the cluster has all rows of
  /// step n, and so all that this block copied to it.
  MLA_DEVICE ptx::SharedAddress received_by_other(uint32_t n) const {
    return stage_barrier(Config::kReceivedByOther, n);
  }
  /// Returns the parity that a wait for step n's phase of a stage's barrier takes.
  MLA_DEVICE static uint32_t parity(uint32_t n) { return n / Config::kStages & 1U; }
  /// Returns the barrier s_done. Its phase ends, in every step, when every score warp has its products of the step, so
  /// that nobody reads the rotary channels any more.
  MLA_DEVICE ptx::SharedAddress s_done() const { return barrier(Config::kSDone); }
  /// Returns the barrier stats_full, a phase of which ends when P of the unit's last step and the unit's output factors
  /// are written.
  MLA_DEVICE ptx::SharedAddress stats_full() const { return barrier(Config::kStatsFull); }
  MLA_DEVICE static uint32_t stats_parity(int unit) { return static_cast<uint32_t>(unit) & 1U; }

  MLA_DEVICE ptx::SharedAddress queries() const { return shared_ + Config::kQueryOffset; }
  MLA_DEVICE ptx::SharedAddress stage(uint32_t n) const {
    return shared_ + Config::kStageOffset + n % Config::kStages * Config::kTileBytes;
  }
  MLA_DEVICE ptx::SharedAddress p(uint32_t n, int half) const {
    return stage(n) + static_cast<uint32_t>(Config::kRopeOffset + half * Config::kHalfBytes);
  }
  /// Returns the offset of a row of a piece, in bytes from the tile's start.
  MLA_DEVICE static uint32_t row_offset(int row, int piece) {
    const auto eight = static_cast<uint32_t>(row) / Config::kAtomRows,
               row_in_atom = static_cast<uint32_t>(row) % Config::kAtomRows;
    return (piece < Config::kLatentPieces
                ? eight * Config::kEightRowsBytes + static_cast<uint32_t>(piece * Config::kAtomBytes)
                : Config::kRopeOffset + eight * Config::kAtomBytes) +
           row_in_atom * Config::kPieceRowBytes;
  }
  /// Returns the offset of a 16-byte chunk of a row, in bytes from the tile's start.
  MLA_DEVICE static uint32_t chunk_offset(int row, int chunk) {
    return row_offset(row, chunk / 8) + static_cast<uint32_t>(((chunk ^ row) & 7) * kChunkBytes);
  }
  /// Returns the number of a score warp in its warpgroup.
  MLA_DEVICE static int score_warp() { return ptx::warp() - Config::kFirstScoreWarp; }

  static constexpr int kWarpRows = 16;  // rows of a tile that one warp copies
  static_assert(Config::kGroupWarps * kWarpRows == Config::kRows && Config::kRows == Config::kKeys);

  /// Issues copies of rows first_row ... first_row + 15 of a tile, for a warp: eight lanes copy 128 bytes of a row,
  /// four rows in a turn. The arguments of lanes r and r + 16 say where row r lies; null stands for a row of zeros.
  /// kJoined says that the rotary channels lie right behind the latent ones; otherwise pieces below d_ckv come from
  /// `ckv`, the others from `kpe`. done(piece) is called behind each piece.
  template <bool kJoined, class Done>
  MLA_DEVICE void copy_rows(ptx::SharedAddress tile, int first_row, const std::byte* ckv, const std::byte* kpe,
                            int d_ckv, ptx::CachePolicy policy, const Done& done) const {
    constexpr int kTurnRows = 4, kTurns = kWarpRows / kTurnRows;
    const int row_in_turn = ptx::lane() >> 3, chunk = ptx::lane() & 7;
    // These are the lane's chunks in even and in odd turns, which have the upper and the lower four rows of an atom.
    const ptx::SharedAddress even = tile + chunk_offset(row_in_turn, chunk),
                             odd = tile + chunk_offset(kTurnRows + row_in_turn, chunk);
    const bool has_rope = args_.d_qk > Config::kLatentDims;
    const std::byte *latent[kTurns], *rope[kTurns];
    bool valid[kTurns];
    MLA_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      latent[turn] = shuffle_pointer(ckv, turn * kTurnRows + row_in_turn);
      valid[turn] = latent[turn] != nullptr;
      latent[turn] += chunk * kChunkBytes;
      if constexpr (!kJoined) rope[turn] = shuffle_pointer(kpe, turn * kTurnRows + row_in_turn) + chunk * kChunkBytes;
    }
    // As straight code, which the first step of a run waits for, 4 requests of 1k tokens took 18.0 instead of 17.4 us
    // (128 heads; H200, 2026-11-30).
    MLA_NO_UNROLL
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      MLA_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) {
        if (piece >= Config::kLatentPieces && !has_rope) continue;
        const std::byte* from = kJoined || piece * Config::kPieceDims < d_ckv
                                    ? latent[turn] + piece * Config::kPieceRowBytes
                                    : rope[turn] + (piece * Config::kPieceRowBytes - d_ckv * 2);
        ptx::cp_async_16((turn % 2 == 0 ? even : odd) + row_offset(first_row + turn / 2 * Config::kAtomRows, piece),
                         from, valid[turn], policy);
      }
      done(piece);
    }
  }

  /// Returns the wgmma descriptor of a tile's rows for products along their channels: the first 16 latent or rotary
  /// channels. The next 16 channels of a piece lie 32 bytes on.
  MLA_DEVICE static uint64_t latent_descriptor(ptx::SharedAddress tile) {
    return ptx::matrix_descriptor(tile, 0, Config::kEightRowsBytes, ptx::Swizzle::k128);
  }
  MLA_DEVICE static uint64_t rope_descriptor(ptx::SharedAddress tile) {
    return ptx::matrix_descriptor(tile + Config::kRopeOffset, 0, Config::kAtomBytes, ptx::Swizzle::k128);
  }
  /// Moves a descriptor by a sum of 64 bits. The function advance() of wgmma.cuh, which adds 32 bits, made decode of
  /// quantized rows 1.3 % slower and was as fast elsewhere (H200, 2026-11-21).
  MLA_DEVICE static uint64_t advance(uint64_t descriptor, int bytes) {
    return descriptor + static_cast<uint64_t>(bytes / 16);
  }

  /// Returns the valid bits of step n: 16 bits for the keys of each load warp, set where a key has a row.
  MLA_DEVICE uint16_t* valid(uint32_t n) const {
    return as<uint16_t>(memory_ + Config::kValidOffset) + n % Config::kStages * Config::kGroupWarps;
  }
  /// Returns the state of the thread that describes units, which lies in shared memory because registers are short.
  MLA_DEVICE UnitWalk& walk() const { return *as<UnitWalk>(memory_ + Config::kWalkOffset); }
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    return PoisonMarks<Config::kKeys>(as<uint8_t>(memory_ + Config::kPoisonOffset + n % 2 * Config::kPoisonBytes));
  }
  /// Returns the factors by which each row's outputs are rescaled before values of step n are added.
  MLA_DEVICE float* factors(uint32_t n) const {
    return as<float>(memory_ + Config::kFactorOffset) + n % 2 * Config::kRows;
  }
  /// Returns the factors that each row's outputs are multiplied by at the end of a unit.
  MLA_DEVICE float* output_factors() const { return factors(0) + 2 * Config::kRows; }

 private:
  MLA_DEVICE ptx::SharedAddress barrier(uint32_t place) const {
    return shared_ + Config::kBarrierOffset + place * Config::kBarrierBytes;
  }
  MLA_DEVICE ptx::SharedAddress stage_barrier(int first, uint32_t n) const {
    return barrier(static_cast<uint32_t>(first) + n % Config::kStages);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

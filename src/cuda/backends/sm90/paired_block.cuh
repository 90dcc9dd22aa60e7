// SPDX-License-Identifier: Apache-2.0
// The roles of the paired wgmma kernel share what is here: the map of shared memory, and the barriers.
#pragma once

#include "cuda/attention/absorbed_load.cuh"
#include "cuda/backends/sm90/paired_config.cuh"
#include "cuda/backends/sm90/wgmma.cuh"
#include "cuda/border/queue.h"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

struct PairedArgs {
  cuda::AbsorbedArgs args;
  // Of dense attention only:
  cuda::TensorMap keys;  // of pages, which are the "heads" of the tensor
  int32_t box_rows;      // a power of two that divides the page size and the keys of a step
  // In sparse attention queries come by tensor copies where all tokens' heads are rows at the same distance:
  bool copies_boxes_of_queries;
  cuda::TensorMap latent_queries;  // pieces of 64 channels are the "heads"; a box has all of them
  cuda::TensorMap rope_queries;    // one piece
};

/// This is the base of all roles. Step n uses stage n % 2, and is the step of math warpgroup n % 2, its owner.
template <class Config>
class PairedBlock : protected AbsorbedUnits<Config> {
  using Units = AbsorbedUnits<Config>;

 public:
  using Units::Units, Units::next_unit;

  /// Initializes barriers. All threads call it once, at the kernel's start.
  MLA_DEVICE void init(bool copies_boxes_of_queries) const {
    if (ptx::thread_index() == 0) {
      for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
        for (int piece = 0; piece < Config::kPieces; ++piece)
          ptx::mbarrier_init(kv_full(stage, piece), arrivals(piece));
        for (int half = 0; half < Config::kMathGroups; ++half)
          ptx::mbarrier_init(kv_empty(stage, half), Config::kGroupWarps * Config::kCluster);
        ptx::mbarrier_init(s_done(stage), Config::kGroupWarps);
        ptx::mbarrier_init(p_full(stage), Config::kGroupWarps);
      }
      ptx::mbarrier_init(q_full(),
                         copies_boxes_of_queries ? 1 : (Config::kGroupWarps - first_query_warp()) * kWarpSize);
      ptx::mbarrier_init(q_empty(), Config::kMathWarps);
      Units::init_unit_barriers();
      ptx::fence_mbarrier_init();
    }
    Units::init_unit_number();
    ptx::sync_block();
    if constexpr (Config::kCluster > 1) ptx::sync_cluster();
  }

 protected:
  using Units::args_, Units::memory_, Units::shared_;

  /// A phase of kv_full ends when a piece of step n's rows is in the stage. With the last piece, the rotary channels,
  /// the step's masks are there, too. Rows that are found by slots come in three parts, each of which has the barrier
  /// of its first piece: all threads of the load warpgroup arrive for their copies, and each warp for what it decodes.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n, int piece) const {
    return barrier(Config::kKvFull + n % Config::kStages * Config::kPieces + static_cast<uint32_t>(piece));
  }
  /// A phase of kv_empty ends when the warpgroup `half` has multiplied the values of its half of the channels of step
  /// n. The other one reads P as well, which is in the place of the rotary channels. In a cluster the same warpgroups
  /// of both blocks arrive, since a block's rows are stored in both.
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n, uint32_t half) const {
    return barrier(Config::kKvEmpty + n % Config::kStages * Config::kMathGroups + half);
  }
  /// A phase of s_done ends when the owner has the scores of step n, so that it does not read the rotary channels any
  /// more, one of p_full when P of step n, the rows' maxima, their factors and the flags are written.
  MLA_DEVICE ptx::SharedAddress s_done(uint32_t n) const { return barrier(Config::kSDone + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress p_full(uint32_t n) const { return barrier(Config::kPFull + n % Config::kStages); }
  MLA_DEVICE static uint32_t parity(uint32_t n) { return n / Config::kStages & 1U; }
  /// A phase of q_full ends when the queries of a unit are there, one of q_empty when no warp multiplies them any more.
  MLA_DEVICE ptx::SharedAddress q_full() const { return barrier(Config::kQFull); }
  MLA_DEVICE ptx::SharedAddress q_empty() const { return barrier(Config::kQEmpty); }
  MLA_DEVICE static uint32_t query_parity(int unit) { return static_cast<uint32_t>(unit) & 1U; }

  /// Returns the first of the load warps that copy queries.
  MLA_DEVICE int first_query_warp() const { return args_.sparse() ? 0 : Config::kFirstQueryWarp; }
  MLA_DEVICE bool has_rope() const { return args_.d_qk > Config::kLatentDims; }
  /// Returns the piece that has the rotary channels, -1 if there are none. Formats that quantize all channels but the
  /// last 64 of 512 have them in the last latent piece.
  MLA_DEVICE int rope_piece() const {
    return args_.pools[0].cache.d_kpe == 0 ? -1 : Config::kLatentPieces - (has_rope() ? 0 : 1);
  }
  static constexpr int kPartMask = ~(Config::kGroupPieces - 1);  // from a piece found by slots to the first of its part

  /// Returns the piece that is loaded and multiplied as number i: first the half of the channels that the owner's
  /// values free, which are free sooner, then the other half, then the rotary channels.
  static constexpr int piece_of(uint32_t owner, int i) {
    const bool in_first_half = i < Config::kGroupPieces;
    const auto half = static_cast<int>(in_first_half ? owner : owner ^ 1U);
    return i < Config::kLatentPieces ? half * Config::kGroupPieces + i % Config::kGroupPieces : i;
  }

  MLA_DEVICE ptx::SharedAddress queries() const { return shared_ + Config::kQueryOffset; }
  MLA_DEVICE ptx::SharedAddress stage(uint32_t n) const {
    return shared_ + Config::kStageOffset + n % Config::kStages * Config::kTileBytes;
  }
  /// Returns where eight rows of a piece begin in a tile, in bytes from its start.
  static constexpr uint32_t atom_offset(int eight, int piece) {
    return static_cast<uint32_t>(piece < Config::kLatentPieces
                                     ? eight * Config::kEightRowsBytes + piece * Config::kPieceStride
                                     : Config::kRopeOffset + eight * Config::kAtomBytes);
  }
  MLA_DEVICE ptx::SharedAddress p_tile(uint32_t n) const { return stage(n) + Config::kRopeOffset; }

  /// Returns the rows' factors by which the outputs so far are multiplied before values of step n are added. Only a
  /// warp whose flags say so has written them.
  MLA_DEVICE float* factors(uint32_t n) const {
    return as<float>(memory_ + Config::kFactorOffset) + n % Config::kStages * Config::kRows;
  }
  /// These bits are the flags that a warp of the owner hands over with P.
  enum Flag : uint8_t {
    kRescales = 1,   // a row has a factor that is not 1
    kHasPoison = 2,  // values of keys that are hidden from some row may be infinite or NaN (poison.cuh)
  };
  /// Returns where the flags of step n lie, one byte for each warp of the owner.
  MLA_DEVICE ptx::SharedAddress flags(uint32_t n) const {
    return shared_ + Config::kFlagOffset + n % Config::kStages * Config::kGroupWarps;
  }
  /// Returns the rows' maxima, in base 2, that P of step n and the outputs behind it are relative to.
  MLA_DEVICE float* maxima(uint32_t n) const {
    return as<float>(memory_ + Config::kMaxOffset) + n % Config::kStages * Config::kRows;
  }
  /// Returns the factor of each row's outputs.
  MLA_DEVICE float* row_values() const { return as<float>(memory_ + Config::kRowOffset); }
  /// Returns the sums of P over the keys of a math warpgroup's steps, for each row.
  MLA_DEVICE float* row_sums(uint32_t group) const {
    return as<float>(memory_ + Config::kSumOffset) + group * Config::kRows;
  }
  /// Returns a byte for each load warp that says whether some row does not see all keys of step n; of slots, all of the
  /// warp's keys.
  MLA_DEVICE uint8_t* masked(uint32_t n) const {
    return as<uint8_t>(memory_ + Config::kMaskedOffset) + n % Config::kStages * Config::kGroupWarps;
  }
  /// Returns the masks of step n, in which a bit says that the row sees the key. In sparse attention all rows see the
  /// keys that have a row, so that there is one mask: valid(n), 16 bits of each load warp.
  MLA_DEVICE uint64_t* masks(uint32_t n) const {
    return as<uint64_t>(memory_ + Config::kMaskOffset) + n % Config::kStages * Config::kMaskRows;
  }
  MLA_DEVICE uint16_t* valid(uint32_t n) const { return as<uint16_t>(reinterpret_cast<std::byte*>(masks(n))); }
  /// Returns the state of the thread that describes units.
  MLA_DEVICE UnitWalk& walk() const { return *as<UnitWalk>(memory_ + Config::kWalkOffset); }

  /// Return the number of the warp among the math warps, and in its warpgroup.
  MLA_DEVICE static int math_warp() { return ptx::warp<Config::kReadsIndexAnew>() - Config::kFirstMathWarp; }
  MLA_DEVICE static int score_warp() { return math_warp() % Config::kGroupWarps; }

 private:
  /// Returns how often threads arrive at a barrier kv_full in a phase.
  MLA_DEVICE int arrivals(int piece) const {
    const bool has_masks = piece >= Config::kLatentPieces;
    if (!args_.sparse()) return has_masks ? 2 : 1;
    if (Config::kQuantized)
      return Config::kGroupWarps + (piece == (rope_piece() & kPartMask) ? Config::kGroupThreads : 0);
    return Config::kGroupThreads + (has_masks ? Config::kGroupWarps : 0);
  }
  MLA_DEVICE ptx::SharedAddress barrier(uint32_t place) const {
    return shared_ + Config::kBarrierOffset + place * kMbarrierBytes;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

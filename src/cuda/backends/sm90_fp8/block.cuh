// SPDX-License-Identifier: Apache-2.0
// The roles of the wgmma kernel on e4m3 share what is here: the map of shared memory, and the barriers.
#pragma once

#include "cuda/backends/sm90_fp8/config.cuh"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

/// Holds what a row's steps hand on from one to the next, in base 2: the maximum that P and outputs are relative to,
/// and the largest logit so far, which may be up to kHeadroom more.
struct RowMax {
  float base = kNoKey, largest = kNoKey;
};

/// This is the base of all roles. Step n uses stage n % kStages and place n % kPlaces, and is the step of math
/// warpgroup n % kMathGroups.
class AbsorbedBlock : protected AbsorbedUnits<AbsorbedConfig> {
  using Units = AbsorbedUnits<AbsorbedConfig>;

 public:
  using Config = AbsorbedConfig;
  using Units::Units, Units::next_unit;

  /// Initializes barriers and marks. All threads call it once, at the kernel's start.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
        // Every load thread's copies arrive by themselves; every load warp arrives for its ordinary stores.
        ptx::mbarrier_init(kv_full(stage), Config::kGroupThreads + Config::kGroupWarps);
        ptx::mbarrier_init(kv_empty(stage), Config::kMathWarps);
      }
      for (uint32_t place = 0; place < Config::kPlaces; ++place) {
        ptx::mbarrier_init(max_full(place), Config::kGroupWarps);
        ptx::mbarrier_init(p_full(place), Config::kGroupWarps);
      }
      Units::init_unit_barriers();
      ptx::fence_mbarrier_init();
    }
    for (int i = ptx::thread_index(); i < Config::kPlaces * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    Units::init_unit_number();
    ptx::sync_block();
  }

 protected:
  using Units::args_, Units::memory_, Units::shared_;

  /// A phase of kv_full ends when step n's rows and scales are in the stage, one of kv_empty when every math warp is
  /// done with the step: with its rows, P, factors and marks.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n) const { return barrier(Config::kKvFull + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n) const { return barrier(Config::kKvEmpty + n % Config::kStages); }
  MLA_DEVICE static uint32_t stage_parity(uint32_t n) { return n / Config::kStages & 1U; }
  /// A phase of max_full ends when step n's row_max() are written, one of p_full when P, its scales and the rows'
  /// factors are.
  MLA_DEVICE ptx::SharedAddress max_full(uint32_t n) const { return barrier(Config::kMaxFull + n % Config::kPlaces); }
  MLA_DEVICE ptx::SharedAddress p_full(uint32_t n) const { return barrier(Config::kPFull + n % Config::kPlaces); }
  MLA_DEVICE static uint32_t place_parity(uint32_t n) { return n / Config::kPlaces & 1U; }

  /// Return the number of the warp among the math warps, and in its warpgroup.
  MLA_DEVICE static int math_warp() { return ptx::warp<Config::kReadsIndexAnew>() - Config::kFirstMathWarp; }
  MLA_DEVICE static int score_warp() { return math_warp() % Config::kGroupWarps; }

  MLA_DEVICE ptx::SharedAddress queries() const { return shared_ + Config::kQueryOffset; }
  MLA_DEVICE ptx::SharedAddress stage(uint32_t n) const {
    return shared_ + Config::kStageOffset + n % Config::kStages * Config::kTileBytes;
  }
  /// Returns the offset of a 16-byte chunk of a row of a piece, in bytes from the piece.
  MLA_DEVICE static uint32_t chunk_offset(int row, int chunk) {
    return tile_offset<Config::kPieceRowBytes>(row, chunk);
  }
  /// Return where P of step n lies for a scale of the keys, and its scales, one for each row.
  MLA_DEVICE ptx::SharedAddress p_tile(uint32_t n, int scale) const {
    return scale < Config::kPTilesInStage
               ? stage(n) + static_cast<uint32_t>(Config::kRopeOffset + scale * Config::kPTileBytes)
               : shared_ +
                     static_cast<uint32_t>(Config::kPOffset + (scale - Config::kPTilesInStage) * Config::kPTileBytes) +
                     n % Config::kPlaces * Config::kPPlaceBytes;
  }
  MLA_DEVICE ptx::SharedAddress p_scales(uint32_t n, int scale) const {
    return shared_ + static_cast<uint32_t>(Config::kPScaleOffset + scale * Config::kRows * 4) +
           n % Config::kPlaces * Config::kPScaleBytes;
  }
  /// Returns where a scale of step n's keys lies, that of key 0 first.
  MLA_DEVICE ptx::SharedAddress key_scales(uint32_t n, int scale) const {
    return shared_ + static_cast<uint32_t>(Config::kScaleOffset + scale * Config::kKeys * 4) +
           n % Config::kStages * Config::kScaleBytes;
  }

  /// Return the rows' factors by which the outputs so far are multiplied before values of step n are added, and whether
  /// any of them is not 1, for each warp of the step's warpgroup.
  MLA_DEVICE ptx::SharedAddress factors(uint32_t n) const {
    return shared_ + Config::kFactorOffset + n % Config::kPlaces * (Config::kRows * 4);
  }
  MLA_DEVICE ptx::SharedAddress rescales(uint32_t n) const {
    return shared_ + Config::kFlagOffset + n % Config::kPlaces * Config::kGroupWarps;
  }
  MLA_DEVICE RowMax* row_max(uint32_t n) const {
    return as<RowMax>(memory_ + Config::kMaxOffset) + n % Config::kPlaces * Config::kRows;
  }
  /// Returns a number for each row: the scales of the queries while a unit has scores to compute, then the factors of
  /// its outputs.
  MLA_DEVICE float* row_values() const { return as<float>(memory_ + Config::kRowOffset); }
  /// Returns the sums of P over the keys of a math warpgroup's steps, for each row.
  MLA_DEVICE float* row_sums(int group) const {
    return as<float>(memory_ + Config::kSumOffset) + group * Config::kRows;
  }

  /// Returns the valid bits of step n: 16 bits for the keys of each load warp, set where a key has a row.
  MLA_DEVICE uint16_t* valid(uint32_t n) const {
    return as<uint16_t>(memory_ + Config::kValidOffset) + n % Config::kStages * Config::kGroupWarps;
  }
  /// Returns the state of the thread that describes units.
  MLA_DEVICE UnitWalk& walk() const { return *as<UnitWalk>(memory_ + Config::kWalkOffset); }
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    return PoisonMarks<Config::kKeys>(
        as<uint8_t>(memory_ + Config::kPoisonOffset + n % Config::kPlaces * Config::kPoisonBytes));
  }

 private:
  MLA_DEVICE ptx::SharedAddress barrier(uint32_t place) const {
    return shared_ + Config::kBarrierOffset + place * kMbarrierBytes;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

// SPDX-License-Identifier: Apache-2.0
// This file has the sizes of a prefill block, and the map of its shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/warpgroup_prefill.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

struct PrefillTiling {
  int keys;          // keys of a tile of K or V: 64 or 128
  int stages;        // tiles of K, and of V, in shared memory
  int q_steps;       // steps of 16 channels of Q that are multiplied from registers; the others from shared memory
  bool takes_turns;  // whether the two computing warpgroups issue their products one after the other
  bool whole_loop;   // whether tiles of which all rows see all keys take a loop of their own
};

template <DType kType_, int kDQk_, int kDV_, PrefillTiling kTiling>
struct PrefillConfig : WarpgroupPrefillConfig {
  static constexpr DType kType = kType_;
  using Element = uint16_t;
  static constexpr int kDQk = kDQk_, kDV = kDV_;
  // setmaxnreg gives the computing warpgroups what the load warpgroup leaves: O takes 64 registers, S 64, P 32 and Q 16
  // (256/128: 64, 32, 16 and 32; 256/256: 128, 32, 16 and none), and nvcc 13.0 spills nothing. With 24 and 240
  // registers 192/128 took 5 to 20 % longer (H200, 2026-12-01).
  static constexpr int kLoadRegisters = 40, kComputeRegisters = 232;
  static constexpr int kKeys = kTiling.keys, kStages = kTiling.stages, kVStages = kStages, kQSteps = kTiling.q_steps;
  static constexpr bool kTakesTurns = kTiling.takes_turns, kWholeLoop = kTiling.whole_loop;
  static constexpr int kQRowBytes = kDQk * 2, kKRowBytes = kDQk * 2, kVRowBytes = kDV * 2;

  static constexpr int kQBytes = kGroupRows * kQRowBytes, kKBytes = kKeys * kKRowBytes, kVBytes = kKeys * kVRowBytes;
  static constexpr int kKBegin = kGroups * kQBytes, kVBegin = kKBegin + kStages * kKBytes;
  // Each computing warp has room for 8 rows of 16-bit outputs, which it brings into order for stores of whole rows.
  static constexpr int kOutputBytes = 8 * kDV * 2, kOutputBegin = kVBegin + kStages * kVBytes;
  static constexpr int kUnitsBegin = kOutputBegin + kGroups * 4 * kOutputBytes;
  static constexpr int kFlagsBegin = kUnitsBegin + kUnitBytes;
  static constexpr int kBarriersBegin = kFlagsBegin + kAllFlagBytes;
  // The mbarriers have these places behind kBarriersBegin, in units of kBarrierBytes.
  enum Barrier : int {
    kKFull = 0,                     // [stage]
    kKEmpty = kKFull + kStages,     // [stage]
    kVFull = kKEmpty + kStages,     // [stage]
    kVEmpty = kVFull + kStages,     // [stage]
    kUnitFull = kVEmpty + kStages,  // [unit % 2]
    kUnitEmpty = kUnitFull + 2,     // [unit % 2]
    kNumBarriers = kUnitEmpty + 2
  };
  static constexpr int kSharedBytes = kBarriersBegin + kNumBarriers * kBarrierBytes;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
  static_assert(kDQk % 64 == 0 && (kDV == 128 || kDV == 256) && (kKeys == 64 || kKeys == 128) && kStages >= 2);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

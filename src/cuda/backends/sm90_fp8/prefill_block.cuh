// SPDX-License-Identifier: Apache-2.0
// The warpgroups of a prefill block share what is here: sizes, the map of shared memory, and where values lie before
// and after they are transposed.
#pragma once

#include <cstdint>

#include "cuda/attention/warpgroup_prefill.cuh"
#include "cuda/backends/sm90_fp8/limits.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

template <int kDQk_, int kDV_>
struct PrefillConfig : WarpgroupPrefillConfig {
  using Element = uint8_t;
  static constexpr int kDQk = kDQk_, kDV = kDV_;
  static constexpr int kLoadRegisters = 40, kComputeRegisters = 232;
  static constexpr int kKeys = cuda::sm90_fp8::prefill_run_keys(kDV);  // a tile is a run
  static constexpr int kStages = 4, kVStages = 2;                      // powers of 2: the loop computes many remainders
  static constexpr bool kTakesTurns = true;
  static constexpr int kQRowBytes = kDQk, kKRowBytes = kDQk, kVRowBytes = kDV;

  // Q and K lie in whole segments, and values as they come. Transposed values are what wgmma multiplies: for each
  // subtile of 64 keys a row of 64 bytes for each column of outputs, swizzled as Swizzle::k64. Of 16 channels the even
  // ones are columns 0 ... 7, and bytes 4 t ... 4 t + 3 of a chunk of 16 keys are keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9
  // (tile/e4m3_pairs.cuh).
  static constexpr int kSubtileKeys = 64, kColumnBytes = kSubtileKeys, kSubtileBytes = kDV * kColumnBytes;
  /// Returns where a chunk of 16 keys lies among a tile's transposed values.
  static constexpr uint32_t values_place(int column, int chunk) {
    return static_cast<uint32_t>(chunk / 4 * kSubtileBytes + column * kColumnBytes +
                                 (chunk % 4 ^ (column >> 1 & 3)) * kChunkBytes);
  }

  static constexpr int kQBytes = kGroupRows * segments(kQRowBytes) * kSegmentBytes;
  static constexpr int kKBytes = kKeys * segments(kKRowBytes) * kSegmentBytes;
  static constexpr int kVBytes = kKeys * kDV, kLoadedBytes = kVBytes;
  static constexpr int kKBegin = kGroups * kQBytes, kVBegin = kKBegin + kStages * kKBytes;
  static constexpr int kLoadedBegin = kVBegin + kVStages * kVBytes;
  static constexpr int kUnitsBegin = kLoadedBegin + kVStages * kLoadedBytes;
  static constexpr int kFlagsBegin = kUnitsBegin + kUnitBytes;
  static constexpr int kBarriersBegin = kFlagsBegin + kAllFlagBytes;
  // The mbarriers have these places behind kBarriersBegin, in units of kBarrierBytes.
  enum Barrier : int {
    kKFull = 0,                             // [stage]
    kKEmpty = kKFull + kStages,             // [stage]
    kVFull = kKEmpty + kStages,             // [V stage]
    kVEmpty = kVFull + kVStages,            // [V stage]
    kLoadedFull = kVEmpty + kVStages,       // [V stage]
    kLoadedEmpty = kLoadedFull + kVStages,  // [V stage]
    kUnitFull = kLoadedEmpty + kVStages,    // [unit % 2]
    kUnitEmpty = kUnitFull + 2,             // [unit % 2]
    kNumBarriers = kUnitEmpty + 2
  };
  static constexpr int kSharedBytes = kBarriersBegin + kNumBarriers * kBarrierBytes;

  static_assert(kSharedBytes <= kSharedBytesPerBlock);
  static_assert(kDQk % 64 == 0 && kDV % kSegmentBytes == 0 && kKeys % kSubtileKeys == 0);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

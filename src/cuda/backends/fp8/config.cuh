// SPDX-License-Identifier: Apache-2.0
// This is the configuration of the kernel that multiplies e4m3 by e4m3: the block's rows, the keys of one step, how
// warps divide the work, and the map of shared memory. Rows of the cache are operands as they land, so that a stage of
// copies is a tile.
#pragma once

#include <cstdint>

#include "cuda/attention/poison.cuh"
#include "cuda/backends/fp8/limits.h"
#include "cuda/ptx/ptx.h"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {

/// A block multiplies `kRows_` query rows (16 or 64) with rows of up to 512 latent channels and 64 rotary ones.
template <int kRows_>
struct AbsorbedConfig {
  static constexpr int kRows = kRows_;
  static constexpr int kLatentDims = cuda::fp8::kLatentDims;
  static constexpr int kRopeDims = 64;
  static constexpr bool kQuantized = true;
  static constexpr bool kDecodes = false;
  static constexpr int kKeyBytes = 1;  // of latent channels; rotary ones may have two

  static constexpr int kThreads = 256;
  // Whatever follows from the index of the thread is computed anew where it is used: kept in registers, it made nvcc
  // 13.0 spill 104 bytes of 64 rows on SM120 (2026-11-23), which now spill none.
  static constexpr bool kReadsIndexAnew = true;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kKeys = cuda::fp8::kRunKeys;  // P of a step's keys have one scale for each row
  static constexpr int kPlanKeys = kKeys;            // the plan lets segments begin and end on multiples of it

  // Of 64 rows, two groups of four warps have 32 rows each (grouped_block.cuh).
  static constexpr int kGroups = kRows == 64 ? 2 : 1;
  static constexpr int kGroupRows = kRows / kGroups;
  static constexpr int kGroupWarps = kWarps / kGroups;
  static constexpr int kGroupThreads = kThreads / kGroups;

  // Scores. The warps of a group divide keys (N) and channels (K). A warp has two runs of kScaleRun channels, each of
  // which has one scale for each key.
  static constexpr int kScaleRun = cuda::fp8::kScaleRun;
  static constexpr int kScoreWarpsK = 4;
  static constexpr int kScoreWarpsN = kGroupWarps / kScoreWarpsK;
  static constexpr int kScoreTilesM = kGroupRows / 16;
  static constexpr int kScoreBlocks = kKeys / 16 / kScoreWarpsN;  // blocks of 16 keys that a warp computes in turn
  static constexpr int kWarpLatents = kLatentDims / kScoreWarpsK;
  static constexpr int kScoreRuns = kWarpLatents / kScaleRun;
  static constexpr int kRunSteps = kScaleRun / 32;  // multiplies of 32 channels
  static constexpr int kLatentSteps = kScoreRuns * kRunSteps;
  static_assert(kRopeDims / 16 == kScoreWarpsK);  // 16-bit rotary channels: 16 for each K slice

  // Outputs. A warp has all rows of its group and its share of the channels.
  static constexpr int kOutputTilesM = kGroupRows / 16;
  static constexpr int kOutputDims = kLatentDims / kGroupWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;
  static constexpr int kOutputRuns = kOutputDims / kScaleRun;
  static constexpr int kRunTiles = kScaleRun / 8;

  // Shared memory, in bytes.
  static constexpr int kRawRowBytes = kLatentDims + 2 * kRopeDims;  // e4m3 latents, bf16 or e4m3 rotary channels
  static constexpr int kTileBytes = kKeys * kRawRowBytes;
  static constexpr int kScoreRowBytes = kKeys * 4;
  static constexpr int kScoreBytes = kScoreWarpsK * kGroupRows * kScoreRowBytes;
  static constexpr int kPlaceBytes = 16;
  static constexpr int kKeyScaleBytes = 32;
  static_assert(kKeyScaleBytes >= most_scale_bytes(DType::kE4M3));
  static constexpr int kScaleBytes = kKeys * kKeyScaleBytes;
  static constexpr int kRowStateBytes = 4 + 8;  // the row's factor, and the state of its softmax
  static constexpr int kUnitBytes = 192;        // for a BlockUnit
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;

  // P of a group of warps: a tile of e4m3 for each scale of a key, and one of 16 bits for rotary channels that are part
  // of the value.
  static constexpr int kMostScales = cuda::fp8::kMostScales;
  static constexpr int kPRowBytes = kKeys;
  static constexpr int kPTileBytes = kGroupRows * kPRowBytes;
  static constexpr int kRopePRowBytes = 2 * kKeys;
  static constexpr int kGroupPBytes = kMostScales * kPTileBytes + kGroupRows * kRopePRowBytes;

  static constexpr int kBarrierBytes = 8;
  static constexpr int kMostTiles = 3;
  /// These are the mbarriers' places, in units of kBarrierBytes. Those of a tile have a place for each tile.
  enum Barrier : int {
    kKvFull,                              // [tile]
    kKvEmpty = kKvFull + kMostTiles,      // [tile]
    kScoresRead = kKvEmpty + kMostTiles,  // [group]
    kOfGroups = kScoresRead,              // from here on, the warps of a group arrive
    kNumBarriers = kScoresRead + kGroups
  };
  /// These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int { kGroupBarrier = 1 };  // one for each group

  static constexpr int kPlaceOffset = 0;
  static constexpr int kEntryOffset = kPlaceOffset + 2 * kKeys * kPlaceBytes;
  static constexpr int kEntryPlaces = 4;
  static constexpr int kRowOffset = kEntryOffset + kEntryPlaces * kKeys * 4;
  static constexpr int kQueryScaleOffset = kRowOffset + kRows * kRowStateBytes;
  static constexpr int kPScaleOffset = kQueryScaleOffset + kRows * 4;  // [scale][row]
  static constexpr int kUnitOffset = kPScaleOffset + kMostScales * kRows * 4;
  static constexpr int kBarrierOffset = kUnitOffset + kUnitBytes;
  static constexpr int kPoisonOffset = kBarrierOffset + kNumBarriers * kBarrierBytes;
  static constexpr int kScoreOffset = (kPoisonOffset + 2 * kGroups * kPoisonBytes + 127) / 128 * 128;
  static constexpr int kPOffset = kScoreOffset + kScoreBytes;
  static constexpr int kTileOffset = kPOffset + kGroups * kGroupPBytes;

  /// Returns the bytes of a block that has so many tiles, and scales for each.
  static constexpr int bytes_with(int tiles) { return kTileOffset + tiles * (kTileBytes + kScaleBytes); }
  static constexpr int kTiles = bytes_with(kMostTiles) <= kSharedBytesPerBlock ? kMostTiles : 2;
  static constexpr int kScalePlaces = kTiles;
  static constexpr int kScaleOffset = kTileOffset + kTiles * kTileBytes;
  static constexpr int kSharedBytes = bytes_with(kTiles);
  static_assert(kTileOffset % 128 == 0 && kSharedBytes <= kSharedBytesPerBlock);
  /// Tiles are filled so many steps ahead.
  static constexpr int kLead = kTiles - 1;

  /// On their way into registers queries lie in tiles: in the last one that rows come to, or in all of them.
  static constexpr int kQueryBytes = kRows * kRawRowBytes;
  static constexpr bool kQueriesBesideKeys = kQueryBytes <= kTileBytes;
  static_assert(kQueryBytes <= kTiles * kTileBytes);

  /// At the end of a unit, 16 rows of each warp's outputs lie where scores, P and tiles were.
  static constexpr int kOutputRowFloats = kOutputDims + 4;  // 4 more, so that rows begin in different banks
  static constexpr int kOutputOffset = kScoreOffset;

  static constexpr int kMinBlocks = 1;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

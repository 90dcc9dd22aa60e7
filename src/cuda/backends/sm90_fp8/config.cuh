// SPDX-License-Identifier: Apache-2.0
// This is the configuration of the wgmma kernel on e4m3: the sizes of a block, and the map of its shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/absorbed_units.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/backends/sm90_fp8/limits.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

/// A block multiplies 64 query rows with rows of 512 latent channels of e4m3 and up to 64 rotary ones, of e4m3 or bf16.
struct AbsorbedConfig {
  static constexpr bool kQuantized = true;
  static constexpr int kRows = 64;  // query rows of a block
  static constexpr int kKeys = 64;  // keys of one step
  static constexpr int kPlanKeys = kKeys;
  static constexpr int kLatentDims = cuda::sm90_fp8::kLatentDims;
  static constexpr int kRopeDims = 64;               // rotary channels behind the latent ones, if the problem has any
  static_assert(kKeys == cuda::sm90_fp8::kRunKeys);  // P of a step has one scale for each row and scale of the keys

  // One warpgroup loads rows. Each of the other two computes scores and P of every second step, and the values of half
  // of the channels of all steps.
  static constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
  static constexpr int kFirstMathWarp = kGroupWarps, kMathGroups = 2, kMathWarps = kMathGroups * kGroupWarps;
  static constexpr int kWarps = kFirstMathWarp + kMathWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kReadsIndexAnew = true;
  static constexpr int kCluster = 1;
  static constexpr int kLoadRegisters = 40, kMathRegisters = 232;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;  // what the launch gives every thread
  static_assert(kLoadRegisters + kMathGroups * kMathRegisters <= kWarps / kGroupWarps * kFirstRegisters);

  // A tile holds 64 rows as pieces of 128 bytes a row, swizzled as wgmma reads them: four of the latent channels, one
  // of the rotary ones.
  static constexpr int kPieceRowBytes = 128, kPieceBytes = 64 * kPieceRowBytes;
  static constexpr int kLatentPieces = kLatentDims / kPieceRowBytes, kPieces = kLatentPieces + 1;
  static constexpr int kTileBytes = kPieces * kPieceBytes;
  static constexpr int kRopeOffset = kLatentPieces * kPieceBytes;
  static constexpr int kEightRowsBytes = 8 * kPieceRowBytes;  // an atom of the swizzle
  static constexpr int kStages = 4;

  // What the warpgroup of a step hands over has two places, since it has every second step. P has a tile [64 rows, 64
  // keys] for each scale of a key, in rows of 64 bytes. The first two tiles take the place of the step's rotary
  // channels, which nobody needs once the step has its scores.
  static constexpr int kPlaces = 2;
  static constexpr int kMostScales = cuda::sm90_fp8::kMostScales;
  static constexpr int kPRowBytes = kKeys, kPTileBytes = kRows * kPRowBytes;
  static constexpr int kPTilesInStage = kPieceBytes / kPTileBytes;
  static constexpr int kPPlaceBytes = (kMostScales - kPTilesInStage) * kPTileBytes;
  static constexpr int kScaleBytes = kMostScales * kKeys * 4;   // of a stage: [scale][key]
  static constexpr int kPScaleBytes = kMostScales * kRows * 4;  // of a place: [scale][row]

  // A value warpgroup has all rows and half of the output channels: products of 64 channels by 64 rows.
  static constexpr int kOutputDims = kLatentDims / kMathGroups, kProductDims = 64;
  static constexpr int kProducts = kOutputDims / kProductDims;
  static constexpr int kGroupProducts = kPieceRowBytes / kProductDims;  // of a piece

  // The mbarriers have these places behind kBarrierOffset, in units of kMbarrierBytes.
  enum Barrier : int {
    kKvFull = 0,                    // [stage]
    kKvEmpty = kKvFull + kStages,   // [stage]
    kMaxFull = kKvEmpty + kStages,  // [place]
    kPFull = kMaxFull + kPlaces,    // [place]
    kNumBarriers = kPFull + kPlaces
  };
  // These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int { kMathBarrier = 1, kGroupBarrier };  // the latter: one for each math warpgroup

  // These are offsets in shared memory, in bytes.
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;
  static constexpr int kQueryOffset = 0;
  static constexpr int kStageOffset = kQueryOffset + kTileBytes;
  static constexpr int kPOffset = kStageOffset + kStages * kTileBytes;
  static constexpr int kScaleOffset = kPOffset + kPlaces * kPPlaceBytes;
  static constexpr int kPScaleOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kFactorOffset = kPScaleOffset + kPlaces * kPScaleBytes;  // f32 [place][row]
  static constexpr int kRowOffset = kFactorOffset + kPlaces * kRows * 4;   // f32 [row]: AbsorbedBlock::row_values()
  static constexpr int kSumOffset = kRowOffset + kRows * 4;                // f32 [math warpgroup][row]
  static constexpr int kMaxOffset = kSumOffset + kMathGroups * kRows * 4;  // RowMax [place][row]
  static constexpr int kFlagOffset = kMaxOffset + kPlaces * kRows * 8;     // a byte [place][warp of the group]
  static constexpr int kBarrierOffset = kFlagOffset + kPlaces * kGroupWarps;
  static constexpr int kUnitBarrierOffset = kBarrierOffset + kNumBarriers * kMbarrierBytes;
  static constexpr int kValidOffset = kUnitBarrierOffset + kUnitBarriers * kMbarrierBytes;  // a bit for each staged key
  static constexpr int kUnitOffset = (kValidOffset + kStages * kKeys / 8 + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + 2 * kUnitBytes;
  static constexpr int kWalkOffset = kUnitNumberOffset + kWarps * 4;
  static constexpr int kPoisonOffset = kWalkOffset + sizeof(UnitWalk);
  static constexpr int kSharedBytes = kPoisonOffset + kPlaces * kPoisonBytes;
  static_assert(kBarrierOffset % 8 == 0 && kWalkOffset % 8 == 0);
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

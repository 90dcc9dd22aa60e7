// SPDX-License-Identifier: Apache-2.0
// The shape of the wgmma attention kernel's block, and what lies where in its shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/absorbed_units.cuh"
#include "cuda/attention/poison.cuh"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// 64 query rows against rows of `kLatentDims_` (512 or 256) channels and up to 64 more. Quantized ones become bf16.
template <int kLatentDims_, KeyKind kKind_>
struct AbsorbedConfig {
  static constexpr bool kQuantized = kKind_ == KeyKind::kQuantized;
  static constexpr DType kType = kKind_ == KeyKind::kF16 ? DType::kF16 : DType::kBF16;  // what is multiplied
  static constexpr int kRows = 64;
  static constexpr int kKeys = 64;  // of one step
  static constexpr int kPlanKeys = kKeys;
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, where d_qk is larger than d_v

  // Warpgroups of four warps: one that fetches rows, one for scores and weights, two for values.
  static constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
  static constexpr int kFirstScoreWarp = kGroupWarps, kFirstValueWarp = 2 * kGroupWarps;
  static constexpr int kValueGroups = 2, kValueWarps = kValueGroups * kGroupWarps;
  static constexpr int kWarps = kFirstValueWarp + kValueWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;
  // Where decoding takes longer than multiplying, two blocks of the same keys decode half of them each.
  static constexpr int kCluster = kQuantized ? 2 : 1;
  static constexpr int kFirstRegisters = 65536 / kThreads;  // what the launch gives every thread
  // Decoding takes registers, and fewer outputs fewer.
  static constexpr int kLoadRegisters = !kQuantized ? 72 : kLatentDims == 512 ? 88 : 104;
  static constexpr int kScoreRegisters = kQuantized && kLatentDims == 512 ? 104 : 120;
  static constexpr int kValueRegisters = kQuantized && kLatentDims != 512 ? 144 : 160;
  static_assert(kLoadRegisters + kScoreRegisters + 2 * kValueRegisters <= 4 * kFirstRegisters);

  // Tiles of 64 rows: pieces of 64 channels, of 128-byte rows swizzled as wgmma reads them. Eight rows of a piece lie
  // together, and then those of its latent pieces, so that decoded ones can be copied at once; rotary channels behind
  // all of them.
  static constexpr int kPieceDims = 64, kPieceRowBytes = kPieceDims * 2, kPieceBytes = 64 * kPieceRowBytes;
  static constexpr int kLatentPieces = kLatentDims / kPieceDims, kPieces = kLatentPieces + 1;
  static constexpr int kTileBytes = kPieces * kPieceBytes;
  static constexpr int kGroupRowsBytes = 8 * kPieceRowBytes;
  static constexpr int kGroupBytes = kLatentPieces * kGroupRowsBytes, kRopeOffset = kLatentPieces * kPieceBytes;
  static constexpr int kStages = 2;
  // Scores begin with the first pieces while later ones are on their way. Decoded ones arrive together: each arrival
  // takes time from who decodes.
  static constexpr int kArrivalPieces = kQuantized ? kPieces : 3;
  static constexpr int kArrivals = (kPieces + kArrivalPieces - 1) / kArrivalPieces;
  // Stages are free again half by half, of 32 keys each. Weights take the place of a half's rotary channels, which are
  // not needed once scores are there: 64 rows by 32 keys, rows of 64 bytes.
  static constexpr int kHalfKeys = kKeys / 2, kHalfBytes = kHalfKeys * kPieceRowBytes;
  static constexpr int kWeightRowBytes = kHalfKeys * 2;
  static_assert(kRows * kWeightRowBytes == kHalfBytes);

  // Outputs: a value warpgroup has all rows of its share of the channels.
  static constexpr int kOutputDims = kLatentDims / kValueGroups, kOutputTiles = kOutputDims / 8;

  // Shared memory.
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;
  static constexpr int kQueryOffset = 0;
  static constexpr int kStageOffset = kQueryOffset + kTileBytes;
  static constexpr int kBarrierOffset = kStageOffset + kStages * kTileBytes;
  static constexpr int kNumBarriers = (kArrivals + 5 + (kCluster > 1 ? kGroupWarps + 1 : 0)) * kStages;
  static constexpr int kUnitBarrierOffset = kBarrierOffset + kNumBarriers * 8;
  static constexpr int kValidOffset = kUnitBarrierOffset + kUnitBarriers * 8;  // a bit for each key of a stage
  static constexpr int kFactorOffset = kValidOffset + kStages * kKeys / 8;     // of two steps, and of a unit
  static constexpr int kUnitOffset = (kFactorOffset + 3 * kRows * 4 + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + 2 * kUnitBytes;
  static constexpr int kWalkOffset = kUnitNumberOffset + kWarps * 4;
  static constexpr int kPoisonOffset = kWalkOffset + sizeof(UnitWalk);
  static constexpr int kSharedBytes = kPoisonOffset + 2 * kPoisonBytes;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

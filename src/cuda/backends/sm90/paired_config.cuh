// SPDX-License-Identifier: Apache-2.0
// This is the configuration of the paired wgmma kernel: the sizes of a block, and the map of its shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/absorbed_units.cuh"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// A block multiplies 64 query rows with rows of 512 latent channels and 64 rotary ones or none, of the queries' type.
/// Rows of a quantized cache, which are found by slots only, are decoded to that type first.
template <DType kType_, bool kQuantized_ = false>
struct PairedConfig {
  static constexpr bool kQuantized = kQuantized_;
  static constexpr DType kType = kType_;  // all operands have this type
  static constexpr int kRows = 64;        // query rows of a block
  static constexpr int kKeys = 64;        // keys of one step
  static constexpr int kPlanKeys = kKeys;
  static constexpr int kLatentDims = 512, kRopeDims = 64;

  // One warpgroup loads queries and rows. Each of the other two computes scores and P of every second step, and the
  // values of half of the channels of all steps.
  static constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
  // With pages warp 0 of the load warpgroup loads rows, another one makes masks, and those behind it load queries.
  static constexpr int kMaskWarp = 1, kFirstQueryWarp = 2;
  static constexpr int kFirstMathWarp = kGroupWarps, kMathGroups = 2, kMathWarps = kMathGroups * kGroupWarps;
  static constexpr int kWarps = kFirstMathWarp + kMathWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kReadsIndexAnew = true;
  // Two blocks of a cluster have the same lists for different query rows, and each decodes half of the keys for both.
  static constexpr int kCluster = kQuantized ? 2 : 1;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;  // what the launch gives every thread
  static constexpr int kLoadRegisters = kQuantized ? 104 : 72, kMathRegisters = kQuantized ? 200 : 216;
  static_assert(kLoadRegisters + kMathGroups * kMathRegisters <= kWarps / kGroupWarps * kFirstRegisters);

  // A tile holds 64 rows as pieces of 64 channels: rows of 128 bytes, swizzled as wgmma reads them and as tensor copies
  // write them. The ninth piece has the rotary channels. Eight rows of a piece are an atom of the swizzle. Pieces lie
  // one behind the other; if rows are decoded, the atoms of all latent pieces of the same eight rows lie together
  // instead, so that one copy brings a half of their channels to the other block.
  static constexpr int kPieceDims = 64, kPieceRowBytes = kPieceDims * 2, kPieceBytes = kKeys * kPieceRowBytes;
  static constexpr int kLatentPieces = kLatentDims / kPieceDims, kPieces = kLatentPieces + 1;
  static constexpr int kTileBytes = kPieces * kPieceBytes;
  static constexpr int kAtomRows = 8, kAtomBytes = kAtomRows * kPieceRowBytes;
  static constexpr int kPieceStride = kQuantized ? kAtomBytes : kPieceBytes;                    // of latent pieces
  static constexpr int kEightRowsBytes = kQuantized ? kLatentPieces * kAtomBytes : kAtomBytes;  // of latent channels
  static constexpr int kRopeOffset = kLatentPieces * kPieceBytes;
  static constexpr int kStages = 2;  // no more fit beside the queries

  // P [64 rows, 64 keys] takes the place of the step's rotary channels, which nobody needs once the scores are
  // computed.
  static_assert(kRows * kKeys * 2 == kPieceBytes);

  // A math warpgroup has all rows and half of the output channels.
  static constexpr int kGroupPieces = kLatentPieces / kMathGroups;
  // Hidden keys of lists have no row, but zeros, so that nothing of them must be cleared.
  static constexpr bool kClearsPoison = !kQuantized;
  static constexpr int kOutputDims = kLatentDims / kMathGroups, kOutputTiles = kOutputDims / 8;

  // The mbarriers have these places behind kBarrierOffset, in units of kMbarrierBytes.
  enum Barrier : int {
    kKvFull = 0,                                // [stage][piece]
    kKvEmpty = kKvFull + kStages * kPieces,     // [stage][half of the latent channels]
    kSDone = kKvEmpty + kStages * kMathGroups,  // [stage]
    kPFull = kSDone + kStages,                  // [stage]
    kQFull = kPFull + kStages,
    kQEmpty,
    kNumBarriers
  };
  // These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int { kMathBarrier = 1, kGroupBarrier };  // the latter: one for each math warpgroup

  // These are offsets in shared memory, in bytes.
  static constexpr int kQueryOffset = 0;
  static constexpr int kStageOffset = kQueryOffset + kTileBytes;
  static constexpr int kBarrierOffset = kStageOffset + kStages * kTileBytes;
  static constexpr int kUnitBarrierOffset = kBarrierOffset + kNumBarriers * kMbarrierBytes;
  static constexpr int kMaskOffset = kUnitBarrierOffset + kUnitBarriers * kMbarrierBytes;  // [stage][row], a bit a key
  // All rows see the same keys of a list, so that one mask would do. With a stride of 8 bytes between those of the two
  // stages ptxas 13.0 keeps addresses of operands in ordinary registers.
  static constexpr int kMaskRows = kQuantized ? 2 : kRows;
  static constexpr int kMaxOffset = kMaskOffset + kStages * kMaskRows * (kKeys / 8);  // f32 maxima of two steps
  static constexpr int kFactorOffset = kMaxOffset + kStages * kRows * 4;              // f32 factors of two steps
  static constexpr int kSumOffset = kFactorOffset + kStages * kRows * 4;              // f32 sums of each warpgroup
  static constexpr int kRowOffset = kSumOffset + kMathGroups * kRows * 4;             // f32 factors of outputs
  static constexpr int kFlagOffset = kRowOffset + kRows * 4;                 // bytes, [stage][warp of a warpgroup]
  static constexpr int kMaskedOffset = kFlagOffset + kStages * kGroupWarps;  // bytes, [stage][warp that loads rows]
  static constexpr int kUnitOffset = (kMaskedOffset + kStages * kGroupWarps + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + kUnitPlaces * kUnitBytes;
  static constexpr int kWalkOffset = (kUnitNumberOffset + kWarps * 4 + 7) / 8 * 8;
  static constexpr int kCodeOffset = (kWalkOffset + sizeof(UnitWalk) + 15) / 16 * 16;  // [load warp][piece][row]
  static constexpr int kPieceCodeBytes = kAtomRows * kPieceDims;  // of the eight rows that a load warp decodes
  static constexpr int kWarpCodeBytes = kQuantized ? kGroupPieces * kPieceCodeBytes : 0;
  static constexpr int kSharedBytes = kCodeOffset + kGroupWarps * kWarpCodeBytes;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

namespace mla::MLA_CUDA_NAMESPACE {

/// Of pages the mask warp finds the unmasked steps; of lists nobody asks.
template <DType kType, bool kQuantized>
inline constexpr bool kUnmaskedStepsLater<sm90::PairedConfig<kType, kQuantized>> = true;

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// This is the configuration of the wgmma kernel for absorbed attention: the sizes of a block, and the map of its shared
// memory.
#pragma once

#include <cstdint>

#include "cuda/attention/absorbed_units.cuh"
#include "cuda/attention/poison.cuh"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// A block multiplies 64 query rows with rows of `kLatentDims_` (512 or 256) latent channels and up to 64 rotary ones.
/// Rows of a quantized cache are decoded to bf16 first.
template <int kLatentDims_, KeyKind kKind_>
struct AbsorbedConfig {
  static constexpr bool kQuantized = kKind_ == KeyKind::kQuantized;
  // All operands have this type.
  static constexpr DType kType = kKind_ == KeyKind::kF16 ? DType::kF16 : DType::kBF16;
  static constexpr int kRows = 64;  // query rows of a block
  static constexpr int kKeys = 64;  // keys of one step
  static constexpr int kPlanKeys = kKeys;
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, if the problem has any

  // Each role has whole warpgroups of four warps: one loads rows, one computes scores and P, two add values.
  static constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
  static constexpr int kFirstScoreWarp = kGroupWarps, kFirstValueWarp = 2 * kGroupWarps;
  static constexpr int kValueGroups = 2, kValueWarps = kValueGroups * kGroupWarps;
  static constexpr int kWarps = kFirstValueWarp + kValueWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;
  static constexpr bool kReadsIndexAnew = false;
  // Decoding a quantized row takes longer than multiplying it, so that two blocks with the same keys form a cluster, in
  // which each decodes half of the keys for both: 383 instead of 444 us (fp8_ds_mla, 128 heads, batch 64, kv 8k; H200,
  // 2026-11-22).
  static constexpr int kCluster = kQuantized ? 2 : 1;
  static constexpr int kFirstRegisters = 65536 / kThreads;  // what the launch gives every thread
  // setmaxnreg moves registers to the roles that need them. Decoding needs more than copying; with 256 latent channels
  // the accumulators of the value warps need fewer. Measured on an H200: 72 registers for decoding 512 channels are 7 %
  // slower than 88, and 80 are 2 % slower (2026-11-22); the splits for 256 channels and for 16-bit rows were chosen
  // without a recorded measurement.
  static constexpr int kLoadRegisters = !kQuantized ? 72 : kLatentDims == 512 ? 88 : 104;
  static constexpr int kScoreRegisters = kQuantized && kLatentDims == 512 ? 104 : 120;
  static constexpr int kValueRegisters = kQuantized && kLatentDims != 512 ? 144 : 160;
  static_assert(kLoadRegisters + kScoreRegisters + 2 * kValueRegisters <= 4 * kFirstRegisters);

  // A tile holds 64 rows as pieces of 64 channels: rows of 128 bytes, swizzled as wgmma reads them. Eight rows of a
  // piece are an atom of the swizzle. The atoms of all latent pieces of the same eight rows lie together, so that eight
  // decoded rows are one contiguous copy; the rotary piece lies behind all latent ones.
  static constexpr int kPieceDims = 64, kPieceRowBytes = kPieceDims * 2, kPieceBytes = 64 * kPieceRowBytes;
  static constexpr int kLatentPieces = kLatentDims / kPieceDims, kPieces = kLatentPieces + 1;
  static constexpr int kTileBytes = kPieces * kPieceBytes;
  static constexpr int kAtomRows = 8, kAtomBytes = kAtomRows * kPieceRowBytes;
  static constexpr int kEightRowsBytes = kLatentPieces * kAtomBytes;  // eight rows' latent channels
  static constexpr int kRopeOffset = kLatentPieces * kPieceBytes;
  static constexpr int kStages = 2;  // no more fit beside the queries
  // Load warps arrive at kv_full once for so many pieces. With 16-bit rows scores begin with the first three pieces
  // while later ones are on their way: with faster maxima and a faster combine, 436 instead of 396 TFLOP/s at batch 32
  // (128 heads, kv 8k; H200, 2026-11-21). Decoded rows arrive at once, because an arrival takes time from the decoding
  // warps, which bound the kernel: two arrivals took 364 instead of 355 us (fp8_ds_mla, 128 heads, batch 64, kv 8k;
  // H200, 2026-11-22).
  static constexpr int kArrivalPieces = kQuantized ? kPieces : 3;
  static constexpr int kArrivals = (kPieces + kArrivalPieces - 1) / kArrivalPieces;
  // A stage is given back in two halves of 32 keys. P of a half (64 rows by 32 keys, 64 bytes a row) replaces the
  // rotary channels of the half's keys, which have the same size and which nobody needs once the scores are computed. P
  // handed over by halves: 481 instead of 472 TFLOP/s at batch 32 (128 heads, kv 8k; H200, 2026-11-21).
  static constexpr int kHalfKeys = kKeys / 2, kHalfBytes = kHalfKeys * kPieceRowBytes;
  static constexpr int kPRowBytes = kHalfKeys * 2;
  static_assert(kRows * kPRowBytes == kHalfBytes);

  // A value warpgroup has all rows and half of the output channels.
  static constexpr int kOutputDims = kLatentDims / kValueGroups, kOutputTiles = kOutputDims / 8;

  // The mbarriers have these places behind kBarrierOffset, in units of kBarrierBytes. Those of a stage have a place for
  // each stage, side by side.
  static constexpr int kBarrierBytes = 8;
  enum Barrier : int {
    kKvFull = 0,                             // [arrival][stage]
    kPFull = kKvFull + kArrivals * kStages,  // [half][stage]
    kKvEmpty = kPFull + 2 * kStages,         // [half][stage]
    kStatsFull = kKvEmpty + 2 * kStages,
    kSDone,
    kRoomInOther,                                             // [load warp][stage], in clusters only
    kReceivedByOther = kRoomInOther + kGroupWarps * kStages,  // [stage], in clusters only
    kNumBarriers = kCluster > 1 ? kReceivedByOther + kStages : kRoomInOther
  };
  // These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int { kScoreBarrier = 1, kValueBarrier };

  // These are offsets in shared memory, in bytes.
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;
  static constexpr int kQueryOffset = 0;
  static constexpr int kStageOffset = kQueryOffset + kTileBytes;
  static constexpr int kBarrierOffset = kStageOffset + kStages * kTileBytes;
  static constexpr int kUnitBarrierOffset = kBarrierOffset + kNumBarriers * kBarrierBytes;
  static constexpr int kValidOffset = kUnitBarrierOffset + kUnitBarriers * kBarrierBytes;  // a bit for each staged key
  static constexpr int kFactorOffset = kValidOffset + kStages * kKeys / 8;  // f32 factors: of two steps, and of a unit
  static constexpr int kUnitOffset = (kFactorOffset + 3 * kRows * 4 + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + 2 * kUnitBytes;
  static constexpr int kWalkOffset = kUnitNumberOffset + kWarps * 4;
  static constexpr int kPoisonOffset = kWalkOffset + sizeof(UnitWalk);
  static constexpr int kSharedBytes = kPoisonOffset + 2 * kPoisonBytes;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

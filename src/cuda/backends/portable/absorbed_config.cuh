// SPDX-License-Identifier: Apache-2.0
// This is the configuration of the mma.sync kernel for absorbed attention: the block's rows, the keys of one step, how
// warps divide the work, and the map of shared memory. Tiles are sized by the shared memory that the architecture gives
// a block.
#pragma once

#include <cstdint>

#include "cuda/attention/key_kind.h"
#include "cuda/attention/poison.cuh"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/tile.cuh"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

/// A block multiplies `kRows_` query rows (16, 32, 64) with rows of `kLatentDims_` channels and 64 more. `kQueryTerms_`
/// is 2 where queries are more precise than the multiplied type: each is split into its value rounded to that type and
/// the rest.
template <int kRows_, int kLatentDims_, KeyKind kKind_, int kQueryTerms_>
struct AbsorbedConfig {
  static constexpr int kRows = kRows_;
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kQueryTerms = kQueryTerms_;
  static constexpr bool kQuantized = kKind_ == KeyKind::kQuantized;
  static constexpr bool kDecodes = kQuantized;  // rows in a tile were decoded
  // Of 64 rows, rows land in a tile and are decoded there: two tiles leave no room for raw rows in 99 KB.
  static constexpr bool kDecodesInTile = kDecodes && kRows == 64;
  static constexpr bool kCodes = kKind_ == KeyKind::kE4M3;  // rows in a tile are e4m3 (absorbed_codes.cuh)
  static_assert(!kCodes || kQueryTerms == 1);
  // The type of all operands.
  static constexpr DType kType = kKind_ == KeyKind::kF16 || kCodes ? DType::kF16 : DType::kBF16;
  static constexpr DType kQueryType = kCodes ? DType::kBF16 : kType;  // in which queries are loaded

  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, if the problem has any
  static constexpr int kKeyBytes = kCodes ? 1 : 2;
  // Rows are whole segments; the last one of e4m3 is half empty.
  static constexpr int kRowBytes =
      ((kLatentDims + kRopeDims) * kKeyBytes + kSegmentBytes - 1) / kSegmentBytes * kSegmentBytes;

  static constexpr int kThreads = 256;
  // Whatever follows from the index of the thread is kept in registers, or computed anew where it is used: whichever
  // makes nvcc 13.0 spill less.
  static constexpr bool kReadsIndexAnew = kQuantized || kCodes || kWrittenFor != 80;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kKeys = 32;
  static constexpr int kPlanKeys = kKeys;  // the plan lets segments begin and end on multiples of it

  // Of 64 rows, two groups of four warps have 32 rows each. They share the tiles; one group copies rows half a step
  // later than the other, so that one multiplies values while the other is at its scores and its softmax.
  static constexpr int kGroups = kRows == 64 ? 2 : 1;
  static constexpr int kGroupRows = kRows / kGroups;
  static constexpr int kGroupWarps = kWarps / kGroups;
  static constexpr int kGroupThreads = kThreads / kGroups;

  // Scores. The warps of a group divide keys (N) and channels (K: the sums of K slices meet in shared memory). Queries
  // stay in registers, so that only keys are read, once by each group. With the channels divided in four the queries
  // fit: 218 instead of 200 TFLOP/s for 128 heads (batch 64, kv 8k; H200, 2026-11-20).
  static constexpr int kScoreWarpsK = 4;
  static constexpr int kScoreWarpsN = kGroupWarps / kScoreWarpsK;
  static constexpr int kScoreTilesM = kGroupRows / 16;
  static constexpr int kScoreBlocks = kKeys / 16 / kScoreWarpsN;  // blocks of 16 keys that a warp computes in turn
  static constexpr int kLatentSteps = kLatentDims / 16 / kScoreWarpsK;
  static constexpr int kRopeSteps = kRopeDims / 16 / kScoreWarpsK;
  static_assert(kRopeSteps == 1);

  // Outputs. A warp has all rows of its group and its share of the channels.
  static constexpr int kOutputTilesM = kGroupRows / 16;
  static constexpr int kOutputDims = kLatentDims / kGroupWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory, in bytes. 16-bit rows land in the tiles; quantized rows land in raw stages, from where the warp that
  // loaded them decodes them into a tile.
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kRawRowBytes = kLatentDims + 2 * kRopeDims;  // e4m3 latents, bf16 or e4m3 rotary channels
  static constexpr int kRawBytes = kKeys * kRawRowBytes;
  static constexpr int kExchangeBytes = kScoreBlocks * kScoreTilesM * kWarpSize * 16;  // of a warp's scores: half
  static constexpr int kScoreBytes = kWarps * kExchangeBytes;
  static constexpr int kPRowBytes = 128;  // a segment of a tile, of whose halves a step has one
  static constexpr int kPlaceBytes = 16;
  static constexpr int kKeyScaleBytes = 32;  // the most that a key has: one byte for every 16 of 512 channels
  static_assert(kKeyScaleBytes >= most_scale_bytes(DType::kE4M3) && kKeyScaleBytes >= most_scale_bytes(DType::kE2M1));
  static constexpr int kScaleBytes = kKeys * kKeyScaleBytes;
  static constexpr int kScalePlaces = 2;
  static constexpr int kRowStateBytes = 4 + 8 + 8;  // the row's factor, the state of its softmax, and its base
  static constexpr int kUnitBytes = 192;            // for a BlockUnit
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;

  static constexpr int kBarrierBytes = 8;
  static constexpr int kMostTiles = kCodes ? 4 : 2;
  /// These are the mbarriers' places, in units of kBarrierBytes. Those of a tile have a place for each tile.
  enum Barrier : int {
    kKvFull,                          // [tile]
    kKvEmpty = kKvFull + kMostTiles,  // [tile]
    kNumBarriers = kKvEmpty + kMostTiles,
    kOfGroups = kNumBarriers  // none
  };
  /// These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int {
    kGroupBarrier = 1,                      // one for each group
    kPairBarrier = kGroupBarrier + kGroups  // in each of two exchanges of scores, one for each of four pairs of warps
  };

  static constexpr int kPlaceOffset = 0;
  static constexpr int kEntryOffset = kPlaceOffset + 2 * kKeys * kPlaceBytes;
  static constexpr int kEntryPlaces = (kDecodes && !kDecodesInTile) || kCodes ? 4 : 2;
  static constexpr int kScaleOffset = kEntryOffset + kEntryPlaces * kKeys * 4;
  static constexpr int kRowOffset = kScaleOffset + (kDecodes && !kDecodesInTile ? kScalePlaces * kScaleBytes : 0);
  static constexpr int kQueryFactorOffset = kRowOffset + kRows * kRowStateBytes;
  static constexpr int kCodeScaleOffset = kQueryFactorOffset + (kCodes ? kRows * 4 : 0);
  static constexpr int kUnitOffset = kCodeScaleOffset + (kCodes ? 32 : 0);
  static constexpr int kBarrierOffset = kUnitOffset + kUnitBytes;
  static constexpr int kPoisonOffset = kBarrierOffset + kNumBarriers * kBarrierBytes;
  static constexpr int kScoreOffset = (kPoisonOffset + 2 * kGroups * kPoisonBytes + 127) / 128 * 128;
  static constexpr int kPOffset = kScoreOffset + kScoreBytes;
  static constexpr int kTileOffset = kPOffset + kRows * kPRowBytes;

  /// Returns the bytes of a block that has so many tiles and raw stages.
  static constexpr int bytes_with(int tiles, int raw_stages) {
    return kTileOffset + tiles * kTileBytes + raw_stages * kRawBytes;
  }
  static constexpr bool fits(int tiles, int raw_stages) {
    return bytes_with(tiles, raw_stages) <= kSharedBytesPerBlock;
  }
  /// Returns whether two blocks of so many tiles and raw stages share an SM. The system takes 1 KB of it for each.
  static constexpr bool fits_twice(int tiles, int raw_stages) {
    return 2 * (bytes_with(tiles, raw_stages) + 1024) <= kSharedBytesPerBlock + 1024;
  }
  /// Returns the tiles of e4m3. Of the smallest blocks two with fewer tiles hide more than one with all that fit.
  static constexpr int tiles_of_codes() {
    if (kRows == 16) return fits_twice(3, 0) ? 3 : 2;
    return fits(4, 0) ? 4 : 3;
  }
  static constexpr int kTiles = kCodes ? tiles_of_codes() : (kDecodes && !kDecodesInTile) || !fits(2, 0) ? 1 : 2;
  static constexpr int kRawStages = !kDecodes || kDecodesInTile ? 0 : fits(kTiles, 2) ? 2 : 1;
  static constexpr int kRawOffset = kTileOffset + kTiles * kTileBytes;
  static constexpr int kSharedBytes = bytes_with(kTiles, kRawStages);
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
  /// Tiles are filled so many steps ahead.
  static constexpr int kLead = kTiles - 1;

  /// On their way into registers queries lie in tiles. Where one tile is enough it is the last that rows come to, and
  /// where rows are quantized the first raw stages may be under way. Else queries begin where scores and P will lie.
  static constexpr int kQueryBytes = kQueryTerms * kRows * (kLatentDims + kRopeDims) * 2;
  static constexpr bool kQueriesBesideKeys = kQueryBytes <= kTileBytes;
  static constexpr int kQueryOffset = kScoreOffset;
  static_assert(kQueryBytes <= kSharedBytes - kQueryOffset);
  static_assert(kRawStages == 0 || kQueriesBesideKeys || kQueryBytes <= kTiles * kTileBytes);

  /// At the end of a unit, 16 rows of each warp's outputs lie where scores, P, tiles and raw stages were.
  static constexpr int kOutputRowFloats = kOutputDims + 4;  // 4 more, so that rows begin in different banks
  static constexpr int kOutputOffset = kScoreOffset;

  /// Two of the smallest blocks share an SM whose memory allows it.
  static constexpr int kMinBlocks = kRows == 16 && kQueryTerms == 1 && fits_twice(kTiles, kRawStages) ? 2 : 1;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

// SPDX-License-Identifier: Apache-2.0
// This is the configuration of the mma.sync kernel for absorbed attention: the block's rows, the keys of one step, how
// warps divide the work, and the map of shared memory. Tiles are sized by the shared memory that the architecture gives
// a block.
#pragma once

#include <cstdint>

#include "cuda/attention/key_kind.h"
#include "cuda/attention/poison.cuh"
#include "cuda/ptx/ptx.h"
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
  static constexpr DType kType = kKind_ == KeyKind::kF16 ? DType::kF16 : DType::kBF16;  // the type of all operands

  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, if the problem has any
  static constexpr int kRowBytes = (kLatentDims + kRopeDims) * 2;

  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarpSize;
  // Blocks of 64 rows that may have 227 KB of shared memory take 64 keys a step, all others 32.
  static constexpr int kKeys = kRows == 64 && kSharedBytesPerBlock >= 227 * 1024 ? 64 : 32;
  static constexpr int kPlanKeys = kKeys;  // the plan lets segments begin and end on multiples of it

  // Scores. Warps divide rows (M), keys (N) and channels (K: the sums of K slices meet in shared memory). Queries stay
  // in registers, so that only keys are read, once for each part of M. With the channels divided in four the queries
  // fit: 218 instead of 200 TFLOP/s for 128 heads (batch 64, kv 8k; H200, 2026-11-20).
  static constexpr int kScoreWarpsM = kRows == 64 ? 2 : 1;
  static constexpr int kScoreWarpsK = 4;
  static constexpr int kScoreWarpsN = kWarps / kScoreWarpsM / kScoreWarpsK;
  static constexpr int kScoreTilesM = kRows / 16 / kScoreWarpsM;
  static constexpr int kScoreGroups = kKeys / 16 / kScoreWarpsN;  // groups of 16 keys that a warp computes in turn
  static constexpr int kLatentSteps = kLatentDims / 16 / kScoreWarpsK;
  static constexpr int kRopeSteps = kRopeDims / 16 / kScoreWarpsK;
  static_assert(kRopeSteps == 1);

  // Outputs. A warp has all rows of its share of the channels.
  static constexpr int kOutputTilesM = kRows / 16;
  static constexpr int kOutputDims = kLatentDims / kWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory, in bytes. Quantized rows land in raw stages and are decoded into the one tile; 16-bit rows land in
  // the two tiles by turns.
  static constexpr int kTiles = kQuantized ? 1 : 2;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kRawRowBytes = kLatentDims + 2 * kRopeDims;  // e4m3 latents, bf16 or e4m3 rotary channels
  static constexpr int kRawBytes = kKeys * kRawRowBytes;
  static constexpr int kScoreRowBytes = kKeys * 4;
  static constexpr int kPlaceBytes = kKeys * (kQuantized ? 24 : 16);
  static constexpr int kKeyScaleBytes = 32;  // the most that a key has: one byte for every 16 of 512 channels
  static_assert(kKeyScaleBytes >= most_scale_bytes(DType::kE4M3) && kKeyScaleBytes >= most_scale_bytes(DType::kE2M1));
  static constexpr int kScaleBytes = kKeys * kKeyScaleBytes;

  static constexpr int kRowStateBytes = 4 + 8;  // the row's factor, and the state of its softmax
  static constexpr int kUnitBytes = 144;        // for a BlockUnit

  static constexpr int kPlaceOffset = 0;
  static constexpr int kEntryOffset = kPlaceOffset + 2 * kPlaceBytes;
  static constexpr int kEntryBytes = kKeys * 4;
  static constexpr int kScaleOffset = kEntryOffset + 2 * kEntryBytes;
  static constexpr int kRowOffset = kScaleOffset + (kQuantized ? 2 * kScaleBytes : 0);
  static constexpr int kUnitOffset = kRowOffset + kRows * kRowStateBytes;
  static constexpr int kPoisonOffset = kUnitOffset + kUnitBytes;
  static constexpr int kTileOffset = (kPoisonOffset + PoisonMarks<kKeys>::kBytes + 127) / 128 * 128;
  static constexpr int kScoreOffset = kTileOffset + kTiles * kTileBytes;
  static constexpr int kRawOffset = kScoreOffset + kScoreWarpsK * kRows * kScoreRowBytes;
  static constexpr int kRawStages = !kQuantized ? 0 : kRawOffset + 2 * kRawBytes <= kSharedBytesPerBlock ? 2 : 1;
  static constexpr int kSharedBytes = kRawOffset + kRawStages * kRawBytes;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);

  /// On their way into registers queries lie where tiles and scores will be, beside the first keys if there is room.
  static constexpr int kQueryBytes = kQueryTerms * kRows * kRowBytes;
  static constexpr bool kQueriesBesideKeys =
      kQueryBytes <= (kQuantized ? kRawOffset - kTileOffset : kSharedBytes - kTileOffset - kTileBytes);
  static constexpr int kQueryStageOffset = kTileOffset + (kQueriesBesideKeys && !kQuantized ? kTileBytes : 0);
  static constexpr int kRopeStageOffset = kQueryStageOffset + kQueryTerms * kRows * kLatentDims * 2;
  static_assert(kQueryStageOffset + kQueryBytes <= kSharedBytes);

  /// Two of the smallest blocks share an SM whose memory allows it. The system takes 1 KB of it for each block.
  static constexpr int kMinBlocks =
      kRows == 16 && kQueryTerms == 1 && 2 * (kSharedBytes + 1024) <= kSharedBytesPerBlock + 1024 ? 2 : 1;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

// SPDX-License-Identifier: Apache-2.0
// The shape of the absorbed attention kernel's block: its rows, the keys of one step, how warps divide the work, and
// what lies where in shared memory. Tiles follow from the shared memory that the architecture gives a block.
#pragma once

#include <cstdint>

#include "cuda/attention/key_kind.h"
#include "cuda/attention/poison.cuh"
#include "cuda/ptx/ptx.h"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

/// `kRows_` query rows (16, 32, 64) against rows of `kLatentDims_` channels and 64 more. `kQueryParts_` is 2 where
/// queries are more precise than the multiplied type: they are split into what that type holds and the rest.
template <int kRows_, int kLatentDims_, KeyKind kKind_, int kQueryParts_>
struct AbsorbedConfig {
  static constexpr int kRows = kRows_;
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kQueryParts = kQueryParts_;
  static constexpr bool kQuantized = kKind_ == KeyKind::kQuantized;
  static constexpr DType kType = kKind_ == KeyKind::kF16 ? DType::kF16 : DType::kBF16;  // what is multiplied

  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, where d_qk is larger than d_v
  static constexpr int kRowBytes = (kLatentDims + kRopeDims) * 2;

  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kKeys = kRows == 64 && kSharedBytesPerBlock >= 227 * 1024 ? 64 : 32;
  static constexpr int kPlanKeys = kKeys;  // segments begin and end on multiples of it

  // Scores. Warps divide rows (M), keys (N) and channels (K: partial sums meet in shared memory). Queries stay in
  // registers, so that only keys are read, once for each of the M.
  static constexpr int kScoreWarpsM = kRows == 64 ? 2 : 1;
  static constexpr int kScoreWarpsK = 4;
  static constexpr int kScoreWarpsN = kWarps / kScoreWarpsM / kScoreWarpsK;
  static constexpr int kScoreTilesM = kRows / 16 / kScoreWarpsM;
  static constexpr int kScoreGroups = kKeys / 16 / kScoreWarpsN;  // of 16 keys, one after another
  static constexpr int kLatentSteps = kLatentDims / 16 / kScoreWarpsK;
  static constexpr int kRopeSteps = kRopeDims / 16 / kScoreWarpsK;
  static_assert(kRopeSteps == 1);

  // Outputs. A warp has all rows and its share of the channels.
  static constexpr int kOutputTilesM = kRows / 16;
  static constexpr int kOutputDims = kLatentDims / kWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory. Quantized rows land in raw stages and are decoded into the one tile; others land in the tiles.
  static constexpr int kTiles = kQuantized ? 1 : 2;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kRawRowBytes = kLatentDims + 2 * kRopeDims;  // e4m3 latents, bf16 or e4m3 rotary channels
  static constexpr int kRawBytes = kKeys * kRawRowBytes;
  static constexpr int kScoreRowBytes = kKeys * 4;
  static constexpr int kPlaceBytes = kKeys * (kQuantized ? 24 : 16);
  static constexpr int kKeyScaleBytes = 32;  // a scale for every 16 of 512 channels
  static_assert(kKeyScaleBytes >= most_scale_bytes(DType::kE4M3) && kKeyScaleBytes >= most_scale_bytes(DType::kE2M1));
  static constexpr int kScaleBytes = kKeys * kKeyScaleBytes;

  static constexpr int kRowStateBytes = 4 + 8;  // factor; state of the softmax
  static constexpr int kUnitBytes = 144;

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

  /// Queries wait on their way into registers where tiles and scores will be, beside the first keys if there is room.
  static constexpr int kQueryBytes = kQueryParts * kRows * kRowBytes;
  static constexpr bool kQueriesBesideKeys =
      kQueryBytes <= (kQuantized ? kRawOffset - kTileOffset : kSharedBytes - kTileOffset - kTileBytes);
  static constexpr int kQueryStageOffset = kTileOffset + (kQueriesBesideKeys && !kQuantized ? kTileBytes : 0);
  static constexpr int kTailStageOffset = kQueryStageOffset + kQueryParts * kRows * kLatentDims * 2;
  static_assert(kQueryStageOffset + kQueryBytes <= kSharedBytes);

  /// The smallest blocks share a multiprocessor where its memory, of which the system takes 1 KB for each, allows.
  static constexpr int kMinBlocks =
      kRows == 16 && kQueryParts == 1 && 2 * (kSharedBytes + 1024) <= kSharedBytesPerBlock + 1024 ? 2 : 1;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

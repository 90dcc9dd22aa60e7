// SPDX-License-Identifier: Apache-2.0
// The shape of the warp-specialized absorbed attention kernel's block, and what lies where in its shared memory.
#pragma once

#include <cstdint>

#include "cuda/portable/absorbed_config.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// `kRows_` query rows against rows of `kLatentDims_` channels and up to 64 more: 64 rows, of 16-bit caches only, as
/// decoding takes warps whose registers 64 rows need; or 16, where keys shall come as fast as memory gives them.
template <int kRows_, int kLatentDims_, KeyKind kKind_>
struct SpecializedConfig {
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = 32;      // of one step
  static constexpr int kPlanKeys = 64;  // segments begin and end on multiples of it
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kTailDims = 64;  // rotary channels behind the latent ones, where d_qk is larger than d_v
  static constexpr bool kQuantized = kKind_ == KeyKind::kE4M3;
  static constexpr DType kType = kKind_ == KeyKind::kF16 ? DType::kF16 : DType::kBF16;  // what is multiplied
  static_assert(kRows == 16 || (kRows == 64 && !kQuantized));

  // Rows are one or two bands; a band has several warps for its scores, and one or two for its weights.
  static constexpr int kBands = kRows == 64 ? 2 : 1, kBandRows = kRows / kBands, kBandTiles = kBandRows / 16;
  static constexpr int kWeightWarps = 2, kFetchWarps = kRows == 64 ? 2 : 3, kDecodeWarps = kQuantized ? 8 : 0;
  static constexpr int kScoreWarps = 4, kValueWarps = 8;
  static constexpr int kFirstWeightWarp = 0, kFirstFetchWarp = kWeightWarps;
  static constexpr int kFirstDecodeWarp = kFirstFetchWarp + kFetchWarps;
  static constexpr int kFirstScoreWarp = kFirstDecodeWarp + kDecodeWarps;
  static constexpr int kFirstValueWarp = kFirstScoreWarp + kScoreWarps;
  static constexpr int kWarps = kFirstValueWarp + kValueWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;

  // With 64 rows registers are short: four warps share one number of them, those who fetch and weigh, those who
  // multiply, and twice those who add. What nvcc 13.0 needs to spill nothing. Re-check: tests/cuda/ptxas_reports.py.
  static constexpr bool kMovesRegisters = kRows == 64;
  static constexpr int kWeightRegisters = kArch == 100 ? 56 : 80, kScoreRegisters = kArch == 100 ? 120 : 112;
  static constexpr int kValueRegisters = kArch == 100 ? 168 : 160;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;  // what the launch gives every thread
  static_assert(!kMovesRegisters || (kWeightRegisters <= kFirstRegisters && kScoreRegisters <= kFirstRegisters));
  static_assert(!kMovesRegisters ||
                4 * kWeightRegisters + 4 * kScoreRegisters + 8 * kValueRegisters <= kWarps * kFirstRegisters);

  // Scores: the warps of a band divide the channels; the sums over their parts meet in shared memory.
  static constexpr int kParts = kScoreWarps / kBands;
  static constexpr int kLatentSteps = kLatentDims / 16 / kParts;  // of 16 channels, of one part
  static constexpr int kTailSteps = kTailDims / 16 / kParts;
  // The queries of these steps stay in registers, the others are shared.
  static constexpr int kHeldSteps = kRows == 64 ? kLatentSteps * 5 / 16 : kLatentSteps * 3 / 4;
  static constexpr int kSharedSteps = kLatentSteps - kHeldSteps + kTailSteps;

  // Outputs: a warp has all rows and its share of the channels.
  static constexpr int kOutputTilesM = kRows / 16;
  static constexpr int kOutputDims = kLatentDims / kValueWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory. 16 bytes behind each row keep rows in different banks: an odd number of 16-byte chunks. Quantized
  // rows land in raw stages and are decoded into the others.
  static constexpr int kStages = kQuantized ? 3 : kRows == 64 ? 4 : 5;
  static constexpr int kKeyPitch = (kLatentDims + kTailDims) * 2 + 16;
  static constexpr int kStageBytes = kKeys * kKeyPitch;
  static constexpr int kRawStages = kQuantized ? 4 : 0;
  static constexpr int kRawPitch = kLatentDims + 16 + kTailDims * 2;  // codes, scales of some formats, rotary channels
  static constexpr int kKeyScaleBytes = 16;                           // of other formats, beside the rows
  static constexpr int kRawBytes = kKeys * (kRawPitch + kKeyScaleBytes);
  static constexpr int kQueryPartBytes = (kHeldSteps > kSharedSteps ? kHeldSteps : kSharedSteps) * 32;
  static constexpr int kQueryPitch = kParts * kQueryPartBytes + 16;
  static constexpr int kWeightPitch = kKeys * 2 + 16;
  static constexpr int kWeightBytes = kRows * kWeightPitch;
  static constexpr int kScoreBytes = kParts * kRows * kKeys * 4;
  static constexpr int kPoisonBytes = kKeys + 4;  // a byte for each key, then one for any
  static constexpr int kUnitBytes = 112;

  static constexpr int kBarrierOffset = 0;
  static constexpr int kNumBarriers = 2 * kStages + 7 + 2 * kBands + 2 * kRawStages;
  static constexpr int kValidOffset = kBarrierOffset + kNumBarriers * 8;  // a bit for each key of a stage
  static constexpr int kRawValidOffset = kValidOffset + kStages * 4;      // and of a raw stage
  static constexpr int kPoisonOffset = kRawValidOffset + kRawStages * 4;
  static constexpr int kFactorOffset = kPoisonOffset + 2 * kPoisonBytes;  // of two steps, and of a unit
  static constexpr int kUnitOffset = (kFactorOffset + 3 * kRows * 4 + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + 2 * kUnitBytes;  // of each warp
  static constexpr int kWeightOffset = (kUnitNumberOffset + kWarps * 4 + 127) / 128 * 128;
  static constexpr int kScoreOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr int kQueryOffset = kScoreOffset + kScoreBytes;
  static constexpr int kStageOffset = kQueryOffset + kRows * kQueryPitch;
  static constexpr int kRawOffset = kStageOffset + kStages * kStageBytes;
  static constexpr int kSharedBytes = kRawOffset + kRawStages * kRawBytes;
  static constexpr bool kAvailable = kHasBulkCopies && kSharedBytesPerBlock >= 227 * 1024;
  static_assert(!kAvailable || kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// The shape of the warp-specialized absorbed attention kernel's block, and what lies where in its shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/absorbed_units.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/backends/bulk/limits.h"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// `kRows_` query rows against rows of `kLatentDims_` channels and up to 64 more: 64 rows, of 16-bit caches only; or
/// 16, where keys shall come as fast as memory gives them.
template <int kRows_, int kLatentDims_, KeyKind kKind_>
struct AbsorbedConfig {
  static constexpr int kRows = kRows_;
  static constexpr bool kQuantized = kKind_ == KeyKind::kQuantized;
  static constexpr int kKeys = kQuantized ? 64 : 32;  // of one step
  static constexpr int kPlanKeys = 64;                // segments begin and end on multiples of it
  // A copy are the rows that a fetch warp sends for at a time, 60 clocks each, but quantized ones that follow one
  // another at once. In the beginning copies wait for those before them, so that the first rows come first, in so large
  // groups.
  static constexpr int kCopyKeys = kQuantized || kRows == 64 ? 32 : 16;
  static constexpr int kStepCopies = kKeys / kCopyKeys, kGroupCopies = kQuantized ? 1 : kStepCopies;
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, where d_qk is larger than d_v
  // What weights are; of 16-bit caches also queries and keys.
  static constexpr DType kType = kKind_ == KeyKind::kBF16 ? DType::kBF16 : DType::kF16;
  static_assert(kRows == 16 || (kRows == 64 && !kQuantized));

  // Rows are one or two bands; a band has several warps for its scores, and some for its weights.
  static constexpr int kBands = kRows == 64 ? 2 : 1, kBandRows = kRows / kBands, kBandTiles = kBandRows / 16;
  static constexpr int kSoftmaxWarps = kRows == 64 ? 2 : 4, kLoadWarps = kRows == 64 ? 2 : 3;
  static constexpr int kScaleWarps = kQuantized ? 1 : 0;
  static constexpr int kScoreWarps = kQuantized ? 8 : 4, kValueWarps = 8;
  static constexpr int kFirstSoftmaxWarp = 0, kFirstLoadWarp = kSoftmaxWarps;
  static constexpr int kFirstScaleWarp = kFirstLoadWarp + kLoadWarps;
  static constexpr int kFirstScoreWarp = kFirstScaleWarp + kScaleWarps;
  static constexpr int kFirstValueWarp = kFirstScoreWarp + kScoreWarps;
  static constexpr int kWarps = kFirstValueWarp + kValueWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;

  // With 64 rows or 24 warps registers are short: four warps share one number of them, those who fetch and weigh, those
  // who multiply, those who add. What nvcc 13.0 needs to spill nothing. Re-check: tests/cuda/ptxas_reports.py.
  static constexpr bool kMovesRegisters = kRows == 64 || kQuantized;
  static constexpr int kSoftmaxRegisters = kQuantized ? (kArch == 100 ? 64 : 72) : kArch == 100 ? 56 : 80;
  static constexpr int kScoreRegisters = kQuantized ? 88 : kArch == 100 ? 120 : 112;
  static constexpr int kValueRegisters = kQuantized ? (kArch == 100 ? 88 : 80) : kArch == 100 ? 168 : 160;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;  // what the launch gives every thread
  static_assert(!kMovesRegisters ||
                kFirstScoreWarp * kSoftmaxRegisters + kScoreWarps * kScoreRegisters + kValueWarps * kValueRegisters <=
                    kWarps * kFirstRegisters);
  // Whether rows of both pools are sent for by the same code, which holds what they are like in registers: on SM100 it
  // would spill.
  static constexpr bool kChoosesRows = kArch != 100 || !kMovesRegisters;

  // Scores: the warps of a band divide the channels; the sums over their parts meet in shared memory. Those of
  // quantized rows also divide the keys, as they decode them.
  static constexpr int kParts = kQuantized ? 4 : kScoreWarps / kBands;
  static constexpr int kPartKeys = kKeys * kParts * kBands / kScoreWarps;
  static constexpr int kPartDims = kLatentDims / kParts;
  static constexpr int kLatentSteps = kPartDims / 16;  // of 16 channels, of one part
  static constexpr int kRopeSteps = kRopeDims / 16 / kParts;
  // The queries of these steps stay in registers, the others are shared.
  static constexpr int kHeldSteps = kRows == 64 ? kLatentSteps * 5 / 16 : kLatentSteps * 3 / 4;
  static constexpr int kSharedSteps = kLatentSteps - kHeldSteps + kRopeSteps;

  // Outputs: a warp has all rows and its share of the channels.
  static constexpr int kOutputTilesM = kRows / 16;
  static constexpr int kOutputDims = kLatentDims / kValueWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory. Rows of a stage are an odd number of 16-byte chunks apart, so that they lie in different banks.
  static constexpr int kStages = 4;
  static constexpr int kFirstGroups = kStages * kStepCopies / kGroupCopies;
  static constexpr int kKeyPitch = kQuantized ? kLatentDims + 16 + kRopeDims * 2  // codes, scales of some formats
                                              : (kLatentDims + kRopeDims) * 2 + 16;
  static constexpr int kKeyScaleBytes = kQuantized ? 16 : 0;  // of other formats, behind the rows
  static_assert(!kQuantized || kKeyScaleBytes >= most_scale_bytes(DType::kE4M3));
  static constexpr int kStageBytes = kKeys * (kKeyPitch + kKeyScaleBytes);
  // Queries come in one turn where there is room: those that registers hold besides those that stay.
  static constexpr bool kQueriesAtOnce = kRows == 16;
  static constexpr int kQueryPartBytes = (kQueriesAtOnce              ? kHeldSteps + kSharedSteps
                                          : kHeldSteps > kSharedSteps ? kHeldSteps
                                                                      : kSharedSteps) *
                                         32;
  static constexpr int kQueryPitch = kQuantized ? (kPartDims + 16) * 2 + 16 : kParts * kQueryPartBytes + 16;
  static constexpr int kQueryBytes = kQuantized ? kScoreWarps * 8 * kQueryPitch : kRows * kQueryPitch;
  static constexpr int kPPitch = kKeys * 2 + 16;
  static constexpr int kPBytes = kRows * kPPitch;
  static constexpr bool kScoresInRows = kRows == 16;  // or as products come
  static constexpr int kScorePitch = kKeys * 4 + 32;
  static constexpr int kScoreBytes = kParts * kRows * (kScoresInRows ? kScorePitch : kKeys * 4);
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;
  static constexpr int kScaleGroups = kQuantized ? cuda::bulk::kMostScales : 0;
  static constexpr int kScaleBytes = kScaleGroups * kKeys * 2;  // of a step: f16 for each key

  static constexpr int kBarrierOffset = 0;
  static constexpr int kNumBarriers = 2 * kStages + 3 + 2 * kBands + kFirstGroups;
  static constexpr int kUnitBarrierOffset = kBarrierOffset + kNumBarriers * 8;
  static constexpr int kValidOffset = kUnitBarrierOffset + kUnitBarriers * 8;  // a bit for each key of a stage
  static constexpr int kPoisonOffset = kValidOffset + kStages * kKeys / 8;
  static constexpr int kFactorOffset = kPoisonOffset + 2 * kPoisonBytes;            // of two steps, and of a unit
  static constexpr int kEventOffset = (kFactorOffset + 3 * kRows * 4 + 7) / 8 * 8;  // of two steps
  static constexpr int kScaleOffset = kEventOffset + 2 * 8;                         // of two steps
  static constexpr int kUnitOffset = (kScaleOffset + 2 * kScaleBytes + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + 2 * kUnitBytes;  // of each warp
  static constexpr int kPOffset = (kUnitNumberOffset + kWarps * 4 + 127) / 128 * 128;
  static constexpr int kScoreOffset = kPOffset + 2 * kPBytes;
  static constexpr int kQueryOffset = kScoreOffset + kScoreBytes;
  static constexpr int kStageOffset = kQueryOffset + kQueryBytes;
  static constexpr int kSharedBytes = kStageOffset + kStages * kStageBytes;
  static_assert(kHasBulkCopies && kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

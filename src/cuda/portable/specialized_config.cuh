// SPDX-License-Identifier: Apache-2.0
// The shape of the warp-specialized absorbed attention kernel's block, and what lies where in its shared memory.
#pragma once

#include <cstdint>

#include "cuda/portable/absorbed_config.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// 64 query rows against rows of `kLatentDims_` 16-bit channels and up to 64 more.
template <int kLatentDims_, KeyKind kKind_>
struct SpecializedConfig {
  static_assert(kKind_ != KeyKind::kE4M3);
  static constexpr int kRows = 64;
  static constexpr int kKeys = 32;      // of one step
  static constexpr int kPlanKeys = 64;  // segments begin and end on multiples of it
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kTailDims = 64;  // rotary channels behind the latent ones, where d_qk is larger than d_v
  static constexpr DType kType = kKind_ == KeyKind::kF16 ? DType::kF16 : DType::kBF16;
  static constexpr bool kQuantized = false;

  // Four warps share one number of registers: those who fetch and weigh, those who multiply, and twice those who add.
  static constexpr int kWeightWarps = 2, kFetchWarps = 2, kScoreWarps = 4, kValueWarps = 8;
  static constexpr int kFirstWeightWarp = 0, kFirstFetchWarp = kWeightWarps;
  static constexpr int kFirstScoreWarp = kFirstFetchWarp + kFetchWarps;
  static constexpr int kFirstValueWarp = kFirstScoreWarp + kScoreWarps;
  static constexpr int kThreads = (kFirstValueWarp + kValueWarps) * kWarpSize;
  // What nvcc 13.0 needs to spill nothing. Re-check: tests/cuda/ptxas_reports.py.
  static constexpr int kWeightRegisters = kArch == 100 ? 72 : 80, kScoreRegisters = kArch == 100 ? 120 : 112;
  static constexpr int kValueRegisters = 160;
  static constexpr int kFirstRegisters = 65536 / kThreads;  // what the launch gives every thread
  static_assert(kWeightRegisters <= kFirstRegisters && kScoreRegisters <= kFirstRegisters);
  static_assert(4 * kWeightRegisters + 4 * kScoreRegisters + 8 * kValueRegisters <= 16 * kFirstRegisters);
  static constexpr int kMinBlocks = 1;

  // Scores: 2 (rows) x 2 (channels) warps; the sums over either half of the channels meet in shared memory.
  static constexpr int kLatentSteps = kLatentDims / 32;  // of 16 channels, of one half
  static constexpr int kTailSteps = kTailDims / 32;
  static constexpr int kHeldSteps = kLatentSteps * 5 / 16;  // their queries stay in registers, the others are shared
  static constexpr int kSharedSteps = kLatentSteps - kHeldSteps + kTailSteps;

  // Outputs: a warp has all rows and its share of the channels.
  static constexpr int kOutputTilesM = kRows / 16;
  static constexpr int kOutputDims = kLatentDims / kValueWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory. 16 bytes behind each row keep rows in different banks: an odd number of 16-byte chunks.
  static constexpr int kStages = 4;
  static constexpr int kKeyPitch = (kLatentDims + kTailDims) * 2 + 16;
  static constexpr int kStageBytes = kKeys * kKeyPitch;
  static constexpr int kQueryHalfBytes = kSharedSteps * 32;
  static constexpr int kQueryPitch = 2 * kQueryHalfBytes + 16;
  static constexpr int kHeldPitch = 2 * kHeldSteps * 32 + 16;  // of the others on their way into registers
  static constexpr int kWeightPitch = kKeys * 2 + 16;
  static constexpr int kWeightBytes = kRows * kWeightPitch;
  static constexpr int kScoreBytes = 2 * kRows * kKeys * 4;  // of both halves of the channels
  static_assert(kRows * kHeldPitch <= kStageBytes);

  static constexpr int kBarrierOffset = 0;
  static constexpr int kNumBarriers = 2 * kStages + 6;
  static constexpr int kValidOffset = kBarrierOffset + kNumBarriers * 8;  // a bit for each key of a stage
  static constexpr int kPoisonBytes = kKeys + 4;                          // a byte for each key, then one for any
  static constexpr int kPoisonOffset = kValidOffset + kStages * 4;
  static constexpr int kFactorOffset = kPoisonOffset + 2 * kPoisonBytes;
  static constexpr int kUnitOffset = (kFactorOffset + 2 * kRows * 4 + 15) / 16 * 16;
  static constexpr int kUnitBytes = 128;
  static constexpr int kPlaceOffset = kUnitOffset + kUnitBytes;  // of the keys that are about to be fetched
  static constexpr int kWeightOffset = (kPlaceOffset + kKeys * 16 + 127) / 128 * 128;
  static constexpr int kScoreOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr int kQueryOffset = kScoreOffset + kScoreBytes;
  static constexpr int kStageOffset = kQueryOffset + kRows * kQueryPitch;
  static constexpr int kSharedBytes = kStageOffset + kStages * kStageBytes;
  static constexpr bool kAvailable = kHasBulkCopies && kSharedBytesPerBlock >= 227 * 1024;
  static_assert(!kAvailable || kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE

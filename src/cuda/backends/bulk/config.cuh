// SPDX-License-Identifier: Apache-2.0
// This file has the shape of a block of the warp-specialized kernel of absorbed attention, and the map of its shared
// memory.
#pragma once

#include <cstdint>

#include "cuda/attention/absorbed_units.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/backends/bulk/limits.h"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// A block computes `kRows_` query rows against rows of `kLatentDims_` latent channels and up to 64 rotary channels. It
/// has 16 query rows, where the time to read the keys from memory is the bound; of 16-bit caches also 32, where it is
/// nearly so, or 64.
///
/// Gains below are of 16 heads, batch 64, on an H200; "kv 4k / 32k" are the times of both lengths in us.
template <int kRows_, int kLatentDims_, KeyKind kKind_>
struct AbsorbedConfig {
  static constexpr int kRows = kRows_;
  static constexpr bool kE2m1 = kKind_ == KeyKind::kE2M1;
  static constexpr bool kQuantized = kKind_ == KeyKind::kQuantized || kE2m1;
  // A step has this many keys. 64 quantized keys instead of 32 took fp8_ds_mla kv 4k / 32k from 60.6 / 354 to 58.0 /
  // 334 us (2026-11-21). 32 keys of 16-bit rows were chosen without a recorded measurement.
  static constexpr int kKeys = kQuantized ? 64 : 32;
  static constexpr int kPlanKeys = 64;  // segments begin and end on multiples of it
  // A "copy" is the rows that a load warp issues in one turn: one bulk copy for each row, which takes the warp 56 to 65
  // clocks, or a single one where quantized rows are adjacent in memory. 16 rows and four softmax warps instead of 32
  // and two took bf16, kv 4k from 84.4 to 83.7 us (2026-11-21).
  // The copies of the first kStages steps are issued in order, in groups of kGroupCopies: each group waits until the
  // one before it is issued, so that the first rows arrive first.
  static constexpr int kCopyKeys = kQuantized || kRows == 64 ? 32 : 16;
  static constexpr int kStepCopies = kKeys / kCopyKeys, kGroupCopies = kQuantized ? 1 : kStepCopies;
  static constexpr int kLatentDims = kLatentDims_;
  static constexpr int kRopeDims = 64;  // rotary channels behind the latent ones, where d_qk is larger than d_v
  // P has this type; with 16-bit caches queries and keys have it too.
  static constexpr DType kType = kKind_ == KeyKind::kBF16 ? DType::kBF16 : DType::kF16;
  static_assert(kRows == 16 || ((kRows == 32 || kRows == 64) && !kQuantized));

  // The rows are one or two bands. Several score warps and some softmax warps share a band. With 16-bit caches and 16
  // rows, two softmax warps instead of one took 97 / 584 to 95 / 579 us (2026-11-21); kCopyKeys says what four gained.
  // A fourth load warp gained nothing there (2026-11-21); with 32 rows it fills a group of four, among which registers
  // are moved. Eight softmax warps for 32 rows took up to 2 % more time (2026-12-01).
  static constexpr int kBands = kRows == 64 ? 2 : 1, kBandRows = kRows / kBands, kBandTiles = kBandRows / 16;
  static constexpr int kSoftmaxWarps = kRows == 64 ? 2 : 4, kLoadWarps = kRows == 64 ? 2 : kRows == 32 ? 4 : 3;
  static constexpr int kScaleWarps = kQuantized ? 1 : 0;
  static constexpr int kScoreWarps = kQuantized ? 8 : 4, kValueWarps = 8;
  static constexpr int kFirstSoftmaxWarp = 0, kFirstLoadWarp = kSoftmaxWarps;
  static constexpr int kFirstScaleWarp = kFirstLoadWarp + kLoadWarps;
  static constexpr int kFirstScoreWarp = kFirstScaleWarp + kScaleWarps;
  static constexpr int kFirstValueWarp = kFirstScoreWarp + kScoreWarps;
  static constexpr int kWarps = kFirstValueWarp + kValueWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 1;

  // With 32 or 64 rows or 24 warps registers are short, so that warps move them (setmaxnreg): each group of four warps
  // has one number of registers, which is that of the load, softmax and scale warps, of the score warps, or of the
  // value warps. With these numbers nvcc 13.0 spills nothing but, of 64 rows compiled for the family of SM100, up to 24
  // bytes (56, 120 and 168: 140), on which tests/cuda/ptxas_reports.py keeps an eye. Other numbers were not measured.
  static constexpr bool kMovesRegisters = kRows > 16 || kQuantized;
  static constexpr int kSoftmaxRegisters = kQuantized ? (kWrittenFor == 100 ? 64 : 72) : kRows == 32 ? 72 : 80;
  static constexpr int kScoreRegisters = kQuantized ? 88 : kRows == 32 ? 128 : 112;
  static constexpr int kValueRegisters = kQuantized ? (kWrittenFor == 100 ? 88 : 80) : kRows == 32 ? 104 : 160;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;  // of each thread at the launch: all 65,536 of an SM
  static_assert(!kMovesRegisters ||
                kFirstScoreWarp * kSoftmaxRegisters + kScoreWarps * kScoreRegisters + kValueWarps * kValueRegisters <=
                    kWarps * kFirstRegisters);
  // Says whether the load warps issue rows of both pools by the same code, which holds the pool's row layout in
  // registers. On SM100, where registers are short, this spilled 44 and 60 bytes (nvcc 13.0, 2026-11-22), so that there
  // each pool has code of its own. The shared code, together with kQueriesAtOnce and with outputs stored two tiles at a
  // time, took bf16, kv 4k from 82.4 to 81.7 us (2026-11-22).
  static constexpr bool kSharedLoadCode = kWrittenFor != 100 || !kMovesRegisters;

  // Scores. The score warps of a band divide the channels into K slices; the sums over the slices meet in shared
  // memory. Score warps of quantized rows also divide the keys of a step, because they convert them.
  static constexpr int kSlices = kQuantized ? 4 : kScoreWarps / kBands;
  static constexpr int kWarpKeys = kKeys * kSlices * kBands / kScoreWarps;
  static constexpr int kSliceDims = kLatentDims / kSlices;
  // All multiplies are mma.sync m16n8k16. A K step is its 16 channels (or keys), which are 32 bytes of 16-bit elements.
  static constexpr int kKStepBytes = 32;
  static constexpr int kLatentSteps = kSliceDims / 16;  // K steps of a slice
  static constexpr int kRopeSteps = kRopeDims / 16 / kSlices;
  // Queries of the first kHeldSteps K steps stay in registers, those of the others in shared memory. The numbers were
  // chosen by what registers hold, without a recorded measurement.
  static constexpr int kHeldSteps = kRows == 64   ? kLatentSteps * 5 / 16
                                    : kRows == 32 ? kLatentSteps / 2
                                                  : kLatentSteps * 3 / 4;
  static constexpr int kSharedSteps = kLatentSteps - kHeldSteps + kRopeSteps;

  // Outputs. A value warp has all rows and its share of the channels, in tiles of 16 rows and 8 channels.
  static constexpr int kOutputTilesM = kRows / 16;
  static constexpr int kOutputDims = kLatentDims / kValueWarps;
  static constexpr int kOutputTilesN = kOutputDims / 8;

  // Shared memory. The rows of a stage are an odd number of 16-byte chunks apart, so that they lie in different banks.
  // With 16-bit rows four stages took 87 / 579 us; on another day five took 88 / 584 us and three 87 / 583 us
  // (2026-11-21).
  static constexpr int kStages = 4;
  static constexpr int kFirstGroups = kStages * kStepCopies / kGroupCopies;
  // A row of e4m3 is its latent channels, 16 bytes for the scales that some formats have there, and its rotary
  // channels. A row of e2m1 is whole, as in nvfp4_ds_mla, whose rows may follow one another. A 16-bit row is all its
  // channels and a chunk of padding.
  static constexpr int kKeyPitch = kE2m1        ? kLatentDims / 2 + kLatentDims / 16 + kChunkBytes + kRopeDims * 2
                                   : kQuantized ? kLatentDims + 16 + kRopeDims * 2
                                                : (kLatentDims + kRopeDims) * 2 + kChunkBytes;
  // Scales of the other formats of e4m3, behind the stage's rows.
  static constexpr int kKeyScaleBytes = kQuantized && !kE2m1 ? 16 : 0;
  static_assert(kKeyScaleBytes == 0 || kKeyScaleBytes >= most_scale_bytes(DType::kE4M3));
  static constexpr int kStageBytes = kKeys * (kKeyPitch + kKeyScaleBytes);
  // Says whether shared memory has room for all queries at once. If it has not, the queries that registers hold pass
  // through it first, and those that stay there come second. One turn instead of two took bf16, kv 4k from 82.0-82.4 to
  // 81.6 us (2026-11-22).
  static constexpr bool kQueriesAtOnce = kRows <= 32;
  static constexpr int kQuerySliceBytes = (kQueriesAtOnce              ? kHeldSteps + kSharedSteps
                                           : kHeldSteps > kSharedSteps ? kHeldSteps
                                                                       : kSharedSteps) *
                                          kKStepBytes;
  static constexpr int kQueryPitch = kQuantized ? (kSliceDims + 16) * 2 + 16 : kSlices * kQuerySliceBytes + 16;
  static constexpr int kQueryBytes = kQuantized ? kScoreWarps * 8 * kQueryPitch : kRows * kQueryPitch;
  static constexpr int kPPitch = kKeys * 2 + kChunkBytes;
  static constexpr int kPBytes = kRows * kPPitch;
  static constexpr bool kScoresInRows = kRows <= 32;  // or else in the layout of the accumulators
  static constexpr int kScorePitch = kKeys * 4 + 32;
  static constexpr int kScoreBytes = kSlices * kRows * (kScoresInRows ? kScorePitch : kKeys * 4);
  static constexpr int kPoisonBytes = (PoisonMarks<kKeys>::kBytes + 3) / 4 * 4;
  // Scales of a step: f16 for each group and key. Value warps of e2m1 load those of two groups at once, which therefore
  // lie in different banks.
  static constexpr int kScaleGroups = kE2m1 ? kLatentDims / 16 : kQuantized ? cuda::bulk::kMostScales : 0;
  static constexpr int kScalePitch = kKeys * 2 + (kE2m1 ? kChunkBytes : 0);
  static constexpr int kScaleBytes = kScaleGroups * kScalePitch;
  // P, factors, events and scales have a place for even and one for odd steps.
  static constexpr int kParities = 2;
  static constexpr int kFactorBytes = kRows * 4, kEventBytes = 8;  // bytes of a step

  /// These are the places of the mbarriers in shared memory, each kMbarrierBytes long.
  enum Barrier : uint32_t {
    kKvFull,                          // one for each stage
    kKvEmpty = kKvFull + kStages,     // one for each stage
    kPFull = kKvEmpty + kStages,      // one for each parity of the step
    kStatsFull = kPFull + kParities,  // only one
    kSFull,                           // one for each band
    kSEmpty = kSFull + kBands,        // one for each band
    kFirstIssued = kSEmpty + kBands,  // one for each group of the first copies
    kNumBarriers = kFirstIssued + kFirstGroups
  };

  static constexpr int kBarrierOffset = 0;
  static constexpr int kUnitBarrierOffset = kBarrierOffset + kNumBarriers * kMbarrierBytes;
  // Each stage has a bit for each of its keys here.
  static constexpr int kValidOffset = kUnitBarrierOffset + kUnitBarriers * kMbarrierBytes;
  static constexpr int kPoisonOffset = kValidOffset + kStages * kKeys / 8;
  static constexpr int kFactorOffset = kPoisonOffset + kParities * kPoisonBytes;
  static constexpr int kOutputFactorOffset = kFactorOffset + kParities * kFactorBytes;  // output factors of a unit
  static constexpr int kEventOffset = (kOutputFactorOffset + kFactorBytes + 7) / 8 * 8;
  static constexpr int kScaleOffset = kEventOffset + kParities * kEventBytes;
  static constexpr int kUnitOffset = (kScaleOffset + kParities * kScaleBytes + 15) / 16 * 16;
  static constexpr int kUnitNumberOffset = kUnitOffset + kUnitPlaces * kUnitBytes;  // an int for each warp
  static constexpr int kPOffset = (kUnitNumberOffset + kWarps * 4 + 127) / 128 * 128;
  static constexpr int kScoreOffset = kPOffset + kParities * kPBytes;
  static constexpr int kQueryOffset = kScoreOffset + kScoreBytes;
  static constexpr int kStageOffset = kQueryOffset + kQueryBytes;
  static constexpr int kSharedBytes = kStageOffset + kStages * kStageBytes;
  static_assert(kHasBulkCopies && kSharedBytes <= kSharedBytesPerBlock);
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

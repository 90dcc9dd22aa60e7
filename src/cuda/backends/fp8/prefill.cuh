// SPDX-License-Identifier: Apache-2.0
// This kernel computes up-projected prefill of e4m3 by mma.sync m16n8k32: S = Q K^T, softmax over the keys that each
// row sees, O = P V, where P of a run of 32 keys becomes e4m3 with a scale for each row. params.h defines the
// arithmetic (AttentionOptions::compute). A block computes kRows query rows of a head.
//
// Grid: see with_query_block(). Each of the kWarps warps has 16 * row_tiles rows, Q and O in registers. P never leaves
// registers: the accumulators of S have the keys of P as the operand has them (e4m3_operands.cuh).
// Shared memory: stages of [K [keys, d_qk] | V [keys, d_v]] (swizzled tiles, whose rows are whole segments of 128
// bytes) and WarpRows [warps]. Q comes by way of the stages' place. The loop, where two or three blocks of an SM fill
// each other's gaps:
//   wait K(t), V(t), barrier | load K, V(t + stages - 1) | for each run of 32 keys: S, softmax, O += scale of P * (P V)
// docs/kernels/cuda_fp8_prefill.md describes the kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numbers>

#include "core/args.h"
#include "cuda/attention/e4m3_prefill.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/attention/prefill_block.cuh"
#include "cuda/backends/fp8/e4m3_operands.cuh"
#include "cuda/backends/fp8/limits.h"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {

/// Returns the bytes of a tile's row of so many elements.
constexpr int whole_segments(int elements) { return (elements + kSegmentBytes - 1) / kSegmentBytes * kSegmentBytes; }

struct PrefillTiling {
  int row_tiles;   // tiles of 16 rows that a warp has
  int q_segments;  // segments of 128 channels of Q that lie in shared memory; registers hold the others
  int keys;        // keys of a stage: whole runs
  int stages;      // tiles of K and V in shared memory
  int min_blocks;  // blocks that share an SM
};

template <int kDQk, int kDV, PrefillTiling kTiling>
class PrefillKernel : PrefillBlock<PrefillKernel<kDQk, kDV, kTiling>, kTiling.row_tiles, cuda::fp8::kRunKeys> {
  using Base = PrefillBlock<PrefillKernel, kTiling.row_tiles, cuda::fp8::kRunKeys>;
  using Base::args_, Base::block_, Base::head_, Base::warp_row_, Base::shared_;
  using Base::kWarpRows, Base::kKeyTiles, Base::visible, Base::warp_rows;
  using typename Base::Scores;

 public:
  using Params = PrefillParams;
  static constexpr const char* kName = "fp8_prefill";
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = kTiling.min_blocks;
  static constexpr int kRows = kWarps * kWarpRows;

 private:
  static constexpr int kRunKeys = cuda::fp8::kRunKeys;
  static constexpr int kKeys = kTiling.keys, kStages = kTiling.stages;
  static constexpr int kRowTiles = kTiling.row_tiles;
  static constexpr int kQkSteps = kDQk / 32, kSegmentSteps = kSegmentBytes / 32;
  static constexpr int kSharedSteps = kTiling.q_segments * kSegmentSteps, kOwnedSteps = kQkSteps - kSharedSteps;
  static constexpr int kSharedQBytes = kTiling.q_segments * kSegmentBytes, kOwnedQBytes = kDQk - kSharedQBytes;
  static constexpr int kOutTiles = kDV / 8;
  static constexpr int kKRowBytes = whole_segments(kDQk), kVRowBytes = kDV;
  static constexpr int kOwnedRowBytes = whole_segments(kOwnedQBytes);
  static constexpr int kKTileBytes = kKeys * kKRowBytes, kStageBytes = kKTileBytes + kKeys * kVRowBytes;

 public:
  static constexpr int kStagesBegin = kRows * kSharedQBytes;
  static constexpr int kTilesBytes = kStagesBegin + std::max(kStages * kStageBytes, kRows* kOwnedRowBytes);
  static constexpr int kSharedBytes = kTilesBytes + kWarps * static_cast<int>(sizeof(WarpRows));
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
  static_assert(kSharedQBytes <= kDQk && kKeys % kRunKeys == 0 && kDQk % 32 == 0 && kDV % kSegmentBytes == 0 &&
                kStages >= 2);

  static MLA_DEVICE void run(const Params& params) {
    with_query_block<kRows>(params,
                            [&](const QueryBlock& block, int head) { PrefillKernel(params, block, head).attend(); });
  }

 private:
  const Params& params_;

  using QRegisters = uint32_t[kOwnedSteps > 0 ? kOwnedSteps : 1][kRowTiles][4];
  using PRegisters = uint32_t[kRowTiles][1][4];
  using Units = RunUnits[kRowTiles];
  using Outputs = float[kRowTiles][kOutTiles][4];

  MLA_DEVICE PrefillKernel(const Params& params, const QueryBlock& block, int head)
      : Base(params.args, block, head, ptx::shuffle(ptx::warp(), 0) * kWarpRows), params_(params) {}

  // Tiles.

  MLA_DEVICE ptx::SharedAddress stage(int first_key) const {
    return shared_ + static_cast<uint32_t>(kStagesBegin + first_key / kKeys % kStages * kStageBytes);
  }
  MLA_DEVICE ptx::SharedAddress k_run(int first_key) const {
    return stage(first_key) + static_cast<uint32_t>(first_key % kKeys * kKRowBytes);
  }
  MLA_DEVICE ptx::SharedAddress v_run(int first_key) const {
    return stage(first_key) + static_cast<uint32_t>(kKTileBytes + first_key % kKeys * kVRowBytes);
  }

  template <int kTileRows, int kRowBytes>
  MLA_DEVICE void load(ptx::SharedAddress to, const void* from, int64_t row, int64_t stride_token, int64_t stride_head,
                       int num_rows) const {
    load_tile<uint8_t, kThreads, kTileRows, kRowBytes>(
        params_.rows_aligned, to, from, row * stride_token + head_ * stride_head, stride_token, num_rows);
  }
  /// Starts to copy the tile of keys from first_key on, if the block sees any of them, where end_key ends what it sees.
  MLA_DEVICE void load_keys(int first_key, int end_key) const {
    if (first_key < end_key) {
      const int row = block_.first_key + first_key, num_rows = block_.kv_len - first_key;
      const ptx::SharedAddress to = stage(first_key);
      load<kKeys, kDQk>(to, args_.k, row, args_.k_stride_token, args_.k_stride_head, num_rows);
      load<kKeys, kDV>(to + kKTileBytes, args_.v, row, args_.v_stride_token, args_.v_stride_head, num_rows);
    }
    ptx::cp_async_commit();
  }
  /// Loads Q: some channels into shared memory, the others by way of the stages' place into registers.
  MLA_DEVICE void load_q(QRegisters& q) const {
    const ptx::SharedAddress owned = shared_ + kStagesBegin;
    const auto* const from = static_cast<const uint8_t*>(args_.q);
    if constexpr (kSharedQBytes > 0) load_q_tile<kSharedQBytes>(shared_, from);
    if constexpr (kOwnedQBytes > 0) load_q_tile<kOwnedQBytes>(owned, from + kSharedQBytes);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::sync_block();
    if constexpr (kOwnedQBytes > 0) {
      const auto lane = lane_of_a<kOwnedRowBytes>(owned + static_cast<uint32_t>(warp_row_ * kOwnedRowBytes));
      MLA_UNROLL
      for (int step = 0; step < kOwnedSteps; ++step) MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) ptx::ldmatrix_x4(q[step][r], lane.at(r * 16, step * 2));
      ptx::sync_block();  // keys will lie where the queries were
    }
  }
  template <int kRowBytes>
  MLA_DEVICE void load_q_tile(ptx::SharedAddress to, const void* from) const {
    load<kRows, kRowBytes>(to, from, block_.first_token, args_.q_stride_token, args_.q_stride_head, block_.rows);
  }

  MLA_DEVICE void attend() const {
    const KeyRange keys = Base::visible_to_block();
    const int begin_key = keys.begin / kKeys * kKeys, end_key = keys.end;
    const bool raw_scores = needs_only_scale(args_.options);
    const float scale_log2 = (raw_scores ? e4m3_score_scale(args_) : 1.0F) * std::numbers::log2e_v<float>;

    QRegisters q;
    Outputs o = {};
    SoftmaxRows states[kRowTiles];

    Base::store_warp_rows();
    load_q(q);
    MLA_UNROLL
    for (int i = 0; i < kStages - 1; ++i) load_keys(begin_key + i * kKeys, end_key);

    MLA_NO_UNROLL
    for (int first_key = begin_key; first_key < end_key; first_key += kRunKeys) {
      if (first_key % kKeys == 0) {
        ptx::cp_async_wait<kStages - 2>();
        ptx::sync_block();  // the tile has come, and all warps are done with the one before
        load_keys(first_key + (kStages - 1) * kKeys, end_key);
      }
      if (!Base::any_visible(first_key)) continue;
      Scores s = {};
      multiply_qk(s, q, k_run(first_key));
      if (!raw_scores) Base::transform(s, first_key, e4m3_score_scale(args_));
      const bool masked = !Base::all_visible(first_key);
      if (masked) Base::mask(s, first_key);
      PRegisters p;
      Units units;
      softmax(s, scale_log2, states, o, p, units);
      // A probability of 0 does not silence a value that is NaN.
      if (masked && any_nan(v_run(first_key))) {
        add_values<true>(o, p, units, v_run(first_key));
        add_nan(o, v_run(first_key), first_key);
      } else {
        add_values<false>(o, p, units, v_run(first_key));
      }
    }
    store(o, states);
  }

  /// Computes s += q k^T.
  MLA_DEVICE void multiply_qk(Scores& s, const QRegisters& q, ptx::SharedAddress keys) const {
    const auto q_lane = lane_of_a<kSegmentBytes * std::max(kTiling.q_segments, 1), true>(
        shared_ + static_cast<uint32_t>(warp_row_ * kSharedQBytes));
    const auto k_lane = lane_of_b<kKRowBytes, true>(keys);
    MLA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      uint32_t a[kRowTiles][4];
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        if (step < kSharedSteps) {
          ptx::ldmatrix_x4(a[r], q_lane.at(r * 16, step * 2));
        } else {
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) a[r][i] = q[step < kSharedSteps ? 0 : step - kSharedSteps][r][i];
        }
      }
      MLA_UNROLL
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_lane.at(n * 8, step * 2));
        MLA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          multiply_e4m3(s[r][n], a[r], b[0], b[1]);
          multiply_e4m3(s[r][n + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

  /// Turns the scores of a run into P as an operand in units of its own for each row, raises the states, and rescales
  /// the earlier accumulators where maxima have exceeded the headroom.
  MLA_DEVICE static void softmax(Scores& s, float scale_log2, SoftmaxRows (&states)[kRowTiles], Outputs& o,
                                 PRegisters& p, Units& units) {
    float largest[kRowTiles][2], factor[kRowTiles][2];
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) row_max(s[r], largest[r]);
    if (raise_rows(largest, scale_log2, states, factor)) {
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) scale_rows(o[r], factor[r]);
    }
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      units[r] = units_of_run(largest[r], scale_log2, states[r]);
      exponentiate_in_units(s[r], units[r], scale_log2, states[r]);
      pack_e4m3_p(s[r], p[r]);
    }
  }

  /// Computes o += p v. With kSilenced, values that are NaN count as 0.
  template <bool kSilenced>
  MLA_DEVICE void add_values(Outputs& o, const PRegisters& p, const Units& units, ptx::SharedAddress values) const {
    const TileLane<kVRowBytes> lane(values, ptx::lane<true>(), 0);
    MLA_UNROLL
    for (int n = 0; n < kOutTiles; n += 2) {
      ptx::sync_warp();  // else nvcc 13.0 loads so many operands at once that it spills what lives longer
      uint32_t pairs[4];
      ptx::ldmatrix_x4_trans(pairs, lane.at(0, n / 2));
      if constexpr (kSilenced) {
        MLA_UNROLL
        for (uint32_t& pair : pairs) pair &= ~nan_bytes(pair);
      }
      MLA_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t b[2];
        channels_of_pairs(b, pairs, odd);
        MLA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          float products[4] = {};
          multiply_e4m3(products, p[r][0], b[0], b[1]);
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) o[r][n + odd][i] += products[i] * units[r].in_o[i / 2];
        }
      }
    }
  }

  /// Returns whether any value of a run is NaN.
  MLA_DEVICE static bool any_nan(ptx::SharedAddress values) {
    uint32_t found = 0;
    for (int i = ptx::lane() * kChunkBytes; i < kRunKeys * kVRowBytes; i += kWarpSize * kChunkBytes) {
      const auto elements = ptx::load_shared<ptx::Vec4>(values + static_cast<uint32_t>(i));
      MLA_UNROLL
      for (uint32_t four : elements.x) found |= nan_bytes(four);
    }
    return ptx::any(found != 0);
  }

  /// Makes the outputs NaN that add_values<true> left out: those of rows that see a key, in channels where its value is
  /// NaN. It goes through the values key by key, since a faster way takes registers of those who never come here.
  MLA_DEVICE void add_nan(Outputs& o, ptx::SharedAddress values, int first_key) const {
    const int position = warp_rows().position + accumulator_row();
    MLA_NO_UNROLL
    for (int key = 0; key < kRunKeys; ++key) {
      bool sees[kRowTiles][2];
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) MLA_UNROLL
      for (int i = 0; i < 2; ++i) sees[r][i] = visible(position + r * 16 + i * 8).contains(first_key + key);
      MLA_UNROLL
      for (int n = 0; n < kOutTiles; n += 2) {
        const uint32_t nan = nan_bytes(ptx::load_shared<uint32_t>(values + tile_offset<kVRowBytes>(key, n / 2) +
                                                                  static_cast<uint32_t>((ptx::lane() & 3) * 4)));
        MLA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) MLA_UNROLL
        for (int i = 0; i < 2; ++i) MLA_UNROLL
        for (int c = 0; c < 4; ++c)
          if (sees[r][i] && (nan >> 8 * c & 1U) != 0) o[r][n + c % 2][2 * i + c / 2] = kNaN;
      }
    }
  }
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

  // Outputs. Of 16 channels a lane has four neighbours, two of the even and two of the odd ones.

  MLA_DEVICE void store(const Outputs& o, const SoftmaxRows (&states)[kRowTiles]) const {
    const float o_factor = *args_.v_scale * inverse_o_scale(args_.o_scale);
    Base::finish(states, o_factor, [&](int r, int i, int64_t offset, float factor) {
      store_outputs(args_, params_.o_aligned, offset, o[r], i, factor);
    });
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

// SPDX-License-Identifier: Apache-2.0
// This kernel computes up-projected prefill of bf16 and f16 by mma.sync m16n8k16: S = Q K^T, softmax over the keys that
// each row sees, O = P V. A block computes kRows query rows of a head.
//
// Grid: see with_query_block(). There are T / kRows + B slots for query blocks, since a block finds its request by
// bisection and surplus blocks exit. Each of a group's kTiling.warps warps has 16 * row_tiles rows of Q and O. P never
// leaves registers, because the accumulators of S have the layout of P as an operand. Two groups have the same rows:
// the one has the even tiles of keys, the other the odd ones, each in its own memory and at its own pace, and at the
// end the first takes over the second's outputs.
// Shared memory (swizzled tiles): Q [kRows, d_qk] | for each group K [keys, d_qk] | V [keys, d_v], 2 bytes each, and
// WarpRows [warps]. Segments of 64 channels of Q that stay in registers come by way of the place of K and V, and have
// no other.
// The loop of a group; two of them, or two blocks of an SM, fill each other's gaps:
//   wait K(t), barrier | load V(t) | S | wait V(t), barrier | load K(t + 1) | softmax, P V
// docs/kernels/cuda_portable_prefill.md describes the kernel.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "core/args.h"
#include "cuda/attention/prefill_block.cuh"
#include "cuda/border/launch.h"
#include "cuda/tile/element16.cuh"

namespace mla::MLA_CUDA_NAMESPACE::portable {

struct PrefillTiling {
  int groups;      // 1 or 2: warps that share the rows, and take every groups-th tile of keys
  int warps;       // of a group
  int row_tiles;   // tiles of 16 rows that a warp has
  int keys;        // keys of a tile of K or V
  int q_steps;     // steps of 16 channels of Q that stay in registers; the others are read from shared memory
  int min_blocks;  // blocks that share an SM
};

template <DType kType, int kDQk, int kDV, PrefillTiling kTiling>
class PrefillKernel : PrefillBlock<PrefillKernel<kType, kDQk, kDV, kTiling>, kTiling.row_tiles, kTiling.keys> {
  using Base = PrefillBlock<PrefillKernel, kTiling.row_tiles, kTiling.keys>;
  using Base::args_, Base::block_, Base::head_, Base::warp_row_, Base::shared_;
  using Base::kWarpRows, Base::kKeyTiles, Base::visible, Base::warp_rows;
  using typename Base::Scores;

 public:
  using Params = PrefillParams;
  static constexpr const char* kName = "prefill";
  static constexpr int kGroups = kTiling.groups;
  static constexpr int kGroupThreads = kTiling.warps * kWarpSize;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kMinBlocks = kTiling.min_blocks;
  static constexpr int kRows = kTiling.warps * kTiling.row_tiles * 16;

 private:
  static constexpr int kElementBytes = 2;
  static constexpr int kQkBytes = kDQk * kElementBytes, kVBytes = kDV * kElementBytes;
  static constexpr int kKeys = kTiling.keys;
  static constexpr int kKeySteps = kKeys / 16;  // steps of 16 keys of P V
  static constexpr int kQkSteps = kDQk / 16;
  static constexpr int kOutTiles = kDV / 8;
  static constexpr int kRowTiles = kTiling.row_tiles;
  static constexpr int kQSteps = kTiling.q_steps < kQkSteps ? kTiling.q_steps : kQkSteps;
  static constexpr int kSegmentSteps = kSegmentBytes / 32;
  static constexpr int kOwnedSegments = kQSteps / kSegmentSteps;  // segments of Q that only registers hold
  static constexpr int kOwnedBytes = kOwnedSegments * kSegmentBytes, kSharedQBytes = kQkBytes - kOwnedBytes;
  static constexpr int kKTileBytes = kKeys * kQkBytes, kVTileBytes = kKeys * kVBytes;
  static constexpr int kGroupBytes = kKTileBytes + kVTileBytes;
  static constexpr int kKeysBegin = kRows * kSharedQBytes;
  // The second group hands these on: 16 bytes of each thread for each tile of 16 rows and 8 channels, or of states.
  static constexpr int kHandedVectors = kGroups == 1 ? 0 : kRowTiles * (kOutTiles + 1);

 public:
  static constexpr int kTilesBytes = std::max(
      {kKeysBegin + kGroups * kGroupBytes, kKeysBegin + kRows* kOwnedBytes, kHandedVectors* kGroupThreads * 16});
  static constexpr int kSharedBytes = kTilesBytes + kThreads / kWarpSize * static_cast<int>(sizeof(WarpRows));
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
  static_assert(kKeys % 16 == 0 && kDQk % 64 == 0 && kDV % 64 == 0 && kGroupThreads % 64 == 0);
  static_assert(kGroups == 1 || kGroups == 2);

  static MLA_DEVICE void run(const Params& params) {
    with_query_block<kRows>(params, [&](const QueryBlock& block, int head) {
      PrefillKernel(params, block, head, kGroups == 1 ? 0 : ptx::shuffle(ptx::warp(), 0) / kTiling.warps).attend();
    });
  }

 private:
  const Params& params_;
  const int group_;

  using QRegisters = uint32_t[kQSteps > 0 ? kQSteps : 1][kRowTiles][4];
  using PRegisters = uint32_t[kRowTiles][kKeySteps][4];
  using Outputs = float[kRowTiles][kOutTiles][4];

  // The warp's number is made uniform twice: made once, nvcc 13.0 spills 92 bytes of 128/128 on SM120 (2026-11-25).
  MLA_DEVICE PrefillKernel(const Params& params, const QueryBlock& block, int head, int group)
      : Base(params.args, block, head, (ptx::shuffle(ptx::warp(), 0) - group * kTiling.warps) * kWarpRows),
        params_(params),
        group_(group) {}

  /// Returns where the warp's rows of Q lie: the channels from kOwnedSegments on.
  MLA_DEVICE ptx::SharedAddress q_tile() const { return shared_ + static_cast<uint32_t>(warp_row_ * kSharedQBytes); }
  MLA_DEVICE ptx::SharedAddress k_tile() const {
    return shared_ + static_cast<uint32_t>(kKeysBegin + group_ * kGroupBytes);
  }
  MLA_DEVICE ptx::SharedAddress v_tile() const { return k_tile() + static_cast<uint32_t>(kKTileBytes); }

  /// Starts to copy rows of q, k or v into a tile, by kLoaders threads: the block's or the group's.
  template <int kLoaders, int kTileRows, int kRowBytes>
  MLA_DEVICE void load(ptx::SharedAddress to, const void* from, int64_t offset, int64_t stride, int num_rows) const {
    load_tile<uint16_t, kLoaders, kTileRows, kRowBytes>(params_.rows_aligned, to, from, offset, stride, num_rows);
  }
  MLA_DEVICE void load_q() const {
    const int64_t offset = block_.first_token * args_.q_stride_token + head_ * args_.q_stride_head;
    if constexpr (kOwnedBytes > 0)
      load<kThreads, kRows, kOwnedBytes>(shared_ + kKeysBegin, args_.q, offset, args_.q_stride_token, block_.rows);
    if constexpr (kSharedQBytes > 0)
      load<kThreads, kRows, kSharedQBytes>(shared_, args_.q, offset + kOwnedBytes / kElementBytes, args_.q_stride_token,
                                           block_.rows);
  }
  MLA_DEVICE void load_k(int tile) const {
    load<kGroupThreads, kKeys, kQkBytes>(
        k_tile(), args_.k, (block_.first_key + tile * kKeys) * args_.k_stride_token + head_ * args_.k_stride_head,
        args_.k_stride_token, block_.kv_len - tile * kKeys);
  }
  MLA_DEVICE void load_v(int tile) const {
    load<kGroupThreads, kKeys, kVBytes>(
        v_tile(), args_.v, (block_.first_key + tile * kKeys) * args_.v_stride_token + head_ * args_.v_stride_head,
        args_.v_stride_token, block_.kv_len - tile * kKeys);
  }
  /// Waits until all copies of the group's threads are in its memory.
  MLA_DEVICE void wait_for_copies() const {
    ptx::cp_async_wait<0>();
    if constexpr (kGroups == 1)
      ptx::sync_block();
    else
      ptx::sync_threads(1 + group_, kGroupThreads);
  }

  MLA_DEVICE void attend() const {
    const KeyRange keys = Base::visible_to_block();
    const int first_tile = keys.begin / kKeys, end_tile = keys.empty() ? first_tile : (keys.end - 1) / kKeys + 1;
    const bool raw_scores = needs_only_scale(args_.options);
    const float scale_log2 = (raw_scores ? args_.sm_scale : 1.0F) * std::numbers::log2e_v<float>;

    QRegisters q;
    Outputs o = {};
    SoftmaxRows states[kRowTiles];

    Base::store_warp_rows();
    load_q();
    if constexpr (kOwnedSegments > 0 || kGroups > 1) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::sync_block();
      load_q_registers(q);
      ptx::sync_block();  // all warps have read their segments, so that K and V may lie there
    }
    if (first_tile + group_ < end_tile) load_k(first_tile + group_);
    ptx::cp_async_commit();
    ptx::sync_warp();  // the warp's WarpRows are written

    MLA_NO_UNROLL
    for (int tile = first_tile + group_; tile < end_tile; tile += kGroups) {
      const bool computes = Base::any_visible(tile * kKeys);
      Scores s = {};

      wait_for_copies();  // K has come, and all warps are done with V of the group's tile before
      load_v(tile);
      ptx::cp_async_commit();
      if constexpr (kQSteps > 0 && kOwnedSegments == 0 && kGroups == 1) {
        if (tile == first_tile) load_q_registers(q);
      }
      if (computes) multiply_qk(s, q, k_tile());

      wait_for_copies();  // V has come, and all warps are done with K
      if (tile + kGroups < end_tile) load_k(tile + kGroups);
      ptx::cp_async_commit();
      if (!computes) continue;
      if (!raw_scores) Base::transform(s, tile * kKeys, args_.sm_scale);
      const bool masked = !Base::all_visible(tile * kKeys);
      if (masked) Base::mask(s, tile * kKeys);
      online_softmax(s, scale_log2, states, o);
      PRegisters p;
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        MLA_UNROLL
        for (int i = 0; i < kKeySteps; ++i) pack_p<kType>(s[r][2 * i], s[r][2 * i + 1], p[r][i]);
      }
      // A probability of 0 does not silence a value that is infinite or NaN.
      if (masked && !all_finite(v_tile())) {
        multiply_pv<true>(o, p, v_tile());
        add_infinite_values(o, v_tile(), tile * kKeys);
      } else {
        multiply_pv<false>(o, p, v_tile());
      }
    }
    if constexpr (kGroups > 1) {
      ptx::sync_block();  // nobody needs tiles any more
      if (group_ == 1) hand_on(o, states);
      ptx::sync_block();
      if (group_ == 1) return;
      take_over(o, states);
    }
    store(o, states);
  }

  /// Returns where the i-th vector of 16 bytes lies that a thread of the second group hands on to one of the first.
  MLA_DEVICE ptx::SharedAddress handed(int i) const {
    return shared_ + static_cast<uint32_t>((i * kGroupThreads + ptx::thread_index() % kGroupThreads) * 16);
  }
  MLA_DEVICE void hand_on(const Outputs& o, const SoftmaxRows (&states)[kRowTiles]) const {
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      ptx::store_shared(handed(kRowTiles * kOutTiles + r), states[r]);
      MLA_UNROLL
      for (int n = 0; n < kOutTiles; ++n) {
        ptx::Vec4 values;
        MLA_UNROLL
        for (int e = 0; e < 4; ++e) values.x[e] = std::bit_cast<uint32_t>(o[r][n][e]);
        ptx::store_shared(handed(r * kOutTiles + n), values);
      }
    }
  }
  /// Adds what the second group has handed on.
  MLA_DEVICE void take_over(Outputs& o, SoftmaxRows (&states)[kRowTiles]) const {
    MLA_UNROLL
    for (int r = 0; r < kRowTiles; ++r) {
      auto others = ptx::load_shared<SoftmaxRows>(handed(kRowTiles * kOutTiles + r));
      float factor[2], other_factor[2];
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        ScoreState &mine = states[r].of[i], &other = others.of[i];
        const float max = std::fmax(mine.max, other.max);
        factor[i] = mine.raise(max);
        other_factor[i] = other.raise(max);
        mine.sum += other.sum;
      }
      MLA_UNROLL
      for (int n = 0; n < kOutTiles; ++n) {
        const auto values = ptx::load_shared<ptx::Vec4>(handed(r * kOutTiles + n));
        MLA_UNROLL
        for (int e = 0; e < 4; ++e)
          o[r][n][e] = o[r][n][e] * factor[e / 2] + std::bit_cast<float>(values.x[e]) * other_factor[e / 2];
      }
    }
  }

  /// Loads the steps of Q that stay in registers: whole segments from where K and V will lie, others from Q's place.
  MLA_DEVICE void load_q_registers(QRegisters& q) const {
    const auto owned = lane_of_a<kOwnedBytes>(shared_ + static_cast<uint32_t>(kKeysBegin + warp_row_ * kOwnedBytes));
    const auto shared = lane_of_a<kSharedQBytes>(q_tile());
    MLA_UNROLL
    for (int step = 0; step < kQSteps; ++step) {
      const int of_shared = step - kOwnedSegments * kSegmentSteps;
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r)
        ptx::ldmatrix_x4(q[step][r], of_shared < 0 ? owned.at(r * 16, step * 2) : shared.at(r * 16, of_shared * 2));
    }
  }

  /// Computes s += q k^T.
  MLA_DEVICE void multiply_qk(Scores& s, const QRegisters& q, ptx::SharedAddress k_tile) const {
    const auto q_lane = lane_of_a<kSharedQBytes>(q_tile());
    const auto k_lane = lane_of_b<kQkBytes>(k_tile);
    MLA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      uint32_t a[kRowTiles][4];
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        if (step < kQSteps) {
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) a[r][i] = q[step < kQSteps ? step : 0][r][i];
        } else {
          ptx::ldmatrix_x4(a[r], q_lane.at(r * 16, (step - kOwnedSegments * kSegmentSteps) * 2));
        }
      }
      MLA_UNROLL
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_lane.at(n * 8, step * 2));
        MLA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          mma<kType>(s[r][n], a[r], b[0], b[1]);
          mma<kType>(s[r][n + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

  /// Computes o += p v. With kFiniteOnly, infinite and NaN values count as 0.
  template <bool kFiniteOnly>
  MLA_DEVICE void multiply_pv(Outputs& o, const PRegisters& p, ptx::SharedAddress v_tile) const {
    const auto v_lane = lane_of_b_trans<kVBytes>(v_tile);
    MLA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      MLA_UNROLL
      for (int n = 0; n < kOutTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane.at(step * 16, n));
        if constexpr (kFiniteOnly) {
          MLA_UNROLL
          for (uint32_t& pair : b) pair = finite_or_zero<kType>(pair);
        }
        MLA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          mma<kType>(o[r][n], p[r][step], b[0], b[1]);
          mma<kType>(o[r][n + 1], p[r][step], b[2], b[3]);
        }
      }
    }
  }

  MLA_DEVICE bool all_finite(ptx::SharedAddress v_tile) const {
    bool found = false;
    for (int i = ptx::lane() * kChunkBytes; i < kVTileBytes; i += kWarpSize * kChunkBytes) {
      const auto elements = ptx::load_shared<ptx::Vec4>(v_tile + static_cast<uint32_t>(i));
      MLA_UNROLL
      for (uint32_t pair : elements.x) found |= !both_finite<kType>(pair);
    }
    return !ptx::any(found);
  }

  /// Adds what multiply_pv<true> left out to the rows that see it. The product of two matrices of ones and zeros, "the
  /// row sees the key" and "the value is NaN or infinite", counts how many such values each row sees in each channel.
  MLA_DEVICE void add_infinite_values(Outputs& o, ptx::SharedAddress v_tile, int first_key) const {
    const auto v_lane = lane_of_b_trans<kVBytes>(v_tile);
    MLA_UNROLL
    for (int n = 0; n < kOutTiles; n += 2) {
      float up[kRowTiles][2][4] = {}, down[kRowTiles][2][4] = {};  // counts of +inf and of -inf; NaN counts as both
      MLA_NO_UNROLL
      for (int step = 0; step < kKeySteps; ++step) {
        uint32_t b[4], b_up[4], b_down[4];
        ptx::ldmatrix_x4_trans(b, v_lane.at(step * 16, n));
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          b_up[i] = not_below_infinity<kType>(b[i]);
          b_down[i] = not_below_infinity<kType>(b[i] ^ 0x80008000U);  // with the signs flipped
        }
        MLA_UNROLL
        for (int r = 0; r < kRowTiles; ++r) {
          uint32_t a[4];
          visible_as_operand(a, r * 16, first_key + step * 16);
          MLA_UNROLL
          for (int half = 0; half < 2; ++half) {
            mma<kType>(up[r][half], a, b_up[2 * half], b_up[2 * half + 1]);
            mma<kType>(down[r][half], a, b_down[2 * half], b_down[2 * half + 1]);
          }
        }
      }
      MLA_UNROLL
      for (int r = 0; r < kRowTiles; ++r) {
        MLA_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (up[r][i / 4][i % 4] > 0.0F) o[r][n + i / 4][i % 4] += -kNoKey;
          if (down[r][i / 4][i % 4] > 0.0F) o[r][n + i / 4][i % 4] += kNoKey;
        }
      }
    }
  }

  /// Makes the A operand that is 1 where a row sees a key and 0 elsewhere.
  MLA_DEVICE void visible_as_operand(uint32_t (&a)[4], int row, int first_key) const {
    const int position = warp_rows().position + row + accumulator_row();
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const KeyRange keys = visible(position + i % 2 * 8);
      const int key = first_key + accumulator_column() + i / 2 * 8;
      a[i] = pack<kType>(keys.contains(key) ? 1.0F : 0.0F, keys.contains(key + 1) ? 1.0F : 0.0F);
    }
  }

  MLA_DEVICE void store(const Outputs& o, const SoftmaxRows (&states)[kRowTiles]) const {
    Base::finish(states, 1.0F, [&](int r, int i, int64_t offset, float factor) {
      const int64_t first = offset + accumulator_column();
      MLA_UNROLL
      for (int n = 0; n < kOutTiles; ++n)
        store_pair(first + n * 8, o[r][n][2 * i] * factor, o[r][n][2 * i + 1] * factor);
    });
  }

  MLA_DEVICE void store_pair(int64_t offset, float low, float high) const {
    if (args_.o_dtype == DType::kF32) {
      float* at = static_cast<float*>(args_.o) + offset;
      at[0] = low;
      at[1] = high;
      return;
    }
    uint16_t* at = static_cast<uint16_t*>(args_.o) + offset;
    const uint32_t pair = pack<kType>(low, high);
    if (params_.o_aligned) {
      *reinterpret_cast<uint32_t*>(at) = pair;
    } else {
      at[0] = static_cast<uint16_t>(pair);
      at[1] = static_cast<uint16_t>(pair >> 16);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

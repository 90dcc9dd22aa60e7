// SPDX-License-Identifier: Apache-2.0
// The computing role of prefill is a warpgroup with 64 query rows, of which each warp has 16.
//   S(n + 1) = Q K^T and O += P(n) V are issued together. The maxima of n + 1 are found while P(n) V runs, and P(n + 1)
//   is made while the other warpgroup's products keep the tensor cores busy.
// P never leaves registers, because the accumulators of S have the layout of P as an operand.
#pragma once

#include <cstdint>
#include <numbers>
#include <type_traits>

#include "cuda/attention/warpgroup_prefill_compute.cuh"
#include "cuda/backends/sm90/prefill_block.cuh"
#include "cuda/backends/sm90/wgmma.cuh"
#include "cuda/tile/element16.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config>
class PrefillComputeRole : WarpgroupPrefillCompute<Config> {
 public:
  MLA_DEVICE PrefillComputeRole(const WarpgroupPrefillParams& params, int group)
      : WarpgroupPrefillCompute<Config>(params, group),
        scale_log2_((this->raw_scores_ ? params.args.sm_scale : 1.0F) * std::numbers::log2e_v<float>) {}

  MLA_DEVICE void run() {
    this->template for_each_unit<kOutTiles>(
        [&](Outputs& o, SoftmaxRows(&rows)[1]) { compute_unit(o, rows); },
        [&](Outputs& o, const SoftmaxRows& rows, const PrefillUnit& unit) { store(o, rows, unit); });
  }

 private:
  using Base = WarpgroupPrefillCompute<Config>;
  using Base::group_, Base::warp_row_, Base::by_boxes_, Base::raw_scores_, Base::unit_, Base::tile_;
  using Base::rows_of, Base::lane_position;
  using Base::wait_for_k, Base::wait_for_v, Base::release_k, Base::release_v, Base::wait_for_turn, Base::pass_turn;

  static constexpr int kQkSteps = Config::kDQk / 16;
  static constexpr int kQSteps = Config::kQSteps < kQkSteps ? Config::kQSteps : kQkSteps;
  static constexpr int kOutTiles = Config::kDV / 8;
  static constexpr DType kType = Config::kType;

  using Scores = float[1][Config::kKeys / 8][4];
  using PRegisters = uint32_t[Config::kKeys / 16][4];
  using Outputs = float[1][kOutTiles][4];
  using QRegisters = uint32_t[kQSteps > 0 ? kQSteps : 1][4];

  const float scale_log2_;  // factor from scores, or from natural logits, to base-2 logits

  MLA_DEVICE void compute_unit(Outputs& o, SoftmaxRows (&rows)[1]) {
    QRegisters q;
    wait_for_q(q);
    this->for_each_tile([&](int& tile, int end, KeyRange whole) { compute_tiles(q, tile, end, whole, rows, o); });
  }

  MLA_DEVICE void wait_for_q(QRegisters& q) const {
    Base::wait_for_q();
    MLA_UNROLL
    for (int step = 0; step < kQSteps; ++step) {
      constexpr uint32_t kQPieceBytes = Config::kGroupRows * kSegmentBytes;
      const auto lane = lane_of_a<kSegmentBytes>(this->q_tile(group_) + static_cast<uint32_t>(step / 4) * kQPieceBytes +
                                                 static_cast<uint32_t>(warp_row_ * kSegmentBytes));
      ptx::ldmatrix_x4(q[step], lane.at(0, step % 4 * 2));
    }
  }

  /// Issues s = q k^T of tile n.
  MLA_DEVICE void issue_scores(Scores& s, const QRegisters& q, int n) const {
    ptx::wgmma_hold(flat(s));
    ptx::wgmma_fence();
    constexpr int kQPieceBytes = Config::kGroupRows * kSegmentBytes, kKPieceBytes = Config::kKeys * kSegmentBytes;
    const uint64_t a = ptx::matrix_descriptor(this->q_tile(group_), 0, this->kAtomBytes, ptx::Swizzle::k128);
    const uint64_t b = ptx::matrix_descriptor(this->k_tile(n), 0, this->kAtomBytes, ptx::Swizzle::k128);
    // A step has 16 channels, 32 bytes, and a piece four steps.
    MLA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      const uint64_t b_step = advance(b, step / 4 * kKPieceBytes + step % 4 * 32);
      if (step < kQSteps)
        wgmma<kType, Config::kKeys, false>(flat(s), q[step < kQSteps ? step : 0], b_step, step > 0);
      else
        wgmma<kType, Config::kKeys, false>(flat(s), advance(a, step / 4 * kQPieceBytes + step % 4 * 32), b_step,
                                           step > 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues o += p v of tile n.
  MLA_DEVICE void issue_values(Outputs& o, const PRegisters& p, int n) const {
    ptx::wgmma_hold(flat(o));
    ptx::wgmma_fence();
    const uint64_t b =
        ptx::matrix_descriptor(this->v_tile(n), Config::kKeys * kSegmentBytes, this->kAtomBytes, ptx::Swizzle::k128);
    MLA_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step)
      wgmma<kType, Config::kDV, true>(flat(o), p[step], advance(b, step * 16 * kSegmentBytes), true);
    ptx::wgmma_commit();
  }

  /// Computes tiles from `tile` on, up to `end`, or one of which hidden values are infinite or NaN.
  MLA_DEVICE void compute_tiles(const QRegisters& q, int& tile, int end, KeyRange whole, SoftmaxRows (&rows)[1],
                                Outputs& o) {
    Scores s;
    PRegisters p;
    float factor[1][2];
    wait_for_k(tile_);
    wait_for_turn();
    issue_scores(s, q, tile_);
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(flat(s));
    release_k(tile_);
    bool masked = !whole.contains(tile);
    this->shape(s[0], tile, masked, this->args_.sm_scale);
    if (raise(s, rows, factor)) scale_rows(o[0], factor[0]);
    exponentiate(s[0], scale_log2_, rows[0]);
    pack_all(s[0], p);

    // Turns the scores of the next tile into P, and adds the values of the one before.
    const auto advance = [&](auto is_whole) {
      ++tile;
      const int n = ++tile_;
      wait_for_k(n);
      wait_for_turn();
      issue_scores(s, q, n);
      wait_for_v(n - 1);
      issue_values(o, p, n - 1);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_hold(flat(s));
      release_k(n);
      if constexpr (!is_whole.value) {
        masked = !whole.contains(tile);
        this->shape(s[0], tile, masked, this->args_.sm_scale);
      }
      // Maxima are found while P V runs, and P is made behind it, into the registers that it has read. ptxas 13.0 would
      // move the maxima behind the wait, too, if no branch stood between them: raise() has one.
      const bool outgrown = raise(s, rows, factor);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(flat(o));
      release_v(n - 1);
      if (outgrown) scale_rows(o[0], factor[0]);
      exponentiate(s[0], scale_log2_, rows[0]);
      pack_all(s[0], p);
    };
    MLA_NO_UNROLL
    for (;;) {
      // Most tiles take a loop of their own, which jumps over nothing.
      if (Config::kWholeLoop && raw_scores_ && by_boxes_ && !masked) {
        MLA_NO_UNROLL
        while (tile + 1 < whole.end) advance(std::true_type());
      }
      if (tile + 1 >= end || (masked && !all_finite(tile_))) break;
      advance(std::false_type());
    }
    // A probability of 0 does not silence a value that is infinite or NaN.
    if (masked && !all_finite(tile_)) {
      multiply_finite(o, p, tile_);
      add_infinite(o, tile_, tile * Config::kKeys);
      ptx::sync_warp();
    } else {
      wait_for_v(tile_);
      issue_values(o, p, tile_);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(flat(o));
    }
    release_v(tile_);
    ++tile;
    ++tile_;
  }

  /// Takes the largest scores of a tile into `rows`. Returns whether a maximum was raised, so that the outputs so far
  /// must be multiplied by `factor`.
  MLA_DEVICE bool raise(const Scores& s, SoftmaxRows (&rows)[1], float (&factor)[1][2]) const {
    float largest[1][2];
    row_max(s[0], largest[0]);
    return raise_rows(largest, scale_log2_, rows, factor);
  }

  template <int kColTiles>
  static MLA_DEVICE void pack_all(const float (&s)[kColTiles][4], uint32_t (&p)[kColTiles / 2][4]) {
    MLA_UNROLL
    for (int i = 0; i < kColTiles / 2; ++i) pack_p<kType>(s[2 * i], s[2 * i + 1], p[i]);
  }

  /// Returns where rows `first` ... first + 15 of channels 64 * piece ... of V's tile n lie.
  MLA_DEVICE ptx::SharedAddress v_piece(int n, int piece, int first) const {
    return this->v_tile(n) + static_cast<uint32_t>((piece * Config::kKeys + first) * kSegmentBytes);
  }

  /// Returns whether all values of tile n are finite. All warps of the group call it, and each looks at a fourth of
  /// them.
  MLA_DEVICE bool all_finite(int n) {
    constexpr int kWarpBytes = Config::kVBytes / Base::kGroupWarps, kAtOnce = 8;
    static_assert(kWarpBytes % (kAtOnce * kWarpSize * kChunkBytes) == 0);
    wait_for_v(n);
    const ptx::SharedAddress values =
        this->v_tile(n) + static_cast<uint32_t>(warp_row_ / 16 * kWarpBytes + ptx::lane() * kChunkBytes);
    uint32_t found = 0;
    MLA_NO_UNROLL
    for (int first = 0; first < kWarpBytes; first += kAtOnce * kWarpSize * kChunkBytes) {
      ptx::Vec4 elements[kAtOnce];
      MLA_UNROLL
      for (int i = 0; i < kAtOnce; ++i)
        elements[i] = ptx::load_shared<ptx::Vec4>(values + static_cast<uint32_t>(first + i * kWarpSize * kChunkBytes));
      MLA_UNROLL
      for (const ptx::Vec4& eight : elements) MLA_UNROLL
      for (uint32_t pair : eight.x) found |= not_finite<kType>(pair);
    }
    return !this->any_warp(found != 0);
  }

  /// Adds p v to o, where infinite and NaN values count as 0.
  MLA_DEVICE void multiply_finite(Outputs& o, const PRegisters& p, int n) const {
    MLA_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step) {
      MLA_UNROLL
      for (int column = 0; column < kOutTiles; column += 2) {
        uint32_t b[4];
        load_values(b, n, step * 16, column);
        MLA_UNROLL
        for (uint32_t& pair : b) pair = finite_or_zero<kType>(pair);
        mma<kType>(o[0][column], p[step], b[0], b[1]);
        mma<kType>(o[0][column + 1], p[step], b[2], b[3]);
      }
    }
  }

  /// Adds what multiply_finite() left out to the rows that see it. The product of two matrices of ones and zeros, "the
  /// row sees the key" and "the value is NaN or infinite", counts how many such values each row sees in each channel.
  MLA_DEVICE void add_infinite(Outputs& o, int n, int first_key) const {
    MLA_UNROLL
    for (int column = 0; column < kOutTiles; column += 2) {
      float up[2][4] = {}, down[2][4] = {};  // counts of +inf and of -inf; NaN counts as both
      MLA_NO_UNROLL
      for (int step = 0; step < Config::kKeys / 16; ++step) {
        uint32_t a[4], b[4], b_up[4], b_down[4];
        visible_as_operand(a, first_key + step * 16);
        load_values(b, n, step * 16, column);
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          b_up[i] = not_below_infinity<kType>(b[i]);
          b_down[i] = not_below_infinity<kType>(b[i] ^ 0x80008000U);  // with the signs flipped
        }
        MLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          mma<kType>(up[half], a, b_up[2 * half], b_up[2 * half + 1]);
          mma<kType>(down[half], a, b_down[2 * half], b_down[2 * half + 1]);
        }
      }
      MLA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (up[i / 4][i % 4] > 0.0F) o[0][column + i / 4][i % 4] += -kNoKey;
        if (down[i / 4][i % 4] > 0.0F) o[0][column + i / 4][i % 4] += kNoKey;
      }
    }
  }

  /// Loads two B operands of 16 keys from `first` on, of 8 channels each from 8 * column on.
  MLA_DEVICE void load_values(uint32_t (&b)[4], int n, int first, int column) const {
    ptx::ldmatrix_x4_trans(b, lane_of_b_trans<kSegmentBytes>(v_piece(n, column / 8, first)).at(0, column % 8));
  }

  /// Makes the A operand that is 1 where a row sees a key and 0 elsewhere.
  MLA_DEVICE void visible_as_operand(uint32_t (&a)[4], int first_key) const {
    const PrefillUnit unit = this->unit(unit_);
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const KeyRange keys = this->visible(unit, lane_position(unit) + i % 2 * 8);
      const int key = first_key + accumulator_column() + i / 2 * 8;
      a[i] = pack<kType>(keys.contains(key) ? 1.0F : 0.0F, keys.contains(key + 1) ? 1.0F : 0.0F);
    }
  }

  MLA_DEVICE void store(Outputs& o, const SoftmaxRows& state, const PrefillUnit& unit) const {
    const core::PrefillArgs& args = this->args_;
    const int first_token = unit.first_token + group_ * Config::kGroupRows + warp_row_;
    const int num_rows = rows_of(unit) - warp_row_;
    const int64_t head_offset = unit.head * args.o_stride_head;
    float factors[2];
    this->finish(state, unit, 1.0F, factors);
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      MLA_UNROLL
      for (int column = 0; column < kOutTiles; ++column) {
        o[0][column][2 * i] *= factors[i];
        o[0][column][2 * i + 1] *= factors[i];
      }
      const int row = accumulator_row() + i * 8;
      if (args.o_dtype != DType::kF32 && this->params_.o_rows_aligned)
        store_rows(o[0], i, first_token + i * 8, num_rows - i * 8, head_offset);
      else if (row < num_rows)
        store_row(o[0], i, (first_token + row) * args.o_stride_token + head_offset + accumulator_column());
    }
  }

  /// Stores eight rows by way of shared memory, so that 16 lanes write one row.
  MLA_DEVICE void store_rows(const float (&o)[kOutTiles][4], int i, int first_token, int num_rows,
                             int64_t head_offset) const {
    constexpr int kRowBytes = Config::kDV * 2, kRowChunks = kRowBytes / kChunkBytes;
    const core::PrefillArgs& args = this->args_;
    const ptx::SharedAddress place =
        this->shared_ +
        static_cast<uint32_t>(Config::kOutputBegin +
                              (group_ * PrefillComputeRole::kGroupWarps + warp_row_ / 16) * Config::kOutputBytes);
    ptx::sync_warp();  // all lanes have read the rows stored before
    MLA_UNROLL
    for (int column = 0; column < kOutTiles; ++column)
      ptx::store_shared(
          place + tile_offset<kRowBytes>(accumulator_row(), column) + static_cast<uint32_t>(accumulator_column() * 2),
          pack<kType>(o[column][2 * i], o[column][2 * i + 1]));
    ptx::sync_warp();
    const int chunk = ptx::lane() % kRowChunks;
    MLA_UNROLL
    for (int r = 0; r < 8; r += kWarpSize / kRowChunks) {
      const int row = r + ptx::lane() / kRowChunks;
      const auto elements = ptx::load_shared<ptx::Vec4>(place + tile_offset<kRowBytes>(row, chunk));
      if (row < num_rows)
        *reinterpret_cast<ptx::Vec4*>(static_cast<uint16_t*>(args.o) + (first_token + row) * args.o_stride_token +
                                      head_offset + chunk * 8) = elements;
    }
  }

  /// Stores the lane's elements of a row, from `offset` on.
  MLA_DEVICE void store_row(const float (&o)[kOutTiles][4], int i, int64_t offset) const {
    MLA_UNROLL
    for (int column = 0; column < kOutTiles; ++column)
      store_pair(offset + column * 8, o[column][2 * i], o[column][2 * i + 1]);
  }
  MLA_DEVICE void store_pair(int64_t offset, float low, float high) const {
    if (this->args_.o_dtype == DType::kF32) {
      float* at = static_cast<float*>(this->args_.o) + offset;
      at[0] = low;
      at[1] = high;
      return;
    }
    uint16_t* at = static_cast<uint16_t*>(this->args_.o) + offset;
    const uint32_t pair = pack<kType>(low, high);
    if (this->params_.o_lane_aligned) {
      *reinterpret_cast<uint32_t*>(at) = pair;
    } else {
      at[0] = static_cast<uint16_t>(pair);
      at[1] = static_cast<uint16_t>(pair >> 16);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

// SPDX-License-Identifier: Apache-2.0
// The computing role of prefill is a warpgroup with 64 query rows, of which each warp has 16.
//   A tile is unmasked if every row of the warpgroup sees all its keys and scores need only the scale. Then
//   S(n + 1) = Q K^T and O += P(n) V are issued together, and the softmax of n + 1 runs while P(n) V, and then the
//   other warpgroup's products, keep the tensor cores busy.
//   Other tiles are computed 64 keys at a time, one thing after another.
// P never leaves registers, because the accumulators of S have the layout of P as an operand.
#pragma once

#include <cstdint>
#include <numbers>

#include "cuda/backends/sm90/prefill_block.cuh"
#include "cuda/backends/sm90/wgmma.cuh"
#include "cuda/tile/element16.cuh"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/softmax.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Returns accumulators of 8-column tiles as the flat array that wgmma takes.
template <int kTiles>
MLA_DEVICE float (&flat(float (&tiles)[1][kTiles][4]))[kTiles * 4] {
  return reinterpret_cast<float(&)[kTiles * 4]>(tiles);
}

template <class Config>
class PrefillComputeRole : public PrefillBlock<Config> {
 public:
  MLA_DEVICE PrefillComputeRole(const PrefillParams& params, int group)
      : PrefillBlock<Config>(params),
        group_(group),
        warp_row_(ptx::shuffle(ptx::warp(), 0) % PrefillComputeRole::kGroupWarps * 16),
        raw_scores_(needs_only_scale(params.args.options)),
        scale_log2_((raw_scores_ ? params.args.sm_scale : 1.0F) * std::numbers::log2e_v<float>) {}

  MLA_DEVICE void run() {
    if (Config::kTakesTurns && group_ == 1) pass_turn();  // group 0 takes the first turn
    this->wait_for_unit(0);
    load_q();
    MLA_NO_UNROLL
    while (this->unit(unit_).rows > 0) {
      Outputs o = {};
      SoftmaxRows rows[1];
      compute_unit(o, rows);
      ++unit_;
      this->wait_for_unit(unit_);
      sync_group();  // no warp multiplies the old queries any more
      load_q();
      store(o, rows[0], unit_ - 1);
      this->leave_unit(unit_ - 1);
    }
    if (Config::kTakesTurns && group_ == 0) wait_for_turn();  // takes the turn that group 1 passed last
  }

 private:
  static constexpr int kSubtileKeys = 64;  // keys that compute_tile() computes at a time
  static constexpr int kQkSteps = Config::kDQk / 16;
  static constexpr int kQSteps = Config::kQSteps < kQkSteps ? Config::kQSteps : kQkSteps;
  static constexpr int kOutTiles = Config::kDV / 8;
  static constexpr DType kType = Config::kType;

  template <int kKeys>
  using Scores = float[1][kKeys / 8][4];
  template <int kKeys>
  using PRegisters = uint32_t[kKeys / 16][4];
  using Outputs = float[1][kOutTiles][4];
  using QRegisters = uint32_t[kQSteps > 0 ? kQSteps : 1][4];

  const int group_;
  const int warp_row_;      // first row of the warp in its group
  const bool raw_scores_;   // whether scores need only the scale
  const float scale_log2_;  // factor from scores, or from natural logits, to base-2 logits
  int unit_ = 0;            // number of the unit being computed
  int tile_ = 0;            // number of its next tile
  int place_ = 0;           // which of two places of flags all_finite() used last

  /// Returns how many rows of a unit are this group's; 0 or less: none.
  MLA_DEVICE int rows_of(const PrefillUnit& unit) const {
    const int rows = unit.rows - group_ * Config::kGroupRows;
    return rows < Config::kGroupRows ? rows : Config::kGroupRows;
  }
  /// Returns the position of the group's first row, and of the lane's first row, in the request.
  MLA_DEVICE int position_of(const PrefillUnit& unit) const { return unit.position + group_ * Config::kGroupRows; }
  MLA_DEVICE int lane_position(const PrefillUnit& unit) const {
    return position_of(unit) + warp_row_ + accumulator_row();
  }

  /// Returns the keys that all of the group's rows see, and those that any of them sees.
  MLA_DEVICE KeyRange visible_to_all(const PrefillUnit& unit) const {
    const int first = position_of(unit), last = first + rows_of(unit) - 1;
    if (last < first) return {};
    return {this->visible(unit, last).begin, this->visible(unit, first).end};
  }
  MLA_DEVICE KeyRange visible_to_any(const PrefillUnit& unit) const {
    const int first = position_of(unit), last = first + rows_of(unit) - 1;
    if (last < first) return {};
    return {this->visible(unit, first).begin, this->visible(unit, last).end};
  }

  MLA_DEVICE void sync_group() const { ptx::sync_threads(Config::kGroupBarrier + group_, Config::kGroupThreads); }

  // The groups take turns in issuing products. Each takes a turn for every tile of a unit, whatever it does with the
  // tile, so that the two never count differently.
  MLA_DEVICE void wait_for_turn() const {
    if constexpr (Config::kTakesTurns)
      ptx::sync_threads(Config::kTurnBarrier + group_, Config::kGroups * Config::kGroupThreads);
  }
  MLA_DEVICE void pass_turn() const {
    if constexpr (Config::kTakesTurns)
      ptx::arrive_threads(Config::kTurnBarrier + (group_ ^ 1), Config::kGroups * Config::kGroupThreads);
  }

  MLA_DEVICE void compute_unit(Outputs& o, SoftmaxRows (&rows)[1]) {
    const PrefillUnit unit = this->unit(unit_);
    const KeyRange unmasked = visible_to_all(unit);
    // These tiles are unmasked; there are none if scores need more than the scale.
    const int first_unmasked = (unmasked.begin + Config::kKeys - 1) / Config::kKeys;
    int end_unmasked = raw_scores_ ? unmasked.end / Config::kKeys : first_unmasked;
    if (end_unmasked > unit.end_tile) end_unmasked = unit.end_tile;
    QRegisters q;
    wait_for_q(q);
    MLA_NO_UNROLL
    for (int tile = unit.first_tile; tile < unit.end_tile;) {
      if (tile >= first_unmasked && tile < end_unmasked) {
        compute_unmasked_tiles(q, end_unmasked - tile, rows, o);
        tile = end_unmasked;
      } else {
        compute_tile(q, tile, rows, o);
        ++tile;
      }
    }
  }

  MLA_DEVICE void wait_for_k(int n) const {
    ptx::mbarrier_wait(this->k_full(n), this->tile_parity(n));
    ptx::fence_async_proxy();
  }
  MLA_DEVICE void wait_for_v(int n) const {
    ptx::mbarrier_wait(this->v_full(n), this->tile_parity(n));
    ptx::fence_async_proxy();
  }
  MLA_DEVICE void release_k(int n) const {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(this->k_empty(n));
  }
  MLA_DEVICE void release_v(int n) const {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(this->v_empty(n));
  }

  MLA_DEVICE void load_q() const {
    const core::PrefillArgs& args = this->args_;
    const PrefillUnit unit = this->unit(unit_);
    this->template load_tile<Config::kGroupRows, Config::kQkPieces>(
        this->q_tile(group_), args.q,
        (unit.first_token + group_ * Config::kGroupRows) * args.q_stride_token + unit.head * args.q_stride_head,
        args.q_stride_token, rows_of(unit));
    ptx::cp_async_commit();
  }
  MLA_DEVICE void wait_for_q(QRegisters& q) const {
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    sync_group();
    MLA_UNROLL
    for (int step = 0; step < kQSteps; ++step) {
      constexpr uint32_t kQPieceBytes = Config::kGroupRows * kSegmentBytes;
      const auto lane = lane_of_a<kSegmentBytes>(this->q_tile(group_) + static_cast<uint32_t>(step / 4) * kQPieceBytes +
                                                 static_cast<uint32_t>(warp_row_ * kSegmentBytes));
      ptx::ldmatrix_x4(q[step], lane.at(0, step % 4 * 2));
    }
  }

  /// Issues s = q k^T for kKeys keys of tile n, from the tile's key `first` on.
  template <int kKeys>
  MLA_DEVICE void multiply_qk(Scores<kKeys>& s, const QRegisters& q, int n, int first) const {
    constexpr int kQPieceBytes = Config::kGroupRows * kSegmentBytes, kKPieceBytes = Config::kKeys * kSegmentBytes;
    const uint64_t a = ptx::matrix_descriptor(this->q_tile(group_), 0, this->kAtomBytes, ptx::Swizzle::k128);
    const uint64_t b = ptx::matrix_descriptor(this->k_tile(n) + static_cast<uint32_t>(first * kSegmentBytes), 0,
                                              this->kAtomBytes, ptx::Swizzle::k128);
    // A step has 16 channels, 32 bytes, and a piece four steps.
    MLA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      const uint64_t b_step = advance(b, step / 4 * kKPieceBytes + step % 4 * 32);
      if (step < kQSteps)
        wgmma<kType, kKeys, false>(flat(s), q[step < kQSteps ? step : 0], b_step, step > 0);
      else
        wgmma<kType, kKeys, false>(flat(s), advance(a, step / 4 * kQPieceBytes + step % 4 * 32), b_step, step > 0);
    }
  }

  /// Issues o += p v for kKeys keys of tile n, from the tile's key `first` on.
  template <int kKeys>
  MLA_DEVICE void multiply_pv(Outputs& o, const PRegisters<kKeys>& p, int n, int first) const {
    const uint64_t b = ptx::matrix_descriptor(this->v_tile(n) + static_cast<uint32_t>(first * kSegmentBytes),
                                              Config::kKeys * kSegmentBytes, this->kAtomBytes, ptx::Swizzle::k128);
    MLA_UNROLL
    for (int step = 0; step < kKeys / 16; ++step)
      wgmma<kType, Config::kDV, true>(flat(o), p[step], advance(b, step * 16 * kSegmentBytes), true);
  }

  /// Computes the next `count` tiles, which are unmasked.
  MLA_DEVICE void compute_unmasked_tiles(const QRegisters& q, int count, SoftmaxRows (&rows)[1], Outputs& o) {
    Scores<Config::kKeys> s;
    PRegisters<Config::kKeys> p;
    float factor[1][2];
    int n = tile_;
    tile_ += count;
    wait_for_k(n);
    wait_for_turn();
    ptx::wgmma_hold(flat(s));
    ptx::wgmma_fence();
    multiply_qk<Config::kKeys>(s, q, n, 0);
    ptx::wgmma_commit();
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(flat(s));
    release_k(n);
    if (softmax(s, rows, factor)) scale_rows(o[0], factor[0]);
    pack_all(s[0], p);
    if (++n < tile_) wait_for_k(n);

    MLA_NO_UNROLL
    for (; n < tile_; ++n) {
      wait_for_turn();
      ptx::wgmma_hold(flat(s));
      ptx::wgmma_hold(flat(o));
      ptx::wgmma_fence();
      multiply_qk<Config::kKeys>(s, q, n, 0);
      ptx::wgmma_commit();
      wait_for_v(n - 1);
      ptx::wgmma_fence();
      multiply_pv<Config::kKeys>(o, p, n - 1, 0);
      ptx::wgmma_commit();
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_hold(flat(s));
      release_k(n);
      const bool outgrown = softmax(s, rows, factor);
      ptx::wgmma_hold(flat(s));
      // The wait stands here, because ptxas 13.0 moves the exponentials behind the next wait_group unless a branch
      // stands between. To check it again: in the loop with 20 HGMMA, MUFU.EX2 come before WARPGROUP.DEPBAR.LE gsb0,
      // 0x0.
      if (n + 1 < tile_) wait_for_k(n + 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(flat(o));
      release_v(n - 1);
      if (outgrown) scale_rows(o[0], factor[0]);
      pack_all(s[0], p);
    }
    wait_for_v(n - 1);
    ptx::wgmma_hold(flat(o));
    ptx::wgmma_fence();
    multiply_pv<Config::kKeys>(o, p, n - 1, 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(flat(o));
    release_v(n - 1);
  }

  /// Turns scores into P and takes them into `rows`. Returns whether a maximum was raised, so that the outputs so far
  /// must be multiplied by `factor`.
  template <int kColTiles>
  MLA_DEVICE bool softmax(float (&s)[1][kColTiles][4], SoftmaxRows (&rows)[1], float (&factor)[1][2]) const {
    float largest[1][2];
    row_max(s[0], largest[0]);
    const bool outgrown = raise_rows(largest, scale_log2_, rows, factor);
    exponentiate(s[0], scale_log2_, rows[0]);
    return outgrown;
  }

  template <int kColTiles>
  static MLA_DEVICE void pack_all(const float (&s)[kColTiles][4], uint32_t (&p)[kColTiles / 2][4]) {
    MLA_UNROLL
    for (int i = 0; i < kColTiles / 2; ++i) pack_p<kType>(s[2 * i], s[2 * i + 1], p[i]);
  }

  /// Computes the keys of any tile that a row of the group sees, kSubtileKeys at a time.
  MLA_DEVICE void compute_tile(const QRegisters& q, int tile, SoftmaxRows (&rows)[1], Outputs& o) {
    const PrefillUnit unit = this->unit(unit_);
    const KeyRange any = visible_to_any(unit), all = visible_to_all(unit);
    const int n = tile_++;
    bool passed = false;
    wait_for_k(n);
    wait_for_turn();
    MLA_NO_UNROLL
    for (int first = 0; first < Config::kKeys; first += kSubtileKeys) {
      const int first_key = tile * Config::kKeys + first;
      if (first_key >= any.end || first_key + kSubtileKeys <= any.begin) continue;
      Scores<kSubtileKeys> s;
      PRegisters<kSubtileKeys> p;
      ptx::wgmma_hold(flat(s));
      ptx::wgmma_fence();
      multiply_qk<kSubtileKeys>(s, q, n, first);
      ptx::wgmma_commit();
      if (!passed) pass_turn();
      passed = true;
      wait_for_v(n);
      const bool masked = first_key + kSubtileKeys > all.end || first_key < all.begin;
      // A probability of 0 does not silence a value that is infinite or NaN.
      const bool finite = !masked || all_finite(n, first);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(flat(s));
      if (!raw_scores_) transform(s[0], first_key);
      if (masked) mask(s[0], first_key);
      float factor[1][2];
      if (softmax(s, rows, factor)) scale_rows(o[0], factor[0]);
      pack_all(s[0], p);
      if (finite) {
        ptx::wgmma_hold(flat(o));
        ptx::wgmma_fence();
        multiply_pv<kSubtileKeys>(o, p, n, first);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(flat(o));
      } else {
        multiply_finite(o, p, n, first);
        add_infinite(o, n, first, first_key);
      }
    }
    if (!passed) pass_turn();
    wait_for_v(n);
    ptx::sync_warp();
    release_k(n);
    release_v(n);
  }

  /// Applies soft cap and ALiBi; scores become natural logits.
  template <int kColTiles>
  MLA_DEVICE void transform(float (&s)[kColTiles][4], int first_key) const {
    const core::Options& options = this->args_.options;
    const PrefillUnit unit = this->unit(unit_);
    const float slope = options.alibi_slopes != nullptr ? options.alibi_slopes[unit.head] : 0.0F;
    const float scale = options.logits_soft_cap == 0.0F ? this->args_.sm_scale : 1.0F;
    if (options.logits_soft_cap != 0.0F) cap_scores(s, this->args_.sm_scale, options.logits_soft_cap);
    add_slope(s, scale, slope, first_key + accumulator_column() - lane_position(unit));
  }
  template <int kColTiles>
  MLA_DEVICE void mask(float (&s)[kColTiles][4], int first_key) const {
    const PrefillUnit unit = this->unit(unit_);
    const int position = lane_position(unit);
    mask_scores(s, {this->visible(unit, position), this->visible(unit, position + 8)}, first_key);
  }

  /// Returns where rows `first` ... first + 15 of channels 64 * piece ... of V's tile n lie.
  MLA_DEVICE ptx::SharedAddress v_piece(int n, int piece, int first) const {
    return this->v_tile(n) + static_cast<uint32_t>((piece * Config::kKeys + first) * kSegmentBytes);
  }

  /// Returns whether kSubtileKeys values from `first` on are finite. All warps of the group call it, and each looks at
  /// 16 of the values.
  MLA_DEVICE bool all_finite(int n, int first) {
    bool found = false;
    for (int piece = 0; piece < Config::kVPieces; ++piece)
      for (int i = ptx::lane() * kChunkBytes; i < 16 * kSegmentBytes; i += kWarpSize * kChunkBytes) {
        const auto elements =
            ptx::load_shared<ptx::Vec4>(v_piece(n, piece, first + warp_row_) + static_cast<uint32_t>(i));
        MLA_UNROLL
        for (uint32_t pair : elements.x) found |= !both_finite<kType>(pair);
      }
    found = ptx::any(found);
    // The two places are used by turns: before a place is written again, all warps have read it, because they met at
    // the barrier for the other place in between.
    place_ ^= 1;
    const ptx::SharedAddress place =
        this->shared_ + static_cast<uint32_t>(Config::kFlagsBegin + (group_ * 2 + place_) * Config::kFlagBytes);
    if (ptx::lane() == 0) ptx::store_shared(place + static_cast<uint32_t>(warp_row_ / 16 * 4), found ? 1U : 0U);
    sync_group();
    const auto flags = ptx::load_shared<ptx::Vec4>(place);
    return (flags.x[0] | flags.x[1] | flags.x[2] | flags.x[3]) == 0;
  }

  /// Adds p v to o, where infinite and NaN values count as 0.
  MLA_DEVICE void multiply_finite(Outputs& o, const PRegisters<kSubtileKeys>& p, int n, int first) const {
    MLA_UNROLL
    for (int step = 0; step < kSubtileKeys / 16; ++step) {
      MLA_UNROLL
      for (int column = 0; column < kOutTiles; column += 2) {
        uint32_t b[4];
        load_values(b, n, first + step * 16, column);
        MLA_UNROLL
        for (uint32_t& pair : b) pair = finite_or_zero<kType>(pair);
        mma<kType>(o[0][column], p[step], b[0], b[1]);
        mma<kType>(o[0][column + 1], p[step], b[2], b[3]);
      }
    }
  }

  /// Adds what multiply_finite() left out to the rows that see it. The product of two matrices of ones and zeros, "the
  /// row sees the key" and "the value is NaN or infinite", counts how many such values each row sees in each channel.
  MLA_DEVICE void add_infinite(Outputs& o, int n, int first, int first_key) const {
    MLA_UNROLL
    for (int column = 0; column < kOutTiles; column += 2) {
      float up[2][4] = {}, down[2][4] = {};  // counts of +inf and of -inf; NaN counts as both
      MLA_NO_UNROLL
      for (int step = 0; step < kSubtileKeys / 16; ++step) {
        uint32_t a[4], b[4], b_up[4], b_down[4];
        visible_as_operand(a, first_key + step * 16);
        load_values(b, n, first + step * 16, column);
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

  MLA_DEVICE void store(Outputs& o, const SoftmaxRows& state, int u) const {
    const core::PrefillArgs& args = this->args_;
    const PrefillUnit unit = this->unit(u);
    const float sink = load_sink(args.options, unit.head);
    const int first_token = unit.first_token + group_ * Config::kGroupRows + warp_row_;
    const int num_rows = rows_of(unit) - warp_row_;
    const int64_t head_offset = unit.head * args.o_stride_head;
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const FinishedRow finished = finish_row(state.of[i].max, quad_sum(state.of[i].sum), sink, 1.0F, args.lse_base);
      MLA_UNROLL
      for (int column = 0; column < kOutTiles; ++column) {
        o[0][column][2 * i] *= finished.o_factor;
        o[0][column][2 * i + 1] *= finished.o_factor;
      }
      const int row = accumulator_row() + i * 8;
      if (args.lse != nullptr && row < num_rows && (ptx::lane() & 3) == 0)
        args.lse[(first_token + row) * args.lse_stride_token + unit.head * args.lse_stride_head] = finished.lse;
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
    if (this->params_.o_pairs_aligned) {
      *reinterpret_cast<uint32_t*>(at) = pair;
    } else {
      at[0] = static_cast<uint16_t>(pair);
      at[1] = static_cast<uint16_t>(pair >> 16);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

// SPDX-License-Identifier: Apache-2.0
// The computing role of prefill is a warpgroup with 64 query rows, of which each warp has 16. P never leaves registers:
// the accumulators of S have the keys of P as transposed values have them (PrefillConfig::values_place()).
//   A tile is one run of keys. P(n) V is issued when S(n + 1) = Q K^T is there, and the maxima of S(n + 1) are found
//   while it runs. While they become P(n + 1), the other warpgroup's products keep the tensor cores busy.
// Products of a run begin at 0 and are added to O by FFMA, because the scale of P differs from run to run.
#pragma once

#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "cuda/attention/e4m3_prefill.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/attention/warpgroup_prefill_compute.cuh"
#include "cuda/backends/sm90_fp8/prefill_block.cuh"
#include "cuda/ptx/wgmma.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

template <class Config>
class PrefillComputeRole : WarpgroupPrefillCompute<Config> {
 public:
  MLA_DEVICE PrefillComputeRole(const WarpgroupPrefillParams& params, int group)
      : Base(params, group),
        o_factor_(*params.args.v_scale * inverse_o_scale(params.args.o_scale)),
        scale_log2_((this->raw_scores_ ? e4m3_score_scale(params.args) : 1.0F) * std::numbers::log2e_v<float>) {}

  MLA_DEVICE void run() {
    this->template for_each_unit<kOutTiles>(
        [&](Outputs& o, SoftmaxRows(&rows)[1]) { compute_unit(o, rows); },
        [&](const Outputs& o, const SoftmaxRows& rows, const PrefillUnit& unit) { store(o, rows, unit); });
  }

 private:
  using Base = WarpgroupPrefillCompute<Config>;
  using Base::group_, Base::warp_row_, Base::tile_;
  using Base::wait_for_k, Base::release_k, Base::release_v, Base::wait_for_turn, Base::pass_turn;

  static constexpr int kQkSteps = Config::kDQk / 32;
  static constexpr int kOutTiles = Config::kDV / 8;
  static constexpr int kSegmentSteps = kSegmentBytes / 32;
  // P V is multiplied in pieces of so many channels, one after another.
  static constexpr int kPieceChannels = Config::kDV == 128 ? 128 : 64, kPieceTiles = kPieceChannels / 8;
  static constexpr int kPieces = Config::kDV / kPieceChannels;

  using Scores = float[1][Config::kKeys / 8][4];
  using PRegisters = uint32_t[Config::kKeys / 32][4];
  using Outputs = float[1][kOutTiles][4];
  using Products = float[1][kPieceTiles][4];

  const float o_factor_;    // what outputs are multiplied by beside what their rows are
  const float scale_log2_;  // factor from products, or from natural logits, to base-2 logits

  /// The load role has fenced what it wrote.
  MLA_DEVICE void wait_for_v(int n) const { ptx::mbarrier_wait(this->v_full(n), this->v_parity(n)); }

  /// Issues q k^T of tile n: s is the sum over the first half of the channels, `rest` over the other.
  MLA_DEVICE void multiply_qk(Scores& s, Scores& rest, int n) const {
    ptx::wgmma_hold(flat(s));
    ptx::wgmma_hold(flat(rest));
    ptx::wgmma_fence();
    constexpr int kQSegmentBytes = Config::kGroupRows * kSegmentBytes, kKSegmentBytes = Config::kKeys * kSegmentBytes;
    const uint64_t a = ptx::matrix_descriptor(this->q_tile(group_), 0, Base::kAtomBytes, ptx::Swizzle::k128);
    const uint64_t b = ptx::matrix_descriptor(this->k_tile(n), 0, Base::kAtomBytes, ptx::Swizzle::k128);
    MLA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      const int segment = step / kSegmentSteps, in_segment = step % kSegmentSteps * 32;
      ptx::wgmma_e4m3<Config::kKeys>(flat(step < kQkSteps / 2 ? s : rest),
                                     ptx::advance(a, segment * kQSegmentBytes + in_segment),
                                     ptx::advance(b, segment * kKSegmentBytes + in_segment), step % (kQkSteps / 2) > 0);
    }
    ptx::wgmma_commit();
  }

  /// Waits for both sums, and adds them.
  MLA_DEVICE static void finish_scores(Scores& s, Scores& rest) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(flat(s));
    ptx::wgmma_hold(flat(rest));
    MLA_UNROLL
    for (int tile = 0; tile < Config::kKeys / 8; ++tile) MLA_UNROLL
    for (int i = 0; i < 4; ++i) s[0][tile][i] += rest[0][tile][i];
  }

  /// Issues products = p v for a piece of the channels of tile n.
  MLA_DEVICE void issue_piece(Products& products, PRegisters& p, int n, int piece) const {
    ptx::wgmma_hold(flat(products));
    ptx::wgmma_hold(p);
    ptx::wgmma_fence();
    constexpr int kSubtileSteps = Config::kSubtileKeys / 32;
    const uint64_t b =
        ptx::matrix_descriptor(this->v_tile(n) + static_cast<uint32_t>(piece * kPieceChannels * Config::kColumnBytes),
                               0, 8 * Config::kColumnBytes, ptx::Swizzle::k64);
    MLA_UNROLL
    for (int step = 0; step < Config::kKeys / 32; ++step)
      ptx::wgmma_e4m3<kPieceChannels>(
          flat(products), p[step],
          ptx::advance(b, step / kSubtileSteps * Config::kSubtileBytes + step % kSubtileSteps * 32), step > 0);
    ptx::wgmma_commit();
  }

  MLA_DEVICE static void add(Outputs& o, const Products& products, const RunUnits& units, int piece) {
    MLA_UNROLL
    for (int column = 0; column < kPieceTiles; ++column) MLA_UNROLL
    for (int i = 0; i < 4; ++i) o[0][piece * kPieceTiles + column][i] += products[0][column][i] * units.in_o[i / 2];
  }

  /// Finds the largest scores of the lane's rows, among its own.
  MLA_DEVICE static void lane_max(const Scores& s, float (&largest)[2]) {
    float of[4][2];
    MLA_UNROLL
    for (int n = 0; n < Config::kKeys / 8; ++n) MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float two = std::fmax(s[0][n][2 * i], s[0][n][2 * i + 1]);
      of[n % 4][i] = n < 4 ? two : std::fmax(of[n % 4][i], two);
    }
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) largest[i] = std::fmax(std::fmax(of[0][i], of[1][i]), std::fmax(of[2][i], of[3][i]));
  }

  /// Takes the largest scores of a run into the states, rescales the outputs so far, and finds the run's units.
  MLA_DEVICE void raise(const float (&largest)[1][2], SoftmaxRows (&rows)[1], Outputs& o, RunUnits& units) const {
    float factor[1][2];
    if (raise_rows(largest, scale_log2_, rows, factor)) scale_rows(o[0], factor[0]);
    units = units_of_run(largest[0], scale_log2_, rows[0]);
  }

  /// Turns scores into P in units of its own for each row, and rescales the outputs so far.
  MLA_DEVICE void softmax(Scores& s, SoftmaxRows (&rows)[1], Outputs& o, PRegisters& p, RunUnits& units) const {
    float largest[1][2];
    lane_max(s, largest[0]);
    MLA_UNROLL
    for (float& of_row : largest[0]) of_row = quad_max(of_row);
    raise(largest, rows, o, units);
    exponentiate_in_units(s[0], units, scale_log2_, rows[0]);
    pack_e4m3_p(s[0], p);
  }

  MLA_DEVICE void compute_unit(Outputs& o, SoftmaxRows (&rows)[1]) {
    this->wait_for_q();
    this->for_each_tile([&](int& tile, int end, KeyRange whole) { compute_tiles(tile, end, whole, rows, o); });
  }

  /// Computes tiles from `tile` on, up to `end`, or one of which hidden values are NaN.
  MLA_DEVICE void compute_tiles(int& tile, int end, KeyRange whole, SoftmaxRows (&rows)[1], Outputs& o) {
    Scores s;
    PRegisters p;
    RunUnits units;
    wait_for_k(tile_);
    wait_for_turn();
    {
      Scores rest;
      multiply_qk(s, rest, tile_);
      pass_turn();
      finish_scores(s, rest);
    }
    release_k(tile_);
    bool masked = !whole.contains(tile);
    this->shape(s[0], tile, masked, e4m3_score_scale(this->args_));
    softmax(s, rows, o, p, units);
    if (tile + 1 < end) wait_for_k(tile_ + 1);

    // Turns the scores of the next tile into P, and adds the values of the one before.
    const auto advance = [&](auto is_whole) {
      ++tile;
      const int n = ++tile_;
      wait_for_turn();
      {
        Scores rest;
        multiply_qk(s, rest, n);
        wait_for_v(n - 1);
        if constexpr (!is_whole.value) masked = !whole.contains(tile);
        finish_scores(s, rest);
      }
      release_k(n);
      if constexpr (!is_whole.value) this->shape(s[0], tile, masked, e4m3_score_scale(this->args_));
      Products products;
      issue_piece(products, p, n - 1, 0);
      pass_turn();
      float largest[1][2];
      lane_max(s, largest[0]);
      // The wait stands here because ptxas 13.0 moves the maxima behind the next wait_group unless a branch stands
      // between.
      if (tile + 1 < end) wait_for_k(n + 1);
      add_piece<0>(o, products, p, units, n - 1);
      MLA_UNROLL
      for (float& of_row : largest[0]) of_row = quad_max(of_row);
      if constexpr (kPieces > 1) {
        add_piece<1>(o, products, p, units, n - 1);
        add_piece<2>(o, products, p, units, n - 1);
        add_piece<3>(o, products, p, units, n - 1);
      }
      release_v(n - 1);
      raise(largest, rows, o, units);
      exponentiate_in_units(s[0], units, scale_log2_, rows[0]);
      pack_e4m3_p(s[0], p);
    };
    MLA_NO_UNROLL
    for (;;) {
      // Most tiles take a loop of their own, which jumps over nothing.
      if (this->raw_scores_ && !masked) {
        MLA_NO_UNROLL
        while (tile + 1 < whole.end) advance(std::true_type());
      }
      if (tile + 1 >= end || (masked && any_nan(tile_))) break;
      advance(std::false_type());
    }
    // A probability of 0 does not silence a value that is NaN.
    if (masked && any_nan(tile_)) {
      add_values_with_nan(o, p, units, tile_, tile * Config::kKeys);
      ptx::sync_warp();
    } else {
      wait_for_v(tile_);
      add_pieces(o, p, units, tile_);
    }
    release_v(tile_);
    ++tile;
    ++tile_;
  }

  /// Computes o += units * p v for the piece in flight, and issues the next one.
  template <int kPiece>
  MLA_DEVICE void add_piece(Outputs& o, Products& products, PRegisters& p, const RunUnits& units, int n) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(flat(products));
    ptx::wgmma_hold(p);
    add(o, products, units, kPiece);
    if constexpr (kPiece + 1 < kPieces) issue_piece(products, p, n, kPiece + 1);
  }

  /// Computes o += units * p v for all pieces, one after another.
  MLA_DEVICE void add_pieces(Outputs& o, PRegisters& p, const RunUnits& units, int n) const {
    Products products;
    MLA_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      issue_piece(products, p, n, piece);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(flat(products));
      ptx::wgmma_hold(p);
      add(o, products, units, piece);
    }
  }

  /// Returns whether any of these values is NaN. All warps of the group call it, and each looks at a fourth of them.
  MLA_DEVICE bool any_nan(int n) {
    constexpr int kWarpBytes = Config::kVBytes / Base::kGroupWarps;
    wait_for_v(n);
    const ptx::SharedAddress values = this->v_tile(n) + static_cast<uint32_t>(warp_row_ / 16 * kWarpBytes);
    uint32_t found = 0;
    for (int i = ptx::lane() * kChunkBytes; i < kWarpBytes; i += kWarpSize * kChunkBytes) {
      const auto elements = ptx::load_shared<ptx::Vec4>(values + static_cast<uint32_t>(i));
      MLA_UNROLL
      for (uint32_t four : elements.x) found |= nan_bits(four);
    }
    return this->any_warp(found != 0);
  }

  /// Does what add_pieces() does for keys of which some values are NaN: they count as 0 for rows that do not see them.
  /// The product of "the row sees the key" and "the value is NaN" says which outputs become NaN.
  MLA_DEVICE void add_values_with_nan(Outputs& o, const PRegisters& p, const RunUnits& units, int n,
                                      int first_key) const {
    MLA_UNROLL
    for (int column = 0; column < kOutTiles; column += 2) {
      float products[2][4] = {}, seen[2][4] = {};
      MLA_UNROLL
      for (int step = 0; step < Config::kKeys / 32; ++step) {
        uint32_t b[4], nan[4], sees[4];
        load_values(b, n, column, step * 2);
        sees_as_operand(sees, first_key + step * 32);
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          nan[i] = nan_bytes(b[i]) & kOnes;
          b[i] &= ~nan_bytes(b[i]);
        }
        MLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          ptx::mma_e4m3(products[half], p[step], b[2 * half], b[2 * half + 1]);
          ptx::mma_e4m3(seen[half], sees, nan[2 * half], nan[2 * half + 1]);
        }
      }
      MLA_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& of = o[0][column + i / 4][i % 4];
        of += products[i / 4][i % 4] * units.in_o[i % 4 / 2];
        if (seen[i / 4][i % 4] > 0.0F) of = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
  static constexpr uint32_t kOnes = 0x38383838;  // four times 1

  /// Loads two B operands of 32 keys, from a chunk of 16 on, of columns 8 * column ... 8 * column + 15.
  MLA_DEVICE void load_values(uint32_t (&b)[4], int n, int column, int chunk) const {
    const int row = (ptx::lane() & 7) | ptx::lane() >> 4 << 3, half = ptx::lane() >> 3 & 1;
    ptx::ldmatrix_x4(b, this->v_tile(n) + Config::values_place(column * 8 + row, chunk + half));
  }

  /// Makes the A operand that is 1 where a row sees a key and 0 elsewhere, of 32 keys in the order of P.
  MLA_DEVICE void sees_as_operand(uint32_t (&a)[4], int first_key) const {
    const PrefillUnit unit = this->unit(this->unit_);
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const KeyRange keys = this->visible(unit, this->lane_position(unit) + i % 2 * 8);
      a[i] = 0;
      MLA_UNROLL
      for (int byte = 0; byte < 4; ++byte)
        if (keys.contains(first_key + i / 2 * 16 + accumulator_column() + byte % 2 + byte / 2 * 8))
          a[i] |= (kOnes & 0xFFU) << 8 * byte;
    }
  }

  MLA_DEVICE void store(const Outputs& o, const SoftmaxRows& rows, const PrefillUnit& unit) const {
    const core::PrefillArgs& args = this->args_;
    const int first_token = unit.first_token + group_ * Config::kGroupRows + warp_row_;
    float factors[2];
    this->finish(rows, unit, o_factor_, factors);
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = accumulator_row() + i * 8;
      if (row < this->rows_of(unit) - warp_row_)
        store_outputs(args, this->params_.o_lane_aligned,
                      (first_token + row) * args.o_stride_token + unit.head * args.o_stride_head, o[0], i, factors[i]);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

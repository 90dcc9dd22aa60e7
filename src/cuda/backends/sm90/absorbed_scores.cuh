// SPDX-License-Identifier: Apache-2.0
// The score role is one warpgroup: it computes S = Q K^T and the online softmax, which turns scores into P.
#pragma once

#include "cuda/attention/warpgroup_scores.cuh"
#include "cuda/backends/sm90/absorbed_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config>
class ScoreRole : WarpgroupScores<Config, AbsorbedBlock<Config>> {
  using Block = AbsorbedBlock<Config>;
  using Base = WarpgroupScores<Config, Block>;
  using Base::kScores, Base::kLaneRowStep, Base::lane_row, Base::lane_column, Base::row_of, Base::chain_of;
  using Block::args_, Block::unit;

 public:
  using Base::Base, Block::next_unit;

  MLA_DEVICE void compute() {
    load_queries();
    Block::find_unmasked_steps();
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      states_[r] = {};
      largest_[r] = kNoKey;
    }
    scale_ = score_scale(args_) * std::numbers::log2e_v<float>;
    // Who asks for max_logits gets exact maxima, without headroom in the last step. Without any, one of the 64 rows has
    // a new maximum in most steps, and all outputs are rescaled: prefill_sparse of 4,096 tokens and 128 heads took 4.46
    // instead of 4.24 ms (H100, 2026-11-27).
    MLA_NO_UNROLL
    for (const uint32_t end = unit().steps.end; next_ < end; ++next_)
      step(next_, args_.max_logits != nullptr && next_ + 1 == end);
    finish();
    Block::leave_unit();
  }

 private:
  MLA_DEVICE static void sync_group() { ptx::sync_threads(Config::kScoreBarrier, Config::kGroupThreads); }

  // Queries.

  MLA_DEVICE void load_queries() const {
    sync_group();  // no warp multiplies the queries of the unit before any more
    const int d_ckv = args_.pools[0].cache.d_ckv;
    if (args_.q_dtype == Config::kType && d_ckv % Config::kPieceDims == 0 &&
        has_whole_chunks(args_.q_nope, args_.q_nope_stride_token, args_.q_nope_stride_head) &&
        has_whole_chunks(args_.q_pe, args_.q_pe_stride_token, args_.q_pe_stride_head)) [[likely]] {
      const QueryRow row =
          unit().rows.row(args_, Block::score_warp() * Block::kWarpRows + (ptx::lane() & (Block::kWarpRows - 1)));
      const bool valid = row.token >= 0;
      Block::template copy_rows<false>(Block::queries(), Block::score_warp() * Block::kWarpRows,
                                       valid ? query(row, 0) : nullptr, valid ? query(row, d_ckv) : nullptr, d_ckv,
                                       ptx::kEvictFirst, [](int) {});
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    } else {
      convert_queries();
    }
    ptx::fence_async_proxy();
    sync_group();
  }

  /// Returns where a channel of a query lies.
  MLA_DEVICE const std::byte* query(const QueryRow& row, int channel) const {
    const int d_ckv = args_.pools[0].cache.d_ckv;
    const int64_t nope = int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head + channel;
    const int64_t pe =
        int64_t{row.token} * args_.q_pe_stride_token + row.head * args_.q_pe_stride_head + channel - d_ckv;
    return static_cast<const std::byte*>(channel < d_ckv ? args_.q_nope : args_.q_pe) +
           (channel < d_ckv ? nope : pe) * static_cast<int64_t>(size_of(args_.q_dtype));
  }

  /// Returns whether all rows of 16-bit queries can be copied 16 bytes at a time.
  MLA_DEVICE static bool has_whole_chunks(const void* from, int64_t stride_token, int64_t stride_head) {
    return ((reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(stride_token * 2) |
             static_cast<uint64_t>(stride_head * 2)) &
            (kChunkBytes - 1)) == 0;
  }

  /// Loads queries of another type or alignment, two channels at a time.
  MLA_DEVICE void convert_queries() const {
    const int thread = ptx::thread_index() - Config::kFirstScoreWarp * kWarpSize, pairs = args_.d_qk / 2;
    MLA_NO_UNROLL
    for (int i = thread; i < Config::kRows * pairs; i += Config::kGroupThreads) {
      const QueryRow row = unit().rows.row(args_, i / pairs);
      const int channel = i % pairs * 2;
      float low = 0.0F, high = 0.0F;
      if (row.token >= 0) {
        low = load_element(query(row, channel), args_.q_dtype, 0);
        high = load_element(query(row, channel), args_.q_dtype, 1);
      }
      ptx::store_shared(Block::queries() + Block::chunk_offset(i / pairs, channel / kVector) +
                            static_cast<uint32_t>(channel % kVector * 2),
                        pack<Config::kType>(low, high));
    }
  }

  // Steps.

  /// Computes S and P of step n; `exact` says that maxima are to be exact behind it. The warp is alone on its quarter
  /// of the SM most of the time, so that latency counts: sums and maxima are computed in four chains (with changes to
  /// combine, 472 instead of 436 TFLOP/s at batch 32, 128 heads, kv 8k; H200, 2026-11-21).
  MLA_DEVICE void step(uint32_t n, bool exact) {
    float s[kScores];
    multiply_queries(s, n);
    const StepRange unmasked = unit().unmasked;  // loaded while the tensor cores multiply
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(s);
    if (ptx::elect()) {
      ptx::mbarrier_arrive(Block::s_done());
      // The step's rows have come, which the other block may wait for. A score warp says so, because a branch for it in
      // the value warps makes ptxas 13.0 serialize their products (C7520): quantized decode was 6 to 14 % slower (H200,
      // 2026-11-23).
      if (Config::kCluster > 1 && ptx::warp() == Config::kFirstScoreWarp)
        ptx::mbarrier_arrive_in_cluster(ptx::map_shared(Block::received_by_other(n), ptx::cluster_rank() ^ 1));
    }
    // The largest score belongs to the largest logit only if the scale is positive.
    float scale = scale_;
    if (unmasked.contains(n) && scale > 0.0F) [[likely]] {
      Base::hide_invalid(s, n);
    } else {
      const bool only_scale = needs_only_scale(args_.options) && scale > 0.0F;
      replace_scores(s, n, only_scale);
      if (!only_scale) scale = 1.0F;
    }
    float largest[2], factor[2] = {1.0F, 1.0F}, base[2];
    Base::find_largest(s, scale, largest);
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) largest_[r] = std::fmax(largest_[r], largest[r]);
    const float headroom = exact ? 0.0F : kHeadroom;
    if (ptx::any(states_[0].is_outgrown_by(largest_[0], headroom) ||
                 states_[1].is_outgrown_by(largest_[1], headroom))) {
      MLA_UNROLL
      for (int r = 0; r < 2; ++r)
        if (states_[r].is_outgrown_by(largest_[r], headroom)) factor[r] = states_[r].raise(largest_[r]);
    }
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      base[r] = states_[r].base();
      if ((ptx::lane() & 3) == 0) Block::factors(n)[lane_row() + r * kLaneRowStep] = factor[r];
    }
    softmax_half<0>(s, n, scale, base);
    softmax_half<1>(s, n, scale, base);
  }

  /// Turns the scores of half of the keys into P, and hands them over.
  template <int kHalf>
  MLA_DEVICE void softmax_half(float (&s)[kScores], uint32_t n, float scale, const float (&base)[2]) {
    float sums[2][4] = {};
    MLA_UNROLL
    for (int i = kHalf * kScores / 2; i < (kHalf + 1) * kScores / 2; ++i) {
      s[i] = ptx::exp2_approx(s[i] * scale - base[row_of(i)]);
      sums[row_of(i)][chain_of(i)] += s[i];
    }
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) states_[r].sum += (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
    // P goes where the rotary channels are until every warp has its scores.
    if (kHalf == 0) ptx::mbarrier_wait(Block::s_done(), n & 1U);
    store_p<kHalf>(s, n);
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::p_full(n, kHalf));
  }

  /// Issues the products of step n, as the rows' pieces come.
  MLA_DEVICE void multiply_queries(float (&s)[kScores], uint32_t n) const {
    uint64_t queries = Block::latent_descriptor(Block::queries()), keys = Block::latent_descriptor(Block::stage(n));
    ptx::wgmma_hold(s);
    ptx::wgmma_fence();
    MLA_UNROLL
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      if (piece % Config::kArrivalPieces == 0) {
        ptx::mbarrier_wait(Block::kv_full(n, piece / Config::kArrivalPieces), Block::parity(n));
        ptx::fence_async_proxy();
      }
      if (piece == Config::kLatentPieces) {
        if (args_.d_qk <= Config::kLatentDims) break;
        queries = Block::rope_descriptor(Block::queries());
        keys = Block::rope_descriptor(Block::stage(n));
      }
      MLA_UNROLL
      for (int step = 0; step < Config::kPieceDims / 16; ++step) {
        const int at = piece % Config::kLatentPieces * Config::kAtomBytes + step * 32;
        wgmma<Config::kType, Config::kKeys>(s, Block::advance(queries, at), Block::advance(keys, at),
                                            piece > 0 || step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Replaces scores by what logit_of() makes of them. Scores rotate through the first four registers.
  MLA_DEVICE void replace_scores(float (&s)[kScores], uint32_t n, bool only_scale) const {
    const RowScores rows[2] = {RowScores(args_, unit().segment, unit().rows.row(args_, lane_row())),
                               RowScores(args_, unit().segment, unit().rows.row(args_, lane_row() + kLaneRowStep))};
    uint64_t visible[2] = {Base::visible_keys(rows[0], n), Base::visible_keys(rows[1], n)};
    MLA_NO_UNROLL
    for (int column = lane_column(); column < Config::kKeys; column += 8) {
      float four[4];
      MLA_UNROLL
      for (int i = 0; i < 4; ++i)
        four[i] = Base::logit_of(rows[i / 2], (visible[i / 2] >> i % 2 & 1) != 0, s[i], n, column + i % 2, only_scale);
      MLA_UNROLL
      for (uint64_t& of_row : visible) of_row >>= 8;
      MLA_UNROLL
      for (int i = 0; i < kScores - 4; ++i) s[i] = s[i + 4];
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) s[kScores - 4 + i] = four[i];
    }
  }

  /// Stores P of half of the keys, rows of 64 bytes in the order of Swizzle::k64.
  template <int kHalf>
  MLA_DEVICE void store_p(const float (&s)[kScores], uint32_t n) const {
    const ptx::SharedAddress row =
        Block::p(n, kHalf) + static_cast<uint32_t>(lane_row() * Config::kPRowBytes + lane_column() * 2);
    const int swizzle = lane_row() >> 1 & 3;
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const ptx::SharedAddress to = row + static_cast<uint32_t>((j ^ swizzle) * kChunkBytes);
      MLA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int i = (kHalf * 4 + j) * 4 + r * 2;
        ptx::store_shared(to + static_cast<uint32_t>(r * kLaneRowStep * Config::kPRowBytes),
                          pack<Config::kType>(s[i], s[i + 1]));
      }
    }
  }

  // The end of a unit.

  MLA_DEVICE void finish() const {
    const int number = Block::unit_number();
    if (number > 0)
      ptx::mbarrier_wait(Block::unit_empty(number - 1),
                         Block::unit_parity(number - 1));  // its factors have been read
    const RowEnd<Config> upper = end_of_row(0), lower = end_of_row(1);
    const bool first_of_row = (ptx::lane() & 3) == 0;
    if (first_of_row) {
      Block::output_factors()[lane_row()] = upper.output_factor();
      Block::output_factors()[lane_row() + kLaneRowStep] = lower.output_factor();
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::stats_full());
    if (first_of_row) {
      upper.store_stats(args_);
      lower.store_stats(args_);
    }
  }

  MLA_DEVICE RowEnd<Config> end_of_row(int r) const {
    float sum = states_[r].sum;
    sum += ptx::shuffle_xor(sum, 1);
    sum += ptx::shuffle_xor(sum, 2);
    return {args_, unit(), lane_row() + r * kLaneRowStep, ScoreState{states_[r].max, sum}};
  }

  uint32_t next_ = 0;     // number of the next step
  ScoreState states_[2];  // of the lane's rows; the sums are over the lane's keys
  float largest_[2];      // the largest logits of these rows
  float scale_;           // factor from scores to base-2 logits, for the unit
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

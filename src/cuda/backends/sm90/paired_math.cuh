// SPDX-License-Identifier: Apache-2.0
// The math role of the paired wgmma kernel is two warpgroups, which take turns with the scores of steps, and each of
// which has the values of half of the channels.
#pragma once

#include "cuda/attention/poison.cuh"
#include "cuda/attention/warpgroup_scores.cuh"
#include "cuda/backends/sm90/paired_block.cuh"
#include "cuda/tile/softmax.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Both warpgroups run the same code, which is half as large as code for each; the number of the warpgroup lies in a
/// uniform register, as all addresses of operands do.
template <class Config>
class PairedMathRole : WarpgroupScores<Config, PairedBlock<Config>> {
  using Block = PairedBlock<Config>;
  using Base = WarpgroupScores<Config, Block>;
  using Base::kScores, Base::kLaneRowStep, Base::lane_row, Base::lane_column, Base::row_of, Base::chain_of;
  using Block::args_, Block::unit, Block::math_warp, Block::score_warp;

 public:
  using Block::next_unit;

  /// `to_other` leads from this block's shared memory to that of the other block of the cluster, in bytes.
  MLA_DEVICE PairedMathRole(const PairedArgs& args, ptx::SharedAddress to_other)
      : Base(args.args),
        to_other_(to_other),
        group_(static_cast<uint32_t>(ptx::shuffle(ptx::warp(), 0) / Config::kGroupWarps - 1)),
        piece_mask_(args.args.sparse() ? Block::kPartMask : ~0) {}

  MLA_DEVICE void compute() {
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      states_[r] = {};
      largest_[r] = kNoKey;
    }
    scale_ = score_scale(args_) * std::numbers::log2e_v<float>;
    MLA_UNROLL
    for (float& output : outputs_) output = 0.0F;
    // The compiler takes what all lanes read from one of them for the same in the whole warp, and so keeps addresses of
    // operands in uniform registers.
    const StepRange steps = {ptx::shuffle(unit().steps.begin, 0), ptx::shuffle(unit().steps.end, 0)};
    const int number = ptx::shuffle(Block::unit_number(), 0);
    ptx::mbarrier_wait(Block::q_full(), Block::query_parity(number));
    ptx::fence_async_proxy();
    // Behind a barrier ptxas takes the threads of a warp for converged; otherwise addresses of operands lie in ordinary
    // registers, and a step takes some 200 instructions more.
    sync_group();
    if (steps.begin + (steps.begin % Config::kMathGroups ^ group_) >= steps.end) give_queries_back();
    // The first step is code of its own: with a condition on the values before it, ptxas 13.0 serializes all products
    // of the kernel (C7514, C7518).
    uint32_t n = steps.begin;
    if (n % Config::kMathGroups == group_ && n < steps.end) {
      float s[kScores];
      uint32_t p[kSteps][4];
      issue_scores<0, Config::kPieces>(s, n);
      softmax(s, p, n, wait_for_scores(s, n, steps.end), false);
      add_own(p);
      ++n;
    }
    // Step n is the other warpgroup's, whose values come before those of the own step n + 1. They are issued between
    // the halves of the own scores, since the second half of the rows comes when the other warpgroup has given it back.
    MLA_NO_UNROLL
    for (; n + 1 < steps.end; n += Config::kMathGroups) {
      float s[kScores];
      uint32_t p[kSteps][4];
      issue_scores<0, Config::kGroupPieces>(s, n + 1);
      issue_other(n);
      // Rows of step n are given back as soon as its values are added. Two pieces keep the tensor cores busy until this
      // warp has seen that.
      constexpr int kBehind = 2;
      issue_scores<Config::kGroupPieces, Config::kGroupPieces + kBehind>(s, n + 1);
      ptx::wgmma_wait<kBehind>();
      release(other());
      issue_scores<Config::kGroupPieces + kBehind, Config::kPieces>(s, n + 1);
      const bool masked = wait_for_scores(s, n + 1, steps.end);
      ptx::wgmma_hold(outputs_);
      softmax(s, p, n + 1, masked, true);
      add_own(p);
    }
    if (n < steps.end) {
      issue_other(n);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(outputs_);
      release(other());
    }
    finish(steps);
    Block::leave_unit();
  }

 private:
  static constexpr int kSteps = Config::kKeys / 16;  // products that add the values of a step

  /// Returns the number of the other warpgroup.
  MLA_DEVICE uint32_t other() const { return group_ ^ 1U; }

  MLA_DEVICE void sync_group() const {
    ptx::sync_threads(Config::kGroupBarrier + static_cast<int>(group_), Config::kGroupThreads);
  }
  MLA_DEVICE static void sync_math() { ptx::sync_threads(Config::kMathBarrier, Config::kMathWarps * kWarpSize); }

  /// Arrives once in each unit, behind the last own scores.
  MLA_DEVICE void give_queries_back() const {
    if (ptx::elect()) ptx::mbarrier_arrive(Block::q_empty());
  }

  // Scores.

  MLA_DEVICE static uint64_t rows_descriptor(ptx::SharedAddress rows, int eight_rows_bytes = Config::kAtomBytes) {
    return ptx::matrix_descriptor(rows, 0, eight_rows_bytes, ptx::Swizzle::k128);
  }

  /// Issues products of the own step n, those of pieces kBegin ... kEnd - 1 in the order in which they come.
  template <int kBegin, int kEnd>
  MLA_DEVICE void issue_scores(float (&s)[kScores], uint32_t n) const {
    const ptx::SharedAddress queries = Block::queries(), keys = Block::stage(group_);
    const uint64_t q_latent = rows_descriptor(queries, Config::kEightRowsBytes),
                   k_latent = rows_descriptor(keys, Config::kEightRowsBytes),
                   q_rope = rows_descriptor(queries + Config::kRopeOffset),
                   k_rope = rows_descriptor(keys + Config::kRopeOffset);
    MLA_UNROLL
    for (int i = kBegin; i < kEnd; ++i) {
      const int piece = Block::piece_of(group_, i);
      // Without a branch: a piece that has no barrier of its own has that of the first piece of its part.
      ptx::mbarrier_wait(Block::kv_full(group_, piece & piece_mask_), Block::parity(n));
      if (i % Config::kGroupPieces == 0 && args_.sparse()) ptx::fence_async_proxy();  // behind copies by cp.async
      if (i == Config::kLatentPieces && !Block::has_rope()) break;
      ptx::wgmma_hold(s);
      ptx::wgmma_fence();
      MLA_UNROLL
      for (int step = 0; step < Config::kPieceDims / 16; ++step) {
        const bool latent = i < Config::kLatentPieces;
        const int at = (latent ? piece * Config::kPieceStride : 0) + step * 32;
        wgmma<Config::kType, Config::kKeys>(s, ptx::advance(latent ? q_latent : q_rope, at),
                                            ptx::advance(latent ? k_latent : k_rope, at), i > 0 || step > 0);
      }
      ptx::wgmma_commit();
    }
  }

  /// Waits for the scores of the own step n. Returns whether some row does not see all of its keys.
  MLA_DEVICE bool wait_for_scores(float (&s)[kScores], uint32_t n, uint32_t end) const {
    const uint32_t masked = *as<uint32_t>(reinterpret_cast<const std::byte*>(Block::masked(group_)));
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(s);
    if (ptx::elect()) ptx::mbarrier_arrive(Block::s_done(group_));
    if (n + Config::kMathGroups >= end) give_queries_back();
    return masked != 0;
  }

  /// Hides keys that a row does not see. Returns whether any of their scores is not finite.
  MLA_DEVICE bool hide(float (&s)[kScores]) {
    constexpr int kWords = Config::kKeys / 32, kWordScores = kScores / kWords;
    float hidden = 0.0F;  // becomes NaN
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = args_.sparse() ? 0 : lane_row() + r * kLaneRowStep;
      const auto* const words = reinterpret_cast<const uint32_t*>(Block::masks(group_) + row);
      MLA_UNROLL
      for (int word = 0; word < kWords; ++word) {
        const uint32_t seen = words[word] >> lane_column();
        MLA_UNROLL
        for (int pair = 0; pair < kWordScores / 4; ++pair) MLA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& score = s[word * kWordScores + pair * 4 + r * 2 + i];
          const bool sees = (seen & 1U << (pair * 8 + i)) != 0;
          hidden += (sees ? 0.0F : score) * 0.0F;
          score = sees ? score : kNoKey;
        }
      }
    }
    return ptx::any(
        ptx::sync_threads_any(Config::kGroupBarrier + static_cast<int>(group_), Config::kGroupThreads, hidden != 0.0F));
  }

  /// Turns the scores of step n into P, raises the rows' maxima, and hands both to the other warpgroup. The time from
  /// scores to P sets the pace of the kernel, so that a single vote finds whether the step needs what few steps need:
  /// up to 4 % less time than two votes with a jump behind each (docs/notebook/2026-11-29-scores-to-p.md).
  MLA_DEVICE void softmax(float (&s)[kScores], uint32_t (&p)[kSteps][4], uint32_t n, bool masked, bool has_before) {
    float base[2], largest[2], sums[2];
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) base[r] = has_before ? Block::maxima(other())[lane_row() + r * kLaneRowStep] : kNoKey;
    find_largest(s, largest);
    needs_care_ = ptx::any(masked || exceeds(largest, base));
    rescales_ = false;
    has_poison_ = false;
    if (needs_care_) [[unlikely]] {
      if (ptx::any(masked)) {
        has_poison_ = hide(s) && Config::kClearsPoison;
        find_largest(s, largest);
      }
      rescales_ = ptx::any(exceeds(largest, base));
      if (rescales_) raise(largest, base);
    }
    compute_p(s, base, p, sums);
    const auto lane = static_cast<uint32_t>(ptx::lane<true>());
    if ((lane & 3) == 0) {
      MLA_UNROLL
      for (int r = 0; r < 2; ++r) Block::maxima(group_)[lane_row() + r * kLaneRowStep] = base[r];
    }
    if (lane == 0)
      ptx::store_shared(
          Block::flags(group_) + static_cast<uint32_t>(score_warp()),
          static_cast<uint8_t>((rescales_ ? Block::kRescales : 0) | (has_poison_ ? Block::kHasPoison : 0)));
    const ptx::SharedAddress row =
        Block::p_tile(group_) +
        (static_cast<uint32_t>(score_warp() * Base::kWarpRows) + (lane & 15)) * uint32_t{Config::kPieceRowBytes} +
        ((lane >> 4) ^ (lane & 7)) * uint32_t{kChunkBytes};
    ptx::mbarrier_wait(Block::s_done(group_), Block::parity(n));  // P replaces the rotary channels
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step)
      ptx::stmatrix_x4(row ^ static_cast<uint32_t>(step * 2 * kChunkBytes), p[step]);
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(Block::p_full(group_));
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      states_[r].sum += sums[r];
      largest_[r] = std::fmax(largest_[r], largest[r]);
    }
  }

  /// Finds the largest logit of each row among the lane's keys.
  MLA_DEVICE void find_largest(const float (&s)[kScores], float (&largest)[2]) const {
    Base::find_lane_largest(s, largest);
    MLA_UNROLL
    for (float& of_row : largest) of_row *= scale_;
  }

  /// Returns whether the lane's sums are not relative to `base` yet, or a logit exceeds the headroom.
  MLA_DEVICE bool exceeds(const float (&largest)[2], const float (&base)[2]) const {
    return states_[0].max != base[0] || states_[1].max != base[1] || largest[0] > base[0] + kHeadroom ||
           largest[1] > base[1] + kHeadroom;
  }

  /// Computes P and the sums of the lane's keys, relative to `base`.
  MLA_DEVICE void compute_p(const float (&s)[kScores], const float (&base)[2], uint32_t (&p)[kSteps][4],
                            float (&of_rows)[2]) const {
    const float from[2] = {finite_or_zero(base[0]), finite_or_zero(base[1])};
    float sums[2][4] = {};
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float two[2];
      MLA_UNROLL
      for (int k = 0; k < 2; ++k) {
        const int at = step * 8 + i * 2 + k;
        two[k] = ptx::exp2_approx(std::fma(s[at], scale_, -from[row_of(at)]));
        sums[row_of(at)][chain_of(at)] += two[k];
      }
      p[step][i] = pack<Config::kType>(two[0], two[1]);
    }
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) of_rows[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
  }

  /// Raises the rows' maxima where the step's logits exceed the headroom, and brings the lane's sums to them.
  MLA_DEVICE void raise(float (&largest)[2], float (&base)[2]) {
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      largest[r] = quad_max(largest[r]);
      ScoreState outputs{base[r], 0.0F};
      factor_[r] = outputs.is_outgrown_by(largest[r], kHeadroom) ? outputs.raise(largest[r]) : 1.0F;
      base[r] = outputs.max;
      if (states_[r].max != base[r]) states_[r].raise(base[r]);
      if ((ptx::lane<true>() & 3) == 0) Block::factors(group_)[lane_row() + r * kLaneRowStep] = factor_[r];
    }
  }

  // Values.

  /// Returns the descriptor of the warpgroup's channels of a stage.
  MLA_DEVICE uint64_t values_descriptor(uint32_t stage) const {
    return ptx::matrix_descriptor(Block::stage(stage) + group_ * Config::kGroupPieces * Config::kPieceStride,
                                  Config::kPieceStride, Config::kEightRowsBytes, ptx::Swizzle::k128);
  }
  static constexpr int kStepBytes = 2 * Config::kEightRowsBytes;  // of 16 keys of a piece

  /// Issues the values of step n, which is the other warpgroup's.
  MLA_DEVICE void issue_other(uint32_t n) {
    ptx::mbarrier_wait(Block::p_full(other()), Block::parity(n));
    if (args_.sparse()) ptx::fence_async_proxy();  // behind copies by cp.async
    const auto flags = ptx::load_shared<uint32_t>(Block::flags(other()));
    if (ptx::any(flags != 0)) [[unlikely]] {
      if ((flags >> (8 * score_warp()) & Block::kRescales) != 0) {
        const float* const factors = Block::factors(other()) + lane_row();
        rescale({factors[0], factors[kLaneRowStep]});
      }
      if ((flags & Block::kHasPoison) != 0) silence_poison(other());
    }
    const uint64_t p = rows_descriptor(Block::p_tile(other())), values = values_descriptor(other());
    ptx::wgmma_hold(outputs_);
    ptx::wgmma_fence();
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step)
      wgmma<Config::kType, Config::kOutputDims, true>(outputs_, ptx::advance(p, step * 32),
                                                      ptx::advance(values, step * kStepBytes), true);
    ptx::wgmma_commit();
  }

  /// Adds the values of the own step, whose P the warpgroup has in registers.
  MLA_DEVICE void add_own(uint32_t (&p)[kSteps][4]) {
    if (needs_care_) [[unlikely]] {
      if (rescales_) rescale(factor_);
      if (has_poison_) silence_poison(group_);
    }
    ptx::wgmma_hold(outputs_);
    ptx::wgmma_hold(p);
    ptx::wgmma_fence();
    const uint64_t values = values_descriptor(group_);
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step)
      wgmma<Config::kType, Config::kOutputDims, true>(outputs_, p[step], ptx::advance(values, step * kStepBytes), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(outputs_);
    release(group_);
  }

  /// Gives back the warpgroup's half of a stage, to both blocks of a cluster.
  MLA_DEVICE void release(uint32_t stage) const {
    if (!ptx::elect()) return;
    ptx::mbarrier_arrive(Block::kv_empty(stage, group_));
    if constexpr (Config::kCluster > 1) ptx::mbarrier_arrive_in_cluster(Block::kv_empty(stage, group_) + to_other_);
  }

  MLA_DEVICE void rescale(const float (&factor)[2]) {
    MLA_UNROLL
    for (int i = 0; i < kOutputs; ++i) outputs_[i] *= factor[row_of(i)];
  }

  /// Clears values of a stage that are not finite, among the warpgroup's channels, of which a warp has one piece.
  /// Hidden keys of lists have no row, but zeros, so that nothing must be cleared.
  MLA_DEVICE void silence_poison(uint32_t stage) const {
    if constexpr (!Config::kClearsPoison) return;
    if (args_.sparse()) return;
    const ptx::SharedAddress piece =
        Block::stage(stage) +
        (group_ * Config::kGroupPieces + static_cast<uint32_t>(score_warp())) * Config::kPieceBytes;
    silence_values<Config::kType>(Config::kPieceBytes / 2, [&](int i) { return piece + static_cast<uint32_t>(i * 2); });
    ptx::fence_async_proxy();
    sync_group();
  }

  // The end of a unit.

  /// Stores outputs, or a partial state, for which nobody waits: its channels need no factor.
  MLA_DEVICE void finish(StepRange steps) {
    const bool partial = ptx::any(unit().slot >= 0);
    float end[2] = {kNoKey, kNoKey};
    if (steps.begin < steps.end) {
      MLA_UNROLL
      for (int r = 0; r < 2; ++r) end[r] = Block::maxima(steps.end - 1)[lane_row() + r * kLaneRowStep];
      if (args_.max_logits != nullptr) [[unlikely]]
        raise_exactly(end, Block::maxima(steps.end - 1));
    }
    if (partial) for_each_row([](const auto& row, int, const auto& pair) { row.store_partial(pair); });
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (states_[r].max != end[r]) states_[r].raise(end[r]);
      float sum = states_[r].sum;
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if ((ptx::lane<true>() & 3) == 0) Block::row_sums(group_)[lane_row() + r * kLaneRowStep] = sum;
    }
    sync_math();
    const int row = math_warp() * kWarpSize + ptx::lane<true>();
    if (row < Config::kRows) {
      const float base = steps.begin < steps.end ? Block::maxima(steps.end - 1)[row] : kNoKey;
      const RowEnd<Config> of_row(args_, unit(), row,
                                  ScoreState{base, Block::row_sums(0)[row] + Block::row_sums(1)[row]});
      Block::row_values()[row] = of_row.output_factor();
      of_row.store_stats(args_);
    }
    sync_math();  // also of a partial state: the sums of the next unit overwrite these
    if (partial) return;
    for_each_row([&](const auto& of_row, int r, const auto& pair) {
      of_row.template store<true>(Block::row_values()[r], pair);
    });
  }

  /// Makes outputs relative to the largest logits themselves, without headroom.
  MLA_DEVICE void raise_exactly(float (&end)[2], float* maxima) {
    MLA_UNROLL
    for (int r = 0; r < 2; ++r)
      Block::row_sums(group_)[lane_row() + r * kLaneRowStep] = quad_max(largest_[r]);  // the sums come there later
    sync_math();
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row() + r * kLaneRowStep;
      const float largest = std::fmax(Block::row_sums(0)[row], Block::row_sums(1)[row]);
      ScoreState outputs{end[r], 0.0F};
      factor_[r] = largest != end[r] ? outputs.raise(largest) : 1.0F;
      end[r] = largest;
      if (group_ == 0) maxima[row] = largest;
    }
    rescale(factor_);
    sync_math();
  }

  /// Calls f(row, r, pair) for both rows of the lane: the ResultRow, its number in the block, and what it stores.
  template <class F>
  MLA_DEVICE void for_each_row(const F& f) {
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      ptx::wgmma_hold(outputs_);  // addresses of the second row are not computed before the first row is stored
      const int r = lane_row() + i * kLaneRowStep;
      f(ResultRow<Config, Config::kOutputTiles>(args_, unit(), r,
                                                static_cast<int>(group_) * Config::kOutputDims + lane_column()),
        r, [&](int tile, float& low, float& high) {
          low = outputs_[tile * 4 + i * 2];
          high = outputs_[tile * 4 + i * 2 + 1];
        });
    }
  }

  static constexpr int kOutputs = Config::kOutputDims / 2;

  const ptx::SharedAddress to_other_;
  const uint32_t group_;  // number of the warpgroup, and of the stage of its own steps
  const int piece_mask_;  // from a piece to the one whose barrier says that it has come
  ScoreState states_[2];  // of the lane's rows, over its keys of the warpgroup's own steps
  float largest_[2];      // the largest logits of these rows among the same keys
  float factor_[2];       // by which outputs are multiplied before those of the own step
  bool needs_care_;       // whether the own step needs what few steps need; otherwise the next two are false
  bool rescales_;         // whether a row of the warp has such a factor that is not 1
  bool has_poison_;       // whether values of the own step that are not finite must be cleared
  float outputs_[kOutputs];
  float scale_;  // factor from scores to base-2 logits, positive: only e4m3 queries have a scale
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

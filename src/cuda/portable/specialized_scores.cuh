// SPDX-License-Identifier: Apache-2.0
// The score warps: they multiply queries and keys. A pair of warps has 32 rows, each of the two half the channels.
#pragma once

#include "cuda/portable/specialized_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class ScoreRole : SpecializedBlock<Config> {
  using Block = SpecializedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit ScoreRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    Block::meet_for_queries();
    hold_queries();
    MLA_NO_UNROLL
    for (; first_ < unit().step_end; ++first_) step(first_);
    Block::end_segment();
  }

 private:
  MLA_DEVICE static int score_warp() { return ptx::warp() - Config::kFirstScoreWarp; }
  MLA_DEVICE static int pair() { return score_warp() / 2; }
  MLA_DEVICE static int half() { return score_warp() % 2; }

  MLA_DEVICE void hold_queries() {
    MLA_UNROLL
    for (int m = 0; m < 2; ++m) {
      const ptx::SharedAddress row =
          Block::stage(first_ + Config::kStages - 1) +
          static_cast<uint32_t>((pair() * 32 + m * 16 + (ptx::lane() & 15)) * Config::kHeldPitch +
                                half() * Config::kHeldSteps * 32 + (ptx::lane() >> 4) * kChunkBytes);
      MLA_UNROLL
      for (int step = 0; step < Config::kHeldSteps; ++step)
        ptx::ldmatrix_x4(queries_[m][step], row + static_cast<uint32_t>(step * 32));
    }
  }

  MLA_DEVICE void step(int n) const {
    ptx::mbarrier_wait(Block::full(n), Block::stage_parity(n));
    float s[2][4][4] = {};
    multiply_queries(s, n);
    if (n > 0) ptx::mbarrier_wait(Block::taken(pair()), Block::score_parity(n - 1));
    MLA_UNROLL
    for (int m = 0; m < 2; ++m) MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      ptx::Vec4 four;
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) four.x[i] = std::bit_cast<uint32_t>(s[m][j][i]);
      ptx::store_shared(Block::scores(pair(), half(), m, j), four);
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::scored(pair()));
  }

  /// Operands of 16 channels: of 32 rows, and of the step's 32 keys.
  struct Operands {
    uint32_t q[2][4], k[2][4];
  };

  MLA_DEVICE static void multiply(float (&s)[2][4][4], const Operands& of) {
    MLA_UNROLL
    for (int m = 0; m < 2; ++m) MLA_UNROLL
    for (int group = 0; group < 2; ++group) {
      mma<Config::kType>(s[m][2 * group], of.q[m], of.k[group][0], of.k[group][1]);
      mma<Config::kType>(s[m][2 * group + 1], of.q[m], of.k[group][2], of.k[group][3]);
    }
  }

  /// Products of the pair's rows and the step's keys over this warp's half of the channels. Operands are read while
  /// those before are multiplied.
  MLA_DEVICE void multiply_queries(float (&s)[2][4][4], int n) const {
    const ptx::SharedAddress lane_keys =
        Block::stage(n) + static_cast<uint32_t>(((ptx::lane() & 7) | (ptx::lane() >> 4) << 3) * Config::kKeyPitch +
                                                ((ptx::lane() >> 3) & 1) * kChunkBytes);
    const ptx::SharedAddress latents = lane_keys + static_cast<uint32_t>(half() * Config::kLatentSteps * 32);
    const ptx::SharedAddress tails =
        lane_keys + static_cast<uint32_t>(Config::kLatentDims * 2 + half() * Config::kTailSteps * 32);
    const ptx::SharedAddress rows =
        shared_ +
        static_cast<uint32_t>(Config::kQueryOffset + (pair() * 32 + (ptx::lane() & 15)) * Config::kQueryPitch +
                              half() * Config::kQueryHalfBytes + (ptx::lane() >> 4) * kChunkBytes);
    const auto load = [&](Operands& to, int step) {
      const ptx::SharedAddress keys = step < Config::kLatentSteps
                                          ? latents + static_cast<uint32_t>(step * 32)
                                          : tails + static_cast<uint32_t>((step - Config::kLatentSteps) * 32);
      MLA_UNROLL
      for (int group = 0; group < 2; ++group)
        ptx::ldmatrix_x4(to.k[group], keys + static_cast<uint32_t>(group * 16 * Config::kKeyPitch));
      MLA_UNROLL
      for (int m = 0; m < 2; ++m) {
        if (step >= Config::kHeldSteps) {
          ptx::ldmatrix_x4(
              to.q[m], rows + static_cast<uint32_t>(m * 16 * Config::kQueryPitch + (step - Config::kHeldSteps) * 32));
        } else {
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) to.q[m][i] = queries_[m][step][i];
        }
      }
    };
    Operands even, odd;
    const bool has_tail = args_.d_qk > Config::kLatentDims;
    load(even, 0);
    MLA_UNROLL
    for (int step = 0; step < Config::kLatentSteps; step += 2) {
      load(odd, step + 1);
      multiply(s, even);
      if (step + 2 < Config::kLatentSteps || has_tail) load(even, step + 2);
      multiply(s, odd);
    }
    if (!has_tail) return;
    load(odd, Config::kLatentSteps + 1);
    multiply(s, even);
    multiply(s, odd);
  }

  int first_ = 0;                               // number of the next step
  uint32_t queries_[2][Config::kHeldSteps][4];  // of the half's first steps
};

}  // namespace mla::MLA_CUDA_NAMESPACE

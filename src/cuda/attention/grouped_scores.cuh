// SPDX-License-Identifier: Apache-2.0
// This base of a grouped block (grouped_block.cuh) has its scores and its softmax. The warps of a group divide the keys
// of a step (N) and the channels (K); the sums of K slices meet in shared memory, in one place that the groups take
// turns with. There a softmax warp has eight rows, four lanes each row, and each lane has eight keys of its row.
#pragma once

#include "cuda/attention/grouped_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class GroupedScores : public GroupedBlock<Config> {
 public:
  using GroupedBlock<Config>::GroupedBlock;

 protected:
  using Base = GroupedBlock<Config>;
  using Base::args_, Base::shared_, Base::lane;
  using Base::group, Base::unit, Base::poison, Base::has_row, Base::row_states, Base::row_factors;

  MLA_DEVICE static int score_warp_n() { return Base::warp_of_group() % Config::kScoreWarpsN; }
  MLA_DEVICE static int score_warp_k() { return Base::warp_of_group() / Config::kScoreWarpsN; }
  MLA_DEVICE static int first_score_key() { return score_warp_n() * Config::kScoreBlocks * 16; }

  MLA_DEVICE static bool has_softmax_rows() { return Base::warp_of_group() < Config::kGroupRows / 8; }
  /// Returns the lane's row of the softmax, counted in its group, and in the block.
  MLA_DEVICE static int group_row() { return Base::warp_of_group() * 8 + (lane() & 7); }
  MLA_DEVICE static int softmax_row() { return group() * Config::kGroupRows + group_row(); }

  /// Returns the barrier scores_read, a phase of which ends, in every step, when every warp of a group has read the
  /// scores.
  MLA_DEVICE ptx::SharedAddress scores_read(int of_group) const {
    return Base::barrier(Config::kScoresRead + of_group);
  }
  /// Waits until the other group has read its scores, which lie where this group's will.
  MLA_DEVICE void wait_for_turn(uint32_t n) const {
    if constexpr (Config::kGroups == 2) {
      if (group() == 1)
        ptx::mbarrier_wait(scores_read(0), n & 1U);
      else if (n > 0)
        ptx::mbarrier_wait(scores_read(1), (n - 1) & 1U);
    }
  }
  /// Says that the warp has read its scores.
  MLA_DEVICE void end_turn() const {
    if constexpr (Config::kGroups == 2) {
      ptx::sync_warp();
      if (lane() == 0) ptx::mbarrier_arrive(scores_read(group()));
    }
  }

  /// Returns where a 16-byte chunk of a row's scores lies. Chunks are permuted so that neither stores of fragments nor
  /// loads of rows meet bank conflicts. Chunk c ^ x lies where chunk c does, but for an exclusive or with 16 x.
  MLA_DEVICE ptx::SharedAddress score_chunk(int slice, int row, int chunk) const {
    const int flip = (row & 3) << 1 | ((row >> 2) & 1);
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset + slice * kSliceBytes + row * Config::kScoreRowBytes +
                                           (chunk ^ flip) * kChunkBytes);
  }
  static constexpr int kSliceBytes = Config::kGroupRows * Config::kScoreRowBytes;

  /// Stores the warp's scores of a block of 16 keys, two tiles of eight.
  MLA_DEVICE void store_scores(const float (&s)[Config::kScoreTilesM][2][4], int block) const {
    const int g = lane() >> 2, t = lane() & 3;
    const ptx::SharedAddress first =
        score_chunk(score_warp_k(), g, first_score_key() / 4 | t >> 1) + static_cast<uint32_t>((t & 1) * 8);
    MLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const ptx::SharedAddress at = first ^ static_cast<uint32_t>((block * 4 + n * 2) * kChunkBytes);
      MLA_UNROLL
      for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(at + static_cast<uint32_t>((m * 16 + half * 8) * Config::kScoreRowBytes),
                          two_floats(s[m][n][2 * half], s[m][n][2 * half + 1]));
    }
  }

  // Softmax. A lane has two runs of four keys of its row. The second run begins kSecondRun keys behind the first, which
  // is how the lanes' P lie in memory as the operand of the multiplication has them.

  static_assert(Config::kKeys == 32 && (Config::kSecondRun == 4 || Config::kSecondRun == 8));
  MLA_DEVICE static int first_lane_key() {
    const int quarter = lane() >> 3;
    return Config::kSecondRun == 4 ? quarter * 8 : (quarter >> 1) * 16 + (quarter & 1) * 4;
  }
  /// Returns the number, in the step, of the lane's key i.
  MLA_DEVICE static int lane_key(int i) { return first_lane_key() + i + (Config::kSecondRun - 4) * (i >> 2); }

  /// Turns the scores of step n into the lane's P, for a warp that has rows of the softmax, and raises the row's state.
  /// store(p) stores P.
  template <class Store>
  MLA_DEVICE void exponentiate(uint32_t n, const Store& store) const {
    float s[8];
    make_logits(s, n);
    const int r = softmax_row();
    ScoreState state = row_states()[r];
    float largest = std::fmax(std::fmax(std::fmax(s[0], s[1]), std::fmax(s[2], s[3])),
                              std::fmax(std::fmax(s[4], s[5]), std::fmax(s[6], s[7])));
    largest = max_of_row(largest);
    const float factor = state.is_outgrown_by(largest, 0.0F) ? state.raise(largest) : 1.0F, base = state.base();
    ptx::sync_warp();  // all lanes have read the state
    float p[8];
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) p[i] = ptx::exp2_approx(s[i] - base);
    store(p);
    float sum = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    sum += ptx::shuffle_xor(sum, 8);
    sum += ptx::shuffle_xor(sum, 16);
    if (lane() >= 8) return;
    row_factors()[r] = factor;
    state.sum += sum;
    row_states()[r] = state;
  }
  /// Returns the largest value of the four lanes of a row.
  MLA_DEVICE static float max_of_row(float value) {
    value = std::fmax(value, ptx::shuffle_xor(value, 8));
    return std::fmax(value, ptx::shuffle_xor(value, 16));
  }

  /// Returns the lane's scores as base-2 logits, -inf where its row does not see the key.
  MLA_DEVICE void make_logits(float (&s)[8], uint32_t n) const {
    const ScoreMode mode = unit().mode;
    const bool unmasked = mode.unmasked.contains(n), direct = unmasked || mode.only_valid;
    if (!direct) replace_scores(n, RowScores(args_, unit().segment, unit().rows.row(args_, softmax_row())));
    load_scores(s, direct ? mode.scale : 1.0F, direct);
    if (unmasked || !mode.only_valid) return;
    MLA_UNROLL
    for (int i = 0; i < 8; ++i)
      if (!has_row(n, lane_key(i))) s[i] = kNoKey;
  }

  /// Loads the lane's scores: the sums of all K slices, or what replace_scores() left in the first one.
  MLA_DEVICE void load_scores(float (&s)[8], float scale, bool all_slices) const {
    const ptx::SharedAddress first = score_chunk(0, group_row(), first_lane_key() / 4);
    const auto add = [&](int slice) {
      MLA_UNROLL
      for (int run = 0; run < 2; ++run) {
        const auto four =
            ptx::load_shared<ptx::Vec4>((first ^ static_cast<uint32_t>(run * Config::kSecondRun / 4 * kChunkBytes)) +
                                        static_cast<uint32_t>(slice * kSliceBytes));
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const auto score = std::bit_cast<float>(four.x[i]);
          s[run * 4 + i] = slice == 0 ? score : s[run * 4 + i] + score;
        }
      }
    };
    add(0);
    if (all_slices) {
      MLA_UNROLL
      for (int slice = 1; slice < Config::kScoreWarpsK; ++slice) add(slice);
    }
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) s[i] *= scale;
  }

  /// Turns the scores of the lane's keys of step n into base-2 logits in place, -inf where the row does not see the
  /// key. It looks at one key at a time, for steps that are masked or whose scores need more than the scale.
  MLA_DEVICE void replace_scores(uint32_t n, const RowScores& row) const {
    const int32_t first = Base::first_key(n);
    constexpr int kEnd = Config::kSecondRun + 4;
    MLA_NO_UNROLL
    for (int key = first_lane_key(); key < first_lane_key() + kEnd; ++key) {
      if (Config::kSecondRun > 4 && (key & 4) != (first_lane_key() & 4)) continue;
      float s = 0.0F;
      MLA_UNROLL
      for (int slice = 0; slice < Config::kScoreWarpsK; ++slice) s += ptx::load_shared<float>(score(slice, key));
      if (has_row(n, key) && row.sees(first + key)) {
        s = row.logit(s, first + key);
      } else {
        if (!is_finite(s)) poison(n).mark(key);
        s = kNoKey;
      }
      ptx::store_shared(score(0, key), s);
    }
  }

  /// Returns where a K slice's score of the lane's row and a key of the step lies.
  MLA_DEVICE ptx::SharedAddress score(int slice, int key) const {
    return score_chunk(slice, group_row(), key / 4) + static_cast<uint32_t>(key % 4 * 4);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

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
  using Base::group, Base::unit, Base::poison, Base::row_states, Base::row_factors;

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

  // A chunk of 16 bytes has a row's scores of four keys, those that a lane of the multiplication has: 2 t, 2 t + 1, 2 t
  // + 8 and 2 t + 9 of each 16. That is their order in an operand of e4m3, too.

  /// Returns where chunk `chunk` of a row's scores lies. Chunks are permuted so that neither stores of fragments nor
  /// loads of rows meet bank conflicts. Chunk c ^ x lies where chunk c does, but for an exclusive or with 16 x.
  MLA_DEVICE ptx::SharedAddress score_chunk(int slice, int row, int chunk) const {
    const int flip = (row & 1) << 2 | (row >> 1 & 3);
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset + slice * kSliceBytes + row * Config::kScoreRowBytes +
                                           (chunk ^ flip) * kChunkBytes);
  }
  static constexpr int kSliceBytes = Config::kGroupRows * Config::kScoreRowBytes;

  /// Stores the warp's scores of a block of 16 keys, two tiles of eight.
  MLA_DEVICE void store_scores(const float (&s)[Config::kScoreTilesM][2][4], int block) const {
    const ptx::SharedAddress at = score_chunk(score_warp_k(), lane() >> 2, first_score_key() / 4 | (lane() & 3)) ^
                                  static_cast<uint32_t>(block * 4 * kChunkBytes);
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      ptx::Vec4 four;
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) four.x[i] = std::bit_cast<uint32_t>(s[m][i >> 1][half * 2 + (i & 1)]);
      ptx::store_shared(at + static_cast<uint32_t>((m * 16 + half * 8) * Config::kScoreRowBytes), four);
    }
  }

  // Softmax. A lane has two chunks of its row, which are two runs of four keys: the second run begins eight keys behind
  // the first.

  static_assert(Config::kKeys == 32);
  MLA_DEVICE static int first_lane_key() { return (lane() >> 4) * 16 + (lane() >> 3 & 1) * 4; }
  /// Returns how far the lane's key i is behind its first one.
  static constexpr int behind_first(int i) { return i + 4 * (i >> 2); }
  static constexpr uint32_t kLaneKeyBits = 0xF0F;

  /// Turns the scores of step n into the lane's P, for a warp that has rows of the softmax, and raises the row's state.
  /// store(p) stores P. Returns whether the step has something rare: a factor of the row's outputs, or a marked key.
  template <class Store>
  MLA_DEVICE bool exponentiate(uint32_t n, const Store& store) const {
    float s[8], scale;
    bool rare = load_logits(s, scale, n);
    const int r = softmax_row();
    ScoreState state = row_states()[r];
    float largest = std::fmax(std::fmax(std::fmax(s[0], s[1]), std::fmax(s[2], s[3])),
                              std::fmax(std::fmax(s[4], s[5]), std::fmax(s[6], s[7])));
    largest = max_of_row(largest) * scale;
    float factor = 1.0F;
    if (state.is_outgrown_by(largest, 0.0F)) {
      factor = state.raise(largest);
      rare = true;
    }
    const float base = state.base();
    ptx::sync_warp();  // all lanes have read the state
    float p[8];
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) p[i] = ptx::exp2_approx(ptx::fma_rn(s[i], scale, -base));
    store(p);
    float sum = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    sum += ptx::shuffle_xor(sum, 8);
    sum += ptx::shuffle_xor(sum, 16);
    if (lane() < 8) {
      row_factors()[r] = factor;
      state.sum += sum;
      row_states()[r] = state;
    }
    return rare;
  }
  /// Returns the largest value of the four lanes of a row.
  MLA_DEVICE static float max_of_row(float value) {
    value = std::fmax(value, ptx::shuffle_xor(value, 8));
    return std::fmax(value, ptx::shuffle_xor(value, 16));
  }

  /// Loads the lane's scores, which times `scale` are base-2 logits; -inf where its row does not see the key. Returns
  /// whether the lane has marked a key.
  MLA_DEVICE bool load_logits(float (&s)[8], float& scale, uint32_t n) const {
    const ScoreMode mode = unit().mode;
    const ptx::SharedAddress first =
        score_chunk(0, group_row(), (lane() >> 4) * 4 + (lane() >> 3 & 1) * 2);  // the other one is its neighbour
    if (!mode.unmasked.contains(n)) {
      const bool marked = replace_scores(n, RowScores(args_, unit().segment, unit().rows.row(args_, softmax_row())));
      scale = 1.0F;
      load_slice(s, first);
      return marked;
    }
    scale = mode.scale;
    load_slice(s, first);
    MLA_UNROLL
    for (int slice = 1; slice < Config::kScoreWarpsK; ++slice) {
      float more[8];
      load_slice(more, first + static_cast<uint32_t>(slice * kSliceBytes));
      MLA_UNROLL
      for (int i = 0; i < 8; ++i) s[i] += more[i];
    }
    const uint32_t valid = Base::valid(n);
    if (valid == Base::kAllKeys) [[likely]]
      return false;
    MLA_UNROLL
    for (int i = 0; i < 8; ++i)
      if ((valid >> (first_lane_key() + behind_first(i)) & 1) == 0) s[i] = kNoKey;
    return false;
  }
  MLA_DEVICE static void load_slice(float (&s)[8], ptx::SharedAddress first) {
    MLA_UNROLL
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      const auto four = ptx::load_shared<ptx::Vec4>(first ^ chunk * kChunkBytes);
      MLA_UNROLL
      for (uint32_t i = 0; i < 4; ++i) s[(i >> 1) * 4 + chunk * 2 + (i & 1)] = std::bit_cast<float>(four.x[i]);
    }
  }

  /// Turns the scores of the lane's keys of step n into base-2 logits, in the place of the first K slice, -inf where
  /// the row does not see the key. It looks at one key at a time, for steps that are masked or whose scores need more
  /// than the scale. Returns whether it has marked a key.
  MLA_DEVICE bool replace_scores(uint32_t n, const RowScores& row) const {
    const int32_t first = Base::first_key(n);
    const uint32_t visible = Base::visible_keys(row, n, kLaneKeyBits << first_lane_key());
    bool marked = false;
    MLA_NO_UNROLL
    for (int key = first_lane_key(); key <= first_lane_key() + behind_first(7); ++key) {
      if ((key & 4) != (first_lane_key() & 4)) continue;
      float s = 0.0F;
      MLA_UNROLL
      for (int slice = 0; slice < Config::kScoreWarpsK; ++slice) s += ptx::load_shared<float>(score(slice, key));
      if ((visible >> key & 1) != 0) {
        s = row.logit(s, first + key);
      } else {
        if (!is_finite(s)) {
          poison(n).mark(key);
          marked = true;
        }
        s = kNoKey;
      }
      ptx::store_shared(score(0, key), s);
    }
    return marked;
  }

  /// Returns where a K slice's score of the lane's row and a key of the step lies.
  MLA_DEVICE ptx::SharedAddress score(int slice, int key) const {
    return score_chunk(slice, group_row(), (key >> 4) * 4 | (key >> 1 & 3)) +
           static_cast<uint32_t>(((key >> 3 & 1) * 2 | (key & 1)) * 4);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

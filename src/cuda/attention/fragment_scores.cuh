// SPDX-License-Identifier: Apache-2.0
// This base of a grouped block (grouped_block.cuh) has its scores and its softmax, in the registers of the
// multiplication. The warps of a group divide the keys of a step (N) and the channels (K) of the scores. Four warps
// have the same keys and a fourth of the channels each. They add up their sums in two exchanges, in each of which a
// warp gives away half of its scores and keeps the other half:
//
//   K slice 0   gives B, keeps A  <->  gives A, keeps B   K slice 1     exchange 0
//               gives A1 <-> A0   (K slices 0 and 2)                    exchange 1
//
// After that each score of the group is in one lane, which makes P of it, relative to the row's maximum of earlier
// steps. Only if a row of the group outgrows that by the headroom are maxima raised and P made again. The barrier
// behind P tells all warps of the group whether this, or a marked key (poison.cuh), is so.
#pragma once

#include "cuda/attention/grouped_block.cuh"
#include "cuda/tile/softmax.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds what turns a row's logits into P: P is 2^(logit - base), unless a logit is above the limit.
struct alignas(8) RowBase {
  float base = 0.0F, limit = kNoKey;
};

template <class Config>
class FragmentScores : public GroupedBlock<Config> {
 public:
  using GroupedBlock<Config>::GroupedBlock;

 protected:
  using Base = GroupedBlock<Config>;
  using Base::args_, Base::shared_, Base::memory_, Base::lane;
  using Base::group, Base::unit, Base::poison, Base::row_states, Base::row_factors, Base::warp_of_group;

  MLA_DEVICE static int score_warp_n() { return warp_of_group() % Config::kScoreWarpsN; }
  MLA_DEVICE static int score_warp_k() { return warp_of_group() / Config::kScoreWarpsN; }

  // Which scores a warp keeps. Its first exchange is with the K slice k ^ 1, its second with k ^ 2. With two blocks of
  // 16 keys the first exchange splits the blocks and the second the two key tiles of a block. With one block, the first
  // exchange splits the key tiles, and the second the rows: tiles of 16, or halves of a tile.

  static_assert(Config::kScoreWarpsK == 4 && Config::kScoreBlocks <= 2);
  static constexpr bool kTwoBlocks = Config::kScoreBlocks == 2;
  static_assert(!kTwoBlocks || Config::kScoreTilesM == 2);
  static constexpr int kLaneRows = kTwoBlocks ? 4 : Config::kScoreTilesM;  // rows of which a lane has scores
  static constexpr int kLaneKeys = 2;                                      // neighbours
  using LaneScores = float[kLaneRows][kLaneKeys];

  MLA_DEVICE static int first_bit() { return score_warp_k() & 1; }
  MLA_DEVICE static int second_bit() { return score_warp_k() >> 1; }

  /// Returns the first key of the block of 16 keys that the warp multiplies first or second.
  MLA_DEVICE static int first_score_key(int block) {
    return kTwoBlocks ? (block ^ 1 ^ first_bit()) * 16 : score_warp_n() * 16;
  }
  /// Returns which key tile of a block is the first operand of the multiplication; the second one is kept.
  MLA_DEVICE static int given_key_tile() { return 1 ^ (kTwoBlocks ? second_bit() : first_bit()); }
  /// Returns which row of the group is row `row` of query tile m. Where the second exchange splits the rows, those that
  /// are given come first.
  MLA_DEVICE static int query_row(int m, int row) {
    if constexpr (kTwoBlocks) return m * 16 + row;
    const int given = 1 ^ second_bit();
    return Config::kScoreTilesM == 2 ? (m ^ given) * 16 + row : row ^ given * 8;
  }

  MLA_DEVICE static int first_lane_key() {
    return (kTwoBlocks ? first_bit() * 16 + second_bit() * 8 : score_warp_n() * 16 + first_bit() * 8) +
           (lane() & 3) * 2;
  }
  /// Returns the lane's row i, counted in its group.
  MLA_DEVICE static int lane_row(int i) {
    return (lane() >> 2) + 8 * i + (kTwoBlocks ? 0 : second_bit() * 8 * Config::kScoreTilesM);
  }
  /// Returns which of the four warps that have scores of a row this one is.
  MLA_DEVICE static int key_part() { return kTwoBlocks ? score_warp_k() : score_warp_n() * 2 + first_bit(); }

  static_assert(Config::kRowStateBytes == sizeof(float) + sizeof(ScoreState) + sizeof(RowBase));
  /// Returns the number of the place of row `r` of group `of_group`. The rows of a lane are neighbours.
  MLA_DEVICE static int place_of_row(int of_group, int r) {
    return of_group * Config::kGroupRows + r % 8 * (Config::kGroupRows / 8) + r / 8;
  }
  /// Returns the base of a row of the group.
  MLA_DEVICE RowBase* row_base(int r) const {
    return as<RowBase>(memory_ + Config::kRowOffset + Config::kRows * (sizeof(float) + sizeof(ScoreState))) +
           place_of_row(group(), r);
  }

  // Exchanges. A warp writes what it gives in the first exchange to its own place, and reads that of its partner. What
  // it gives in the second one goes to the place that it has read. Its partners read and write in step with it, so that
  // a place is free when it is written; the barrier behind P comes before the next step.

  /// Returns the lane's chunk of 16 bytes in the place of a warp; the next chunk is kGivenBytes further.
  MLA_DEVICE ptx::SharedAddress exchange(int of_warp) const {
    return shared_ +
           static_cast<uint32_t>(Config::kScoreOffset + of_warp * Config::kExchangeBytes + lane() * kChunkBytes);
  }
  static constexpr uint32_t kGivenBytes = kWarpSize * kChunkBytes;
  static_assert(kLaneRows * kGivenBytes <= Config::kExchangeBytes);  // replace_scores() has a chunk for each row
  static_assert(Config::kPairBarrier + Config::kWarps <= 16, "a block has 16 barriers of bar.sync");

  /// Returns the warp that has the same keys and the K slice k ^ `slices`.
  MLA_DEVICE static int partner(int slices) { return Base::warp() ^ slices * Config::kScoreWarpsN; }
  /// Waits for the partner of the first exchange (slices = 1) or of the second (2).
  MLA_DEVICE static void sync_pair(int slices) {
    const int low = warp_of_group() & ~(slices * Config::kScoreWarpsN);
    const int pair =
        slices == 1 ? (low / (2 * Config::kScoreWarpsN)) * Config::kScoreWarpsN + low % Config::kScoreWarpsN : low;
    constexpr int kPairs = Config::kGroupWarps / 2;
    ptx::sync_threads(Config::kPairBarrier + (group() * 2 + (slices == 2 ? 1 : 0)) * kPairs + pair, 2 * kWarpSize);
  }

  MLA_DEVICE static void give(ptx::SharedAddress to, const float (&s)[4]) {
    ptx::Vec4 four;
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) four.x[i] = std::bit_cast<uint32_t>(s[i]);
    ptx::store_shared(to, four);
  }
  MLA_DEVICE static void take(ptx::SharedAddress from, float (&s)[4]) {
    const auto four = ptx::load_shared<ptx::Vec4>(from);
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) s[i] += std::bit_cast<float>(four.x[i]);
  }

  /// Adds up the scores of all K slices. multiply(block, s) computes the warp's slice of a block of 16 keys.
  template <class Multiply>
  MLA_DEVICE void add_slices(LaneScores& scores, const Multiply& multiply) const {
    constexpr int kTilesM = Config::kScoreTilesM;
    const ptx::SharedAddress mine = exchange(Base::warp()), theirs = exchange(partner(1));
    float s[kTilesM][2][4] = {};
    multiply(0, s);
    if constexpr (kTwoBlocks) {
      MLA_UNROLL
      for (int i = 0; i < 2 * kTilesM; ++i) give(mine + i * kGivenBytes, s[i / 2][i % 2]);
      float kept[kTilesM][2][4] = {};
      multiply(1, kept);
      sync_pair(1);
      MLA_UNROLL
      for (int i = 0; i < 2 * kTilesM; ++i) take(theirs + i * kGivenBytes, kept[i / 2][i % 2]);
      MLA_UNROLL
      for (int m = 0; m < kTilesM; ++m) give(theirs + m * kGivenBytes, kept[m][0]);
      sync_pair(2);
      const ptx::SharedAddress last = exchange(partner(3));
      MLA_UNROLL
      for (int m = 0; m < kTilesM; ++m) {
        take(last + m * kGivenBytes, kept[m][1]);
        keep(scores, 2 * m, kept[m][1]);
      }
    } else {
      MLA_UNROLL
      for (int m = 0; m < kTilesM; ++m) give(mine + m * kGivenBytes, s[m][0]);
      sync_pair(1);
      MLA_UNROLL
      for (int m = 0; m < kTilesM; ++m) take(theirs + m * kGivenBytes, s[m][1]);
      if constexpr (kTilesM == 2) {
        give(theirs, s[0][1]);
        sync_pair(2);
        take(exchange(partner(3)), s[1][1]);
        keep(scores, 0, s[1][1]);
      } else {
        ptx::store_shared(theirs, two_floats(s[0][1][0], s[0][1][1]));
        sync_pair(2);
        const auto two = ptx::load_shared<uint64_t>(exchange(partner(3)));
        scores[0][0] = s[0][1][2] + std::bit_cast<float>(static_cast<uint32_t>(two));
        scores[0][1] = s[0][1][3] + std::bit_cast<float>(static_cast<uint32_t>(two >> 32));
      }
    }
  }
  /// Takes the two rows of a tile as rows i and i + 1 of the lane.
  MLA_DEVICE static void keep(LaneScores& scores, int i, const float (&s)[4]) {
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) scores[i + j / 2][j % 2] = s[j];
  }

  // Softmax.

  /// Returns the number of the thread in its group. The first ones look after a row each.
  MLA_DEVICE static int group_thread() { return warp_of_group() * kWarpSize + lane(); }

  /// Forgets what is known of the rows of earlier units. Barriers follow before the rows are used.
  MLA_DEVICE void start_rows() {
    const int r = group_thread();
    if (r < Config::kGroupRows) *row_base(r) = {};
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) sums_[i] = 0.0F;
  }

  /// Turns scores of step n into base-2 logits, -inf where the row does not see the key. Returns whether the lane has
  /// marked a key.
  MLA_DEVICE bool make_logits(LaneScores& s, uint32_t n) const {
    const ScoreMode mode = unit().mode;
    if (!mode.unmasked.contains(n)) return replace_scores(s, n);
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) MLA_UNROLL
    for (int j = 0; j < kLaneKeys; ++j) s[i][j] *= mode.scale;
    const uint32_t valid = Base::valid(n);
    if (valid == Base::kAllKeys) [[likely]]
      return false;
    MLA_UNROLL
    for (int j = 0; j < kLaneKeys; ++j) {
      if ((valid >> (first_lane_key() + j) & 1) != 0) continue;
      MLA_UNROLL
      for (int i = 0; i < kLaneRows; ++i) s[i][j] = kNoKey;
    }
    return false;
  }

  /// Does so for steps that are masked or whose scores need more than the scale, a row at a time. The scores wait in
  /// the place that the warp has read last.
  MLA_DEVICE bool replace_scores(LaneScores& s, uint32_t n) const {
    bool marked = false;
    const ptx::SharedAddress place = exchange(partner(3));
    const auto of_row = [&](int i) { return place + i * kGivenBytes; };
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) ptx::store_shared(of_row(i), two_floats(s[i][0], s[i][1]));
    const int32_t first = Base::first_key(n);
    MLA_NO_UNROLL
    for (int i = 0; i < kLaneRows; ++i) {
      const RowScores row(args_, unit().segment, unit().rows.row(args_, group() * Config::kGroupRows + lane_row(i)));
      const uint32_t visible = Base::visible_keys(row, n, 3U << first_lane_key());
      MLA_NO_UNROLL
      for (int key = first_lane_key(); key < first_lane_key() + kLaneKeys; ++key) {
        const ptx::SharedAddress at = of_row(i) + static_cast<uint32_t>((key & 1) * 4);
        auto score = ptx::load_shared<float>(at);
        if ((visible >> key & 1) != 0) {
          score = row.logit(score, first + key);
        } else {
          if (!is_finite(score)) {
            poison(n).mark(key);
            marked = true;
          }
          score = kNoKey;
        }
        ptx::store_shared(at, score);
      }
    }
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) {
      const auto two = ptx::load_shared<uint64_t>(of_row(i));
      s[i][0] = std::bit_cast<float>(static_cast<uint32_t>(two));
      s[i][1] = std::bit_cast<float>(static_cast<uint32_t>(two >> 32));
    }
    return marked;
  }

  /// Turns logits into P, which store(i, low, high, anew) stores for the lane's row i; `added` is what its sum grows
  /// by. Returns whether a row is outgrown.
  template <class Store>
  MLA_DEVICE bool exponentiate(const LaneScores& s, float (&added)[kLaneRows], const Store& store, bool anew) const {
    bool outgrown = false;
    const RowBase* const bases = row_base(lane_row(0));
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) {
      const RowBase row = bases[i];
      outgrown |= std::fmax(s[i][0], s[i][1]) > row.limit;
      const float low = ptx::exp2_approx(s[i][0] - row.base), high = ptx::exp2_approx(s[i][1] - row.base);
      store(i, low, high, anew);
      added[i] = low + high;
    }
    return outgrown;
  }

  /// Computes P of step n from logits. All warps of the group return whether the step has something rare: outputs of
  /// earlier steps have been rescaled by factors of their rows, or keys are marked.
  template <class Store, class Rescale>
  MLA_DEVICE bool softmax(uint32_t n, LaneScores& s, const Store& store, const Rescale& rescale) {
    float added[kLaneRows];
    const bool marked = make_logits(s, n);
    const bool outgrown = exponentiate(s, added, store, false);
    const bool rare = Base::sync_group_any(outgrown || marked);
    if (rare) [[unlikely]]
      raise(s, added, store, rescale);
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) sums_[i] += added[i];
    return rare;
  }

  /// Raises the maxima of rows that are outgrown, and makes P anew.
  template <class Store, class Rescale>
  MLA_DEVICE void raise(const LaneScores& s, float (&added)[kLaneRows], const Store& store, const Rescale& rescale) {
    // All exchanges of the step are over.
    float* const maxima = of_parts();
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) {
      const float largest = quad_max(std::fmax(s[i][0], s[i][1]));
      if ((lane() & 3) == 0) maxima[key_part() * Config::kGroupRows + lane_row(i)] = largest;
    }
    Base::sync_group();
    const float headroom = args_.max_logits != nullptr ? 0.0F : kHeadroom;  // max_logits are exact maxima
    const int r = group_thread();
    if (r < Config::kGroupRows) {
      ScoreState& state = row_states()[group() * Config::kGroupRows + r];
      float largest = maxima[r];
      MLA_UNROLL
      for (int part = 1; part < 4; ++part) largest = std::fmax(largest, maxima[part * Config::kGroupRows + r]);
      row_factors()[group() * Config::kGroupRows + r] =
          state.is_outgrown_by(largest, headroom) ? state.raise(largest) : 1.0F;
      *row_base(r) = {state.base(), state.max + headroom};
    }
    Base::sync_group();
    exponentiate(s, added, store, true);
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) sums_[i] *= row_factors()[group() * Config::kGroupRows + lane_row(i)];
    rescale();
    Base::sync_group();
  }

  /// Adds up the rows' sums of all lanes at the end of a unit. A barrier of the block must follow.
  MLA_DEVICE void finish_sums() const {
    float* const sums = of_parts();
    Base::sync_group();  // nobody reads the exchanges any more
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) {
      const float sum = quad_sum(sums_[i]);
      if ((lane() & 3) == 0) sums[key_part() * Config::kGroupRows + lane_row(i)] = sum;
    }
    Base::sync_group();
    const int r = group_thread();
    if (r >= Config::kGroupRows) return;
    float sum = sums[r];
    MLA_UNROLL
    for (int part = 1; part < 4; ++part) sum += sums[part * Config::kGroupRows + r];
    row_states()[group() * Config::kGroupRows + r].sum = sum;
  }

  /// Returns the place of a float for each of the four parts of each of the group's rows, where exchanges lie
  /// otherwise.
  MLA_DEVICE float* of_parts() const {
    static_assert(4 * Config::kGroupRows * sizeof(float) <= Config::kGroupWarps * Config::kExchangeBytes);
    return as<float>(memory_ + Config::kScoreOffset + group() * Config::kGroupWarps * Config::kExchangeBytes);
  }

  float sums_[kLaneRows];  // of the lane's P
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// Tests where compressors keep their state, by playing requests: what a call needs must be where its table says.
#include "mla/replay/state_table.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "mla/replay/engine.h"
#include "trace.h"

namespace mla::cli::replay {
namespace {

/// Plays calls of compress over memory that holds, in place of a state, whose token it is of.
class Played {
 public:
  Played(const CompressorShape& shape, int32_t page_size, int32_t num_pages, int32_t seats, int32_t drafts)
      : shape_(shape), table_(shape, page_size, num_pages, seats, drafts) {}

  /// Computes a range of request number `request`; those of its tokens from `good` on will be rejected. Returns whether
  /// all that its latents need was there.
  bool call(int32_t request, const TokenRange& range, int32_t good) {
    table_.update(std::span(&range, 1));
    const TensorView table = table_.table();
    const int64_t columns = table.shape[1], rows = table_.block_size();
    const auto place = [&](int32_t position) -> std::pair<int64_t, int64_t> {
      const int32_t block = static_cast<const int32_t*>(table.data)[position / rows % columns];
      EXPECT_LT(block, table_.num_blocks());
      return {block, position % rows};
    };
    bool found = true;
    // The first latent that ends in the range is pooled from these.
    const int32_t last = (range.start + shape_.ratio) / shape_.ratio * shape_.ratio - 1;
    for (int32_t position = std::max(last - shape_.span() + 1, 0); position < range.start; ++position)
      found = found && memory_[place(position)] == std::pair(owner(request, position), position);
    std::set<std::pair<int64_t, int64_t>> written;
    const int64_t end = range.start + range.count;
    for (int64_t position = std::max<int64_t>(range.start, end - columns * rows); position < end; ++position) {
      const auto at = place(static_cast<int32_t>(position));
      if (at.first < 0) continue;
      EXPECT_TRUE(written.insert(at).second) << "two tokens of a call share a place";
      memory_[at] = {position < good ? owner(request, static_cast<int32_t>(position)) : -1,
                     static_cast<int32_t>(position)};
    }
    return found;
  }
  /// Lets requests have the first `tokens` tokens of request 0.
  void share(int32_t tokens) { shared_ = tokens; }

 private:
  int32_t owner(int32_t request, int32_t position) const { return position < shared_ ? 0 : request; }

  CompressorShape shape_;
  StateTable table_;
  std::map<std::pair<int64_t, int64_t>, std::pair<int32_t, int32_t>> memory_;
  int32_t shared_ = 0;
};

CompressorShape shape_of(int32_t ratio, bool overlap) {
  CompressorShape shape;
  shape.ratio = ratio;
  shape.overlap = overlap;
  shape.d_latent = 128;
  return shape;
}

TEST(StateTable, HoldsWhatEveryCallNeeds) {
  constexpr int32_t kPageTokens = 128, kPrefix = 512;
  for (const CompressorShape& shape : {shape_of(4, true), shape_of(4, false), shape_of(128, false), shape_of(2, false)})
    for (uint64_t seed = 0; seed < 40; ++seed) {
      MLA_TRACE(fmt::format("ratio {} overlap {} seed {}", shape.ratio, shape.overlap, seed));
      std::mt19937_64 random(seed);
      const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); };
      const int32_t drafts = below(6);
      Played played(shape, kPageTokens, /*num_pages=*/40, /*seats=*/2, drafts);
      // Three requests, two of them at a time; the last takes the first one's seat. All have a prefix in common.
      struct Request {
        std::vector<int32_t> pages;
        int32_t seat, done;
      };
      std::vector<Request> requests = {{{}, 0, 0}, {{}, 1, kPrefix}, {{}, 0, kPrefix}};
      for (int32_t page = 0; page < 10; ++page)
        for (size_t r = 0; r < 3; ++r)
          requests[r].pages.push_back(page < kPrefix / kPageTokens ? page : page + 10 * static_cast<int32_t>(r));
      played.share(kPrefix);
      const auto advance = [&](int32_t r, int32_t count, int32_t good) {
        Request& one = requests[static_cast<size_t>(r)];
        EXPECT_TRUE(
            played.call(r, {.pages = one.pages, .start = one.done, .count = count, .seat = one.seat}, one.done + good))
            << "request " << r << " at " << one.done;
        one.done += good;
      };
      while (requests[0].done < 600) {  // a prompt in pieces of any length
        const int32_t count = 1 + below(below(3) == 0 ? 300 : 9);
        advance(0, count, count);
      }
      for (int32_t pair : {0, 2})
        for (int turn = 0; turn < 60; ++turn) {
          const int32_t r = turn % 2 == 0 ? pair : 1, count = 1 + below(drafts + 1);
          if (requests[static_cast<size_t>(r)].done < 1200) advance(r, count, 1 + below(count));
        }
    }
}

TEST(StateTable, ANewRequestLeavesTheSeatBesideItAlone) {
  constexpr int32_t kPageTokens = 128;
  Played played(shape_of(4, true), kPageTokens, /*num_pages=*/18, /*seats=*/2, /*drafts=*/1);
  std::vector<int32_t> pages[3];
  for (int32_t page = 0; page < 18; ++page) pages[page / 6].push_back(page);
  const auto call = [&](int32_t request, int32_t start, int32_t end, int32_t seat) {
    return played.call(request, {.pages = pages[request], .start = start, .count = end - start, .seat = seat}, end);
  };
  // The first request goes while all spares of its seat are in use.
  ASSERT_TRUE(call(0, 0, 12, 0));
  ASSERT_TRUE(call(0, 12, 115, 0));
  ASSERT_TRUE(call(1, 0, 13, 1));
  ASSERT_TRUE(call(2, 0, 699, 0));
  EXPECT_TRUE(call(1, 13, 14, 1));
  EXPECT_TRUE(call(2, 699, 700, 0));
}

TEST(StateTable, ARingTooShortForDraftsWouldBeSeen) {
  // The same requests, and a ring as if nothing were ever rejected.
  const CompressorShape shape = shape_of(128, false);
  Played enough(shape, 128, 1, 1, /*drafts=*/3), short_of(shape, 128, 1, 1, /*drafts=*/0);
  for (Played* played : {&enough, &short_of}) {
    ASSERT_TRUE(played->call(0, {.pages = {}, .start = 0, .count = 126}, 126));
    ASSERT_TRUE(played->call(0, {.pages = {}, .start = 126, .count = 4}, 127));
  }
  EXPECT_TRUE(enough.call(0, {.pages = {}, .start = 127, .count = 1}, 128));
  EXPECT_FALSE(short_of.call(0, {.pages = {}, .start = 127, .count = 1}, 128));
}

TEST(Seats, AreGivenBackAndGivenAgain) {
  std::vector<Sequence> sequences(4);
  for (Sequence& sequence : sequences) sequence.state = SequenceState::kDecode;
  const auto step = [](std::vector<int32_t> running) {
    Step all;
    for (int32_t sequence : running) all.decode.push_back({.sequence = sequence});
    return all;
  };
  Seats seats(2);
  seats.update(step({0, 1}), sequences);
  EXPECT_EQ(seats.of(0), 0);
  EXPECT_EQ(seats.of(1), 1);
  sequences[0].state = SequenceState::kFinished;
  seats.update(step({1, 2}), sequences);
  EXPECT_EQ(seats.of(1), 1);
  EXPECT_EQ(seats.of(2), 0);
  sequences[1].state = SequenceState::kLeftOut;
  seats.update(step({2, 3}), sequences);
  EXPECT_EQ(seats.of(2), 0);
  EXPECT_EQ(seats.of(3), 1);
}

}  // namespace
}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

namespace mla::cli::replay {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Request make_request(int64_t line, double arrival_ms, int32_t input, int32_t output, std::vector<int64_t> ids = {}) {
  Request request;
  request.line = line;
  request.arrival_ms = arrival_ms;
  request.input_length = input;
  request.output_length = output;
  for (int64_t block = std::ssize(ids); block < (input + kBlockTokens - 1) / kBlockTokens; ++block)
    ids.push_back(line * 1000000 + block);
  request.hash_ids = std::move(ids);
  return request;
}

// Runs to the end with steps of one millisecond; returns the time of the end.
double run_all(Scheduler& scheduler, double now_ms = 0.0) {
  for (int step = 0; !scheduler.done() && step < 1000000; ++step) {
    const Step next = scheduler.next(now_ms);
    now_ms = next.empty() ? scheduler.next_arrival_ms() : now_ms + 1.0;
    if (!next.empty()) scheduler.complete(next, now_ms);
  }
  EXPECT_TRUE(scheduler.done());
  return now_ms;
}

TEST(Scheduler, RefusedRequestsWaitAndAreLeftOutOnceNobodyRuns) {
  const std::vector<Request> requests = {make_request(1, 0, 100, 2), make_request(2, 0, 50, 2),
                                         make_request(3, 0, 60, 2), make_request(4, 5, 70, 2)};
  Scheduler scheduler(requests, {.page_size = 16, .num_pages = 100, .chunk = 150, .max_batch = 8});
  std::set<int64_t> refused = {2, 3};
  const auto admits = [&](const Sequence& sequence) { return refused.count(sequence.request->line) == 0; };
  scheduler.complete(scheduler.next(0, admits), 1);
  EXPECT_THAT(scheduler.running(), ::testing::ElementsAre(0));
  EXPECT_EQ(scheduler.num_queued(0), 2);
  refused = {3};
  scheduler.complete(scheduler.next(1, admits), 2);  // request 1 is done, request 2 has another chance
  EXPECT_THAT(scheduler.running(), ::testing::ElementsAre(1));
  scheduler.complete(scheduler.next(2, admits), 3);
  EXPECT_EQ(scheduler.num_finished(), 2);
  EXPECT_EQ(scheduler.num_left_out(), 0);
  EXPECT_TRUE(scheduler.next(3, admits).empty());
  EXPECT_EQ(scheduler.sequences()[2].state, SequenceState::kLeftOut);
  EXPECT_EQ(scheduler.next_arrival_ms(), 5);

  scheduler.complete(scheduler.next(5, admits), 6);
  EXPECT_LT(scheduler.pool().num_free(), 100);
  scheduler.give_up(3);
  EXPECT_TRUE(scheduler.done());
  EXPECT_EQ(scheduler.num_finished(), 2);
  EXPECT_EQ(scheduler.num_left_out(), 2);
  EXPECT_EQ(scheduler.pool().num_free(), 100);
  EXPECT_EQ(scheduler.next_arrival_ms(), INFINITY);
}

TEST(Scheduler, ChunksPromptsAndDecodesBesideThem) {
  const std::vector<Request> requests = {make_request(1, 0, 100, 3), make_request(2, 0, 300, 2)};
  Scheduler scheduler(requests, {.page_size = 16, .num_pages = 100, .chunk = 150, .max_batch = 8});
  Step step = scheduler.next(0);
  ASSERT_THAT(step.prefill, SizeIs(2));
  EXPECT_EQ(step.prefill[0].count, 100);
  EXPECT_EQ(step.prefill[1].start, 0);
  EXPECT_EQ(step.prefill[1].count, 50);
  EXPECT_THAT(step.decode, IsEmpty());
  scheduler.complete(step, 10);
  EXPECT_EQ(scheduler.sequences()[0].first_token_ms, 10);

  step = scheduler.next(10);
  ASSERT_THAT(step.prefill, SizeIs(1));
  EXPECT_EQ(step.prefill[0].start, 50);
  EXPECT_EQ(step.prefill[0].count, 150);
  ASSERT_THAT(step.decode, SizeIs(1));
  EXPECT_EQ(step.decode[0].sequence, 0);
  EXPECT_EQ(step.decode[0].count, 1);
  EXPECT_EQ(step.decode[0].accepted, 1);
  scheduler.complete(step, 20);
  run_all(scheduler, 20);
  EXPECT_EQ(scheduler.sequences()[0].num_output, 3);
  EXPECT_EQ(scheduler.sequences()[0].num_computed, 102);  // the last answer token is not fed back
  EXPECT_EQ(scheduler.sequences()[1].num_output, 2);
  EXPECT_EQ(scheduler.pool().num_free(), 100);
}

TEST(Scheduler, DraftsShortenAnswersAndSomeAreWrong) {
  std::vector<Request> requests;
  for (int64_t line = 1; line <= 20; ++line) requests.push_back(make_request(line, 0, 10, 101));
  SchedulerOptions options{.page_size = 16, .num_pages = 200, .chunk = 1000, .max_batch = 20};
  Scheduler plain(requests, options);
  options.drafts = 1;
  options.seed = 3;
  Scheduler drafting(requests, options), again(requests, options);
  const double plain_ms = run_all(plain), drafting_ms = run_all(drafting);
  EXPECT_EQ(run_all(again), drafting_ms);
  EXPECT_LT(drafting_ms, plain_ms);
  int64_t drafts = 0, accepted = 0;
  for (const Sequence& sequence : drafting.sequences()) {
    EXPECT_EQ(sequence.num_output, 101);
    EXPECT_EQ(sequence.num_computed, 110);  // the last answer token is not fed back
    drafts += sequence.num_drafts;
    accepted += sequence.num_accepted;
  }
  EXPECT_NEAR(static_cast<double>(accepted) / static_cast<double>(drafts), kDraftAcceptance, 0.06);
  EXPECT_EQ(plain.sequences()[0].num_drafts, 0);
  options.drafts = -1;
  EXPECT_THAT(Scheduler::check(requests, options).message(), HasSubstr("drafts"));
}

TEST(Scheduler, WaitsForArrivals) {
  const std::vector<Request> requests = {make_request(1, 5, 10, 1), make_request(2, 50, 10, 1)};
  const SchedulerOptions options{.page_size = 16, .num_pages = 10, .chunk = 100, .max_batch = 8};
  Scheduler scheduler(requests, options);
  EXPECT_TRUE(scheduler.next(0).empty());
  EXPECT_EQ(scheduler.next_arrival_ms(), 5);
  const Step step = scheduler.next(5);
  EXPECT_THAT(step.prefill, SizeIs(1));
  scheduler.complete(step, 6);
  EXPECT_TRUE(scheduler.next(6).empty());
  EXPECT_EQ(scheduler.num_queued(60), 1);

  SchedulerOptions fast = options;
  fast.as_fast_as_possible = true;
  Scheduler eager(requests, fast);
  EXPECT_THAT(eager.next(0).prefill, SizeIs(2));
}

TEST(Scheduler, KeepsToMaxBatch) {
  std::vector<Request> requests;
  for (int64_t i = 1; i <= 5; ++i) requests.push_back(make_request(i, 0, 8, 4));
  Scheduler scheduler(requests, {.page_size = 8, .num_pages = 100, .chunk = 1000, .max_batch = 2});
  double now = 0;
  while (!scheduler.done()) {
    const Step step = scheduler.next(now);
    ASSERT_FALSE(step.empty());
    EXPECT_LE(scheduler.num_running(), 2);
    scheduler.complete(step, ++now);
  }
  for (const Sequence& sequence : scheduler.sequences()) EXPECT_EQ(sequence.num_output, 4);
}

TEST(Scheduler, SharesPrefixesOfEarlierRequests) {
  const std::vector<Request> requests = {make_request(1, 0, 1100, 1, {7, 8}), make_request(2, 0, 1200, 1, {7, 8}),
                                         make_request(3, 0, 1024, 1, {7, 8})};
  Scheduler scheduler(requests, {.page_size = 64, .num_pages = 100, .chunk = 1100, .max_batch = 8});
  run_all(scheduler);
  EXPECT_EQ(scheduler.sequences()[0].num_hit, 0);
  EXPECT_EQ(scheduler.sequences()[1].num_hit, 1024);
  EXPECT_EQ(scheduler.sequences()[2].num_hit, 512);  // its last token must be computed
}

TEST(Scheduler, PutsAnswersThatBeginWithTheSamePagesSideBySide) {
  const std::vector<Request> requests = {make_request(1, 0, 600, 9, {7, 1}), make_request(2, 0, 600, 9, {8, 2}),
                                         make_request(3, 1, 600, 9, {7, 3}), make_request(4, 1, 600, 9, {8, 4})};
  for (const bool together : {false, true}) {
    Scheduler scheduler(requests, {.page_size = 256, .num_pages = 100, .sharers_side_by_side = together});
    scheduler.complete(scheduler.next(0), 1);
    scheduler.complete(scheduler.next(1), 2);
    std::vector<int32_t> order;
    for (const DecodePiece& piece : scheduler.next(2).decode) order.push_back(piece.sequence);
    ASSERT_THAT(order, SizeIs(4));
    EXPECT_EQ(order[0] % 2 == order[1] % 2, together);  // requests 0 and 2 share pages, 1 and 3 others
  }
}

TEST(Scheduler, SharesNothingIfPagesDoNotDivideBlocks) {
  const std::vector<Request> requests = {make_request(1, 0, 1100, 1, {7, 8}), make_request(2, 9, 1100, 1, {7, 8})};
  Scheduler scheduler(requests, {.page_size = 96, .num_pages = 100, .chunk = 2000, .max_batch = 8});
  run_all(scheduler);
  EXPECT_EQ(scheduler.sequences()[1].num_hit, 0);
  EXPECT_EQ(scheduler.pool().num_free(), 100);
}

TEST(Scheduler, AFullPoolMakesRequestsWaitInOrder) {
  std::vector<Request> requests;
  for (int64_t i = 1; i <= 6; ++i) requests.push_back(make_request(i, 0, 600, 50));
  // One request needs 11 pages of 64.
  Scheduler scheduler(requests, {.page_size = 64, .num_pages = 12, .chunk = 4096, .max_batch = 8});
  run_all(scheduler);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(scheduler.sequences()[i].num_output, 50);
    if (i > 0) {
      EXPECT_GE(scheduler.sequences()[i].admitted_ms, scheduler.sequences()[i - 1].finished_ms);
    }
  }
  EXPECT_GE(scheduler.prefix_cache().num_evicted_blocks(), 4);
}

TEST(Scheduler, ARequestWithoutAnswerEndsWithItsPrompt) {
  const std::vector<Request> requests = {make_request(1, 0, 10, 0)};
  Scheduler scheduler(requests, {.page_size = 16, .num_pages = 1, .chunk = 4, .max_batch = 1});
  EXPECT_EQ(run_all(scheduler), 3.0);
  EXPECT_EQ(scheduler.sequences()[0].num_output, 0);
}

TEST(SchedulerCheck, NamesTheRequestThatNeverFits) {
  const std::vector<Request> requests = {make_request(1, 0, 10, 1), make_request(2, 0, 100, 29)};
  SchedulerOptions options{.page_size = 16, .num_pages = 8, .chunk = 4, .max_batch = 1};
  EXPECT_TRUE(Scheduler::check(requests, options).ok());  // 128 tokens: the last of the answer needs no place
  options.num_pages = 7;
  EXPECT_EQ(Scheduler::check(requests, options).message(),
            "pool: expected at least 8 pages of 16 tokens for the request of line 2 (input 100, output 29), got 7");
  options.num_pages = 0;
  EXPECT_THAT(Scheduler::check(requests, options).message(), HasSubstr("pool: expected at least one page"));
  options = {.page_size = 0, .num_pages = 9, .chunk = 4, .max_batch = 1};
  EXPECT_THAT(Scheduler::check(requests, options).message(), HasSubstr("page_size"));
  options = {.page_size = 1, .num_pages = 900, .chunk = 0, .max_batch = 1};
  EXPECT_THAT(Scheduler::check(requests, options).message(), HasSubstr("chunk"));
  options = {.page_size = 1, .num_pages = 900, .chunk = 1, .max_batch = 0};
  EXPECT_THAT(Scheduler::check(requests, options).message(), HasSubstr("max_batch"));
}

// Tests who may write a slot, and what every slot holds: it is written at most once while it is anybody's, and read
// back as the token that the reader means.
class RandomReplay : public ::testing::TestWithParam<uint32_t> {};

TEST_P(RandomReplay, LosesNothingAndNeverRewritesSharedPages) {
  SCOPED_TRACE(::testing::Message() << "seed " << GetParam());
  std::mt19937 random(GetParam());
  const auto pick = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  const int32_t page_size = std::array{1, 16, 64, 256, 512, 48}[static_cast<size_t>(pick(0, 5))];
  std::vector<Request> requests;
  double arrival = 0;
  for (int64_t line = 1; line <= 40; ++line) {
    arrival += pick(0, 3);
    std::vector<int64_t> ids;  // a random walk in a small tree, so that prefixes repeat
    const int32_t input = pick(1, 3000);
    for (int32_t block = 0; block < (input + 511) / 512; ++block) ids.push_back(block * 10 + pick(0, 1));
    requests.push_back(make_request(line, arrival, input, pick(0, 20), ids));
  }
  const SchedulerOptions options{.page_size = page_size,
                                 .num_pages = (3020 + page_size - 1) / page_size + pick(0, 4000 / page_size + 1),
                                 .chunk = pick(1, 2000),
                                 .max_batch = pick(1, 10),
                                 .drafts = pick(0, 1) * pick(1, 5),
                                 .seed = GetParam()};
  const std::vector<int64_t> kWrongDraft = {-1};
  ASSERT_TRUE(Scheduler::check(requests, options).ok());
  Scheduler scheduler(requests, options);

  // What a token is: its prompt up to its block and its place; an answer's tokens belong to the request.
  const auto content = [&](const Request& request, int32_t position) {
    std::vector<int64_t> key;
    if (position >= request.input_length) return std::vector<int64_t>{-request.line, position};
    for (int32_t block = 0; block <= position / kBlockTokens; ++block)
      key.push_back(request.hash_ids[static_cast<size_t>(block)]);
    key.push_back(position);
    return key;
  };
  std::map<int64_t, std::vector<int64_t>> cache;  // slot -> content
  const auto slot = [&](const Sequence& sequence, int32_t position) {
    return int64_t{sequence.pages[static_cast<size_t>(position / page_size)]} * page_size + position % page_size;
  };
  const auto write = [&](const Sequence& sequence, int32_t position) {
    const int32_t page = sequence.pages[static_cast<size_t>(position / page_size)];
    EXPECT_EQ(scheduler.pool().ref_count(page), 1) << "a shared page is written";
    cache[slot(sequence, position)] = content(*sequence.request, position);
  };
  double now = 0;
  int64_t hits = 0;
  for (int step_index = 0; !scheduler.done(); ++step_index) {
    ASSERT_LT(step_index, 200000);
    const Step step = scheduler.next(now);
    if (step.empty()) {
      ASSERT_GT(scheduler.next_arrival_ms(), now) << "nobody runs although somebody waits";
      now = scheduler.next_arrival_ms();
      continue;
    }
    int32_t tokens = 0;
    for (const PrefillPiece& piece : step.prefill) {
      const Sequence& sequence = scheduler.sequences()[static_cast<size_t>(piece.sequence)];
      EXPECT_EQ(piece.start, sequence.num_computed);
      tokens += piece.count;
      for (int32_t i = 0; i < piece.count; ++i) write(sequence, piece.start + i);
    }
    EXPECT_LE(tokens, options.chunk);
    EXPECT_LE(scheduler.num_running(), options.max_batch);
    for (const DecodePiece& piece : step.decode) {
      const Sequence& sequence = scheduler.sequences()[static_cast<size_t>(piece.sequence)];
      EXPECT_LE(piece.count, options.drafts + 1);
      EXPECT_GE(piece.accepted, 1);
      EXPECT_LE(piece.accepted, piece.count);
      EXPECT_LE(sequence.num_output + piece.count, sequence.request->output_length);
      for (int32_t i = 0; i < piece.count; ++i) {
        write(sequence, sequence.num_computed + i);
        if (i >= piece.accepted) cache[slot(sequence, sequence.num_computed + i)] = kWrongDraft;
      }
    }
    // Everything that attention would read is what the request means. Every step would be slow, so now and then.
    if (step_index % 16 == 0) {
      for (const PrefillPiece& piece : step.prefill) {
        const Sequence& sequence = scheduler.sequences()[static_cast<size_t>(piece.sequence)];
        for (int32_t position = 0; position < piece.start + piece.count; ++position)
          ASSERT_EQ(cache[slot(sequence, position)], content(*sequence.request, position));
      }
      for (const DecodePiece& piece : step.decode) {
        const Sequence& sequence = scheduler.sequences()[static_cast<size_t>(piece.sequence)];
        for (int32_t position = 0; position < sequence.num_computed + piece.accepted; ++position)
          ASSERT_EQ(cache[slot(sequence, position)], content(*sequence.request, position));
      }
    }
    scheduler.complete(step, ++now);
    EXPECT_LE(scheduler.pool().num_free() + scheduler.prefix_cache().num_evictable_pages(), options.num_pages);
  }
  for (const Sequence& sequence : scheduler.sequences()) {
    EXPECT_EQ(sequence.num_output, sequence.request->output_length);
    EXPECT_GE(sequence.num_computed, sequence.request->input_length);
    EXPECT_LE(sequence.arrival_ms, sequence.admitted_ms);
    EXPECT_LT(sequence.admitted_ms, sequence.first_token_ms);
    EXPECT_LE(sequence.first_token_ms, sequence.finished_ms);
    hits += sequence.num_hit;
  }
  // All pages are free or belong to blocks that nobody uses any more.
  EXPECT_EQ(scheduler.pool().num_free() + scheduler.prefix_cache().num_evictable_pages(), options.num_pages);
  if (kBlockTokens % page_size != 0) {
    EXPECT_EQ(hits, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomReplay, ::testing::Range(0U, 24U));

}  // namespace
}  // namespace mla::cli::replay

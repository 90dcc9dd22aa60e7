// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <vector>

namespace mla::cli::replay {
namespace {

using ::testing::ElementsAre;

constexpr SchedulerOptions kOptions = {.page_size = 16, .num_pages = 1000, .chunk = 100, .max_batch = 8};

Request request_of(int64_t line, int32_t input, int32_t output) {
  Request request;
  request.line = line;
  request.input_length = input;
  request.output_length = output;
  for (int64_t block = 0; block < (input + kBlockTokens - 1) / kBlockTokens; ++block)
    request.hash_ids.push_back(line * 1000 + block);
  return request;
}

// Says how many seconds work takes on a machine that knows two speeds.
struct Machine {
  double per_pair = 1e-6, per_step = 1e-2;

  WorkSeconds seconds(const Work& work) const {
    WorkSeconds seconds = {};
    seconds[Work::kPrefillPairs] = work.amount[Work::kPrefillPairs] * per_pair;
    seconds[Work::kDecodeSteps] = work.amount[Work::kDecodeSteps] * per_step;
    return seconds;
  }
};

struct Replayed {
  double elapsed = 0.0;
  std::vector<int64_t> finished, left_out;
};

// Replays to the end on a clock of its own; `at_step` may change the machine.
Replayed replay(
    const std::vector<Request>& requests, double seconds, Machine machine,
    const std::function<void(int, Machine&)>& at_step = [](int, Machine&) {}) {
  Scheduler scheduler(requests, kOptions);
  TimeBudget budget(seconds, kOptions, 0);
  Replayed run;
  for (int steps = 0; !scheduler.done(); ++steps) {
    at_step(steps, machine);
    budget.cut(scheduler, run.elapsed);
    const Step step =
        scheduler.next(0.0, [&](const Sequence& waiting) { return budget.admits(waiting, scheduler, run.elapsed); });
    if (step.empty()) continue;
    const Work work = work_of(step, scheduler.sequences());
    const auto taken = machine.seconds(work);
    for (double part : taken) run.elapsed += part;
    scheduler.complete(step, run.elapsed);
    budget.observe(work, taken);
  }
  for (const Sequence& sequence : scheduler.sequences())
    (sequence.state == SequenceState::kFinished ? run.finished : run.left_out).push_back(sequence.request->line);
  EXPECT_EQ(scheduler.num_finished(), std::ssize(run.finished));
  EXPECT_EQ(scheduler.num_left_out(), std::ssize(run.left_out));
  EXPECT_EQ(scheduler.num_running(), 0);
  return run;
}

TEST(Work, OfARequestIsThatOfItsSteps) {
  const std::vector<Request> requests = {request_of(1, 250, 5)};
  Scheduler scheduler(requests, kOptions);
  const Work whole = work_left(scheduler.sequences()[0], kOptions);
  Work sum;
  double steps = 0.0;
  while (!scheduler.done()) {
    const Step step = scheduler.next(0.0);
    const Work work = work_of(step, scheduler.sequences());
    steps += work.amount[Work::kDecodeSteps];
    sum += work;
    scheduler.complete(step, 0.0);
  }
  sum.amount[Work::kDecodeSteps] = steps;  // of one request: they follow one another
  EXPECT_EQ(sum.amount, whole.amount);
  EXPECT_EQ(whole.amount[Work::kPrefillPairs], 250 * 251 / 2);
  EXPECT_EQ(whole.amount[Work::kPrefillKeys], 100 + 200 + 250);
  EXPECT_EQ(whole.amount[Work::kDecodeKeys], 251 + 252 + 253 + 254);
}

TEST(TimeBudget, LeavesOutWhatWouldNotFitAndFinishesTheRest) {
  // 0.125 s, 50 s, 0.5 s and 0.1 s of prompts.
  const std::vector<Request> requests = {request_of(1, 500, 2), request_of(2, 10000, 2), request_of(3, 1000, 2),
                                         request_of(4, 450, 10)};
  const Replayed run = replay(requests, 2.0, {});
  EXPECT_THAT(run.finished, ElementsAre(1, 3, 4));
  EXPECT_THAT(run.left_out, ElementsAre(2));
  EXPECT_LE(run.elapsed, 2.0);
}

TEST(TimeBudget, HasRoomForEverythingIfThereIsTime) {
  const std::vector<Request> requests = {request_of(1, 500, 2), request_of(2, 1000, 40)};
  EXPECT_THAT(replay(requests, 10.0, {}).finished, ElementsAre(1, 2));
}

TEST(TimeBudget, GivesUpAFirstRequestThatTurnsOutTooLong) {
  const std::vector<Request> requests = {request_of(1, 10000, 2), request_of(2, 500, 2)};
  const Replayed run = replay(requests, 2.0, {});
  EXPECT_THAT(run.finished, ElementsAre(2));
  EXPECT_THAT(run.left_out, ElementsAre(1));
  EXPECT_LE(run.elapsed, 2.0);
}

TEST(TimeBudget, FollowsAMachineThatSlowsDown) {
  const std::vector<Request> requests = {request_of(1, 1000, 2), request_of(2, 1000, 2), request_of(3, 1000, 2)};
  const Replayed fast = replay(requests, 2.0, {});
  EXPECT_THAT(fast.finished, ElementsAre(1, 2, 3));
  const Replayed slow = replay(requests, 2.0, {}, [](int step, Machine& machine) {
    if (step == 4) machine.per_pair *= 20.0;
  });
  EXPECT_FALSE(slow.left_out.empty());
  EXPECT_LE(slow.elapsed, 4.0);  // a step or two are over before the change shows
}

TEST(TimeBudget, PredictsChecksByTheirNumber) {
  TimeBudget budget(10.0, kOptions, 4);
  Work step;
  step.amount[Work::kPrefillTokens] = 100;
  step.amount[Work::kChecks] = 1;
  WorkSeconds seconds = {};
  seconds[Work::kPrefillTokens] = 0.5;
  seconds[Work::kChecks] = 2.0;
  budget.observe(step, seconds);
  Work left;
  left.amount[Work::kPrefillTokens] = 800;
  EXPECT_DOUBLE_EQ(budget.predict(left), 8 * 0.5 + 2 * 2.0);
}

TEST(TimeBudget, BooksEverySecondOfAStepOnce) {
  Recorder before, after;
  for (Phase phase : {Phase::kGenerate, Phase::kGather, Phase::kMerge, Phase::kPrefillPrologue, Phase::kDecodePrologue,
                      Phase::kDecodeProjection, Phase::kPrefillSparse, Phase::kPrefillProjection, Phase::kPrefillFinish,
                      Phase::kDecodeFinish, Phase::kCheck})
    after.time(phase, [] {});
  for (bool with_prefill : {false, true}) {
    const WorkSeconds seconds = seconds_by_kind(before, after, 3.0, with_prefill);
    EXPECT_NEAR(std::accumulate(seconds.begin(), seconds.end(), 0.0), 3.0, 1e-9);
    EXPECT_GT(seconds[with_prefill ? Work::kPrefillTokens : Work::kDecodeSteps], 2.9);
  }
}

TEST(TimeBudget, ComputesAStepWhateverTheTime) {
  const std::vector<Request> requests = {request_of(1, 1000, 2), request_of(2, 1000, 2)};
  const Replayed run = replay(requests, 1e-9, {});
  EXPECT_THAT(run.left_out, ElementsAre(1, 2));
  EXPECT_GT(run.elapsed, 0.0);
}

}  // namespace
}  // namespace mla::cli::replay

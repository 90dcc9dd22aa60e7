// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <tuple>
#include <utility>

namespace mla::schedule {
namespace {

std::vector<Sequence> ragged_sequences(uint32_t seed, int32_t count, int32_t longest) {
  std::mt19937 random(seed);
  const auto below = [&](int32_t bound) { return static_cast<int32_t>(random() % static_cast<uint32_t>(bound)); };
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < count; ++i) {
    sequences.push_back({.request = i,
                         .q_len = below(5),
                         .rows_per_token = 1 + below(128),
                         .kv_len = below(longest + 1),
                         .causal = below(2) == 0,
                         .window_left = below(3) == 0 ? below(longest + 1) : -1,
                         .share = {.rank = below(2), .world = 2 + below(2), .interleave = 1 + below(5)}});
    if (below(2) == 0) sequences.back().share = {};
  }
  return sequences;
}

/// Expects every visible key of every row in exactly one task, splits numbered in key order, and partial slots that are
/// disjoint.
void expect_complete(const std::vector<Sequence>& sequences, const Schedule& schedule, const SplitOptions& options) {
  std::map<int32_t, std::map<int32_t, std::vector<Task>>> blocks;  // by request and first row
  for (const Task& task : schedule.tasks) blocks[task.request][task.row_begin].push_back(task);
  std::vector<int> slot_uses(static_cast<size_t>(schedule.num_partials), 0);
  for (const Sequence& sequence : sequences) {
    int32_t next_row = 0;
    for (auto& [row, tasks] : blocks[sequence.request]) {
      EXPECT_EQ(row, next_row);
      next_row = row + tasks[0].row_count;
      EXPECT_LE(tasks[0].row_count, options.max_rows);
      std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.split_idx < b.split_idx; });
      const int32_t first_key = visible_keys(sequence, row).begin;
      int32_t next_key = first_key;
      for (size_t i = 0; i < tasks.size(); ++i) {
        const Task& task = tasks[i];
        EXPECT_EQ(task.split_idx, static_cast<int32_t>(i));
        EXPECT_EQ(task.num_splits, static_cast<int32_t>(tasks.size()));
        EXPECT_EQ(task.row_count, tasks[0].row_count);
        EXPECT_EQ(task.kv_begin, next_key);
        EXPECT_TRUE(task.kv_end > task.kv_begin || tasks.size() == 1);
        next_key = task.kv_end;
        if (task.num_splits == 1) {
          EXPECT_EQ(task.partial_slot, -1);
        } else {
          ASSERT_GE(task.partial_slot, 0);
          ASSERT_LT(task.partial_slot + task.split_idx, schedule.num_partials);
          const int32_t slot = task.partial_slot + task.split_idx;
          ++slot_uses[static_cast<size_t>(slot)];
        }
      }
      EXPECT_EQ(next_key, std::max(first_key, visible_keys(sequence, next_row - 1).end));
    }
    EXPECT_EQ(next_row, sequence.num_rows());
  }
  for (int uses : slot_uses) EXPECT_EQ(uses, 1);
  ASSERT_FALSE(schedule.group_begin.empty());
  EXPECT_EQ(schedule.group_begin.front(), 0);
  EXPECT_EQ(schedule.group_begin.back(), static_cast<int32_t>(schedule.tasks.size()));
  EXPECT_TRUE(std::is_sorted(schedule.group_begin.begin(), schedule.group_begin.end()));
}

/// Returns one query token of `rows` heads that sees `keys` keys.
Sequence one_token(int32_t request, int32_t rows, int32_t keys) {
  return {.request = request, .q_len = 1, .rows_per_token = rows, .kv_len = keys};
}

TEST(Schedule, CoversEveryKeyOnceWhateverTheBatch) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const auto sequences = ragged_sequences(seed, 1 + static_cast<int32_t>(seed % 40), seed % 3 == 0 ? 50 : 40000);
    for (bool invariant : {false, true}) {
      const SplitOptions options{
          .num_workers = 1 + static_cast<int32_t>(seed % 9), .key_block = 96, .batch_invariant = invariant};
      const Schedule schedule = make_schedule(sequences, options);
      expect_complete(sequences, schedule, options);
      if (invariant) continue;
      EXPECT_LE(schedule.num_partials, kMaxPartialsPerWorker * options.num_workers);
      int64_t rows = 0;
      for (const Sequence& sequence : sequences) rows += sequence.num_rows();
      EXPECT_LE(static_cast<int64_t>(schedule.tasks.size()),
                max_tasks(rows, static_cast<int64_t>(sequences.size()), options));
    }
  }
}

TEST(Schedule, IsDeterministic) {
  const auto sequences = ragged_sequences(7, 50, 30000);
  const SplitOptions options{.num_workers = 6, .key_block = 96};
  const Schedule a = make_schedule(sequences, options);
  const Schedule b = make_schedule(sequences, options);
  ASSERT_EQ(a.tasks.size(), b.tasks.size());
  for (size_t i = 0; i < a.tasks.size(); ++i) {
    EXPECT_EQ(a.tasks[i].request, b.tasks[i].request);
    EXPECT_EQ(a.tasks[i].kv_begin, b.tasks[i].kv_begin);
    EXPECT_EQ(a.tasks[i].partial_slot, b.tasks[i].partial_slot);
  }
  EXPECT_EQ(a.group_begin, b.group_begin);
}

TEST(Schedule, SplitsALoneLongRequestOverAllWorkers) {
  const Sequence sequence = one_token(0, 16, 32768);
  for (int32_t workers : {2, 3, 8, 32}) {
    const Schedule schedule = make_schedule(std::span(&sequence, 1), {.num_workers = workers, .key_block = 96});
    EXPECT_GE(static_cast<int32_t>(schedule.tasks.size()), workers);
    EXPECT_LE(schedule.makespan, 1.2 * schedule.total_cost / workers) << workers << " workers";
  }
}

TEST(Schedule, CutsRowsRatherThanKeysWhereThatBalances) {
  const Sequence sequence = one_token(0, 128, 4096);
  const Schedule schedule = make_schedule(std::span(&sequence, 1), {.num_workers = 2, .key_block = 96});
  EXPECT_EQ(schedule.num_partials, 0);
  ASSERT_EQ(schedule.tasks.size(), 2U);
  EXPECT_EQ(schedule.tasks[0].row_count, 64);
}

TEST(Schedule, LeavesAnEvenBatchWhole) {
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < 32; ++i) sequences.push_back(one_token(i, 128, 4096));
  const Schedule schedule = make_schedule(sequences, {.num_workers = 2, .key_block = 96});
  EXPECT_EQ(schedule.num_partials, 0);
  EXPECT_EQ(schedule.tasks.size(), sequences.size());
}

TEST(Schedule, KeepsRaggedBatchesBalanced) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const auto sequences = ragged_sequences(seed, 64, 16384);
    for (int32_t workers : {2, 4, 16}) {
      const Schedule schedule = make_schedule(sequences, {.num_workers = workers, .key_block = 96});
      EXPECT_LE(schedule.makespan, 1.1 * schedule.total_cost / workers) << "seed " << seed << ", " << workers;
    }
  }
}

TEST(Schedule, TakesLongTasksFirst) {
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < 20; ++i) sequences.push_back(one_token(i, 16, 100 * (1 + i * 7 % 20)));
  const Schedule schedule = make_schedule(sequences, {.num_workers = 2, .key_block = 96});
  for (size_t i = 1; i < schedule.tasks.size(); ++i) {
    const Task &before = schedule.tasks[i - 1], &task = schedule.tasks[i];
    EXPECT_GE(before.kv_end - before.kv_begin, task.kv_end - task.kv_begin) << i;
  }
}

std::vector<Sequence> prefill_of(const std::vector<int32_t>& lengths, int32_t num_heads) {
  std::vector<Sequence> sequences;
  for (size_t i = 0; i < lengths.size(); ++i)
    for (int32_t head = 0; head < num_heads; ++head)
      sequences.push_back(
          {.request = static_cast<int32_t>(i), .head = head, .q_len = lengths[i], .kv_len = lengths[i]});
  return sequences;
}

/// Returns whether no sequence's tasks are apart, and no longer one is behind a shorter one of the same sequence.
bool keeps_sequences_together(const Schedule& schedule) {
  std::map<std::pair<int32_t, int32_t>, size_t> last;  // task of a sequence
  for (size_t i = 0; i < schedule.tasks.size(); ++i) {
    const Task& task = schedule.tasks[i];
    const auto [entry, first] = last.try_emplace({task.request, task.head}, i);
    if (first) continue;
    if (entry->second + 1 != i || schedule.tasks[i - 1].kv_end < task.kv_end) return false;
    entry->second = i;
  }
  return true;
}

TEST(Schedule, KeepsTheTasksOfAHeadTogether) {
  for (int32_t workers : {1, 2, 4}) {
    const SplitOptions options{.num_workers = workers, .max_rows = 256, .key_block = 96, .split_keys = false};
    const Schedule schedule = make_schedule(prefill_of({1024}, 16), options);
    EXPECT_EQ(schedule.tasks.size(), 64U);
    EXPECT_TRUE(keeps_sequences_together(schedule)) << workers << " workers";
    EXPECT_LE(schedule.makespan, 1.01 * schedule.total_cost / workers) << workers << " workers";
  }
}

TEST(Schedule, KeepsTasksTogetherOnlyWhereThatBalances) {
  int together = 0;
  int apart = 0;
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    std::vector<int32_t> lengths;
    for (int i = 0; i < 4; ++i) lengths.push_back(100 + static_cast<int32_t>(random() % 5000));
    for (int32_t workers : {2, 7, 16}) {
      const SplitOptions options{.num_workers = workers, .max_rows = 256, .key_block = 96, .split_keys = false};
      const Schedule schedule = make_schedule(prefill_of(lengths, 3), options);
      std::vector<double> costs;
      for (const Task& task : schedule.tasks)
        costs.push_back(task_cost(options.cost, task.row_count, task.kv_end - task.kv_begin));
      std::sort(costs.begin(), costs.end(), std::greater<>());
      EXPECT_LE(schedule.makespan, 1.011 * simulate(costs, workers)) << round << ", " << workers << " workers";
      ++(keeps_sequences_together(schedule) ? together : apart);
    }
  }
  EXPECT_GT(together, 0);
  EXPECT_GT(apart, 0);
}

TEST(Schedule, GroupsShortRequests) {
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < 1024; ++i) sequences.push_back(one_token(i, 16, 1 + i % 7));
  const Schedule schedule = make_schedule(sequences, {.num_workers = 2, .key_block = 96});
  EXPECT_EQ(schedule.tasks.size(), sequences.size());
  EXPECT_LE(schedule.num_groups(), 130);
  EXPECT_GE(schedule.num_groups(), 64);
}

TEST(Schedule, InvariantCutsDependOnTheSequenceAlone) {
  const Sequence probe{.request = 0, .q_len = 3, .rows_per_token = 64, .kv_len = 9999};
  const auto cuts_of_probe = [&](std::vector<Sequence> others, int32_t workers) {
    others.insert(others.begin(), probe);
    const Schedule schedule = make_schedule(others, {.num_workers = workers, .key_block = 96, .batch_invariant = true});
    std::vector<std::tuple<int32_t, int32_t, int32_t>> cuts;
    for (const Task& task : schedule.tasks)
      if (task.request == 0) cuts.emplace_back(task.row_begin, task.kv_begin, task.kv_end);
    std::sort(cuts.begin(), cuts.end());
    return cuts;
  };
  const auto alone = cuts_of_probe({}, 1);
  EXPECT_GT(alone.size(), 2U);
  auto others = ragged_sequences(3, 40, 60000);
  for (Sequence& sequence : others) ++sequence.request;
  EXPECT_EQ(cuts_of_probe(others, 1), alone);
  EXPECT_EQ(cuts_of_probe(others, 7), alone);
  EXPECT_EQ(cuts_of_probe({}, 64), alone);
}

TEST(Schedule, NeverSplitsKeysWhereToldNotTo) {
  const Sequence sequence = one_token(0, 32, 100000);
  for (bool invariant : {false, true}) {
    const Schedule schedule =
        make_schedule(std::span(&sequence, 1),
                      {.num_workers = 8, .key_block = 96, .split_keys = false, .batch_invariant = invariant});
    EXPECT_EQ(schedule.tasks.size(), 1U);
  }
}

TEST(VisibleKeys, AreBottomRightAligned) {
  const Sequence causal{.request = 0, .q_len = 3, .rows_per_token = 2, .kv_len = 10};
  EXPECT_EQ(visible_keys(causal, 0).end, 8);
  EXPECT_EQ(visible_keys(causal, 1).end, 8);
  EXPECT_EQ(visible_keys(causal, 5).end, 10);
  const Sequence more_queries_than_keys{.request = 0, .q_len = 5, .rows_per_token = 1, .kv_len = 2};
  EXPECT_EQ(visible_keys(more_queries_than_keys, 2).end, 0);
  EXPECT_EQ(visible_keys(more_queries_than_keys, 3).end, 1);
  const Sequence full{.request = 0, .q_len = 5, .rows_per_token = 1, .kv_len = 2, .causal = false};
  EXPECT_EQ(visible_keys(full, 0).end, 2);
}

TEST(Schedule, WindowsAndSharesNarrowWhatARowSees) {
  const Sequence window{.request = 0, .q_len = 2, .rows_per_token = 1, .kv_len = 10, .window_left = 3};
  EXPECT_EQ(visible_keys(window, 0).begin, 5);
  EXPECT_EQ(visible_keys(window, 0).end, 9);
  EXPECT_EQ(visible_keys(window, 1).begin, 6);
  const Sequence wide{.request = 0, .q_len = 2, .rows_per_token = 1, .kv_len = 10, .window_left = INT32_MAX};
  EXPECT_EQ(visible_keys(wide, 0).begin, 0);
  // Rank 1 of 2 with runs of 2 owns tokens 2, 3, 6, 7 of 10.
  const Sequence share{.request = 0,
                       .q_len = 2,
                       .rows_per_token = 1,
                       .kv_len = 10,
                       .window_left = 6,
                       .share = {.rank = 1, .world = 2, .interleave = 2}};
  EXPECT_EQ(visible_keys(share, 0).begin, 0);  // sees 2 ... 8
  EXPECT_EQ(visible_keys(share, 0).end, 4);
  EXPECT_EQ(visible_keys(share, 1).begin, 1);  // sees 3 ... 9
}

TEST(Schedule, HoldsForTheLongestSequences) {
  const Sequence sequence = one_token(0, 16, 1 << 30);
  for (int32_t workers : {1, 2, 64}) {
    const SplitOptions options{.num_workers = workers, .key_block = 96};
    expect_complete({sequence}, make_schedule(std::span(&sequence, 1), options), options);
  }
}

TEST(Schedule, EmptyBatchHasNoGroups) {
  const Schedule schedule = make_schedule({}, {.num_workers = 4, .key_block = 96});
  EXPECT_TRUE(schedule.tasks.empty());
  EXPECT_EQ(schedule.num_groups(), 0);
}

TEST(Simulate, TakesTheNextTaskWhenAWorkerIsFree) {
  const double costs[] = {5, 4, 3, 3};
  EXPECT_DOUBLE_EQ(simulate(costs, 1), 15);
  EXPECT_DOUBLE_EQ(simulate(costs, 2), 8);  // 5 + 3 and 4 + 3
  EXPECT_DOUBLE_EQ(simulate(costs, 4), 5);
  EXPECT_DOUBLE_EQ(simulate({}, 4), 0);
}

TEST(EvenBlockRows, CutsEvenlyInWholeGroups) {
  EXPECT_EQ(even_block_rows(16, 128, 16), 16);
  EXPECT_EQ(even_block_rows(17, 128, 16), 32);
  EXPECT_EQ(even_block_rows(128, 128, 16), 128);
  EXPECT_EQ(even_block_rows(160, 128, 16), 80);  // two blocks of 80 rather than 128 and 32
  EXPECT_EQ(even_block_rows(0, 128, 16), 0);
  for (int32_t rows = 1; rows < 1000; ++rows) {
    const int32_t block = even_block_rows(rows, 128, 16);
    EXPECT_LE(block, 128);
    EXPECT_LE((rows + block - 1) / block, (rows + 127) / 128);
  }
}

TEST(InvariantSplits, GrowWithLengthUpToABound) {
  EXPECT_EQ(invariant_num_splits(0), 1);
  EXPECT_EQ(invariant_num_splits(kInvariantSplitKeys * 2 - 1), 1);
  EXPECT_EQ(invariant_num_splits(kInvariantSplitKeys * 2), 2);
  EXPECT_EQ(invariant_num_splits(1 << 30), kInvariantMaxSplits);
}

}  // namespace
}  // namespace mla::schedule

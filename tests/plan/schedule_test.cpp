// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

namespace mla::plan {
namespace {

std::vector<Unit> ragged_units(uint32_t seed, int32_t count, int32_t longest) {
  std::mt19937 random(seed);
  std::vector<Unit> units;
  for (int32_t i = 0; i < count; ++i) {
    const auto keys = static_cast<int32_t>(random() % static_cast<uint32_t>(longest + 1));
    const auto rows = static_cast<int32_t>(1 + random() % 128);
    units.push_back({.request = i, .head = 0, .row_begin = 0, .row_count = rows, .num_keys = keys});
  }
  return units;
}

/// Every key of every unit in exactly one task; splits numbered in key order; partial slots disjoint.
void expect_complete(const std::vector<Unit>& units, const Schedule& schedule) {
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<Task>> by_unit;
  for (const Task& task : schedule.tasks) by_unit[{task.request, task.head, task.row_begin}].push_back(task);
  ASSERT_EQ(by_unit.size(), units.size());
  std::vector<int> slot_uses(static_cast<size_t>(schedule.num_partials), 0);
  for (const Unit& unit : units) {
    auto& tasks = by_unit[{unit.request, unit.head, unit.row_begin}];
    std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.split_idx < b.split_idx; });
    int32_t next_key = 0;
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Task& task = tasks[i];
      EXPECT_EQ(task.split_idx, static_cast<int32_t>(i));
      EXPECT_EQ(task.num_splits, static_cast<int32_t>(tasks.size()));
      EXPECT_EQ(task.row_count, unit.row_count);
      EXPECT_EQ(task.kv_begin, next_key);
      EXPECT_TRUE(task.kv_end > task.kv_begin || unit.num_keys == 0);
      next_key = task.kv_end;
      if (task.num_splits == 1) {
        EXPECT_EQ(task.partial_slot, -1);
      } else {
        ASSERT_GE(task.partial_slot, 0);
        ASSERT_LT(task.partial_slot + task.split_idx, schedule.num_partials);
        ++slot_uses[static_cast<size_t>(task.partial_slot + task.split_idx)];
      }
    }
    EXPECT_EQ(next_key, unit.num_keys);
  }
  for (int uses : slot_uses) EXPECT_EQ(uses, 1);
  ASSERT_FALSE(schedule.group_begin.empty());
  EXPECT_EQ(schedule.group_begin.front(), 0);
  EXPECT_EQ(schedule.group_begin.back(), static_cast<int32_t>(schedule.tasks.size()));
  EXPECT_TRUE(std::is_sorted(schedule.group_begin.begin(), schedule.group_begin.end()));
}

TEST(Schedule, CoversEveryKeyOnceWhateverTheBatch) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const auto units = ragged_units(seed, 1 + static_cast<int32_t>(seed % 40), seed % 3 == 0 ? 50 : 40000);
    for (bool invariant : {false, true}) {
      const SplitOptions options{.num_workers = 1 + static_cast<int32_t>(seed % 9), .key_block = 96,
                                 .batch_invariant = invariant};
      const Schedule schedule = make_schedule(units, options);
      expect_complete(units, schedule);
      if (!invariant) {
        EXPECT_LE(schedule.num_partials, kMaxPartialsPerWorker * options.num_workers);
      }
    }
  }
}

TEST(Schedule, IsDeterministic) {
  const auto units = ragged_units(7, 50, 30000);
  const SplitOptions options{.num_workers = 6, .key_block = 96};
  const Schedule a = make_schedule(units, options);
  const Schedule b = make_schedule(units, options);
  ASSERT_EQ(a.tasks.size(), b.tasks.size());
  for (size_t i = 0; i < a.tasks.size(); ++i) {
    EXPECT_EQ(a.tasks[i].request, b.tasks[i].request);
    EXPECT_EQ(a.tasks[i].kv_begin, b.tasks[i].kv_begin);
    EXPECT_EQ(a.tasks[i].partial_slot, b.tasks[i].partial_slot);
  }
  EXPECT_EQ(a.group_begin, b.group_begin);
}

TEST(Schedule, SplitsALoneLongRequestOverAllWorkers) {
  const Unit unit{.request = 0, .row_count = 16, .num_keys = 32768};
  for (int32_t workers : {2, 3, 8, 32}) {
    const Schedule schedule = make_schedule(std::span(&unit, 1), {.num_workers = workers, .key_block = 96});
    EXPECT_GE(static_cast<int32_t>(schedule.tasks.size()), workers);
    EXPECT_LE(schedule.makespan, 1.15 * schedule.total_cost / workers) << workers << " workers";
  }
}

TEST(Schedule, LeavesAnEvenBatchWhole) {
  std::vector<Unit> units;
  for (int32_t i = 0; i < 32; ++i) units.push_back({.request = i, .row_count = 128, .num_keys = 4096});
  const Schedule schedule = make_schedule(units, {.num_workers = 2, .key_block = 96});
  EXPECT_EQ(schedule.num_partials, 0);
  EXPECT_EQ(schedule.tasks.size(), units.size());
}

TEST(Schedule, KeepsRaggedBatchesBalanced) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const auto units = ragged_units(seed, 64, 16384);
    for (int32_t workers : {2, 4, 16}) {
      const Schedule schedule = make_schedule(units, {.num_workers = workers, .key_block = 96});
      EXPECT_LE(schedule.makespan, 1.1 * schedule.total_cost / workers) << "seed " << seed << ", " << workers;
    }
  }
}

TEST(Schedule, GroupsShortRequests) {
  std::vector<Unit> units;
  for (int32_t i = 0; i < 1024; ++i) units.push_back({.request = i, .row_count = 16, .num_keys = 1 + i % 7});
  const Schedule schedule = make_schedule(units, {.num_workers = 2, .key_block = 96});
  EXPECT_EQ(schedule.tasks.size(), units.size());
  EXPECT_LE(schedule.num_groups(), 130);
  EXPECT_GE(schedule.num_groups(), 64);
}

TEST(Schedule, InvariantSplitDependsOnTheUnitAlone) {
  const Unit probe{.request = 0, .row_count = 64, .num_keys = 9999};
  const auto splits_of_probe = [&](std::vector<Unit> others, int32_t workers) {
    others.insert(others.begin(), probe);
    const Schedule schedule =
        make_schedule(others, {.num_workers = workers, .key_block = 96, .batch_invariant = true});
    std::vector<std::pair<int32_t, int32_t>> ranges;
    for (const Task& task : schedule.tasks)
      if (task.request == 0) ranges.emplace_back(task.kv_begin, task.kv_end);
    std::sort(ranges.begin(), ranges.end());
    return ranges;
  };
  const auto alone = splits_of_probe({}, 1);
  EXPECT_GT(alone.size(), 1U);
  auto others = ragged_units(3, 40, 60000);
  for (Unit& unit : others) ++unit.request;
  EXPECT_EQ(splits_of_probe(others, 1), alone);
  EXPECT_EQ(splits_of_probe(others, 7), alone);
  EXPECT_EQ(splits_of_probe({}, 64), alone);
}

TEST(Schedule, NeverSplitsWhereToldNotTo) {
  const Unit unit{.request = 0, .row_count = 128, .num_keys = 100000};
  for (bool invariant : {false, true}) {
    const Schedule schedule = make_schedule(
        std::span(&unit, 1), {.num_workers = 8, .key_block = 96, .split = false, .batch_invariant = invariant});
    EXPECT_EQ(schedule.tasks.size(), 1U);
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
}  // namespace mla::plan

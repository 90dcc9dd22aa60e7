// SPDX-License-Identifier: Apache-2.0
#include "cpu/task_list.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace mla::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

TEST(TaskList, HandsEveryTaskToOneWorkerAndCanRunAgain) {
  std::vector<schedule::Sequence> sequences;
  for (int32_t i = 0; i < 300; ++i)
    sequences.push_back({.request = i, .q_len = 1, .rows_per_token = 1 + i % 20, .kv_len = 10 * i});
  const schedule::Schedule schedule = schedule::make_schedule(sequences, {.num_workers = 3, .key_block = 96});
  const TaskList::Capacity capacity{.tasks = 400, .partials = 48};
  Carver counter(nullptr);
  const TaskList counted(counter, capacity);
  std::vector<std::byte> memory(counter.used() + 64);
  std::byte* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  Carver planning(aligned);
  TaskList(planning, capacity).store(schedule, TileShape{.max_rows = 128, .key_block = 96, .d_qk = 64, .d_v = 64});

  Carver running(aligned);
  EXPECT_EQ(TaskList::stored_capacity(aligned).tasks, 400);
  const TaskList list(running, TaskList::stored_capacity(aligned));
  core::ThreadPool pool(3, {});
  for (int round = 0; round < 20; ++round) {
    std::vector<std::atomic<int>> seen(300);
    list.for_each(pool, [&](const schedule::Task& task, int32_t worker) {
      EXPECT_LT(worker, 3);
      if (task.split_idx == 0) ++seen[static_cast<size_t>(task.request)];
    });
    for (const auto& count : seen) EXPECT_EQ(count.load(), 1);
  }
}

TEST(MergeFactors, AddUpToOne) {
  float lse[] = {1.0F, 99.0F, 2.0F, 99.0F, kLowest, 99.0F};  // stride 2
  const float merged = merge_factors(lse, 2, 3);
  EXPECT_NEAR(merged, std::log2(6.0F), 1e-6);
  EXPECT_NEAR(lse[0], 2.0F / 6.0F, 1e-6);
  EXPECT_NEAR(lse[2], 4.0F / 6.0F, 1e-6);
  EXPECT_EQ(lse[4], 0.0F);
  EXPECT_EQ(lse[1], 99.0F);
}

TEST(MergeFactors, OfStatesThatSawNothingAreZero) {
  float lse[] = {kLowest, kLowest};
  EXPECT_EQ(merge_factors(lse, 1, 2), kLowest);
  EXPECT_EQ(lse[0], 0.0F);
  EXPECT_EQ(lse[1], 0.0F);
}

TEST(MergeFactors, KeepNaN) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (auto [a, b] : {std::pair{kNaN, kNaN}, std::pair{kNaN, 1.0F}, std::pair{1.0F, kNaN}, std::pair{kLowest, kNaN}}) {
    float lse[] = {a, b};
    EXPECT_TRUE(std::isnan(merge_factors(lse, 1, 2)));
    EXPECT_TRUE(std::isnan(lse[0]));
  }
}

TEST(MergeFactors, SurvivesHugeValues) {
  float lse[] = {3e38F, -3e38F};
  EXPECT_EQ(merge_factors(lse, 1, 2), 3e38F);
  EXPECT_EQ(lse[0], 1.0F);
  EXPECT_EQ(lse[1], 0.0F);
}

}  // namespace
}  // namespace mla::cpu

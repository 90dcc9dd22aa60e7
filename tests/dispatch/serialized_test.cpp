// SPDX-License-Identifier: Apache-2.0
// Tests calls on one context from several threads. Runs under the thread sanitizer too.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/problems.h"

namespace mla::test {
namespace {

constexpr int kThreads = 3, kRounds = 30;

/// Holds a decode long enough to be split over the workers, so that a run keeps counters in its workspace.
struct SplitDecode {
  static constexpr int64_t kTokens = 2048, kPage = 64;
  std::vector<uint16_t> q = std::vector<uint16_t>(16 * 576), cache = std::vector<uint16_t>(kTokens * 576),
                        o = std::vector<uint16_t>(16 * 512, kSentinel);
  std::vector<int32_t> kv_len = {kTokens}, table;
  DecodeParams params;

  SplitDecode() {
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<uint16_t>(0x3C00 + i % 200);
    for (size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<uint16_t>(0x3C00 + i % 251);
    for (int32_t page = 0; page < kTokens / kPage; ++page) table.push_back(page);
    params = {
        .q = of(q, {1, 16, 576}),
        .cache = {.kv = of(cache, {kTokens / kPage, kPage, 576})},
        .pages = {.block_table = contiguous(table.data(), DType::kI32, {1, kTokens / kPage}), .kv_len = of(kv_len)},
        .sm_scale = 0.07F,
        .o = of(o, {1, 16, 512})};
  }
};

/// Calls f(thread) on several threads at once.
template <class F>
void on_threads(const F& f) {
  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      for (waiting.fetch_sub(1); waiting.load() > 0;) std::this_thread::yield();
      f(i);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Serialized, RunsOfOnePlanOnOneContext) {
  const Context context = Context::create({.num_threads = 2, .backend = "cpu"}).value();
  SplitDecode expected;
  std::vector<std::byte> workspace(workspace_size(context, expected.params).value());
  const Plan planned = plan(context, expected.params, workspace).value();
  ASSERT_GT(planned.num_splits(), 0U);
  ASSERT_TRUE(run(context, planned, expected.params).ok());
  std::vector<int> wrong(kThreads, 0);
  on_threads([&](int thread) {
    SplitDecode mine;
    for (int round = 0; round < kRounds; ++round) {
      std::fill(mine.o.begin(), mine.o.end(), kSentinel);
      if (!run(context, planned, mine.params).ok() || mine.o != expected.o) ++wrong[static_cast<size_t>(thread)];
    }
  });
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

TEST(Serialized, PlansInOneWorkspaceWinOrAreRefused) {
  const Context context = Context::create({.num_threads = 2, .backend = "cpu"}).value();
  SplitDecode expected;
  std::vector<std::byte> workspace(workspace_size(context, expected.params).value());
  const Plan first = plan(context, expected.params, workspace).value();
  ASSERT_TRUE(run(context, first, expected.params).ok());
  std::atomic<int> wrong{0}, ran{0};
  on_threads([&](int) {
    SplitDecode mine;
    for (int round = 0; round < kRounds; ++round) {
      const Plan planned = plan(context, mine.params, workspace).value();
      std::fill(mine.o.begin(), mine.o.end(), kSentinel);
      const bool ok = run(context, planned, mine.params).ok();
      if (ok) ++ran;
      if (ok ? mine.o != expected.o : mine.o != std::vector<uint16_t>(mine.o.size(), kSentinel)) ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_GT(ran.load(), 0);
}

}  // namespace
}  // namespace mla::test

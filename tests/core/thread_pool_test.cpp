// SPDX-License-Identifier: Apache-2.0
// Tests ThreadPool. Runs under the thread sanitizer too.
#include "core/thread_pool.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "core/processors.h"
#include "problems.h"

namespace mla::core {
namespace {

std::vector<int32_t> allowed_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int32_t> processors;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int32_t i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(static_cast<size_t>(i), &set)) processors.push_back(i);
  return processors;
}

/// Returns whether it could.
bool bind_this_thread(int32_t processor) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(processor), &one);
  return sched_setaffinity(0, sizeof one, &one) == 0;
}

/// Loads OpenMP, which binds this thread, and looks where the workers of a pool may run. Exits with 0 if that is where
/// the process might run before, and with the number of what is wrong if not.
[[noreturn]] void run_beside_openmp(const char* bind) {
  const std::vector<int32_t> before = allowed_processors();
  setenv("OMP_PROC_BIND", bind, 1);
  if (dlopen("libgomp.so.1", RTLD_NOW) == nullptr) std::exit(1);
  if (allowed_processors().size() != 1) std::exit(2);
  if (usable_processors() != before) std::exit(3);
  std::vector<int32_t> of_worker;
  ThreadPool(2, {}).run([&](int32_t worker) {
    if (worker == 1) of_worker = allowed_processors();
  });
  if (of_worker != before) std::exit(4);
  ThreadPool(2, std::vector<int32_t>{before[0], before[1]}).run([&](int32_t worker) {
    if (worker == 1) of_worker = allowed_processors();
  });
  if (of_worker != std::vector<int32_t>{before[1]}) std::exit(5);
  bind_this_thread(before.back());  // the program's own will, not OpenMP's
  std::exit(usable_processors() == std::vector<int32_t>{before.back()} ? 0 : 6);
}

TEST(ThreadPool, WorkersUseAllProcessorsThoughOpenMPBoundTheCaller) {
  if (allowed_processors().size() < 2) GTEST_SKIP() << "one processor";
  for (const char* bind : {"true", "close", "spread"})
    EXPECT_EXIT(run_beside_openmp(bind), testing::ExitedWithCode(0), "") << bind;
}

TEST(ThreadPool, UsableProcessorsAreTheThreads) {
  const std::vector<int32_t> all = allowed_processors();
  EXPECT_EQ(usable_processors(), all);
  std::vector<int32_t> of_bound;
  std::thread([&] {  // a thread that somebody else binds stays bound
    ASSERT_TRUE(bind_this_thread(all.back()));
    of_bound = usable_processors();
  })
      .join();
  EXPECT_EQ(of_bound, std::vector<int32_t>{all.back()});
}

TEST(ThreadPool, CallsEveryWorkerOnce) {
  for (int32_t size : {1, 2, 3, 8}) {
    ThreadPool pool(size, {});
    EXPECT_EQ(pool.size(), size);
    std::vector<int> calls(static_cast<size_t>(size), 0);  // plain ints: each worker owns one
    for (int round = 0; round < 200; ++round) pool.run([&](int32_t worker) { ++calls[static_cast<size_t>(worker)]; });
    for (int count : calls) EXPECT_EQ(count, 200);
  }
}

TEST(ThreadPool, TheCallerIsWorkerZero) {
  ThreadPool pool(3, {});
  std::vector<std::thread::id> ids(3);
  pool.run([&](int32_t worker) { ids[static_cast<size_t>(worker)] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_NE(ids[1], ids[0]);
  EXPECT_NE(ids[2], ids[1]);
}

TEST(ThreadPool, LimitsWorkersWhenAsked) {
  ThreadPool pool(4, {});
  for (int32_t limit : {-1, 0, 1, 2, 3, 4, 5}) {
    std::vector<int> calls(4, 0);
    pool.run([&](int32_t worker) { ++calls[static_cast<size_t>(worker)]; }, limit);
    const int32_t expected = std::clamp(limit, 1, 4);
    for (int32_t worker = 0; worker < 4; ++worker)
      EXPECT_EQ(calls[static_cast<size_t>(worker)], worker < expected ? 1 : 0) << limit;
  }
}

TEST(ThreadPool, SeesWhatTheCallerWroteAndTheOtherWayRound) {
  ThreadPool pool(4, {});
  std::vector<int64_t> values(4, 0);
  int64_t input = 0;
  for (int64_t round = 1; round <= 500; ++round) {
    input = round;
    pool.run([&](int32_t worker) { values[static_cast<size_t>(worker)] = input * (worker + 1); });
    for (int64_t worker = 0; worker < 4; ++worker) ASSERT_EQ(values[static_cast<size_t>(worker)], round * (worker + 1));
  }
}

TEST(ThreadPool, WakesSleepingWorkersAndWaitsForSlowOnes) {
  ThreadPool pool(3, {});
  std::atomic<int> calls{0};
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than the workers spin
    pool.run([&](int32_t worker) {
      if (worker != 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      calls.fetch_add(1, std::memory_order_relaxed);
    });
    EXPECT_EQ(calls.load(), 3 * (round + 1));
  }
}

TEST(ThreadPool, SerializesCallers) {
  ThreadPool pool(3, {});
  int64_t unguarded = 0;  // only worker 0 of one call at a time touches it
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round)
        pool.run([&](int32_t worker) {
          if (worker == 0) ++unguarded;
        });
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(unguarded, 400);
}

TEST(ThreadPool, SeveralPoolsWorkAtOnce) {
  constexpr int kPools = 3;
  std::vector<int64_t> sums(kPools, 0);
  std::vector<std::thread> owners;
  for (int p = 0; p < kPools; ++p)
    owners.emplace_back([&sums, p] {
      ThreadPool pool(3, {});
      std::vector<int64_t> parts(3, 0);
      for (int round = 0; round < 200; ++round)
        pool.run([&](int32_t worker) { parts[static_cast<size_t>(worker)] += round; });
      sums[static_cast<size_t>(p)] = parts[0] + parts[1] + parts[2];
    });
  for (std::thread& owner : owners) owner.join();
  for (int64_t sum : sums) EXPECT_EQ(sum, 3 * 199 * 200 / 2);
}

TEST(ThreadPool, StartsAndStopsQuietly) {
  for (int round = 0; round < 50; ++round) ThreadPool pool(4, {});
}

TEST(ThreadPool, PinsWorkersButNotTheCaller) {
  const std::vector<int32_t> processors = allowed_processors();
  ASSERT_FALSE(processors.empty());
  const int32_t target = processors.back();
  ThreadPool pool(2, std::vector<int32_t>{-1, target});
  std::vector<int32_t> processor(2, -1);
  pool.run([&](int32_t worker) { processor[static_cast<size_t>(worker)] = sched_getcpu(); });
  EXPECT_EQ(processor[1], target);
  EXPECT_EQ(allowed_processors(), processors);
}

TEST(ThreadPool, UnpinnedWorkersKeepOffTheCallersProcessorAndStayFree) {
  const std::vector<int32_t> processors = allowed_processors();
  if (processors.size() < 2) GTEST_SKIP() << "one processor";
  ThreadPool pool(2, {});
  int together = 0;
  std::vector<int32_t> workers_processors;
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int32_t own = sched_getcpu();
    pool.run([&](int32_t worker) {
      if (worker == 0) return;
      together += sched_getcpu() == own ? 1 : 0;
      workers_processors = allowed_processors();
    });
  }
  EXPECT_LT(together, 10);  // others may move the caller meanwhile
  EXPECT_EQ(workers_processors, processors);
}

TEST(ThreadPool, NamesTheProcessorItCannotPinTo) {
  for (int32_t wrong : {-1, CPU_SETSIZE - 1, CPU_SETSIZE, INT32_MAX}) {
    try {
      ThreadPool pool(3, std::vector<int32_t>{0, allowed_processors()[0], wrong});
      ADD_FAILURE() << "pinned to processor " << wrong;
    } catch (const PinningError& error) {
      EXPECT_EQ(error.processor, wrong);
      EXPECT_EQ(error.worker, 2);
    }
  }
}

TEST(Contexts, RunConcurrentlyWithTheSameResult) {
  constexpr int kContexts = 3;
  std::vector<std::vector<uint16_t>> outputs(kContexts);
  std::vector<std::thread> users;
  for (int c = 0; c < kContexts; ++c)
    users.emplace_back([&outputs, c] {
      test::Decode p;
      for (size_t i = 0; i < p.q.size(); ++i) p.q[i] = static_cast<uint16_t>(0x3F00 + i);
      for (size_t i = 0; i < p.cache.data.size(); ++i) p.cache.data[i] = static_cast<uint16_t>(0x3E00 + i % 64);
      const Context context = Context::create({.num_threads = 2, .affinity = {}, .backend = {}}).value();
      std::vector<std::byte> workspace(workspace_size(context, p.params).value());
      const Plan planned = plan(context, p.params, workspace).value();
      for (int round = 0; round < 20; ++round) EXPECT_EQ(run(context, planned, p.params).message(), "");
      outputs[static_cast<size_t>(c)] = p.o;
    });
  for (std::thread& user : users) user.join();
  EXPECT_NE(outputs[0][0], test::kSentinel);
  for (const auto& output : outputs) EXPECT_EQ(output, outputs[0]);
}

}  // namespace
}  // namespace mla::core

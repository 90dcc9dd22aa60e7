// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/ceilings.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>

#include "mla/bench/gpu.h"
#include "mla/mla.h"

namespace mla::bench {
namespace {

TEST(Team, RunsEveryWorkerOnceAndMeetsAtBarriers) {
  for (int32_t threads : {1, 2, 5}) {
    Team team(threads);
    ASSERT_EQ(team.size(), threads);
    for (int repetition = 0; repetition < 50; ++repetition) {
      std::atomic<int32_t> before{0}, wrong{0};
      std::vector<int32_t> calls(static_cast<size_t>(threads), 0);
      team.run([&](int32_t worker) {
        ++calls[static_cast<size_t>(worker)];
        ++before;
        team.barrier();
        if (before != threads) ++wrong;
        team.barrier();
      });
      EXPECT_EQ(wrong, 0);
      EXPECT_EQ(calls, std::vector<int32_t>(static_cast<size_t>(threads), 1));
    }
  }
}

TEST(CeilingMeter, EveryCeilingIsPlausible) {
  CeilingMeter meter(2);
  for (Ceiling ceiling : kAllCeilings) {
    EXPECT_GT(meter.sample(ceiling, 0.002), 0.01) << name(ceiling);
    EXPECT_LT(meter.median(ceiling), 1e6) << name(ceiling);
  }
}

// Threads in turns on one processor do no more than one thread.
TEST(Ceilings, ThreadsInTurnsAreNotFaster) {
  const auto chunk = [](int start, int end) {
    using Time = std::chrono::steady_clock::time_point;
    return Chunk{.start = Time(std::chrono::seconds(start)), .end = Time(std::chrono::seconds(end)), .work = 6};
  };
  EXPECT_DOUBLE_EQ(rate_of({chunk(5, 7)}), 3);
  EXPECT_DOUBLE_EQ(rate_of({chunk(5, 7), chunk(5, 7)}), 6);
  EXPECT_DOUBLE_EQ(rate_of({chunk(7, 9), chunk(5, 7)}), 3);
  EXPECT_DOUBLE_EQ(rate_of({chunk(6, 7), chunk(5, 9), chunk(7, 8)}), 4.5);
}

TEST(CeilingMeter, CopiesEveryByte) {
  CeilingMeter meter(3);
  for (size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}, size_t{100001}}) {
    std::vector<char> source(bytes), destination(bytes + 1, 'x');
    for (size_t i = 0; i < bytes; ++i) source[i] = static_cast<char>(i * 31 + 1);
    const std::vector<double> seconds = meter.copy_seconds(destination.data(), source.data(), bytes, 4);
    EXPECT_EQ(seconds.size(), 4U);
    EXPECT_EQ(std::memcmp(destination.data(), source.data(), bytes), 0);
    EXPECT_EQ(destination.back(), 'x');
  }
}

TEST(CeilingKernels, CountTheirFlops) {
  const CeilingKernels& kernels = ceiling_kernels();
  for (auto* kernel : {kernels.bf16, kernels.f32, kernels.f32_avx2}) {
    EXPECT_GT(kernel(10), 0.0);
    EXPECT_DOUBLE_EQ(kernel(30), 3 * kernel(10));
  }
}

TEST(GpuCeilings, KnowWhereE4M3IsConverted) {
  for (const int32_t arch : {90, 100, 103, 110}) EXPECT_TRUE(converts_e4m3(arch)) << arch;
  for (const int32_t arch : {89, 120, 121}) EXPECT_FALSE(converts_e4m3(arch)) << arch;
  for (const int32_t arch : machine_info().emulated_archs) {
    const Result<Gpu> gpu = Gpu::open("emulated:sm" + std::to_string(arch));
    ASSERT_TRUE(gpu.ok()) << gpu.status().message();
    EXPECT_EQ(converts_e4m3(*gpu), converts_e4m3(arch)) << arch;
  }
}

TEST(Statistics, MedianAndQuantiles) {
  EXPECT_EQ(median_of({}), 0.0);
  EXPECT_EQ(median_of({3, 1, 2}), 2.0);
  EXPECT_EQ(median_of({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(quantile_of({}, 0.1), 0.0);
  std::vector<double> values;
  for (int i = 99; i >= 0; --i) values.push_back(i);
  EXPECT_EQ(quantile_of(values, 0.1), 10.0);
  EXPECT_EQ(quantile_of(values, 0.9), 90.0);
  EXPECT_EQ(quantile_of(values, 1.0), 99.0);
}

TEST(Buffer, IsZeroedAndMoves) {
  Buffer buffer(1 << 16, true);
  EXPECT_EQ(buffer.as<uint64_t>()[100], 0U);
  std::byte* data = buffer.data();
  const Buffer moved = std::move(buffer);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size(), size_t{1} << 16);
  EXPECT_GE(available_memory(), 0);
}

}  // namespace
}  // namespace mla::bench

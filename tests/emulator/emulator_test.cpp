// SPDX-License-Identifier: Apache-2.0
// Tests what the emulator promises: every thread of every block runs once, orders follow the seed, copies land late,
// and faults are told in words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include "emulator/harness.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

using emulator::run_kernel;
using testing::HasSubstr;
using testing::StartsWith;

struct Pointers {
  int32_t* a = nullptr;
  float* f = nullptr;
  int32_t n = 0;
};

/// Makes a kernel of a function.
template <void (*kFunction)(const Pointers&), int kNumThreads = 64>
struct Kernel {
  using Params = Pointers;
  static constexpr const char* kName = "kernel";
  static constexpr int kThreads = kNumThreads;
  static void run(const Params& params) { kFunction(params); }
};

template <void (*kFunction)(const Pointers&), int kNumThreads = 64>
Status run_function(const Pointers& params, const emulator::Shape& shape = {}, uint64_t seed = 1,
                    emulator::Counters* counters = nullptr) {
  return run_kernel<Kernel<kFunction, kNumThreads>>(params, shape, seed, counters);
}

template <void (*kFunction)(const Pointers&), int kNumThreads = 64>
std::string fault_of(int32_t shared_bytes = 1024) {
  for (uint64_t seed = 0; seed + 1 < emulator::kSeeds; ++seed) {
    const Status status = run_function<kFunction, kNumThreads>({}, {.shared_bytes = shared_bytes}, seed);
    EXPECT_FALSE(status.ok()) << "seed " << seed;
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_THAT(status.message(), StartsWith("kernel: "));
  }
  return run_function<kFunction, kNumThreads>({}, {.shared_bytes = shared_bytes}, emulator::kSeeds).message();
}

ptx::SharedAddress shared_base() { return ptx::shared_address(ptx::shared_memory()); }

void count_visits(const Pointers& p) {
  const int block =
      (ptx::block_index_z() * ptx::grid_size_y() + ptx::block_index_y()) * ptx::grid_size_x() + ptx::block_index_x();
  ptx::atomic_add(p.a + block * 64 + ptx::thread_index(), 1);
}

TEST(Emulator, RunsEveryThreadOfEveryBlockOnce) {
  for (const auto& [x, y, z] :
       {std::array{1, 1, 1}, std::array{7, 3, 2}, std::array{1000, 1, 1}, std::array{1, 2, 30}}) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      std::vector<int32_t> visits(static_cast<size_t>(x * y * z) * 64);
      emulator::Counters counters;
      const Status status = run_function<count_visits>({visits.data()}, {x, y, z}, seed, &counters);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_THAT(visits, testing::Each(1));
      EXPECT_EQ(counters.blocks, x * y * z);
    }
  }
}

TEST(Emulator, AnEmptyGridIsNoLaunch) {
  EXPECT_TRUE(run_function<count_visits>({}, {0, 1, 1}).ok());
  EXPECT_TRUE(run_function<count_visits>({}, {1, 0, 1}).ok());
}

void record_order(const Pointers& p) {
  if (ptx::thread_index() == p.n) p.a[1 + ptx::atomic_add(p.a, 1)] = ptx::block_index_x();
}

TEST(Emulator, OrderOfBlocksFollowsTheSeed) {
  core::ThreadPool one(1, {});
  std::set<std::vector<int32_t>> orders;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::vector<int32_t> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      std::vector<int32_t> order(1 + 50);
      const Pointers params{order.data()};
      const Status status = emulator::run({.entry = &kernel_entry<Kernel<record_order>>,
                                           .params = &params,
                                           .grid_x = 50,
                                           .shared_limit = 0,
                                           .seed = seed},
                                          one);
      ASSERT_TRUE(status.ok()) << status.message();
      if (repeat == 0) first = order;
      EXPECT_EQ(order, first);
    }
    orders.insert(first);
  }
  EXPECT_GT(orders.size(), 6U);
}

void record_threads(const Pointers& p) { p.a[1 + ptx::atomic_add(p.a, 1)] = ptx::thread_index(); }

TEST(Emulator, OrderOfThreadsFollowsTheSeed) {
  std::set<std::vector<int32_t>> orders;
  for (uint64_t seed = 0; seed < 16; ++seed) {
    std::vector<int32_t> order(1 + 64);
    ASSERT_TRUE(run_function<record_threads>({order.data()}, {}, seed).ok());
    orders.insert(order);
    std::sort(order.begin() + 1, order.end());
    for (int i = 0; i < 64; ++i) EXPECT_EQ(order[static_cast<size_t>(i) + 1], i);
  }
  EXPECT_GT(orders.size(), 12U);
}

void read_untouched(const Pointers& p) {
  const auto* const shared = reinterpret_cast<const float*>(ptx::shared_memory());
  p.f[ptx::block_index_x() * 64 + ptx::thread_index()] = shared[ptx::thread_index()];
  ptx::sync_block();
  ptx::store_shared(shared_base() + static_cast<uint32_t>(ptx::thread_index()) * 4, 1.0F);  // for the block to come
}

TEST(Emulator, SharedMemoryStartsAsNan) {
  std::vector<float> out(20 * 64);
  ASSERT_TRUE(run_function<read_untouched>({nullptr, out.data()}, {.grid_x = 20, .shared_bytes = 256}).ok());
  for (const float value : out) EXPECT_TRUE(std::isnan(value));
}

void read_registers_without_value(const Pointers& p) {
  float sums[4];
  const uint32_t zeros[4] = {};
  ptx::mma_bf16(sums, zeros, 0, 0);
  for (int i = 0; i < 4; ++i) p.f[ptx::thread_index() * 4 + i] = sums[i];
}

/// Expects what compilers put into such registers: GCC fills them with -1.7e38, clang with NaN.
TEST(Emulator, RegistersStartAsLargeNumbersOrNan) {
  std::vector<float> out(32 * 4);
  ASSERT_TRUE((run_function<read_registers_without_value, 32>({nullptr, out.data()}).ok()));
  for (const float value : out) EXPECT_FALSE(std::abs(value) < 1e38F) << value;
}

void copy_and_overwrite_source(const Pointers& p) {
  if (ptx::thread_index() != 0) return;
  ptx::cp_async_16(shared_base(), p.f, true);
  ptx::cp_async_commit();
  ptx::cp_async_16(shared_base() + 16, p.f + 4, false);
  ptx::cp_async_commit();
  ptx::cp_async_16(shared_base() + 32, p.f + 4, true);  // never committed
  p.f[0] = 5;
  ptx::cp_async_wait<1>();
  p.f[8] = ptx::load_shared<float>(shared_base());
  p.f[9] = ptx::load_shared<float>(shared_base() + 16);
  ptx::cp_async_wait<0>();
  p.f[10] = ptx::load_shared<float>(shared_base() + 16);
  p.f[11] = ptx::load_shared<float>(shared_base() + 32);
}

TEST(Emulator, CopiesLandAsLateAsTheirGroupAllows) {
  std::vector<float> memory(12, 1);
  ASSERT_TRUE(run_function<copy_and_overwrite_source>({nullptr, memory.data()}, {.shared_bytes = 64}).ok());
  EXPECT_EQ(memory[8], 5) << "the source is read when the copy lands";
  EXPECT_TRUE(std::isnan(memory[9]));
  EXPECT_EQ(memory[10], 0) << "invalid sources give zeros";
  EXPECT_TRUE(std::isnan(memory[11])) << "a copy of no group never lands";
}

void all_kinds_of_work(const Pointers&) {
  float c[4] = {};
  const uint32_t a[4] = {};
  uint32_t r[4];
  ptx::mma_f16(c, a, 0, 0);
  ptx::ldmatrix_x4(r, shared_base() + static_cast<uint32_t>(ptx::lane()) * 16);
  ptx::shuffle_xor(1, 1);
  ptx::ballot(true);
  ptx::sync_block();
  ptx::cp_async_8(shared_base() + static_cast<uint32_t>(ptx::thread_index()) * 8, c, false);
}

TEST(Emulator, CountsWorkByWarp) {
  emulator::Counters counters;
  ASSERT_TRUE(run_function<all_kinds_of_work>({}, {.grid_x = 3, .shared_bytes = 512}, 1, &counters).ok());
  EXPECT_EQ(counters.mma, 6);
  EXPECT_EQ(counters.ldmatrix, 6);
  EXPECT_EQ(counters.shuffles, 12);
  EXPECT_EQ(counters.barriers, 6);
  EXPECT_EQ(counters.async_copy_bytes, 0);
}

void count_around_wait(const Pointers& p) {
  ptx::atomic_add(p.a, 1);
  ptx::sync_block();
  ptx::prefetch_l2(p.a);
  ptx::wait_for_previous_grid();
  ptx::sync_block();
  ptx::atomic_add(p.a, 1000);
}

TEST(Emulator, ThreadsEndWhereThePreviousGridDoesNot) {
  for (const bool ends : {true, false}) {
    int32_t count = 0;
    emulator::Counters counters;
    const Pointers pointers = {&count, nullptr};
    const Status status = emulator::run({.entry = &kernel_entry<Kernel<count_around_wait>>,
                                         .params = &pointers,
                                         .grid_x = 20,
                                         .threads = Kernel<count_around_wait>::kThreads,
                                         .shared_limit = kSharedBytesPerBlock,
                                         .previous_grid_ends = ends,
                                         .counters = &counters},
                                        emulator::pool());
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(count, 20 * 64 * (ends || !kHasGridDependencies ? 1001 : 1));
    EXPECT_EQ(counters.prefetches, 20 * 64);
    EXPECT_EQ(counters.blocks, 20);
  }
}

void add_up(const Pointers& p) {
  ptx::atomic_add(p.a, 1);
  ptx::atomic_add(p.f, 0.5F);
}

/// Each thread hands its number to the one of the next block of the cluster, again and again.
void hand_round(const Pointers& p) {
  constexpr int kThreads = 64, kRounds = 9;
  const auto thread = static_cast<uint32_t>(ptx::thread_index());
  const ptx::SharedAddress base = shared_base(), mine = base + kThreads * 4, landed = mine + kThreads * 16;
  const int next = (ptx::cluster_rank() + 1) % p.n;
  if (thread == 0) {
    ptx::mbarrier_init(base, 1);             // all of a round has landed
    ptx::mbarrier_init(base + 8, kThreads);  // the next block has room
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  ptx::sync_cluster();
  uint32_t value = static_cast<uint32_t>(ptx::block_index_x());
  for (uint32_t round = 0; round < kRounds; ++round) {
    if (thread == 0) ptx::mbarrier_arrive_expect_bytes(base, kThreads * 16);
    if (round > 0) ptx::mbarrier_wait(base + 8, (round - 1) % 2);
    ptx::store_shared(mine + thread * 16, ptx::Vec4{{value, thread, round, 7}});
    ptx::fence_async_proxy();
    ptx::sync_block();
    if (thread == 0) {
      const ptx::SharedAddress to = ptx::map_shared(landed, next);
      ptx::bulk_copy_in_cluster(to, mine, kThreads * 16, ptx::map_shared(base, next));
    }
    ptx::mbarrier_wait(base, round % 2);
    const auto got = ptx::load_shared<ptx::Vec4>(landed + (thread ^ 33) * 16);
    ptx::mbarrier_arrive_in_cluster(ptx::map_shared(base + 8, (ptx::cluster_rank() + p.n - 1) % p.n));
    value = got.x[1] == (thread ^ 33) && got.x[2] == round ? got.x[0] : 1000;
  }
  p.a[ptx::block_index_x() * kThreads + static_cast<int>(thread)] = static_cast<int32_t>(value);
  ptx::sync_cluster();
}

TEST(Emulator, BlocksOfAClusterReachEachOther) {
  for (const int32_t cluster : {1, 2, 3, 8}) {
    for (uint64_t seed = 0; seed < emulator::kSeeds; ++seed) {
      constexpr int kBlocks = 24, kThreads = 64, kRounds = 9;
      std::vector<int32_t> values(size_t{kBlocks} * kThreads, -1);
      const Status status = run_function<hand_round>(
          {.a = values.data(), .n = cluster}, {.grid_x = kBlocks, .cluster = cluster, .shared_bytes = 4096}, seed);
      ASSERT_TRUE(status.ok()) << status.message();
      for (int32_t i = 0; i < kBlocks * kThreads; ++i) {
        const int32_t block = i / kThreads, first = block / cluster * cluster;
        ASSERT_EQ(values[static_cast<size_t>(i)], first + (block - first + kRounds * (cluster - 1)) % cluster)
            << "cluster " << cluster << ", seed " << seed << ", thread " << i;
      }
    }
  }
}

TEST(Emulator, AtomicsHoldAcrossBlocks) {
  int32_t count = 0;
  float sum = 0;
  ASSERT_TRUE(run_function<add_up>({&count, &sum}, {.grid_x = 500}).ok());
  EXPECT_EQ(count, 500 * 64);
  EXPECT_EQ(sum, 500 * 32);
}

// ---- Launches that no target grants ------------------------------------------------------------------------------

TEST(Launch, SharedMemoryBeyondTheLimit) {
  const Status status = run_function<count_visits>({}, {.shared_bytes = kSharedBytesPerBlock + 16});
  EXPECT_EQ(status.message(), "kernel: shared memory: expected at most the target's 232448 bytes, got 232464");
}

TEST(Launch, ThreadsThatAreNoWarps) {
  EXPECT_THAT((run_function<count_visits, 48>({})).message(), HasSubstr("threads: expected a multiple of 32"));
  EXPECT_THAT((run_function<count_visits, 1056>({})).message(), HasSubstr("at most 1024, got 1056"));
}

TEST(Launch, ClusterThatDoesNotDivideTheGrid) {
  for (const int32_t cluster : {0, 3, 16})
    EXPECT_THAT(
        run_function<count_visits>({}, {.grid_x = 32, .cluster = cluster}).message(),
        HasSubstr("cluster: expected 1 to 8 blocks, a divisor of the grid's 32, got " + std::to_string(cluster)));
}
TEST(Launch, GridBeyondTheLimit) {
  EXPECT_THAT(run_function<count_visits>({}, {1, 65536, 1}).message(), HasSubstr("at most 65535 blocks in y and z"));
}

// ---- Faults of kernels -------------------------------------------------------------------------------------------

void half_a_block_at_a_barrier(const Pointers&) {
  if (ptx::warp() == 0) ptx::sync_block();
}
void half_a_warp_at_a_barrier(const Pointers&) {
  if (ptx::lane() < 16) ptx::sync_block();
}
void two_collectives(const Pointers&) {
  float c[4] = {};
  const uint32_t a[4] = {};
  if (ptx::lane() % 2 == 0) {
    ptx::sync_warp();
  } else {
    ptx::mma_bf16(c, a, 0, 0);
  }
}
void two_places(const Pointers&) {
  // NOLINTNEXTLINE(bugprone-branch-clone): that there are two is the point
  if (ptx::lane() == 3) {
    ptx::sync_warp();
  } else {
    ptx::sync_warp();
  }
}
void returned_lanes(const Pointers&) {
  if (ptx::lane() < 3) return;
  ptx::ballot(true);
}

TEST(Faults, DeadlockTellsWhoWaitsWhere) {
  const std::string text = fault_of<half_a_block_at_a_barrier>();
  EXPECT_THAT(text, StartsWith("kernel: block (0, 0, 0): deadlock: threads 0-31 waited at bar.sync 0 for 64 threads, "
                               "of which 32 came (emulator_test.cpp:"));
  EXPECT_THAT(text, HasSubstr("; threads 32-63 had ended"));
}

TEST(Faults, DivergenceTellsWhichLanes) {
  EXPECT_THAT(fault_of<half_a_warp_at_a_barrier>(), HasSubstr("the threads of a warp diverged"));
  EXPECT_THAT((fault_of<two_collectives, 32>()), HasSubstr("waited at bar.warp.sync"));
  EXPECT_THAT((fault_of<two_collectives, 32>()), HasSubstr("threads 1, 3, 5, 7"));
  EXPECT_THAT((fault_of<two_places, 32>()), HasSubstr("threads 0-2, 4-31 waited at bar.warp.sync"));
  const std::string ended = fault_of<returned_lanes, 32>();
  EXPECT_THAT(ended, HasSubstr("threads 0-2 had ended; threads 3-31 waited at vote"));
}

void beyond_shared_memory(const Pointers&) {
  ptx::load_shared<float>(shared_base() + 1024 - 252 + static_cast<uint32_t>(ptx::thread_index()) * 4);
}
void before_shared_memory(const Pointers&) { ptx::store_shared(shared_base() - 4, 1.0F); }
void across_the_end(const Pointers&) { ptx::cp_async_16(shared_base() + 1016, nullptr, false); }
void no_shared_address(const Pointers&) { ptx::store_shared(0, 1.0F); }
void matrix_row_outside(const Pointers&) {
  uint32_t r[4];
  ptx::ldmatrix_x4(r, shared_base() + static_cast<uint32_t>(ptx::thread_index()) * 32);
}
void foreign_pointer(const Pointers&) {
  const int local = 0;
  ptx::shared_address(&local);
}

TEST(Faults, SharedAccessOutOfRange) {
  EXPECT_THAT(fault_of<beyond_shared_memory>(), HasSubstr("thread 63: access to 4 bytes at offset 1024 of 1024 bytes"));
  EXPECT_THAT(fault_of<before_shared_memory>(), HasSubstr("at offset -4 of"));
  EXPECT_THAT(fault_of<across_the_end>(), HasSubstr("expected a multiple of 16"));
  EXPECT_THAT(fault_of<no_shared_address>(), HasSubstr("at offset -1024 of"));
  EXPECT_THAT(fault_of<matrix_row_outside>(), HasSubstr("access to 16 bytes at offset"));
  EXPECT_THAT(fault_of<foreign_pointer>(), HasSubstr("shared_address of a pointer"));
}

alignas(16) std::array<float, 8> global_memory;

void misaligned_shared(const Pointers&) { ptx::load_shared<ptx::Vec4>(shared_base() + 8); }
void misaligned_source(const Pointers&) { ptx::cp_async_16(shared_base(), &global_memory[1], true); }
void misaligned_global(const Pointers&) {
  ptx::load_global(reinterpret_cast<const ptx::Vec4*>(static_cast<const void*>(&global_memory[1])));
}

TEST(Faults, Misalignment) {
  EXPECT_THAT(fault_of<misaligned_shared>(), HasSubstr("shared address 1032: expected a multiple of 16"));
  EXPECT_THAT(fault_of<misaligned_source>(), HasSubstr("expected a multiple of 16"));
  EXPECT_THAT(fault_of<misaligned_global>(), HasSubstr("expected a multiple of 16"));
}

void barrier_sixteen(const Pointers&) { ptx::sync_threads(16, 64); }
void barrier_of_half_warps(const Pointers&) { ptx::sync_threads(1, 48); }
void barrier_beyond_the_block(const Pointers&) { ptx::sync_threads(1, 96); }
void arrives_twice(const Pointers&) {
  if (ptx::warp() == 1) return;
  ptx::arrive_threads(1, 64);
  ptx::arrive_threads(1, 64);
}
void lanes_at_different_barriers(const Pointers&) { ptx::sync_threads(1 + ptx::lane() % 2, 64); }

TEST(Faults, NamedBarriers) {
  EXPECT_THAT(fault_of<barrier_sixteen>(), HasSubstr("barrier 16: a block has barriers 0 to 15"));
  EXPECT_THAT(fault_of<barrier_of_half_warps>(), HasSubstr("barrier 1 for 48 threads: expected a multiple of 32"));
  EXPECT_THAT(fault_of<barrier_beyond_the_block>(), HasSubstr("at most the block's 64"));
  EXPECT_THAT(fault_of<arrives_twice>(), HasSubstr("barrier 1: a warp came to it twice"));
  EXPECT_THAT(fault_of<lanes_at_different_barriers>(), HasSubstr("came to barriers 1 and 2"));
}

void uninitialized_mbarrier(const Pointers&) { ptx::mbarrier_wait(shared_base(), 0); }
void overwritten_mbarrier(const Pointers&) {
  if (ptx::thread_index() != 0) return;
  ptx::mbarrier_init(shared_base() + 8, 1);
  ptx::store_shared(shared_base() + 12, 0);
  ptx::mbarrier_arrive(shared_base() + 8);
}
void mbarrier_without_arrivals(const Pointers&) {
  if (ptx::thread_index() == 0) ptx::mbarrier_init(shared_base(), 2);
  ptx::sync_block();
  if (ptx::thread_index() == 7) ptx::mbarrier_arrive_expect_bytes(shared_base(), 32);
  ptx::mbarrier_wait(shared_base(), 0);
}
void bulk_copy_that_nobody_awaits(const Pointers&) {
  if (ptx::thread_index() != 0) return;
  ptx::mbarrier_init(shared_base(), 1);
  ptx::fence_mbarrier_init();
  ptx::mbarrier_arrive_expect_bytes(shared_base(), 16);
  ptx::bulk_copy(shared_base() + 16, global_memory.data(), 16, shared_base(), ptx::kEvictFirst);
}
void copy_without_a_policy(const Pointers&) {
  ptx::cp_async_16(shared_base() + 16, global_memory.data(), true, ptx::CachePolicy{});
}
void bulk_copy_without_a_policy(const Pointers&) {
  ptx::bulk_copy(shared_base() + 16, global_memory.data(), 16, shared_base(), ptx::CachePolicy{7});
}
void bulk_copy_of_odd_size(const Pointers&) {
  ptx::bulk_copy(shared_base() + 16, global_memory.data(), 24, shared_base(), ptx::kEvictFirst);
}

/// Returns a tensor of four rows, two heads.
emulator::TensorMap tensor_map(int64_t channels) {
  return {.mark = emulator::TensorMap::kMark,
          .base = reinterpret_cast<const std::byte*>(global_memory.data()),
          .sizes = {channels, 4, 2},
          .strides = {128, 512},
          .box_rows = 8,
          .box_heads = 1};
}
template <int kChannel, int kRow, int kHead, bool kMade = true, uint32_t kTo = 1024, int kChannels = 64>
void tensor_copy_of(const Pointers&) {
  emulator::TensorMap map = tensor_map(kChannels);
  if (!kMade) map.mark = 0;
  ptx::tensor_copy(shared_base() + kTo, &map, kChannel, kRow, kHead, shared_base());
}

void arrival_that_nobody_awaits(const Pointers&) {
  if (ptx::thread_index() != 0) return;
  ptx::mbarrier_init(shared_base(), 1);
  ptx::cp_async_16(shared_base() + 16, global_memory.data(), true);
  ptx::mbarrier_arrive_after_copies(shared_base());
}

TEST(Faults, Mbarriers) {
  EXPECT_THAT(fault_of<uninitialized_mbarrier>(), HasSubstr("the mbarrier at 1024 is not initialized"));
  EXPECT_THAT(fault_of<overwritten_mbarrier>(), HasSubstr("the mbarrier at 1032 was overwritten"));
  EXPECT_THAT(fault_of<mbarrier_without_arrivals>(),
              HasSubstr("waited for the mbarrier at 1024, parity 0, which lacks 1 arrivals and 32 bytes"));
  EXPECT_THAT(fault_of<bulk_copy_that_nobody_awaits>(),
              HasSubstr("the block ended while bulk copies were on their way"));
  EXPECT_THAT(fault_of<arrival_that_nobody_awaits>(),
              HasSubstr("the block ended before all its cp.async had reported to their mbarriers"));
  EXPECT_THAT(fault_of<bulk_copy_of_odd_size>(), HasSubstr("bulk copy of 24 bytes"));
  EXPECT_THAT((fault_of<tensor_copy_of<0, 0, 0, false>>()), HasSubstr("tensor copy with a map that was never made"));
  EXPECT_THAT((fault_of<tensor_copy_of<0, 4, 0>>()), HasSubstr("tensor copy at 4 of dimension 1: expected 0 to 3"));
  EXPECT_THAT((fault_of<tensor_copy_of<0, 0, -1>>()), HasSubstr("tensor copy at -1 of dimension 2: expected 0 to 1"));
  EXPECT_THAT((fault_of<tensor_copy_of<64, 0, 0>>()), HasSubstr("tensor copy at 64 of dimension 0: expected 0 to 63"));
  EXPECT_THAT((fault_of<tensor_copy_of<0, 0, 0, true, 1024, 60>>()),
              HasSubstr("a tensor of 60 channels: expected a multiple of 8"));
  EXPECT_THAT((fault_of<tensor_copy_of<0, 0, 0, true, 128>>()), HasSubstr("tensor copy to 1152: expected a multiple"));
  EXPECT_THAT((fault_of<tensor_copy_of<0, 3, 1>>()), HasSubstr("the mbarrier at 1024 is not initialized"));
  EXPECT_THAT(fault_of<copy_without_a_policy>(), HasSubstr("cache policy 0: expected one that createpolicy makes"));
  EXPECT_THAT(fault_of<bulk_copy_without_a_policy>(), HasSubstr("cache policy 7: expected one"));
}

void wait_for_another_block(const Pointers&) {
  int flag = 0;
  while (ptx::load_acquire(&flag) == 0) {
  }
}

TEST(Faults, WaitingForAnotherBlock) {
  EXPECT_THAT((run_function<wait_for_another_block, 32>({})).message(), HasSubstr("cannot wait for each other"));
}

void throw_something(const Pointers&) { throw std::runtime_error("no kernel does this"); }

TEST(Faults, AnExceptionEndsTheLaunchOnly) {
  EXPECT_THAT(fault_of<throw_something>(), HasSubstr("the kernel threw an exception"));
}

void fault_in_one_block(const Pointers& p) {
  if (ptx::block_index_x() == p.n && ptx::thread_index() == 5) ptx::store_shared(shared_base() - 4, 1);
  ptx::sync_block();
}

TEST(Faults, NameTheBlockAndLeaveNothingBehind) {
  for (int32_t n = 0; n < 40; n += 13) {
    const Status status = run_function<fault_in_one_block>({.n = n}, {.grid_x = 40, .shared_bytes = 16});
    EXPECT_THAT(status.message(), StartsWith("kernel: block (" + std::to_string(n) + ", 0, 0): thread 5: access"));
    EXPECT_TRUE(run_function<fault_in_one_block>({.n = 40}, {.grid_x = 40, .shared_bytes = 16}).ok());
  }
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE

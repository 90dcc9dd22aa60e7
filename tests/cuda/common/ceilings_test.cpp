// SPDX-License-Identifier: Apache-2.0
// Tests that what is timed does what is counted: reads and copies every byte, multiplies every tile.
#include "cuda/common/ceilings.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "emulator/harness.h"
#include "mla/numeric.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

using emulator::run_kernel;

// Just below, at and above what all threads read in one round of 8.
constexpr int kStep = 2 * ReadCeilingKernel::kThreads;
constexpr int kCounts[] = {0, 1, kStep - 1, 8 * kStep, 8 * kStep + 1, 19 * kStep + 7};

std::vector<ptx::Vec4> even_words(int count) {
  std::vector<ptx::Vec4> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i)
    for (uint32_t w = 0; w < 4; ++w) values[i].x[w] = 2 * (static_cast<uint32_t>(i) * 4 + w + 1);
  return values;
}

TEST(ReadCeiling, SeesEveryVectorAndWritesNothing) {
  for (int count : kCounts) {
    std::vector<ptx::Vec4> values = even_words(count);
    uint32_t sink = 77;
    const ReadParams params = {.data = values.data(), .count = count, .sink = &sink};
    ASSERT_TRUE(run_kernel<ReadCeilingKernel>(params, {.grid_x = 2}, 1).ok());
    EXPECT_EQ(sink, 77U) << count;
    // An odd word anywhere shows.
    for (int at : {0, count / 2, count - 1}) {
      if (at < 0 || at >= count) continue;
      sink = 77;
      values[static_cast<size_t>(at)].x[0] |= 1U;
      ASSERT_TRUE(run_kernel<ReadCeilingKernel>(params, {.grid_x = 2}, 1).ok());
      EXPECT_NE(sink, 77U) << at << " of " << count;
      values[static_cast<size_t>(at)].x[0] &= ~1U;
    }
  }
}

TEST(CopyCeiling, CopiesEveryVectorAndNoMore) {
  for (int count : kCounts) {
    const std::vector<ptx::Vec4> from = even_words(count);
    std::vector<ptx::Vec4> to(static_cast<size_t>(count) + 1, ptx::Vec4{});
    ASSERT_TRUE(
        run_kernel<CopyCeilingKernel>({.to = to.data(), .from = from.data(), .count = count}, {.grid_x = 2}, 1).ok());
    for (int i = 0; i < count; ++i)
      for (int w = 0; w < 4; ++w)
        ASSERT_EQ(to[static_cast<size_t>(i)].x[w], from[static_cast<size_t>(i)].x[w]) << i << " of " << count;
    EXPECT_EQ(to.back().x[0], 0U);
  }
}

template <class Mma>
class MmaCeiling : public testing::Test {};
using Multiplications = testing::Types<MmaOfBf16, MmaOfE4M3<>>;
TYPED_TEST_SUITE(MmaCeiling, Multiplications);

TYPED_TEST(MmaCeiling, MultipliesAsOftenAsItCounts) {
  using Kernel = MmaCeilingKernel<TypeParam>;
  uint32_t sink = 77;
  emulator::Counters counters;
  constexpr int kRounds = 3, kBlocks = 2;
  ASSERT_TRUE(run_kernel<Kernel>({.rounds = kRounds, .sink = &sink}, {.grid_x = kBlocks}, 1, &counters).ok());
  EXPECT_EQ(sink, 77U);
  EXPECT_EQ(counters.mma, kBlocks * (Kernel::kThreads / kWarpSize) * kRounds * Kernel::kChains);
}

// Numbers of magnitudes from 1 to 2, with both signs and many mantissas: zeros and NaNs would draw another power.
TEST(RandomNumbers, HaveOneMagnitude) {
  std::set<float> bf16, e4m3;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const uint32_t two = random_numbers<MmaOfBf16>(seed), four = random_numbers<MmaOfE4M3<>>(seed);
    for (uint32_t i = 0; i < 2; ++i) bf16.insert(bf16_to_f32(static_cast<uint16_t>(two >> 16 * i)));
    for (uint32_t i = 0; i < 4; ++i) e4m3.insert(e4m3_to_f32(static_cast<uint8_t>(four >> 8 * i)));
  }
  EXPECT_GT(bf16.size(), 150U);
  EXPECT_EQ(e4m3.size(), 16U);
  for (const float value : bf16) EXPECT_TRUE(std::abs(value) >= 1.0F && std::abs(value) < 2.0F) << value;
  for (const float value : e4m3) EXPECT_TRUE(std::abs(value) >= 1.0F && std::abs(value) < 2.0F) << value;
}

TEST(WgmmaCeiling, RunsInItsSharedMemory) {
  uint32_t sink = 77;
  const Status status = run_kernel<WgmmaCeilingKernel<>>({.rounds = 1, .sink = &sink},
                                                         {.shared_bytes = WgmmaCeilingKernel<>::kSharedBytes}, 1);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(sink, 77U);
}

struct WgmmaParams {
  const uint16_t* a;  // [64, 32]
  const uint16_t* b;  // [256, 32]
  float* d;           // [64, 256]
};

/// Computes d += a b over 32 channels, in two steps; tiles lie as cores of 8 rows by 8 channels, four along k.
struct WgmmaKernel {
  using Params = WgmmaParams;
  static constexpr const char* kName = "wgmma";
  static constexpr int kThreads = 128;
  static constexpr uint32_t kCore = 128, kRows = 4 * kCore;
  static constexpr int kABytes = 64 * 64, kBBytes = 256 * 64;

  static void fill(const uint16_t* from, int rows, ptx::SharedAddress to) {
    for (int i = ptx::thread_index(); i < rows * 32; i += kThreads) {
      const int row = i / 32, k = i % 32;
      const auto core = static_cast<uint32_t>(row / 8) * kRows + static_cast<uint32_t>(k / 8) * kCore;
      ptx::store_shared(to + core + static_cast<uint32_t>(row % 8 * 16 + k % 8 * 2), from[i]);
    }
  }
  static void run(const Params& params) {
    const ptx::SharedAddress a = ptx::shared_address(ptx::shared_memory()), b = a + kABytes;
    fill(params.a, 64, a);
    fill(params.b, 256, b);
    ptx::fence_async_proxy();
    ptx::sync_block();
    float d[128] = {};
    ptx::wgmma_fence();
    for (uint32_t step = 0; step < 2; ++step)
      ptx::wgmma_bf16<256>(d, ptx::matrix_descriptor(a + 2 * step * kCore, kCore, kRows),
                           ptx::matrix_descriptor(b + 2 * step * kCore, kCore, kRows), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < 128; ++i) {
      const int row = ptx::warp() * 16 + ptx::lane() / 4 + (i % 4 < 2 ? 0 : 8);
      params.d[row * 256 + i / 4 * 8 + ptx::lane() % 4 * 2 + i % 2] = d[i];
    }
  }
};

TEST(Wgmma, MultipliesTiles) {
  std::vector<uint16_t> a(64 * 32), b(256 * 32);
  for (size_t i = 0; i < a.size(); ++i) a[i] = f32_to_bf16(static_cast<float>(static_cast<int>(i * 7 % 23) - 11));
  for (size_t i = 0; i < b.size(); ++i) b[i] = f32_to_bf16(static_cast<float>(static_cast<int>(i * 5 % 19) - 9));
  std::vector<float> d(64 * 256, -1.0F);
  const Status status = run_kernel<WgmmaKernel>({.a = a.data(), .b = b.data(), .d = d.data()},
                                                {.shared_bytes = WgmmaKernel::kABytes + WgmmaKernel::kBBytes}, 1);
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t row = 0; row < 64; ++row)
    for (size_t column = 0; column < 256; ++column) {
      float expected = 0;
      for (size_t k = 0; k < 32; ++k) expected += bf16_to_f32(a[row * 32 + k]) * bf16_to_f32(b[column * 32 + k]);
      ASSERT_EQ(d[row * 256 + column], expected) << row << ", " << column;
    }
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE

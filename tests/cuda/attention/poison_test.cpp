// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/poison.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "cuda/border/launch.h"
#include "emulator/test_queue.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

constexpr int kKeys = 32;

TEST(PoisonMarks, ResetLeavesNoKeyMarked) {
  std::array<uint8_t, PoisonMarks<kKeys>::kBytes> bytes;
  bytes.fill(0xEE);
  const PoisonMarks<kKeys> marks(bytes.data());
  for (int thread = 0; thread < 7; ++thread) marks.reset(thread, 7);
  EXPECT_FALSE(marks.any());
  EXPECT_TRUE(std::ranges::all_of(bytes, [](uint8_t byte) { return byte == 0; }));
  marks.for_each_marked([](int key) { FAIL() << key; });
}

TEST(PoisonMarks, AreSeenInTheOrderOfTheKeys) {
  std::array<uint8_t, PoisonMarks<kKeys>::kBytes> bytes = {};
  const PoisonMarks<kKeys> marks(bytes.data());
  for (const int key : {kKeys - 1, 0, 17}) marks.mark(key);
  EXPECT_TRUE(marks.any());
  std::vector<int> marked;
  marks.for_each_marked([&](int key) { marked.push_back(key); });
  EXPECT_EQ(marked, (std::vector<int>{0, 17, kKeys - 1}));
  marks.reset(0, 1);
  EXPECT_FALSE(marks.any());
}

struct Values {
  uint16_t* values;
  int32_t count;
};

/// A warp silences a row of values in shared memory.
template <DType kType>
struct SilenceKernel {
  using Params = Values;
  static constexpr const char* kName = "silence";
  static constexpr int kThreads = kWarpSize, kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& p) {
    const ptx::SharedAddress row = ptx::shared_address(ptx::shared_memory());
    for (int c = ptx::lane(); c < p.count + 1; c += kWarpSize)
      ptx::store_shared(row + static_cast<uint32_t>(c * 2), p.values[c]);
    ptx::sync_warp();
    silence_values<kType>(p.count, [&](int c) { return row + static_cast<uint32_t>(c * 2); });
    ptx::sync_warp();
    for (int c = ptx::lane(); c < p.count + 1; c += kWarpSize)
      p.values[c] = ptx::load_shared<uint16_t>(row + static_cast<uint32_t>(c * 2));
  }
};

template <DType kType>
void expect_silenced(uint16_t infinity, uint16_t nan) {
  constexpr int32_t kCount = 50;
  std::vector<uint16_t> values(kCount + 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x1234 + i);
  values[0] = values[33] = infinity;
  values[7] = values[49] = nan;
  values[12] = static_cast<uint16_t>(nan | 0x8000);
  values[kCount] = nan;  // belongs to another warp and is left alone
  std::vector<uint16_t> expected = values;
  for (const size_t i : {0, 33, 7, 49, 12}) expected[i] = 0;
  emulated_test::TestQueue queue(1);
  ASSERT_TRUE(launch<SilenceKernel<kType>>(queue, {.grid_x = 1, .shared_bytes = 256}, {values.data(), kCount}).ok());
  EXPECT_EQ(values, expected);
}

TEST(SilenceValues, ClearsWhatIsNotFinite) {
  expect_silenced<DType::kBF16>(0x7F80, 0x7FC1);
  expect_silenced<DType::kF16>(0x7C00, 0x7E01);
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE

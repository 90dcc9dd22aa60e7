// SPDX-License-Identifier: Apache-2.0
// Tests that top_k on an emulated GPU selects what the reference selects, and touches nothing else.
#include <cmath>
#include <limits>
#include <vector>

#include "cuda/common/memory.h"
#include "cuda/common/top_k.h"
#include "reference/reference.h"
#include "reference/scalar.h"
#include "trace.h"

namespace mla::indexer_test {
namespace {

using namespace mla::writers_test;  // NOLINT(google-build-using-namespace): random problems and their memory

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kKinds = 9;

float logit_of_kind(int kind, int64_t i, Random& random) {
  const auto normal = [&] {
    return static_cast<float>(random.integer(-1000, 1000) + random.integer(-1000, 1000)) * 1e-3F;
  };
  switch (kind) {
    case 0: return normal();
    case 1: return std::floor(normal() * 2.0F);                     // many ties
    case 2: return 1.0F;                                            // nothing else
    case 3: return i % 3 == 0 ? 0.0F : -0.0F;                       // one value
    case 4: return i % 5 == 0 ? std::nanf("") : -kInfinity;         // NaN lowest
    case 5: return 1.0F + static_cast<float>(i % 1000) * 0x1p-23F;  // the last bits decide
    case 6: return normal() * 1e-40F;                               // subnormal
    case 7: return i % 11 == 0 ? kInfinity : i % 7 == 0 ? -std::nanf("") : normal() * 1e30F;
    default: return i % 4 == 0 ? normal() : -5.0F;
  }
}

core::TopKArgs random_top_k(Random& random, Memory& memory, int kind, int64_t n, int32_t rows) {
  core::TopKArgs args = {.num_tokens = rows,
                         .num_logits = n,
                         .logits_dtype = random.of({DType::kF32, DType::kBF16, DType::kF16}),
                         .logits_stride_token = n + random.integer(0, 5)};
  std::vector<float> logits;
  std::vector<int32_t> lengths;
  for (int32_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < args.logits_stride_token; ++i)
      logits.push_back(i < n ? logit_of_kind(kind, i, random) : std::numeric_limits<float>::max());
    lengths.push_back(random.integer(0, static_cast<int32_t>(n) + 2));
  }
  const auto size = static_cast<int64_t>(size_of(args.logits_dtype));
  std::byte* const at = memory.bytes(std::ssize(logits) * size, size * random.integer(0, 3));
  for (int64_t i = 0; i < std::ssize(logits); ++i)
    reference::store(logits[static_cast<size_t>(i)], args.logits_dtype, i, at);
  args.logits = at;
  if (random.chance(2)) args.lengths = memory.list(lengths);
  args.k = random.of({1, 7, 64, 512, 2048, 2176, 3000});
  const int32_t block_size = random.of({1, 1, 8, 8, 3, 500});
  if (random.chance(2)) {
    const int32_t count = static_cast<int32_t>(n) / block_size + random.integer(0, 1);
    std::vector<int32_t> blocks;
    for (int64_t i = 0; i < int64_t{rows} * count; ++i) blocks.push_back(random.integer(-1, 1000000));
    args.blocks = {.blocks = memory.list(blocks), .stride_token = count, .count = count, .size = block_size};
  } else {
    args.block_size = block_size;
  }
  args.indices_stride_token = args.k + random.integer(0, 3);
  args.indices = reinterpret_cast<int32_t*>(memory.bytes(rows * args.indices_stride_token * 4, 4));
  return args;
}

TEST(CudaTopK, SelectsWhatTheReferenceSelects) {
  for (uint64_t seed = 0; seed < 54; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int64_t n = random.of({1, 15, 100, 4096, 5000, 12288, 20000, 40000});
    const auto args = random_top_k(random, memory, static_cast<int>(seed % kKinds), n, random.integer(1, 3));
    TestQueue queue(seed, random.of({4, 16}));
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::top_k(args); }, [&] { return run_top_k(args, queue); }));
  }
}

/// With one multiprocessor a row is one block's, with 16 it is divided among a cluster of 8 where there are clusters.
TEST(CudaTopK, TakesLongRows) {
  for (int kind = 0; kind < kKinds; ++kind)
    for (const int32_t block_size : {1, 8})
      for (const int32_t num_sms : {1, 16}) {
        MLA_TRACE(testing::Message() << "kind " << kind << ", block size " << block_size << ", SMs " << num_sms);
        Random random(static_cast<uint64_t>(77 + kind));
        Memory memory(random);
        core::TopKArgs args = random_top_k(random, memory, kind, 140001, 1);
        args.lengths = nullptr;
        args.blocks = {};
        args.block_size = block_size;
        TestQueue queue(1, num_sms);
        ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
            memory, [&] { reference::top_k(args); }, [&] { return run_top_k(args, queue); }));
      }
}

/// Of a short row in long storage the later blocks of a cluster have nothing.
TEST(CudaTopK, ShortRowsAmongLongOnes) {
  for (const int32_t length : {0, 1, 7, 100, 513, 5000}) {
    MLA_TRACE(testing::Message() << "length " << length);
    Random random(static_cast<uint64_t>(length));
    Memory memory(random);
    core::TopKArgs args = random_top_k(random, memory, 1, 140001, 1);
    const std::vector<int32_t> lengths = {length};
    args.lengths = memory.list(lengths);
    args.blocks = {};
    args.block_size = random.of({1, 3});
    TestQueue queue(1, 16);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::top_k(args); }, [&] { return run_top_k(args, queue); }));
  }
}

TEST(CudaTopK, NoRowsAreNoLaunch) {
  TestQueue queue(0);
  EXPECT_TRUE(run_top_k({.k = 4}, queue).ok());
}

}  // namespace
}  // namespace mla::indexer_test

// SPDX-License-Identifier: Apache-2.0
// Where GPU kernels may look. On emulated GPUs, whose memory is the host's: pages that nobody owns are protected, so
// that a read is a crash, and pages lie further than 2^32 elements apart.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "device_test.h"
#include "far_pool.h"
#include "fenced_memory.h"

namespace mla {
namespace {

/// The kit's problems on a real GPU are copied there; these bring memory of their own.
template <Op op>
class EmulatedMemory : public DeviceTest<op> {
 protected:
  void SetUp() override {
    if (!this->device().starts_with("emulated:")) GTEST_SKIP() << "host memory is not this GPU's";
    DeviceTest<op>::SetUp();
  }
};

class DecodeMemoryOnDevice : public EmulatedMemory<Op::kDecode> {};
MLA_FOR_EVERY_DEVICE(DecodeMemoryOnDevice, Op::kDecode);

TEST_P(DecodeMemoryOnDevice, PageOffsetsBeyond32Bits) {
  const FarPool pool;
  ASSERT_NE(pool.memory.data(), nullptr);
  for (int32_t heads : {16, 33}) {
    kit::DecodeSpec spec;
    spec.num_heads = heads;
    spec.kv_len = {250};
    spec.cache.poison = false;
    const kit::DecodeCase problem(fit(spec));
    MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
    const std::vector<std::byte> near = bits_of(problem.o);
    for (size_t i = 0; i < kFarPages.size(); ++i)
      std::memcpy(pool.page(kFarPages[i]),
                  problem.memory.kv.as<uint16_t>() + problem.memory.pages_of[0][i] * FarPool::kPageElements,
                  FarPool::kPageElements * 2);
    DecodeParams params = problem.params();
    params.cache.kv = pool.view();
    params.pages.kv_indices.data = const_cast<int32_t*>(kFarPages.data());
    params.pages.kv_indices.shape[0] = 4;
    const int32_t kv_indptr[] = {0, 4};
    params.pages.kv_indptr = contiguous(kv_indptr, DType::kI32, {2});
    problem.reset_outputs();
    run_params(context(), params);
    EXPECT_EQ(bits_of(problem.o), near);
  }
}

TEST_P(DecodeMemoryOnDevice, EveryFormatWithUnownedPagesUnmapped) {
  for (CacheFormat format : kAllCacheFormats) {
    kit::DecodeSpec spec;
    spec.cache = fenced_cache(format);
    spec.q_len = {2};
    spec.kv_len = {129, 64, 1, 0};
    const kit::DecodeCase problem(fit(spec));
    std::vector<std::unique_ptr<FencedMemory>> fences;
    DecodeParams params = problem.params();
    fence(params.cache.kv, problem.memory.kv, fences);
    fence(params.q, problem.q, fences);
    protect_unowned(params.cache.kv, problem.memory);
    run_params(context(), params);
    const Result<kit::Expected> expected = kit::expected_of(problem);
    MLA_EXPECT_OK(expected);
    const kit::Outcome outcome = kit::check_outputs(problem, *expected, row());
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
}

class DecodeSparseMemoryOnDevice : public EmulatedMemory<Op::kDecodeSparse> {};
MLA_FOR_EVERY_DEVICE(DecodeSparseMemoryOnDevice, Op::kDecodeSparse);

TEST_P(DecodeSparseMemoryOnDevice, SlotsBeyond32Bits) {
  const FarPool pool;
  ASSERT_NE(pool.memory.data(), nullptr);
  kit::DecodeSparseSpec spec;
  spec.q_len = {1, 1};
  spec.pool.cache.poison = false;
  spec.pool.cache.shuffled_pages = false;
  spec.pool.num_tokens = 256;
  spec.pool.invalid_share = 0;
  const kit::DecodeSparseCase problem(fit(spec));
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  const std::vector<std::byte> near = bits_of(problem.o);
  auto* indices = problem.pool.indices.as<int32_t>();
  for (size_t i = 0; i < kFarPages.size(); ++i)
    std::memcpy(pool.page(kFarPages[i]),
                problem.pool.memory.kv.as<uint16_t>() + static_cast<int64_t>(i) * FarPool::kPageElements,
                FarPool::kPageElements * 2);
  for (int64_t i = 0; i < 2 * 64; ++i)
    indices[i] = kFarPages[static_cast<size_t>(indices[i] / 64)] * 64 + indices[i] % 64;
  DecodeSparseParams params = problem.params();
  params.pool.cache.kv = pool.view();
  problem.reset_outputs();
  run_params(context(), params);
  EXPECT_EQ(bits_of(problem.o), near);
}

}  // namespace
}  // namespace mla

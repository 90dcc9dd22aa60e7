// SPDX-License-Identifier: Apache-2.0
// Tests where kernels look: pages that nobody owns and the memory behind every tensor are protected, so that a read is
// a crash.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "backend_test.h"
#include "fenced_memory.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSpec;

class DecodeMemory : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeMemory, Op::kDecode);

TEST_P(DecodeMemory, ReadsOwnedPagesAndNothingBehindAnyTensor) {
  const int32_t dims[][2] = {{576, 512}, {512, 512}, {320, 256}, {1088, 1024}};
  for (const auto& [d_qk, d_v] : dims)
    for (int32_t heads : {1, 7, 16, 33})
      for (DType q_dtype : {DType::kBF16, DType::kF32})
        for (bool shuffled : {false, true}) {
          DecodeSpec spec;
          spec.cache.d_qk = d_qk;
          spec.cache.d_v = d_v;
          spec.cache.shuffled_pages = shuffled;
          spec.cache.unowned_pages = shuffled ? 5 : 0;  // in order, the last owned page stands before the fence
          spec.cache.garbage_table_tail = false;        // the table ends at its fence as well
          spec.num_heads = heads;
          spec.q_dtype = spec.o_dtype = q_dtype;
          spec.q_len = {2};
          spec.kv_len = {129, 64, 1, 320};
          const DecodeCase problem(spec);
          std::vector<std::unique_ptr<FencedMemory>> fences;
          DecodeParams params = problem.params();
          fence(params.q, problem.q, fences);
          fence(params.cache.kv, problem.memory.kv, fences);
          fence(params.pages.kv_indices, problem.memory.table, fences);
          fence(params.pages.kv_indptr, problem.memory.kv_indptr, fences);
          fence(params.pages.kv_len, problem.memory.kv_len, fences);
          fence(params.qo_indptr, problem.qo_indptr, fences);
          protect_unowned(params.cache.kv, problem.memory);
          run_params(context(), params);
          const Result<kit::Expected> expected = kit::expected_of(problem);
          MLA_EXPECT_OK(expected);
          const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
          EXPECT_TRUE(outcome.ok) << outcome.line();
        }
}

TEST_P(DecodeMemory, EveryFormatWithUnownedPagesUnmapped) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool ranks : {false, true}) {
      DecodeSpec spec;
      spec.cache = fenced_cache(format);
      spec.q_len = {2};
      spec.kv_len = {129, 64, 1, 320, 0};
      if (ranks) spec.context_parallel = {.rank = 1, .world = 3, .interleave = 16};
      const DecodeCase problem(spec);
      std::vector<std::unique_ptr<FencedMemory>> fences;
      DecodeParams params = problem.params();
      fence(params.cache.kv, problem.memory.kv, fences);
      fence(params.q, problem.q, fences);
      protect_unowned(params.cache.kv, problem.memory);
      run_params(context(), params);
      const Result<kit::Expected> expected = kit::expected_of(problem);
      MLA_EXPECT_OK(expected);
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

class DecodeSparseMemory : public BackendTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_ROW(DecodeSparseMemory, Op::kDecodeSparse);

TEST_P(DecodeSparseMemory, IndicesThatDoNotCountAreNeverDereferenced) {
  // Wild numbers between the valid ones, and behind the length slots of pages that are not mapped.
  for (CacheFormat format : kAllCacheFormats)
    for (bool two_pools : {false, true})
      for (kit::LengthForm length : {kit::LengthForm::kPerToken, kit::LengthForm::kPerRequest}) {
        kit::DecodeSparseSpec spec;
        spec.pool.cache = fenced_cache(format);
        spec.pool.num_tokens = 130;
        spec.pool.topk = 100;
        spec.pool.topk_length = length;
        spec.pool.invalid_share = 0.4;
        spec.pool.empty_share = 0.2;
        if (two_pools) spec.extra_pool = spec.pool;
        spec.q_len = {2, 1, 3, 4};
        const kit::DecodeSparseCase problem(spec);
        std::vector<std::unique_ptr<FencedMemory>> fences;
        DecodeSparseParams params = problem.params();
        fence(params.pool.cache.kv, problem.pool.memory.kv, fences);
        fence(params.pool.indices, problem.pool.indices, fences);
        protect_unowned(params.pool.cache.kv, problem.pool.memory);
        if (two_pools) {
          fence(params.extra_pool.cache.kv, problem.extra_pool->memory.kv, fences);
          protect_unowned(params.extra_pool.cache.kv, problem.extra_pool->memory);
        }
        run_params(context(), params);
        const Result<kit::Expected> expected = kit::expected_of(problem);
        MLA_EXPECT_OK(expected);
        const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
        EXPECT_TRUE(outcome.ok) << outcome.line();
      }
}

TEST_P(DecodeSparseMemory, TheLastRowOfThePoolIsTheLastThatIsRead) {
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t page_size : {1, 3}) {
      kit::DecodeSparseSpec spec;
      spec.pool.cache = kit::usual_cache(format);
      spec.pool.cache.page_size = page_size;
      spec.pool.cache.unowned_pages = 0;
      spec.pool.num_tokens = 33;
      spec.pool.topk = 200;
      const kit::DecodeSparseCase problem(spec);
      std::vector<std::unique_ptr<FencedMemory>> fences;
      DecodeSparseParams params = problem.params();
      fence(params.pool.cache.kv, problem.pool.memory.kv, fences);
      run_params(context(), params);
      const Result<kit::Expected> expected = kit::expected_of(problem);
      MLA_EXPECT_OK(expected);
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

class GatherMemory : public BackendTest<Op::kGather> {};
MLA_FOR_EVERY_ROW(GatherMemory, Op::kGather);

TEST_P(GatherMemory, ReadsOwnedPagesAndNothingBehindAnyTensor) {
  for (DType out_dtype : {DType::kBF16, DType::kF32}) {
    kit::GatherSpec spec;
    spec.cache.unowned_pages = 5;
    spec.cache.garbage_table_tail = false;
    spec.kv_len = {129, 64, 320};
    spec.token_start = {1, 0, 200};
    spec.count = {128, 64, 7};
    spec.out_dtype = out_dtype;
    const kit::GatherCase problem(spec);
    MLA_EXPECT_OK(run(context(), problem.params()));
    std::vector<std::unique_ptr<FencedMemory>> fences;
    GatherParams params = problem.params();
    fence(params.cache.kv, problem.memory.kv, fences);
    fence(params.pages.kv_indices, problem.memory.table, fences);
    fence(params.out_kv, problem.out_kv, fences);
    protect_unowned(params.cache.kv, problem.memory);
    std::memset(params.out_kv.data, kit::kUntouched, problem.out_kv.size());
    MLA_EXPECT_OK(run(context(), params));
    EXPECT_EQ(std::memcmp(params.out_kv.data, problem.out_kv.data(), problem.out_kv.size()), 0);
  }
}

TEST_P(GatherMemory, EveryFormatWithUnownedPagesUnmapped) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool block_table : {false, true}) {
      kit::GatherSpec spec;
      spec.cache = fenced_cache(format);
      spec.cache.block_table = block_table;
      spec.kv_len = {129, 64, 320};
      spec.token_start = {1, 0, 200};
      spec.count = {128, 64, 7};
      const kit::GatherCase problem(spec);
      std::vector<std::unique_ptr<FencedMemory>> fences;
      GatherParams params = problem.params();
      fence(params.cache.kv, problem.memory.kv, fences);
      protect_unowned(params.cache.kv, problem.memory);
      MLA_EXPECT_OK(run(context(), params));
      const kit::Outcome outcome = kit::check_outputs(problem, GetParam());
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

class IndexerMemoryTest : public BackendTest<Op::kIndexerLogits> {};
MLA_FOR_EVERY_ROW(IndexerMemoryTest, Op::kIndexerLogits);

TEST_P(IndexerMemoryTest, UnownedPagesUnmapped) {
  for (IndexerFormat format : kAllIndexerFormats) {
    kit::IndexerLogitsSpec spec;
    spec.format = format;
    spec.page_stride_extra = to_memory_pages(indexer_page_bytes(spec.page_size, format), DType::kU8);
    spec.unowned_pages = 5;
    spec.q_len = {2};
    spec.kv_len = {129, 64, 1, 320, 0};
    const kit::IndexerLogitsCase problem(spec);
    std::vector<std::unique_ptr<FencedMemory>> fences;
    IndexerLogitsParams params = problem.params();
    fence(params.cache.kv, problem.memory.kv, fences);
    fence(params.q, problem.q, fences);
    fence(params.weights, problem.weights, fences);
    protect_unowned(params.cache.kv, problem.table);
    MLA_EXPECT_OK(run(context(), params));
    const kit::Outcome outcome = kit::check_outputs(problem, GetParam());
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
}

class PrefillMemory : public BackendTest<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillMemory, Op::kPrefill);

TEST_P(PrefillMemory, ReadsNothingBehindAnyTensor) {
  for (int32_t d_qk : {192, 128})
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (int32_t heads : {1, 3}) {
        kit::PrefillSpec spec;
        spec.d_qk = d_qk;
        spec.dtype = spec.o_dtype = dtype;
        spec.num_heads = heads;
        spec.q_len = {33, 5};
        spec.kv_len = {70, 5};
        const kit::PrefillCase problem(spec);
        std::vector<std::unique_ptr<FencedMemory>> fences;
        PrefillParams params = problem.params();
        fence(params.q, problem.q, fences);
        fence(params.k, problem.k, fences);
        fence(params.v, problem.v, fences);
        fence(params.qo_indptr, problem.qo_indptr, fences);
        fence(params.kv_indptr, problem.kv_indptr, fences);
        run_params(context(), params);
        const Result<kit::Expected> expected = kit::expected_of(problem);
        MLA_EXPECT_OK(expected);
        const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
        EXPECT_TRUE(outcome.ok) << outcome.line();
      }
}

}  // namespace
}  // namespace mla

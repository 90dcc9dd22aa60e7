// SPDX-License-Identifier: Apache-2.0
// Tests for bugs that others shipped, one test each, in every cache format where a cache is concerned.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "backend_test.h"
#include "fenced_memory.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSparseCase;
using kit::DecodeSparseSpec;
using kit::DecodeSpec;

template <class Spec>
Spec with_format(Spec spec, CacheFormat format) {
  if constexpr (requires { spec.pool; })
    spec.pool.cache = kit::usual_cache(format);
  else
    spec.cache = kit::usual_cache(format);
  return spec;
}

class MergeBugs : public BackendTest<Op::kMergeStates> {};
MLA_FOR_EVERY_ROW(MergeBugs, Op::kMergeStates);

TEST_P(MergeBugs, BothLseMinusInfinityInAMerge) {
  for (LseBase base : {LseBase::kE, LseBase::kTwo})
    for (bool in_place : {false, true}) {
      kit::MergeSpec spec;
      spec.num_states = 2;
      spec.empty_share = 1;
      spec.lse_base = base;
      spec.in_place = in_place;
      const kit::MergeCase problem(spec);
      MLA_EXPECT_OK(run(context(), problem.params()));
      for (double value : kit::to_dense(problem.params().o)) ASSERT_EQ(value, 0);
      for (double value : kit::to_dense(problem.params().lse)) ASSERT_EQ(value, kMinusInfinity);
    }
}

TEST_P(MergeBugs, BaseTwoLseInAMergeOfItsBase) {
  // The same states with lse in base 2 give the same o, and the same lse in base 2.
  kit::MergeSpec spec;
  spec.empty_share = 0;
  const kit::MergeCase natural(spec), binary(spec);
  MLA_EXPECT_OK(run(context(), natural.params()));
  auto* lse = binary.partial_lse.as<float>();
  for (size_t i = 0; i < binary.partial_lse.size() / sizeof(float); ++i) lse[i] /= std::log(2.0F);
  MergeStatesParams params = binary.params();
  params.lse_base = LseBase::kTwo;
  MLA_EXPECT_OK(run(context(), params));
  const std::vector<double> o = kit::to_dense(natural.params().o), o_two = kit::to_dense(params.o);
  const std::vector<double> e = kit::to_dense(natural.params().lse), two = kit::to_dense(params.lse);
  for (size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(o_two[i], o[i], 1e-5);
  for (size_t i = 0; i < e.size(); ++i) ASSERT_NEAR(two[i] * std::log(2.0), e[i], 1e-5);
}

class DecodeBugs : public BackendTest<Op::kDecode> {
 protected:
  void expect_outputs(const DecodeCase& problem) const {
    const Result<kit::Expected> expected = kit::expected_of(problem);
    MLA_EXPECT_OK(expected);
    const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
};
MLA_FOR_EVERY_ROW(DecodeBugs, Op::kDecode);

TEST_P(DecodeBugs, PaddedGraphRowsWithStaleBlockTables) {
  // And: hang on a padded captured batch with q_len > 1.
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t q_len : {1, 2, 5}) {
      DecodeSpec spec = with_format(DecodeSpec{}, format);
      spec.q_len = {q_len};
      spec.kv_len = {90, 300, 0, 0, 0, 0};
      spec.cache.block_table = true;  // rows of requests without tokens are all 2147483647
      spec.omit_qo_indptr = true;
      expect_ok(spec);
    }
}

TEST_P(DecodeBugs, UninitializedSplitScratchAbove64QueryTokens) {
  for (CacheFormat format : kAllCacheFormats) {
    DecodeSpec spec = with_format(DecodeSpec{}, format);
    spec.q_len = {16};
    spec.kv_len = {4000, 40, 200, 16, 1, 64};
    spec.num_heads = 4;
    const DecodeCase problem(spec);
    const Context other = make_context(4);
    std::vector<std::byte> first;
    for (uint8_t start : {uint8_t{0xFF}, uint8_t{0x00}, uint8_t{0x7F}}) {
      problem.reset_outputs();
      MLA_EXPECT_OK(planned_run(other, problem.params(), start));
      if (first.empty()) first = bits_of(problem.o);
      EXPECT_EQ(bits_of(problem.o), first) << static_cast<int>(start) << ' ' << name(format);
    }
    expect_outputs(problem);
  }
}

TEST_P(DecodeBugs, SplitKvForLargeQLen) {
  const Context other = make_context(6);
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t q_len : {16, 100}) {
      DecodeSpec spec = with_format(DecodeSpec{}, format);
      spec.q_len = {q_len};
      spec.kv_len = {1500};
      spec.num_heads = 2;
      const kit::Outcome outcome = kit::check(other, spec);
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

TEST_P(DecodeBugs, PageOffsetIn32BitsAndMoreThan2To31Elements) {
  // A packed pool of more than 2^32 bytes, of which only the pages in use take memory; pages are 2^31 bytes apart.
  constexpr int64_t kStride = int64_t{1} << 31;
  const FencedMemory far(static_cast<size_t>(5 * kStride));
  if (far.data() == nullptr) GTEST_SKIP() << "the system does not map 10 GiB without reserving them";
  for (CacheFormat format : {CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4}) {
    DecodeSpec spec = with_format(DecodeSpec{}, format);
    spec.kv_len = {64 * 5};
    spec.cache.unowned_pages = 0;
    spec.cache.poison = false;
    const DecodeCase problem(spec);
    MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
    const std::vector<std::byte> near = bits_of(problem.o);
    DecodeParams params = problem.params();
    const int64_t stride = params.cache.kv.stride[0];
    for (int64_t page = 0; page < 5; ++page)
      std::memcpy(far.data() + page * kStride, problem.memory.kv.data() + page * stride, static_cast<size_t>(stride));
    params.cache.kv.data = far.data();
    params.cache.kv.stride[0] = kStride;
    problem.reset_outputs();
    MLA_EXPECT_OK(planned_run(context(), params));
    EXPECT_EQ(bits_of(problem.o), near) << name(format);
  }
}

TEST_P(DecodeBugs, PageStrideIgnored) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool causal : {true, false})
      for (int32_t q_len : {1, 3}) {
        DecodeSpec spec = with_format(DecodeSpec{}, format);  // engines interleave layers
        spec.cache.page_stride_extra = 3 * row_bytes(format, spec.cache.d_qk) * 64;
        spec.kv_len = {300, 129};
        spec.q_len = {q_len};
        spec.causal = causal;
        expect_ok(spec);
      }
}

TEST_P(DecodeBugs, OutputSizedFromTheModelsHeadCount) {
  // DCP gathers the heads of all ranks: 128 of them on each of 8.
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla}) {
    DecodeSpec spec = with_format(DecodeSpec{}, format);
    spec.num_heads = 1024;
    spec.kv_len = {40};
    spec.context_parallel = {.rank = 2, .world = 8, .interleave = 1};
    expect_ok(spec);
  }
}

TEST_P(DecodeBugs, GlobalCausalPositionUnderDcpWithQLenAbove1) {
  // Key j of the request is visible to query i iff j <= kv_len - q_len + i, wherever it lives: 0 keys and -inf for the
  // ranks that hold none of them.
  for (int32_t rank = 0; rank < 4; ++rank) {
    DecodeSpec spec;
    spec.q_len = {4};
    spec.kv_len = {4, 6};
    spec.num_heads = 2;
    spec.context_parallel = {.rank = rank, .world = 4, .interleave = 1};
    const DecodeCase problem(spec);
    MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
    const std::vector<double> lse = kit::to_dense(problem.params().lse);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(lse[i * 2] == kMinusInfinity, static_cast<int32_t>(i) < rank);
    for (size_t i = 0; i < 4; ++i)
      EXPECT_EQ(lse[(4 + i) * 2] == kMinusInfinity, static_cast<int32_t>(i) + 2 < rank) << rank << ' ' << i;
    expect_outputs(problem);
  }
}

TEST_P(DecodeBugs, Fp8KvOnTheSecondTurn) {
  // Append after reuse of a page: other rows, other scales, in the slots of a request that is gone.
  const Result<Context> any = Context::create({.num_threads = 2, .affinity = {}, .backend = {}});
  MLA_EXPECT_OK(any);
  for (CacheFormat format : kAllCacheFormats)
    for (bool token_scales : {false, true}) {
      if (token_scales && format != CacheFormat::kFP8) continue;
      DecodeSpec spec = with_format(DecodeSpec{}, format);
      spec.cache.token_scales = spec.cache.two_tensors = token_scales;
      spec.kv_len = {200};
      const DecodeCase problem(spec);
      const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
      MLA_EXPECT_OK(done);
      std::vector<int64_t> slots;
      for (int64_t token = 0; token < 200; ++token) slots.push_back(problem.memory.slot_of(0, token));
      const int64_t d_qk = spec.cache.d_qk;
      for (float magnitude : {1.0F, 0.01F, 3.0F}) {
        const kit::Buffer rows(static_cast<size_t>(200 * d_qk) * 2);
        kit::fill_normal(rows.data(), DType::kBF16, 0, 200 * d_qk, 500, magnitude);
        AppendParams append;
        append.kv = contiguous(rows.data(), DType::kBF16, {200, d_qk});
        append.slot_mapping = contiguous(slots.data(), DType::kI64, {200});
        append.cache = problem.memory.cache;
        MLA_EXPECT_OK(run(*any, append));
        problem.reset_outputs();
        MLA_EXPECT_OK(run(context(), done->plan, problem.params()));
        expect_outputs(problem);
      }
    }
}

TEST_P(DecodeBugs, NanPastKvLenInTheLastPage) {
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t kv_len : {1, 15, 16, 17, 31, 33, 63, 64, 65}) {
      DecodeSpec spec = with_format(DecodeSpec{}, format);  // poisons rows and scales past kv_len
      spec.kv_len = {kv_len};
      spec.num_heads = 3;
      expect_ok(spec);
    }
}

TEST_P(DecodeBugs, SmScaleChangedAfterPlan) {
  for (CacheFormat format : kAllCacheFormats) {
    DecodeSpec spec = with_format(DecodeSpec{}, format);
    spec.kv_len = {700, 30};
    DecodeCase problem(spec);
    const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
    MLA_EXPECT_OK(done);
    const std::vector<std::byte> before = bits_of(problem.o);
    problem.spec.sm_scale = spec.effective_sm_scale() / 2;
    problem.reset_outputs();
    MLA_EXPECT_OK(run(context(), done->plan, problem.params()));
    EXPECT_NE(bits_of(problem.o), before);
    expect_outputs(problem);
  }
}

TEST_P(DecodeBugs, PlannedAtOneBatchShapeRunAtAnother) {
  DecodeSpec spec;
  spec.kv_len = {130, 70};
  const DecodeCase planned(spec);
  const Result<kit::PlannedRun> done = kit::plan_and_run(context(), planned);
  MLA_EXPECT_OK(done);
  std::vector<DecodeSpec> others(5, spec);
  others[0].kv_len = {130, 70, 1};
  others[1].kv_len = {130, 71};
  others[2].q_len = {2};
  others[3].cache = kit::usual_cache(CacheFormat::kFP8DsMla);
  others[4].context_parallel = {.rank = 0, .world = 2, .interleave = 1};
  for (const DecodeSpec& other : others) {
    const DecodeCase problem(other);
    EXPECT_FALSE(run(context(), done->plan, problem.params()).ok()) << describe(other);
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << describe(other);
  }
}

class SparseBugs : public BackendTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_ROW(SparseBugs, Op::kDecodeSparse);

TEST_P(SparseBugs, InteriorMinusOneIndices) {
  for (CacheFormat format : kAllCacheFormats)
    for (double invalid_share : {0.1, 0.5, 0.9}) {
      DecodeSparseSpec spec = with_format(DecodeSparseSpec{}, format);
      spec.pool.invalid_share = invalid_share;
      spec.pool.topk = 200;
      expect_ok(spec);
    }
}

TEST_P(SparseBugs, AllIndicesMinusOneWithASink) {
  // o = 0 and lse = -inf, with no sink, a finite one, or infinite ones.
  for (CacheFormat format : kAllCacheFormats)
    for (int sinks = 0; sinks < 3; ++sinks) {
      DecodeSparseSpec spec = with_format(DecodeSparseSpec{}, format);
      spec.pool.invalid_share = 1;
      spec.options.attn_sink = sinks > 0;
      spec.options.infinite_sinks = sinks > 1;
      const DecodeSparseCase problem(spec);
      MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
      for (double value : kit::to_dense(problem.params().o)) ASSERT_EQ(value, 0);
      for (double value : kit::to_dense(problem.params().lse)) ASSERT_EQ(value, kMinusInfinity);
    }
}

TEST_P(SparseBugs, MoreThan64QueryTokens) {
  for (CacheFormat format : kAllCacheFormats) {
    DecodeSparseSpec spec = with_format(DecodeSparseSpec{}, format);
    spec.q_len = std::vector<int32_t>(70, 1);
    spec.num_heads = 4;
    spec.pool.topk = 100;
    expect_ok(spec);
  }
}

TEST_P(SparseBugs, PageStrideIgnoredInOneOfTwoPools) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool first : {true, false}) {
      DecodeSparseSpec spec = with_format(DecodeSparseSpec{}, format);
      spec.extra_pool = spec.pool;
      (first ? spec.pool : *spec.extra_pool).cache.page_stride_extra = 64 * 1024;
      expect_ok(spec);
    }
}

TEST_P(SparseBugs, SinkThatIsInfinite) {
  // +inf: o = 0 while lse stays; -inf: as if there were none.
  DecodeSparseSpec spec = with_format(DecodeSparseSpec{}, CacheFormat::kFP8DsV4);
  spec.pool.invalid_share = 0;
  const DecodeSparseCase plain(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), plain));
  spec.options.attn_sink = true;
  const DecodeSparseCase problem(spec);
  auto* sinks = problem.attn_sink.as<float>();
  for (int h = 0; h < 16; ++h) sinks[h] = h % 2 == 0 ? -kInfinity : kInfinity;
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  EXPECT_EQ(bits_of(problem.lse), bits_of(plain.lse));
  const std::vector<double> with = kit::to_dense(problem.params().o), without = kit::to_dense(plain.params().o);
  const size_t d_v = 512;
  for (size_t i = 0; i < with.size(); ++i) ASSERT_EQ(with[i], i / d_v % 2 == 0 ? without[i] : 0.0) << i;
}

}  // namespace
}  // namespace mla

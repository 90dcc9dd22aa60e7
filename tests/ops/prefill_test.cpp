// SPDX-License-Identifier: Apache-2.0
// Tests prefill against the reference, and what it promises beyond numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "backend_test.h"

namespace mla {
namespace {

using kit::PrefillCase;
using kit::PrefillSpec;

class PrefillTest : public BackendTest<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillTest, Op::kPrefill);

TEST_P(PrefillTest, KeysThatAQueryDoesNotSeeMayBeInfiniteOrNaN) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (int32_t tokens : {1, 2, 16, 67, 130})
      for (uint16_t value :
           {uint16_t{0x7FFF}, uint16_t{0xFFFF}, static_cast<uint16_t>(dtype == DType::kBF16 ? 0x7F80 : 0x7C00)}) {
        PrefillSpec spec;
        spec.dtype = spec.o_dtype = dtype;
        spec.q_len = spec.kv_len = {tokens};
        spec.num_heads = 2;
        const PrefillCase problem(spec);
        auto* v = problem.v.as<uint16_t>();
        const int64_t last = tokens - 1;
        std::fill_n(v + last * 2 * 128, 128, value);  // head 0 of the last token, and of the one before
        if (last > 0) std::fill_n(v + (last - 1) * 2 * 128, 128, static_cast<uint16_t>(value ^ 0x8000U));
        std::fill_n(v + (static_cast<int64_t>(tokens / 2) * 2 + 1) * 128 + 70, 1, value);  // one channel of head 1
        MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
        const Result<kit::Expected> expected = kit::expected_of(problem);
        ASSERT_TRUE(expected.ok());
        const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
        EXPECT_TRUE(outcome.ok) << outcome.line();
      }
}

// Such a key may lie in a block of keys behind which another one follows, whose copies may take its place early: those
// of the first 44 keys, if a block has 256 keys.
TEST_P(PrefillTest, KeysFarFromTheEndMayBeInfiniteOrNaN) {
  for (int32_t key : {20, 43, 150})
    for (uint16_t value : {uint16_t{0x7F80}, uint16_t{0x7FFF}}) {
      PrefillSpec spec;
      spec.q_len = {200};
      spec.kv_len = {300};
      spec.num_heads = 2;
      spec.options.window_left = 100;
      const PrefillCase problem(spec);
      std::fill_n(problem.v.as<uint16_t>() + int64_t{key} * 2 * 128, 128, value);  // head 0
      MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
      const Result<kit::Expected> expected = kit::expected_of(problem);
      ASSERT_TRUE(expected.ok());
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

TEST_P(PrefillTest, HeadDimsAndTypes) {
  for (int32_t d_qk : {192, 128})
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (bool wide_output : {false, true})
        for (bool causal : {true, false}) {
          PrefillSpec spec;
          spec.d_qk = d_qk;
          spec.dtype = dtype;
          spec.o_dtype = wide_output ? DType::kF32 : dtype;
          spec.causal = causal;
          spec.q_len = spec.kv_len = {70};
          spec.num_heads = 3;
          expect_ok(spec);
        }
}

TEST_P(PrefillTest, E4m3WithScalesOfItsOwn) {
  for (const auto& [d_qk, d_v] : {std::pair{192, 128}, std::pair{128, 128}, std::pair{96, 64}})
    for (DType o_dtype : {DType::kBF16, DType::kF32, DType::kE4M3})
      for (Compute compute : {Compute::kDefault, Compute::kFP8}) {
        PrefillSpec spec;
        spec.d_qk = d_qk;
        spec.d_v = d_v;
        spec.dtype = DType::kE4M3;
        spec.o_dtype = o_dtype;
        spec.options.compute = compute;
        spec.q_len = {70, 3};
        spec.kv_len = {230, 3};
        spec.num_heads = 3;
        expect_ok_if_taken(spec);
      }
}

TEST_P(PrefillTest, UnseenKeysOfE4m3MayBeNaN) {
  for (int32_t tokens : {1, 16, 67, 130}) {
    PrefillSpec spec;
    spec.dtype = DType::kE4M3;
    spec.q_len = spec.kv_len = {tokens};
    spec.num_heads = 2;
    const PrefillCase problem(spec);
    auto* const v = problem.v.as<uint8_t>();
    std::fill_n(v + int64_t{tokens - 1} * 2 * 128, 128, uint8_t{0x7F});  // head 0 of the last token
    v[(int64_t{tokens / 2} * 2 + 1) * 128 + 70] = 0xFF;                  // one channel of head 1
    MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
    const Result<kit::Expected> expected = kit::expected_of(problem);
    ASSERT_TRUE(expected.ok());
    const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
}

TEST_P(PrefillTest, HeadCounts) {
  for (int32_t heads : {1, 2, 5, 8, 12, 16, 20, 32, 128}) {
    PrefillSpec spec;
    spec.num_heads = heads;
    spec.q_len = spec.kv_len = {33};
    expect_ok(spec);
  }
}

TEST_P(PrefillTest, ManyHeadsOfShortRequests) {  // far more tasks than rows would need
  PrefillSpec spec;
  spec.num_heads = 128;
  spec.q_len = {1, 2, 1};
  spec.kv_len = {1, 2, 9};
  expect_ok(spec);
}

TEST_P(PrefillTest, Lengths) {
  for (int32_t len : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 600}) {
    PrefillSpec spec;
    spec.num_heads = 2;
    spec.q_len = spec.kv_len = {len};
    expect_ok(spec);
  }
}

TEST_P(PrefillTest, RaggedBatch) {
  PrefillSpec spec;
  spec.q_len = {5, 0, 100, 1, 64, 3};
  spec.kv_len = {5, 0, 300, 1, 64, 0};
  spec.num_heads = 4;
  for (bool causal : {true, false}) {
    spec.causal = causal;
    expect_ok(spec);
  }
}

TEST_P(PrefillTest, MoreKeysThanQueries) {
  for (int32_t context_len : {1, 63, 64, 500}) {
    PrefillSpec spec;
    spec.q_len = {50};
    spec.kv_len = {50 + context_len};
    spec.num_heads = 3;
    expect_ok(spec);
  }
}

TEST_P(PrefillTest, FewerKeysThanQueriesLeaveRowsWithoutKey) {
  PrefillSpec spec;
  spec.q_len = {40};
  spec.kv_len = {7};
  spec.num_heads = 2;
  const PrefillCase problem(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  const std::vector<double> o = kit::to_dense(problem.params().o), lse = kit::to_dense(problem.params().lse);
  for (size_t row = 0; row < 80; ++row) {
    const bool sees = row / 2 >= 33;
    EXPECT_EQ(lse[row] == -std::numeric_limits<double>::infinity(), !sees) << row;
    for (size_t c = 0; c < 128 && !sees; ++c) ASSERT_EQ(o[row * 128 + c], 0) << row;
  }
  expect_ok(spec);
}

TEST_P(PrefillTest, EmptyBatches) {
  PrefillSpec spec;
  spec.q_len = spec.kv_len = {};
  expect_ok(spec);
  spec.q_len = spec.kv_len = {0, 0};
  expect_ok(spec);
  spec.q_len = {3};
  spec.kv_len = {0};
  expect_ok(spec);
  spec.q_len = {0};
  spec.kv_len = {9};
  expect_ok(spec);
}

TEST_P(PrefillTest, EveryStride) {
  for (int64_t extra : {1, 8, 100}) {
    PrefillSpec spec;
    spec.q_len = {40, 3};
    spec.kv_len = {70, 3};
    spec.num_heads = 3;
    for (int64_t* stride :
         {&spec.q_head_extra, &spec.q_token_extra, &spec.k_head_extra, &spec.k_token_extra, &spec.v_head_extra,
          &spec.v_token_extra, &spec.o_head_extra, &spec.o_token_extra, &spec.lse_token_extra}) {
      *stride = extra;
      expect_ok(spec);
      *stride = 0;
    }
  }
}

TEST_P(PrefillTest, LseIsOptionalAndHasTwoBases) {
  PrefillSpec spec;
  spec.q_len = spec.kv_len = {50};
  spec.lse_base = LseBase::kTwo;
  expect_ok(spec);
  spec.want_lse = false;
  expect_ok(spec);
}

TEST_P(PrefillTest, LargeScores) {
  PrefillSpec spec;
  spec.score_std = 60;
  spec.q_len = spec.kv_len = {150};
  spec.num_heads = 2;
  expect_ok(spec);
}

TEST_P(PrefillTest, LongSequence) {
  PrefillSpec spec;
  spec.q_len = spec.kv_len = {2500};
  spec.num_heads = 1;
  expect_ok(spec);
  spec.q_len = {20};
  spec.kv_len = {60000};
  expect_ok(spec);
}

TEST_P(PrefillTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 3000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 40; ++seed)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
      expect_ok_if_taken(kit::random_prefill_spec(seed, dtype));
}

TEST_P(PrefillTest, AnyNumberOfThreads) {
  for (int32_t threads : {1, 3, 16}) {
    const Context other = make_context(threads);
    for (uint64_t seed = 4000; seed < 4010; ++seed) {
      const kit::Outcome outcome = kit::check(other, kit::random_prefill_spec(seed, DType::kBF16));
      EXPECT_TRUE(outcome.ok) << threads << " threads: " << outcome.line();
    }
  }
}

TEST_P(PrefillTest, SmScaleMayChangeAfterThePlan) {
  PrefillSpec spec;
  spec.q_len = spec.kv_len = {90};
  PrefillCase problem(spec);
  Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
  MLA_EXPECT_OK(done);
  const std::vector<std::byte> before = bits_of(problem.o);
  problem.spec.sm_scale = spec.effective_sm_scale() / 2;
  problem.reset_outputs();
  MLA_EXPECT_OK(run(context(), done->plan, problem.params()));
  EXPECT_NE(bits_of(problem.o), before);
  const Result<kit::Expected> expected = kit::expected_of(problem);
  MLA_EXPECT_OK(expected);
  const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
  EXPECT_TRUE(outcome.ok) << outcome.line();
}

TEST_P(PrefillTest, ChunkedPrefillMergesToTheWhole) {
  // "Extend": the new tokens see the context unmasked and themselves causally; both partials merged by lse equal one
  // causal call over everything.
  for (LseBase base : {LseBase::kE, LseBase::kTwo}) {
    PrefillSpec spec;
    spec.q_len = {60};
    spec.kv_len = {200};
    spec.num_heads = 4;
    spec.o_dtype = DType::kF32;
    spec.lse_base = base;
    const PrefillCase problem(spec);
    const int32_t kv_indptrs[][2] = {{0, 140}, {0, 60}};
    expect_parts_merge(context(), GetParam(), problem, [&](size_t part, PrefillParams& params) {
      const int64_t first = part == 0 ? 0 : 140;
      for (TensorView* view : {&params.k, &params.v}) {
        view->data = static_cast<uint16_t*>(view->data) + first * view->stride[0];
        view->shape[0] = kv_indptrs[part][1];
      }
      params.kv_indptr = contiguous(kv_indptrs[part], DType::kI32, {2});
      params.causal = part == 1;
    });
  }
}

}  // namespace
}  // namespace mla

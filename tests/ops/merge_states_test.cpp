// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend_test.h"

namespace mla {
namespace {

using kit::MergeCase;
using kit::MergeSpec;

class MergeStatesTest : public BackendTest<Op::kMergeStates> {};
MLA_FOR_EVERY_ROW(MergeStatesTest, Op::kMergeStates);

TEST_P(MergeStatesTest, NumbersOfStates) {
  for (int32_t states : {1, 2, 3, 8, 33, 100}) {
    MergeSpec spec;
    spec.num_states = states;
    expect_ok(spec);
    spec.in_place = true;
    expect_ok(spec);
  }
}

TEST_P(MergeStatesTest, TypesAndWidths) {
  for (DType partial : {DType::kF32, DType::kBF16, DType::kF16})
    for (DType o : {DType::kF32, DType::kBF16, DType::kF16})
      for (int32_t d_v : {64, 128, 256, 512, 1024})
        for (bool in_place : {false, true}) {
          MergeSpec spec;
          spec.partial_dtype = partial;
          spec.o_dtype = o;
          spec.d_v = d_v;
          spec.in_place = in_place;
          spec.num_heads = 5;
          expect_ok(spec);
        }
}

TEST_P(MergeStatesTest, OddWidthsAreRightOrRefused) {
  for (int32_t d_v : {1, 7, 16, 48, 513}) {
    MergeSpec spec;
    spec.d_v = d_v;
    if (can_run(spec)) {
      expect_ok(spec);
      continue;
    }
    const MergeCase problem(spec);
    const Status status = run(context(), problem.params());
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.message();
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched));
  }
}

TEST_P(MergeStatesTest, AllMinusInfinityIsZeroAndMinusInfinity) {
  for (bool in_place : {false, true}) {
    MergeSpec spec;
    spec.num_states = in_place ? 1 : 2;
    spec.empty_share = 1;  // and every o is NaN
    spec.in_place = in_place;
    const MergeCase problem(spec);
    MLA_EXPECT_OK(run(context(), problem.params()));
    for (double value : kit::to_dense(problem.params().o)) ASSERT_EQ(value, 0);
    for (double value : kit::to_dense(problem.params().lse)) ASSERT_EQ(value, kMinusInfinity);
    // Merging it once more changes nothing.
    MergeStatesParams again = problem.params();
    again.in_place = true;
    MLA_EXPECT_OK(run(context(), again));
    for (double value : kit::to_dense(again.o)) ASSERT_EQ(value, 0);
    for (double value : kit::to_dense(again.lse)) ASSERT_EQ(value, kMinusInfinity);
  }
}

TEST_P(MergeStatesTest, OneEmptyStateOfTwoLeavesTheOther) {
  std::vector<float> partial(2 * 16), lse = {static_cast<float>(kMinusInfinity), 1.25F}, o(16), out_lse(1);
  for (size_t c = 0; c < 16; ++c) {
    partial[c] = std::numeric_limits<float>::quiet_NaN();
    partial[16 + c] = static_cast<float>(c) + 0.3F;
  }
  MergeStatesParams params;
  params.partial_o = contiguous(partial.data(), DType::kF32, {2, 1, 1, 16});
  params.partial_lse = contiguous(lse.data(), DType::kF32, {2, 1, 1});
  params.o = contiguous(o.data(), DType::kF32, {1, 1, 16});
  params.lse = contiguous(out_lse.data(), DType::kF32, {1, 1});
  MLA_EXPECT_OK(run(context(), params));
  for (size_t c = 0; c < 16; ++c) EXPECT_FLOAT_EQ(o[c], partial[16 + c]);
  EXPECT_FLOAT_EQ(out_lse[0], 1.25F);
}

TEST_P(MergeStatesTest, BaseTwoIsNotReadAsNatural) {
  // States of lse 0 and 1 weigh 1:2 in base two, 1:e in base e.
  std::vector<float> partial(2 * 16), o(16);
  std::fill(partial.begin() + 16, partial.end(), 1.0F);
  const std::vector<float> lse = {0, 1};
  for (LseBase base : {LseBase::kTwo, LseBase::kE}) {
    float out_lse = 0;
    MergeStatesParams params;
    params.partial_o = contiguous(partial.data(), DType::kF32, {2, 1, 1, 16});
    params.partial_lse = contiguous(lse.data(), DType::kF32, {2, 1, 1});
    params.lse_base = base;
    params.o = contiguous(o.data(), DType::kF32, {1, 1, 16});
    params.lse = contiguous(&out_lse, DType::kF32, {1, 1});
    MLA_EXPECT_OK(run(context(), params));
    const double b = base == LseBase::kTwo ? 2 : std::exp(1.0);
    for (float value : o) EXPECT_NEAR(value, b / (1 + b), 1e-6);
    EXPECT_NEAR(out_lse, std::log(1 + b) / std::log(b), 1e-6);
  }
}

TEST_P(MergeStatesTest, HugeAndDistantLse) {
  for (float lse_std : {100.0F, 1e6F}) {
    MergeSpec spec;
    spec.lse_std = lse_std;
    spec.empty_share = 0;
    expect_ok(spec);
  }
}

TEST_P(MergeStatesTest, EveryStride) {
  for (int64_t extra : {1, 8, 100}) {
    MergeSpec spec;
    spec.num_tokens = 3;
    spec.num_heads = 5;
    for (bool in_place : {false, true}) {
      spec.in_place = in_place;
      for (int64_t* stride : {&spec.partial_state_extra, &spec.partial_token_extra, &spec.partial_head_extra,
                              &spec.o_token_extra, &spec.o_head_extra}) {
        *stride = extra;
        expect_ok(spec);
        *stride = 0;
      }
    }
  }
}

TEST_P(MergeStatesTest, LseIsOptional) {
  MergeSpec spec;
  spec.want_lse = false;
  expect_ok(spec);
}

TEST_P(MergeStatesTest, NoTokens) {
  MergeSpec spec;
  spec.num_tokens = 0;
  expect_ok(spec);
}

TEST_P(MergeStatesTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 5000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 60; ++seed)
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) expect_ok(kit::random_merge_spec(seed, dtype));
}

TEST_P(MergeStatesTest, SameBitsForAnyNumberOfThreads) {
  MergeSpec spec;
  spec.num_tokens = 37;
  const MergeCase problem(spec);
  MLA_EXPECT_OK(run(context(), problem.params()));
  const std::vector<std::byte> first = bits_of(problem.o);
  for (int32_t threads : {1, 3, 7}) {
    problem.reset_outputs();
    MLA_EXPECT_OK(run(make_context(threads), problem.params()));
    EXPECT_EQ(bits_of(problem.o), first) << threads;
  }
}

}  // namespace
}  // namespace mla

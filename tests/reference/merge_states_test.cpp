// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "mla/numeric.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Holds the states of one token and one head with d_v = 2, all f32.
struct SmallMerge {
  std::vector<float> partial_o, partial_lse;
  std::vector<float> o = {NAN, NAN}, lse = {NAN};
  bool in_place = false;
  LseBase lse_base = LseBase::kE;

  void run() {
    core::MergeStatesArgs args;
    args.num_states = static_cast<int32_t>(partial_lse.size());
    args.num_tokens = 1;
    args.num_heads = 1;
    args.d_v = 2;
    args.in_place = in_place;
    args.lse_form.base = lse_base;
    args.partial_o = partial_o.data();
    args.partial_o_stride_state = args.partial_o_stride_token = args.partial_o_stride_head = 2;
    args.partial_lse = partial_lse.data();
    args.partial_lse_stride_state = args.partial_lse_stride_token = args.partial_lse_stride_head = 1;
    args.o = o.data();
    args.o_stride_token = args.o_stride_head = 2;
    args.lse = lse.data();
    args.lse_stride_token = args.lse_stride_head = 1;
    merge_states(args);
  }
};

TEST(ReferenceMerge, WeighsByExpOfLse) {
  SmallMerge merge{.partial_o = {0, 8, 4, 0}, .partial_lse = {0, std::log(3.0F)}};
  merge.run();
  EXPECT_FLOAT_EQ(merge.o[0], 3.0F);
  EXPECT_FLOAT_EQ(merge.o[1], 2.0F);
  EXPECT_FLOAT_EQ(merge.lse[0], std::log(4.0F));
}

TEST(ReferenceMerge, BaseTwo) {
  SmallMerge merge{.partial_o = {0, 8, 4, 0}, .partial_lse = {0, std::log2(3.0F)}, .lse_base = LseBase::kTwo};
  merge.run();
  EXPECT_FLOAT_EQ(merge.o[0], 3.0F);
  EXPECT_FLOAT_EQ(merge.lse[0], 2.0F);
}

TEST(ReferenceMerge, EmptyStatesWeighNothingWhateverTheyHold) {
  SmallMerge merge{.partial_o = {NAN, NAN, 4, 6}, .partial_lse = {kMinusInfinity, 0.5F}};
  merge.run();
  EXPECT_EQ(merge.o, (std::vector<float>{4, 6}));
  EXPECT_EQ(merge.lse[0], 0.5F);
}

TEST(ReferenceMerge, AllEmptyIsEmptyNotNan) {
  SmallMerge merge{.partial_o = {NAN, 1, 1, 1}, .partial_lse = {kMinusInfinity, kMinusInfinity}};
  for (int round = 0; round < 2; ++round) {
    merge.run();
    EXPECT_EQ(merge.o, (std::vector<float>{0, 0}));
    EXPECT_EQ(merge.lse[0], kMinusInfinity);
    merge.in_place = true;
  }
}

TEST(ReferenceMerge, InPlaceAddsTheStateOnEntry) {
  SmallMerge merge{.partial_o = {0, 8}, .partial_lse = {0}, .o = {4, 0}, .lse = {std::log(3.0F)}, .in_place = true};
  merge.run();
  EXPECT_FLOAT_EQ(merge.o[0], 3.0F);
  EXPECT_FLOAT_EQ(merge.o[1], 2.0F);
  EXPECT_FLOAT_EQ(merge.lse[0], std::log(4.0F));
}

TEST(ReferenceMerge, HugeLseDoNotOverflow) {
  SmallMerge merge{.partial_o = {1, 1, 3, 3}, .partial_lse = {5000, 5000}};
  merge.run();
  EXPECT_EQ(merge.o, (std::vector<float>{2, 2}));
  EXPECT_FLOAT_EQ(merge.lse[0], 5000 + std::log(2.0F));
}

TEST(ReferenceMerge, StridesAndNarrowTypes) {
  // 2 states x 2 tokens x 2 heads of one bf16 channel, every stride different; o is f16
  constexpr int64_t kState = 20, kToken = 8, kHead = 3;
  std::vector<uint16_t> partial(2 * kState, f32_to_bf16(NAN));
  std::vector<float> partial_lse(2 * 10, NAN);
  for (int64_t n = 0; n < 2; ++n)
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t h = 0; h < 2; ++h) {
        partial[static_cast<size_t>(n * kState + t * kToken + h * kHead)] =
            f32_to_bf16(static_cast<float>(100 * n + 10 * t + h));
        partial_lse[static_cast<size_t>(n * 10 + t * 4 + h * 2)] = 0;
      }
  std::vector<uint16_t> o(16, 0xABCD);
  core::MergeStatesArgs args;
  args.num_states = args.num_heads = 2;
  args.num_tokens = 2;
  args.d_v = 1;
  args.partial_dtype = DType::kBF16;
  args.partial_o = partial.data();
  args.partial_o_stride_state = kState;
  args.partial_o_stride_token = kToken;
  args.partial_o_stride_head = kHead;
  args.partial_lse = partial_lse.data();
  args.partial_lse_stride_state = 10;
  args.partial_lse_stride_token = 4;
  args.partial_lse_stride_head = 2;
  args.o_dtype = DType::kF16;
  args.o = o.data();
  args.o_stride_token = 5;
  args.o_stride_head = 2;
  merge_states(args);
  std::vector<uint16_t> expected(16, 0xABCD);
  for (size_t t = 0; t < 2; ++t)
    for (size_t h = 0; h < 2; ++h) expected[t * 5 + h * 2] = f32_to_f16(static_cast<float>(50 + 10 * t + h));
  EXPECT_EQ(o, expected);
}

}  // namespace
}  // namespace mla::reference

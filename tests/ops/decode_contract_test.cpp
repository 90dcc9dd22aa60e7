// SPDX-License-Identifier: Apache-2.0
// Tests what decode promises beyond numbers, and mistakes that other libraries shipped, one test each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "backend_test.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSpec;

class DecodeContract : public BackendTest<Op::kDecode> {
 protected:
  kit::Expected expected(const DecodeCase& problem) const {
    Result<kit::Expected> made = kit::expected_of(problem);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return std::move(made).value();
  }

  void expect_outputs(const DecodeCase& problem) const {
    const kit::Outcome outcome = kit::check_outputs(problem, expected(problem), GetParam());
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
};
MLA_FOR_EVERY_ROW(DecodeContract, Op::kDecode);

TEST_P(DecodeContract, RowsWithoutVisibleKeyAreZeroAndMinusInfinity) {
  DecodeSpec spec;
  spec.q_len = {5};
  spec.kv_len = {2, 0, 4};
  const DecodeCase problem(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  const std::vector<double> o = kit::to_dense(problem.params().o), lse = kit::to_dense(problem.params().lse);
  const size_t heads = 16, d_v = 512;
  size_t empty = 0;
  for (size_t b = 0; b < 3; ++b)
    for (size_t i = 0; i < 5; ++i)
      for (size_t h = 0; h < heads; ++h) {
        const size_t row = (b * 5 + i) * heads + h;
        const bool sees = spec.kv_len[b] - 5 + static_cast<int32_t>(i) >= 0;
        EXPECT_EQ(lse[row] == kMinusInfinity, !sees) << b << ' ' << i << ' ' << h;
        if (sees) continue;
        ++empty;
        for (size_t c = 0; c < d_v; ++c) ASSERT_EQ(o[row * d_v + c], 0) << b << ' ' << i << ' ' << h;
      }
  EXPECT_EQ(empty, (3 + 5 + 1) * heads);
}

TEST_P(DecodeContract, KeysThatAQueryDoesNotSeeMayBeNaN) {
  // 0 * NaN is NaN: masking the probability of a future key is not enough.
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16})
    for (int32_t heads : {8, 12, 16})
      for (int32_t kv_len : {2, 66, 67, 97}) {
        DecodeSpec spec;
        spec.q_len = {3};
        spec.kv_len = {kv_len};
        spec.num_heads = heads;
        spec.cache.format = format;
        const DecodeCase problem(spec);
        const int32_t last = kv_len - 1, page_size = spec.cache.page_size;
        const int32_t page = problem.memory.pages_of[0][static_cast<size_t>(last / page_size)];
        auto* row = problem.memory.kv.as<uint16_t>() + problem.memory.ckv_offset(page, last % page_size);
        std::fill_n(row, 512, uint16_t{0x7FFF});
        MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
        expect_outputs(problem);
      }
}

TEST_P(DecodeContract, PaddedBatchWithStaleBlockTables) {
  // Graph capture pads: requests of length 0 whose rows of the table are garbage; once hung for q_len > 1.
  for (int32_t q_len : {1, 2, 4}) {
    DecodeSpec spec;
    spec.q_len = {q_len};
    spec.kv_len = {90, 300, 0, 0, 0, 0, 0, 0};
    spec.cache.block_table = true;
    spec.omit_qo_indptr = true;
    expect_ok(spec);
  }
}

TEST_P(DecodeContract, ExpIsGoodTo21Bits) {
  // Keys 0 and e_0: one score is 0, the other the head's q[0] * sm_scale = ln(p) exactly enough, so o[0] = p / (1 + p).
  DecodeSpec spec;
  spec.num_heads = 512;
  spec.kv_len = {2};
  spec.q_dtype = spec.o_dtype = DType::kF32;
  spec.sm_scale = 1;
  const DecodeCase problem(spec);
  problem.q.fill(0);
  for (int32_t head = 0; head < 512; ++head) problem.q.as<float>()[head * 576] = -5.0F * static_cast<float>(head) / 512;
  const int32_t page = problem.memory.pages_of[0][0];
  auto* keys = problem.memory.kv.as<uint16_t>() + problem.memory.ckv_offset(page, 0);
  std::fill_n(keys, 2 * 576, uint16_t{0});
  keys[576] = f32_to_bf16(1);
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  double worst = 0, worst_lse = 0;
  for (size_t head = 0; head < 512; ++head) {
    const double score = static_cast<double>(problem.q.as<float>()[head * 576]);
    const double expected_o = std::exp(score) / (1 + std::exp(score)), expected_lse = std::log1p(std::exp(score));
    worst = std::max(worst, std::abs(static_cast<double>(problem.o.as<float>()[head * 512]) / expected_o - 1));
    worst_lse = std::max(worst_lse, std::abs(static_cast<double>(problem.lse.as<float>()[head]) - expected_lse));
  }
  EXPECT_LT(worst, 0x1p-21 + 10 * 0x1p-24);  // and ten roundings of numbers near the score's size
  EXPECT_LT(worst_lse, 0x1p-21 + 10 * 0x1p-24);
}

TEST_P(DecodeContract, EmptyBatches) {
  DecodeSpec spec;
  spec.kv_len = {};
  spec.q_len = {};
  expect_ok(spec);
  spec.kv_len = {7, 0};
  spec.q_len = {0, 0};
  expect_ok(spec);
  spec.kv_len = {0};
  spec.q_len = {1};
  spec.cache.unowned_pages = 0;  // a pool without a page
  expect_ok(spec);
}

TEST_P(DecodeContract, LseBaseTwoIsTheNaturalOneScaled) {
  DecodeSpec spec;
  spec.kv_len = {200};
  const DecodeCase natural(spec);
  spec.lse_base = LseBase::kTwo;
  const DecodeCase binary(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), natural));
  MLA_EXPECT_OK(kit::plan_and_run(context(), binary));
  EXPECT_EQ(bits_of(natural.o), bits_of(binary.o));
  const std::vector<double> e = kit::to_dense(natural.params().lse), two = kit::to_dense(binary.params().lse);
  for (size_t i = 0; i < e.size(); ++i) EXPECT_NEAR(two[i], e[i] / std::log(2.0), 1e-5);
}

TEST_P(DecodeContract, LseWithoutKeysIsAsAskedAndNothingElseChanges) {
  DecodeSpec spec;
  spec.q_len = {3};
  spec.kv_len = {1, 5000, 0};  // queries that see nothing stand before those that see keys, and alone
  spec.options.attn_sink = true;
  const DecodeCase usual(spec);
  spec.lse_inf_without_keys = true;
  const DecodeCase asked(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), usual));
  MLA_EXPECT_OK(kit::plan_and_run(context(), asked));
  EXPECT_EQ(bits_of(usual.o), bits_of(asked.o));
  std::vector<double> expected = kit::to_dense(usual.params().lse), given = kit::to_dense(asked.params().lse);
  const size_t without_keys = 5 * static_cast<size_t>(spec.num_heads);
  EXPECT_EQ(std::erase(expected, -HUGE_VAL), without_keys);
  EXPECT_EQ(std::erase(given, HUGE_VAL), without_keys);
  EXPECT_EQ(given, expected);
}

TEST_P(DecodeContract, SplitScratchIsNeverReadBeforeItIsWritten) {
  // More than 64 query tokens and one request long enough to be split; the workspace starts with different bytes.
  DecodeSpec spec;
  spec.q_len = {16};
  spec.kv_len = {5000, 40, 200, 16, 1, 64, 70};
  spec.num_heads = 4;
  const DecodeCase problem(spec);
  const Context other = make_context(4);
  std::vector<std::byte> first;
  for (uint8_t start : {uint8_t{0xFF}, uint8_t{0x00}, uint8_t{0x7F}}) {
    problem.reset_outputs();
    MLA_EXPECT_OK(planned_run(other, problem.params(), start));
    if (first.empty()) first = bits_of(problem.o);
    EXPECT_EQ(bits_of(problem.o), first) << static_cast<int>(start);
  }
  expect_outputs(problem);
}

TEST_P(DecodeContract, SplitKvWithLargeQLen) {
  const Context other = make_context(6);
  for (int32_t q_len : {8, 16, 64, 200}) {
    DecodeSpec spec;
    spec.q_len = {q_len};
    spec.kv_len = {1500};
    spec.num_heads = 2;
    const kit::Outcome outcome = kit::check(other, spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
}

TEST_P(DecodeContract, NanPastKvLenInTheLastPage) {
  for (int32_t kv_len = 1; kv_len <= 65; ++kv_len) {
    DecodeSpec spec;  // poisons rows past kv_len, unowned pages and gaps
    spec.kv_len = {kv_len};
    spec.num_heads = 3;
    expect_ok(spec);
  }
}

TEST_P(DecodeContract, PageStrideLargerThanThePage) {
  for (bool two_tensors : {false, true}) {
    DecodeSpec spec;  // engines interleave layers: the stride is a multiple of the page
    spec.cache.two_tensors = two_tensors;
    spec.cache.page_stride_extra = int64_t{3} * 64 * 576;
    spec.kv_len = {300, 129};
    expect_ok(spec);
  }
}

TEST_P(DecodeContract, TwoTensorsMayStartLikeOne) {
  // kpe begins where the first row of ckv ends, but its rows lie further apart.
  constexpr int64_t kPageStride = 32 * 1152, kCkvStride = 1152, kKpeStride = 1184;
  DecodeSpec spec;
  spec.kv_len = {40, 17};
  spec.cache.page_size = 16;
  spec.cache.two_tensors = true;
  const DecodeCase problem(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  const std::vector<std::byte> before = bits_of(problem.o);
  DecodeParams params = problem.params();
  const kit::Buffer memory(static_cast<size_t>(params.cache.ckv.shape[0] * kPageStride) * 2);
  const auto move = [&](TensorView& part, int64_t first, int64_t row_stride) {
    auto* to = memory.as<uint16_t>() + first;
    for (int64_t page = 0; page < part.shape[0]; ++page)
      for (int64_t slot = 0; slot < part.shape[1]; ++slot)
        std::copy_n(static_cast<const uint16_t*>(part.data) + page * part.stride[0] + slot * part.stride[1],
                    part.shape[2], to + page * kPageStride + slot * row_stride);
    part.data = to;
    part.stride[0] = kPageStride;
    part.stride[1] = row_stride;
  };
  move(params.cache.ckv, 0, kCkvStride);
  move(params.cache.kpe, 512, kKpeStride);
  problem.reset_outputs();
  MLA_EXPECT_OK(planned_run(context(), params));
  EXPECT_EQ(bits_of(problem.o), before);
}

TEST_P(DecodeContract, SmScaleMayChangeAfterThePlan) {
  DecodeSpec spec;
  spec.kv_len = {700, 30};
  DecodeCase problem(spec);
  Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
  MLA_EXPECT_OK(done);
  const std::vector<std::byte> before = bits_of(problem.o);
  problem.spec.sm_scale = spec.effective_sm_scale() / 2;
  problem.reset_outputs();
  MLA_EXPECT_OK(run(context(), done->plan, problem.params()));
  EXPECT_NE(bits_of(problem.o), before);
  expect_outputs(problem);
}

TEST_P(DecodeContract, DataAndPageNumbersMayChangeAfterThePlan) {
  DecodeSpec spec;
  spec.kv_len = {700, 30, 64};
  const DecodeCase first(spec);
  Result<kit::PlannedRun> done = kit::plan_and_run(context(), first);
  MLA_EXPECT_OK(done);
  spec.seed = 99;  // other data, other pages, other strides, other pointers; the same lengths
  spec.o_head_extra = 24;
  spec.cache.token_stride_extra = 8;
  const DecodeCase second(spec);
  MLA_EXPECT_OK(run(context(), done->plan, second.params()));
  expect_outputs(second);
}

TEST_P(DecodeContract, APlanRunsAgainAndAgain) {
  DecodeSpec spec;
  spec.kv_len = {3000, 30, 64};
  spec.num_heads = 5;
  const DecodeCase problem(spec);
  Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
  MLA_EXPECT_OK(done);
  for (int round = 0; round < 5; ++round) {
    problem.reset_outputs();
    MLA_EXPECT_OK(run(context(), done->plan, problem.params()));
    expect_outputs(problem);
  }
}

TEST_P(DecodeContract, TwoPlansWithTheirOwnWorkspaces) {
  DecodeSpec spec;
  spec.kv_len = {3000};
  const DecodeCase first(spec);
  spec.kv_len = {17, 2000, 5};
  const DecodeCase second(spec);
  Result<kit::PlannedRun> one = kit::plan_and_run(context(), first), two = kit::plan_and_run(context(), second);
  MLA_EXPECT_OK(one);
  MLA_EXPECT_OK(two);
  first.reset_outputs();
  second.reset_outputs();
  MLA_EXPECT_OK(run(context(), two->plan, second.params()));
  MLA_EXPECT_OK(run(context(), one->plan, first.params()));
  expect_outputs(first);
  expect_outputs(second);
}

TEST_P(DecodeContract, WorkspaceOfAnyAlignment) {
  for (int32_t misalign : {1, 2, 4, 31, 63}) {
    DecodeSpec spec;
    spec.kv_len = {2000, 7};
    spec.workspace_misalign = misalign;
    expect_ok(spec);
  }
}

TEST_P(DecodeContract, WorkspaceDoesNotGrowWithKvLen) {
  const auto size_for = [&](int32_t kv_len) {
    DecodeSpec spec;
    spec.kv_len = {kv_len};
    spec.num_heads = 16;
    spec.cache.poison = false;
    const DecodeCase problem(spec);
    const Result<size_t> size = workspace_size(context(), problem.params());
    EXPECT_TRUE(size.ok()) << size.status().message();
    return *size;
  };
  EXPECT_EQ(size_for(16384), size_for(65536));
}

TEST_P(DecodeContract, AppendAfterReuseOfAPage) {
  // The second turn of a chat: pages of a finished request hold another one's rows; a kernel that caches anything
  // about a page, or a writer that leaves part of it, shows here.
  DecodeSpec spec;
  spec.kv_len = {200};
  spec.cache.poison = false;
  const DecodeCase problem(spec);
  const DecodeParams params = problem.params();
  const Result<Context> any = Context::create({.num_threads = 2, .affinity = {}, .backend = {}});
  MLA_EXPECT_OK(any);
  Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
  MLA_EXPECT_OK(done);
  expect_outputs(problem);
  std::vector<int64_t> slots;
  for (int64_t token = 0; token < 200; ++token)
    slots.push_back(int64_t{problem.memory.pages_of[0][static_cast<size_t>(token / 64)]} * 64 + token % 64);
  for (uint64_t turn = 0; turn < 3; ++turn) {
    const kit::Buffer rows(200 * 576 * 2);
    kit::fill_normal(rows.data(), DType::kBF16, 0, int64_t{200} * 576, 500 + turn);
    AppendParams append;
    append.kv = contiguous(rows.data(), DType::kBF16, {200, 576});
    append.slot_mapping = contiguous(slots.data(), DType::kI64, {200});
    append.cache = params.cache;
    MLA_EXPECT_OK(run(*any, append));
    problem.reset_outputs();
    MLA_EXPECT_OK(run(context(), done->plan, params));
    expect_outputs(problem);
  }
}

TEST_P(DecodeContract, RequestsMaySharePages) {
  // A common prefix: both requests start with the same pages.
  DecodeSpec spec;
  spec.kv_len = {150, 150, 150};
  spec.cache.block_table = true;
  const DecodeCase problem(spec);
  const DecodeParams params = problem.params();
  auto* table = static_cast<int32_t*>(params.pages.block_table.data);
  const int64_t width = params.pages.block_table.shape[1];
  table[width] = table[2 * width] = table[0];
  table[2 * width + 1] = table[1];
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  expect_outputs(problem);
}

TEST_P(DecodeContract, PartialsOfTwoHalvesMergeToTheWhole) {
  for (LseBase base : {LseBase::kE, LseBase::kTwo}) {
    DecodeSpec spec;
    spec.kv_len = {256};
    spec.causal = false;
    spec.o_dtype = DType::kF32;
    spec.lse_base = base;
    spec.cache.block_table = true;
    const DecodeCase problem(spec);
    const int32_t half_len = 128;
    expect_parts_merge(context(), GetParam(), problem, [&](size_t half, DecodeParams& params) {
      params.pages.block_table.data = static_cast<int32_t*>(params.pages.block_table.data) + 2 * half;
      params.pages.block_table.shape[1] = 2;
      params.pages.kv_len = contiguous(&half_len, DType::kI32, {1});
    });
  }
}

}  // namespace
}  // namespace mla

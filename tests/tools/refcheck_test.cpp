// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/refcheck.h"

#include <cstring>

#include "expect_usage_error.h"
#include "mla/bench/measure.h"

namespace mla::bench {
namespace {

Case small_case(Op op) {
  Case one;
  one.op = op;
  one.heads = 4;
  one.page_size = 16;
  one.threads = 2;
  if (op == Op::kPrefill) {
    one.d_qk = 192;
    one.d_v = 128;
  }
  if (op == Op::kMergeStates) one.q_dtype = DType::kF32;
  one.requests = {{3, 40}, {1, 1}, {5, 200}};
  if (op == Op::kPrefill) one.requests = {{40, 40}, {1, 1}, {50, 200}};
  return one;
}

// Large enough that only a sample is compared.
Case large_case(Op op) {
  Case one = small_case(op);
  one.heads = 40;
  one.requests = {{1, 3000}, {4, 2500}, {1, 17}};
  if (op == Op::kPrefill) one.requests = {{300, 400}, {16, 17}};
  return one;
}

const TensorView& output_of(const Workload& workload, TensorView& storage) {
  const Workload::Problem& problem = workload.problem();
  if (const auto* decode = std::get_if<kit::DecodeCase>(&problem)) storage = decode->params().o;
  if (const auto* prefill = std::get_if<kit::PrefillCase>(&problem)) storage = prefill->params().o;
  if (const auto* merge = std::get_if<kit::MergeCase>(&problem)) storage = merge->params().o;
  if (const auto* append = std::get_if<kit::AppendCase>(&problem)) storage = append->params().cache.kv;
  if (const auto* gather = std::get_if<kit::GatherCase>(&problem)) storage = gather->params().out_kv;
  return storage;
}

TEST(Refcheck, AcceptsEveryOperation) {
  for (Op op : {Op::kDecode, Op::kPrefill, Op::kMergeStates, Op::kAppend, Op::kGather}) {
    const Workload workload(small_case(op), 1);
    const RefcheckResult result = refcheck(workload);
    EXPECT_EQ(result.failure, "") << name(op);
    EXPECT_GT(result.rows, 0) << name(op);
  }
}

TEST(Refcheck, AcceptsSamplesOfLargeProblems) {
  for (Op op : {Op::kDecode, Op::kPrefill}) {
    const Workload workload(large_case(op), 1);
    const RefcheckResult result = refcheck(workload);
    EXPECT_EQ(result.failure, "") << name(op);
    EXPECT_GT(result.rows, 0) << name(op);
  }
}

TEST(Refcheck, SeesWrongOutputs) {
  for (Op op : {Op::kDecode, Op::kPrefill, Op::kMergeStates, Op::kAppend, Op::kGather}) {
    for (const Case& one : {small_case(op), large_case(op)}) {
      const Workload workload(one, 1);
      TensorView storage;
      const TensorView& o = output_of(workload, storage);
      std::memset(o.data, 0x3F, static_cast<size_t>(o.numel()) * size_of(o.dtype));
      const RefcheckResult result = refcheck(workload);
      EXPECT_NE(result.failure, "") << name(op);
      EXPECT_GT(result.error, 0.01) << name(op);
    }
  }
}

TEST(Workload, RefusesWhatNoBackendCanRun) {
  Case one = small_case(Op::kDecode);
  one.cache = CacheFormat::kFP8;
  cli::expect_usage_error([&] { Workload(one, 1); }, {"fp8"});
  one = small_case(Op::kDecode);
  one.d_v = 600;
  cli::expect_usage_error([&] { Workload(one, 1); }, {"576/600"});
}

TEST(Workload, CountsVisiblePairsOnly) {
  const Workload decode(small_case(Op::kDecode), 1);
  // Causal: 38 + 39 + 40, 1, and 196 + ... + 200 keys.
  EXPECT_DOUBLE_EQ(decode.work().flops, 2.0 * 4 * (117 + 1 + 990) * (576 + 512));
  const Workload append(small_case(Op::kAppend), 1);
  EXPECT_EQ(append.work().flops, 0.0);
  EXPECT_EQ(append.copy_pair().bytes, 241U * 1152U);
}

TEST(Measure, JudgesTargetsAndRatios) {
  CaseGroup group;
  group.cases = {small_case(Op::kDecode), small_case(Op::kDecode)};
  group.cases[1].page_size = 1;
  group.target = {.min_share = 1e-9, .max_us = 1e9, .min_ratio = 1e9};
  Meters meters;
  MeasureOptions options;
  options.min_time = 0.01;
  options.max_runs = 20;
  options.refcheck = true;
  const auto results = measure(group, meters, options, [](const std::string&) {});
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0].met, true);
  EXPECT_EQ(results[1].met, false) << "the second case cannot be 10^9 times as good as the first";
  EXPECT_FALSE(results[0].ratio.has_value());
  EXPECT_TRUE(results[1].ratio.has_value());
  for (const Measurement& m : results) {
    EXPECT_GT(m.runs, 0);
    EXPECT_LE(m.p10_s, m.median_s);
    EXPECT_LE(m.median_s, m.p90_s);
    EXPECT_NEAR(m.ceiling_share.value_or(0.0), m.gflops / m.ceiling, 1e-9);
    ASSERT_TRUE(m.error.has_value());
    EXPECT_EQ(m.error_text, "");
  }
}

}  // namespace
}  // namespace mla::bench

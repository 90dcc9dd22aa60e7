// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/refcheck.h"

#include <type_traits>
#include <variant>

#include "mla/bench/measure.h"
#include "tools/mla/expect_usage_error.h"

namespace mla::bench {
namespace {

Case small_case(Op op) {
  Case one;
  one.op = op;
  one.heads = 4;
  one.page_size = 16;
  one.to_page_size = 8;
  one.topk = 24;
  one.threads = 2;
  if (op == Op::kPrefill) {
    one.d_qk = 192;
    one.d_v = 128;
  }
  if (op == Op::kMergeStates) one.q_dtype = DType::kF32;
  if (op == Op::kIndexerLogits || op == Op::kIndexerTopK) one.q_dtype = DType::kE4M3;
  one.requests = {{3, 40}, {1, 1}, {5, 200}};
  if (op == Op::kPrefill) one.requests = {{40, 40}, {1, 1}, {50, 200}};
  return one;
}

// Returns a case that is large enough that only a sample is compared.
Case large_case(Op op) {
  Case one = small_case(op);
  one.heads = 40;
  one.sink = true;
  one.topk = 2000;
  one.requests = {{1, 3000}, {4, 2500}, {1, 17}};
  if (op == Op::kPrefill) one.requests = {{300, 400}, {16, 17}};
  return one;
}

// Returns a buffer that the operation writes.
kit::Buffer* first_output(const Workload& workload) {
  return std::visit(
      [](const auto& problem) -> kit::Buffer* {
        using KitCase = std::decay_t<decltype(problem)>;
        if constexpr (std::is_same_v<KitCase, std::monostate>) return nullptr;
        if constexpr (std::is_same_v<KitCase, kit::IndexerTopKCase>)
          return const_cast<kit::Buffer*>(&problem.slots);  // its logits are scratch
        else if constexpr (requires { problem.outputs(); })
          for (const kit::Buffer* buffer : problem.outputs())
            if (buffer->size() > 0) return const_cast<kit::Buffer*>(buffer);
        if constexpr (requires { problem.o; }) return const_cast<kit::Buffer*>(&problem.o);
        return nullptr;
      },
      workload.problem());
}

TEST(Refcheck, AcceptsEveryOperation) {
  for (Op op : kAllOps) {
    const Workload workload(small_case(op), 1);
    const RefcheckResult result = refcheck(workload);
    EXPECT_EQ(result.failure, "") << name(op);
    EXPECT_GT(result.rows, 0) << name(op);
  }
}

TEST(Refcheck, AcceptsEveryFormat) {
  for (Op op : {Op::kDecode, Op::kDecodeSparse, Op::kAppend, Op::kGather, Op::kAppendRope, Op::kCopyPages})
    for (CacheFormat format : kAllCacheFormats)
      for (Scales scales : {Scales::kPowersOfTwo, Scales::kF32, Scales::kPerSlot}) {
        if (scales == Scales::kPerSlot && format != CacheFormat::kFP8) continue;
        Case one = small_case(op);
        one.cache = one.to_cache = format;
        one.scales = scales;
        const KvLayout layout = kv_layout(format);
        if (layout.is_packed()) one.d_qk = layout.nope_dim + layout.rope_dim;
        const Workload workload(one, 1);
        EXPECT_EQ(refcheck(workload).failure, "") << name(op) << " " << name(format);
      }
}

TEST(Refcheck, AcceptsSamplesOfLargeProblems) {
  for (Op op : {Op::kDecode, Op::kPrefill, Op::kDecodeSparse, Op::kPrefillSparse}) {
    const Workload workload(large_case(op), 1);
    const RefcheckResult result = refcheck(workload);
    EXPECT_EQ(result.failure, "") << name(op);
    EXPECT_GT(result.rows, 0) << name(op);
  }
  for (kit::Tree tree : {kit::Tree::kMask, kit::Tree::kParents}) {
    Case one = large_case(Op::kDecode);
    one.tree = tree;
    one.alibi = true;
    one.requests = {{8, 4000}};
    EXPECT_EQ(refcheck(Workload(one, 1)).failure, "");
  }
}

// The rounding of queries and weights is in the one error and not in the other, of whole problems and of samples.
TEST(Refcheck, TellsTheErrorOfTheMethodFromThatOfTheKernel) {
  for (Op op : {Op::kDecode, Op::kDecodeSparse})
    for (Case one : {small_case(op), large_case(op)}) {
      if (one.heads == 40) one.requests = {{4, 1500}};
      one.cache = CacheFormat::kFP8DsMla;
      one.compute = Compute::kFP8;
      const RefcheckResult result = refcheck(Workload(one, 1));
      EXPECT_EQ(result.failure, "") << name(op);
      ASSERT_TRUE(result.method_error.has_value()) << name(op);
      EXPECT_GT(*result.method_error, 2 * result.error) << name(op);
      EXPECT_GT(*result.method_error, 1e-3) << name(op);
      EXPECT_LT(*result.method_error, 0.2) << name(op);
    }
}

TEST(Refcheck, SeesWrongOutputs) {
  for (Op op : kAllOps) {
    for (const Case& one : {small_case(op), large_case(op)}) {
      const Workload workload(one, 1);
      kit::Buffer* const output = first_output(workload);
      ASSERT_NE(output, nullptr) << name(op);
      output->fill(0x3F);
      const RefcheckResult result = refcheck(workload);
      EXPECT_NE(result.failure, "") << name(op);
      EXPECT_GT(result.error, 0.01) << name(op);
    }
  }
}

TEST(Workload, RefusesWhatNoBackendCanRun) {
  Case one = small_case(Op::kDecode);
  one.cache = CacheFormat::kFP8DsMla;
  one.d_qk = 512;
  cli::expect_usage_error([&] { Workload(one, 1); }, {"fp8_ds_mla", "576", "512"});
  one = small_case(Op::kDecode);
  one.d_v = 600;
  cli::expect_usage_error([&] { Workload(one, 1); }, {"576/600"});
}

TEST(Workload, CountsVisiblePairsOnly) {
  Workload decode(small_case(Op::kDecode), 1);
  // Causal: 38 + 39 + 40, 1, and 196 + ... + 200 keys.
  EXPECT_DOUBLE_EQ(decode.work().flops, 2.0 * 4 * (117 + 1 + 990) * (576 + 512));
  const Workload sparse(small_case(Op::kDecodeSparse), 1);
  EXPECT_DOUBLE_EQ(sparse.work().flops, 2.0 * 4 * 9 * 24 * (576 + 512));
  Workload append(small_case(Op::kAppend), 1);
  EXPECT_EQ(append.work().flops, 0.0);
  EXPECT_EQ(append.copy_pair().bytes, append.work().bytes / 2);
  EXPECT_GE(append.work().bytes, 2 * 241 * 1152);
  Case quantizing = small_case(Op::kAppend);
  quantizing.cache = CacheFormat::kFP8;
  Workload narrower(quantizing, 1);  // neither the rows nor the cache alone is half of what is moved
  EXPECT_EQ(narrower.copy_pair().bytes, std::floor(narrower.work().bytes / 2));
  EXPECT_GE(narrower.work().bytes, 241 * (1152 + 576));
  EXPECT_EQ(decode.copy_pair().bytes, 0U);
  EXPECT_GT(Workload(small_case(Op::kCopyPages), 1).copy_pair().bytes, 200U * 576U);
}

TEST(Measure, TopKIsComparedWithNthElement) {
  CaseGroup group;
  group.cases = {small_case(Op::kTopK)};
  group.cases[0].requests = {{4, 20000}};
  group.target = {.min_share = {}, .max_us = {}, .min_ratio = 1e-6};
  Meters meters;
  MeasureOptions options;
  options.min_time = 0.01;
  options.max_runs = 10;
  const auto results = measure(group, meters, options, [](const std::string&) {});
  ASSERT_TRUE(results[0].ratio.has_value());
  EXPECT_GT(*results[0].ratio, 0.0);
  EXPECT_EQ(results[0].met, true);
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

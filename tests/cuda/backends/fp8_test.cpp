// SPDX-License-Identifier: Apache-2.0
// Tests what cuda_fp8 takes, and how close its kernels come to the arithmetic that compute = fp8 stands for.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cuda/backends/fp8_problems.h"
#include "kit/buffer.h"
#include "kit/cases.h"
#include "kit/check.h"
#include "kit/compare.h"
#include "kit/kit.h"
#include "mla/mla.h"
#include "mla/numeric.h"
#include "trace.h"

namespace mla::test {
namespace {

using testing::HasSubstr;

Problem in_fp8(CacheFormat format, int32_t arch = 120) { return problem_in_fp8(format, arch); }

BackendVerdict of_fp8(const Problem& problem) { return verdict_of("cuda_fp8", problem); }

bool emulates_sm120() { return emulates(120); }

TEST(Fp8, IsForSm89AndSm120) {
  for (int32_t arch : {75, 80, 86, 90, 100})
    EXPECT_EQ(of_fp8(in_fp8(CacheFormat::kFP8, arch)).reason,
              "needs sm89 or sm120 or sm121 (RTX 4090, L40S, RTX PRO 6000, RTX 50), not sm" + std::to_string(arch));
}

TEST(Fp8, RunsWhatAsksForIt) {
  if (!emulates_sm120()) GTEST_SKIP() << "this build does not emulate sm120";
  for (CacheFormat format : {CacheFormat::kFP8, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4, CacheFormat::kFP8Nope})
    for (Op op : {Op::kDecode, Op::kDecodeSparse})
      for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}) {
        MLA_TRACE(std::string(name(op)) + " " + std::string(name(format)) + " " + std::string(name(q_dtype)));
        Problem problem = in_fp8(format);
        problem.op = op;
        problem.q_dtype = q_dtype;
        EXPECT_EQ(explain(problem, "auto").selected, "cuda_fp8") << of_fp8(problem).reason;
        EXPECT_EQ(of_fp8(problem).numerics.multiplied, Arithmetic::kE4M3);
        problem.compute = Compute::kDefault;
        EXPECT_EQ(explain(problem, "auto").selected, "cuda_portable");
        EXPECT_EQ(of_fp8(problem).reason, "multiplies e4m3 by e4m3, for compute = fp8 only");
      }
}

TEST(Fp8, LeavesRowsOfOtherScales) {
  if (!emulates_sm120()) GTEST_SKIP() << "this build does not emulate sm120";
  for (CacheFormat format : {CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41, CacheFormat::kNvFP4DsMla,
                             CacheFormat::kNvFP4DsMla368, CacheFormat::kNvFP4DsV4, CacheFormat::kMxFP4DsV4})
    EXPECT_EQ(
        of_fp8(in_fp8(format)).reason,
        "takes rows of e4m3 with scales of f32 or UE8M0 for 64 channels or more, not " + std::string(name(format)));
}

constexpr std::pair<int32_t, int32_t> kPrefillWidths[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

Problem prefill_in_fp8(int32_t d_qk, int32_t d_v, DType dtype = DType::kE4M3) {
  Problem problem = in_fp8(CacheFormat::kBF16);
  problem.op = Op::kPrefill;
  problem.q_dtype = dtype;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  return problem;
}

TEST(Fp8, RunsPrefillThatAsksForIt) {
  if (!emulates_sm120()) GTEST_SKIP() << "this build does not emulate sm120";
  for (const auto& [d_qk, d_v] : kPrefillWidths) {
    Problem problem = prefill_in_fp8(d_qk, d_v);
    EXPECT_EQ(explain(problem, "auto").selected, "cuda_fp8") << of_fp8(problem).reason;
    EXPECT_EQ(of_fp8(problem).numerics.multiplied, Arithmetic::kE4M3);
    problem.compute = Compute::kDefault;
    EXPECT_EQ(explain(problem, "auto").selected, "cuda_portable");
    EXPECT_EQ(of_fp8(problem).reason, "multiplies e4m3 by e4m3, for compute = fp8 only");
  }
}

TEST(Fp8, SaysWhichPrefillItDoesNotTake) {
  EXPECT_EQ(of_fp8(prefill_in_fp8(96, 64)).reason, "takes d_qk/d_v of 192/128, 128/128, 256/128, 256/256, not 96/64");
  EXPECT_THAT(of_fp8(prefill_in_fp8(192, 128, DType::kBF16)).reason, HasSubstr("prefill of e4m3 tensors, not of bf16"));
}

TEST(Fp8, SaysWhatItDoesNotTake) {
  Problem problem = in_fp8(CacheFormat::kBF16);
  EXPECT_THAT(of_fp8(problem).reason, HasSubstr("quantized caches, not for bf16"));
  problem = in_fp8(CacheFormat::kFP8);
  problem.d_qk = 320;
  problem.d_v = 256;
  EXPECT_EQ(of_fp8(problem).reason, "takes d_qk/d_v of 576/512, 512/512, not 320/256");
  problem = in_fp8(CacheFormat::kFP8);
  problem.op = Op::kPrefillSparse;
  EXPECT_THAT(of_fp8(problem).reason,
              HasSubstr("for decode, decode_sparse, prefill, indexer_logits and indexer_top_k only"));
  problem = in_fp8(CacheFormat::kFP8DsMla);
  problem.op = Op::kDecodeSparse;
  problem.extra_cache = CacheFormat::kFP8;
  EXPECT_THAT(of_fp8(problem).reason, HasSubstr("quantized in both pools or in none, not fp8_ds_mla and fp8"));
}

/// Returns a decode that has steps of every kind: whole, masked, and shorter than a step; in blocks of 16 and 64 rows.
kit::DecodeSpec decode_of(CacheFormat format, bool power_of_two_scales, int32_t heads, DType q_dtype) {
  kit::DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.cache.power_of_two_scales = power_of_two_scales;
  spec.cache.token_scales = spec.cache.two_tensors = format == CacheFormat::kFP8;
  spec.num_heads = heads;
  spec.q_dtype = q_dtype;
  spec.o_dtype = DType::kF32;
  spec.q_len = {2};
  spec.kv_len = {300, 3, 65};
  spec.options.compute = Compute::kFP8;
  return spec;
}

/// Returns the same over two pools of rows, one of which has one scale for all rows if the other has four for each.
kit::DecodeSparseSpec sparse_of(const kit::DecodeSpec& decode) {
  kit::DecodeSparseSpec spec;
  static_cast<kit::AbsorbedSpec&>(spec) = decode;
  spec.q_len = {2, 1};
  spec.pool = {.cache = decode.cache, .num_tokens = 200, .topk = 150};
  spec.extra_pool = {.cache = decode.cache, .num_tokens = 90, .topk = 70};
  spec.extra_pool->cache.token_scales = false;
  return spec;
}

Result<Context> emulated_context(const char* device) {
  return Context::create({.num_threads = 2, .affinity = {}, .backend = "auto", .device = device});
}

void expect_close(const kit::Outcome& outcome, CacheFormat format) {
  EXPECT_TRUE(outcome.ok) << outcome.line();
  EXPECT_EQ(outcome.backend, "cuda_fp8");
  const bool rounds_p = kv_layout(format).value_has_rope;
  EXPECT_LT(outcome.error.max_rel, rounds_p ? 4e-3 : 5e-4) << outcome.spec;
  EXPECT_LT(outcome.error.cosine_distance, rounds_p ? 1e-7 : 1e-9) << outcome.spec;
  EXPECT_LT(outcome.error.max_lse, 2e-6) << outcome.spec;
}

// What is left between the kernels and the reference, which rounds the same numbers to e4m3, are the sums in f32, and
// the few P that these move over a tie; rotary channels of a value meet P of bf16. P that were rounded in other units
// are a hundred times as far away.
TEST(Fp8, ErrorsAreThoseOfSums) {
  if (!emulates_sm120()) GTEST_SKIP() << "this build does not emulate sm120";
  const Result<Context> context = emulated_context("emulated:sm120");
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (CacheFormat format : {CacheFormat::kFP8, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4, CacheFormat::kFP8Nope})
    for (bool power_of_two_scales : {false, true})  // tensor cores multiply by the latter, and by UE8M0
      for (int32_t heads : {5, 40})
        for (DType q_dtype : {DType::kBF16, DType::kE4M3}) {
          const kit::DecodeSpec spec = decode_of(format, power_of_two_scales, heads, q_dtype);
          expect_close(kit::check(*context, spec), format);
          expect_close(kit::check(*context, sparse_of(spec)), format);
        }
}

}  // namespace
}  // namespace mla::test

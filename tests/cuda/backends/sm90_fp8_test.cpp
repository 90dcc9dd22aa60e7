// SPDX-License-Identifier: Apache-2.0
// Tests what cuda_sm90_fp8 takes, and how close its kernels come to the arithmetic that compute = fp8 stands for.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda/backends/fp8_problems.h"
#include "kit/cases.h"
#include "kit/check.h"
#include "kit/kit.h"
#include "mla/mla.h"
#include "mla/numeric.h"
#include "trace.h"

namespace mla::test {
namespace {

using testing::HasSubstr;

constexpr std::array kFormats = {CacheFormat::kFP8, CacheFormat::kFP8DsMla, CacheFormat::kFP8Nope};

Problem on_hopper(CacheFormat format, int32_t arch = 90) { return problem_in_fp8(format, arch); }

BackendVerdict of_sm90_fp8(const Problem& problem) { return verdict_of("cuda_sm90_fp8", problem); }

class Sm90Fp8 : public testing::Test {
 protected:
  void SetUp() override {
    if (!emulates(90)) GTEST_SKIP() << "this build does not emulate sm90";
  }
};

TEST(Sm90Fp8Verdict, IsForSm90) {
  for (int32_t arch : {80, 89, 100, 120})
    EXPECT_EQ(of_sm90_fp8(on_hopper(CacheFormat::kFP8, arch)).reason,
              "needs sm90 (H100, H200), not sm" + std::to_string(arch));
}

TEST_F(Sm90Fp8, RunsWhatAsksForIt) {
  for (CacheFormat format : kFormats)
    for (Op op : {Op::kDecode, Op::kDecodeSparse})
      for (int64_t heads : {1, 16, 128})
        for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}) {
          MLA_TRACE(std::string(name(op)) + " " + std::string(name(format)) + " " + std::string(name(q_dtype)));
          Problem problem = on_hopper(format);
          problem.op = op;
          problem.num_heads = heads;
          problem.q_dtype = q_dtype;
          EXPECT_EQ(explain(problem, "auto").selected, "cuda_sm90_fp8") << of_sm90_fp8(problem).reason;
          EXPECT_EQ(of_sm90_fp8(problem).numerics.multiplied, Arithmetic::kE4M3);
          problem.compute = Compute::kDefault;
          EXPECT_NE(explain(problem, "auto").selected, "cuda_sm90_fp8");
          EXPECT_EQ(of_sm90_fp8(problem).reason, "multiplies e4m3 by e4m3, for compute = fp8 only");
        }
}

Problem prefill_on_hopper(int64_t d_qk, int64_t d_v) {
  Problem problem = on_hopper(CacheFormat::kBF16);
  problem.op = Op::kPrefill;
  problem.q_dtype = DType::kE4M3;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  return problem;
}

// A run has as many keys as registers hold scores of.
TEST_F(Sm90Fp8, RunsPrefillThatAsksForIt) {
  for (const auto& [d_qk, d_v] : {std::pair(192, 128), std::pair(128, 128), std::pair(256, 128), std::pair(256, 256)}) {
    Problem problem = prefill_on_hopper(d_qk, d_v);
    EXPECT_EQ(explain(problem, "auto").selected, "cuda_sm90_fp8") << of_sm90_fp8(problem).reason;
    EXPECT_EQ(of_sm90_fp8(problem).numerics.p_run, d_v == 128 ? 128 : 64);
    problem.compute = Compute::kDefault;
    EXPECT_EQ(explain(problem, "auto").selected, "cuda_portable");
  }
  EXPECT_EQ(of_sm90_fp8(prefill_on_hopper(96, 64)).reason,
            "takes d_qk/d_v of 192/128, 128/128, 256/128, 256/256, not 96/64");
  Problem problem = prefill_on_hopper(192, 128);
  problem.q_dtype = DType::kBF16;
  EXPECT_THAT(of_sm90_fp8(problem).reason, HasSubstr("prefill of e4m3 tensors, not of bf16"));
}

// An H100 or H200 keeps 14 bits of a sum, and so does the emulator.
TEST_F(Sm90Fp8, SaysHowItSums) {
  Problem problem = on_hopper(CacheFormat::kFP8);
  EXPECT_EQ(of_sm90_fp8(problem).numerics.sum_bits, 14);
  EXPECT_EQ(of_sm90_fp8(problem).numerics.p_run, 64);
}

TEST_F(Sm90Fp8, SaysWhatItDoesNotTake) {
  for (CacheFormat format : {CacheFormat::kFP8DsV4, CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41,
                             CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsV4, CacheFormat::kMxFP4DsV4})
    EXPECT_EQ(of_sm90_fp8(on_hopper(format)).reason,
              "takes rows of e4m3 with scales of f32 for 128 channels or more, not " + std::string(name(format)));
  EXPECT_THAT(of_sm90_fp8(on_hopper(CacheFormat::kBF16)).reason, HasSubstr("quantized caches, not for bf16"));
  Problem problem = on_hopper(CacheFormat::kFP8);
  problem.d_qk = 320;
  problem.d_v = 256;
  EXPECT_EQ(of_sm90_fp8(problem).reason, "takes d_qk/d_v of 576/512, 512/512, not 320/256");
  problem = on_hopper(CacheFormat::kFP8DsMla);
  problem.op = Op::kDecodeSparse;
  problem.extra_cache = CacheFormat::kFP8;
  EXPECT_THAT(of_sm90_fp8(problem).reason, HasSubstr("quantized in both pools or in none"));
}

/// Returns a decode whose units have odd and even numbers of steps, whole, masked and short ones.
kit::DecodeSpec decode_by_steps(CacheFormat format, bool token_scales, int32_t heads, DType q_dtype) {
  kit::DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.cache.token_scales = spec.cache.two_tensors = token_scales && format == CacheFormat::kFP8;
  spec.num_heads = heads;
  spec.q_dtype = q_dtype;
  spec.o_dtype = DType::kF32;
  spec.q_len = {2};
  spec.kv_len = {300, 3, 0, 65, 128};
  spec.options.compute = Compute::kFP8;
  return spec;
}

/// Returns the same over two pools of rows, of one scale each if any of them has one.
kit::DecodeSparseSpec sparse_by_steps(const kit::DecodeSpec& decode) {
  kit::DecodeSparseSpec spec;
  static_cast<kit::AbsorbedSpec&>(spec) = decode;
  spec.q_len = {2, 1};
  spec.pool = {.cache = decode.cache, .num_tokens = 200, .topk = 150};
  spec.extra_pool = {.cache = decode.cache, .num_tokens = 90, .topk = 70};
  spec.extra_pool->cache.tensor_scale = 0.04F;
  return spec;
}

Result<Context> emulated_context() {
  return Context::create({.num_threads = 2, .affinity = {}, .backend = "auto", .device = "emulated:sm90"});
}

/// Expects of an outcome the errors of sums. Returns whether, beyond these, a P of much weight was moved over a tie of
/// e4m3: by up to 2^-3 of it.
bool expect_close(const kit::Outcome& outcome) {
  EXPECT_TRUE(outcome.ok) << outcome.line();
  EXPECT_EQ(outcome.backend, "cuda_sm90_fp8");
  EXPECT_LT(outcome.error.max_rel, 0x1p-5) << outcome.spec;
  EXPECT_LT(outcome.error.cosine_distance, 2e-7) << outcome.spec;
  EXPECT_LT(outcome.error.max_lse, 2e-6) << outcome.spec;
  return outcome.error.max_rel > 5e-4 || outcome.error.cosine_distance > 1e-9;
}

// What is left between the kernels and the reference, which rounds the same numbers to e4m3, are the sums in f32, and
// the few P that these move over a tie: of 160,000 P two or three, of which few have much weight.
TEST_F(Sm90Fp8, ErrorsAreThoseOfSums) {
  const SumsInF32 sums;
  const Result<Context> context = emulated_context();
  ASSERT_TRUE(context.ok()) << context.status().message();
  int moved = 0;
  for (CacheFormat format : kFormats)
    for (bool token_scales : {false, true})
      for (int32_t heads : {5, 40})
        for (DType q_dtype : {DType::kBF16, DType::kE4M3}) {
          if (token_scales && format != CacheFormat::kFP8) continue;
          const kit::DecodeSpec spec = decode_by_steps(format, token_scales, heads, q_dtype);
          moved += expect_close(kit::check(*context, spec)) ? 1 : 0;
          moved += expect_close(kit::check(*context, sparse_by_steps(spec))) ? 1 : 0;
        }
  EXPECT_LE(moved, 3);  // of 32 problems
}

// Runs of another length give other P: what is compared with runs of 32 is some hundred times as far away.
TEST_F(Sm90Fp8, RunsHaveSixtyFourKeys) {
  const SumsInF32 sums;
  const Result<Context> context = emulated_context();
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (bool token_scales : {false, true}) {
    kit::DecodeSpec spec = decode_by_steps(CacheFormat::kFP8, token_scales, 16, DType::kBF16);
    spec.kv_len = {700};
    const kit::DecodeCase problem(spec);
    const auto ran = kit::plan_and_run(*context, problem);
    ASSERT_TRUE(ran.ok()) << ran.status().message();
    const Result<kit::Expected> of_32 = kit::expected_of(problem);
    ASSERT_TRUE(of_32.ok());
    double worst = 0, largest = 0;
    for (size_t i = 0; i < of_32->o.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(problem.o.as<float>()[i]) - of_32->o[i]));
      largest = std::max(largest, std::abs(of_32->o[i]));
    }
    EXPECT_GT(worst, 2e-3 * largest);
    expect_close(kit::check(*context, spec));
  }
}

// A run of which a row sees one key only gives the value of that key, since the key rules the run's unit. Base-2 logits
// of up to 256 are some 2^-17 apart in f32, and so relatively are powers of two of their differences.
TEST_F(Sm90Fp8, OneKeyOfARunGivesItsValue) {
  const Result<Context> context = emulated_context();
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (float score_std : {0.1F, 40.0F}) {
    kit::DecodeSpec spec = decode_by_steps(CacheFormat::kFP8, false, 3, DType::kBF16);
    spec.q_len = {70};
    spec.kv_len = {70};
    spec.score_std = score_std;
    spec.options.window_left = 0;
    const kit::Outcome outcome = kit::check(*context, spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
    EXPECT_LT(outcome.error.max_rel, score_std < 1 ? 2e-6 : 1e-5) << outcome.line();
  }
}

// A score that overflows f32 makes the outputs of its row NaN, not a number that looks like one.
TEST_F(Sm90Fp8, AnInfiniteScoreShows) {
  const Result<Context> context = emulated_context();
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (bool token_scales : {false, true}) {
    kit::DecodeSpec spec = decode_by_steps(CacheFormat::kFP8, token_scales, 2, DType::kBF16);
    spec.cache.d_qk = 512;  // rotary channels could make it NaN
    spec.q_len = {1};
    spec.kv_len = {70};
    const kit::DecodeCase problem(spec);
    const TensorView q = problem.params().q;
    std::fill_n(static_cast<uint16_t*>(const_cast<void*>(q.data)), q.shape[2], f32_to_bf16(3e38F));  // head 0
    const auto ran = kit::plan_and_run(*context, problem);
    ASSERT_TRUE(ran.ok()) << ran.status().message();
    for (int32_t c = 0; c < spec.cache.d_v; ++c) {
      ASSERT_TRUE(std::isnan(problem.o.as<float>()[c])) << c;
      ASSERT_TRUE(std::isfinite(problem.o.as<float>()[spec.cache.d_v + c])) << c;
    }
  }
}

}  // namespace
}  // namespace mla::test

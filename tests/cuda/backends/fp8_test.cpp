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

// Prefill. The tests run on both architectures, whose multiplies differ.

class Fp8Prefill : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const auto& archs = machine_info().emulated_archs;
    if (std::find(archs.begin(), archs.end(), GetParam()) == archs.end())
      GTEST_SKIP() << "this build does not emulate sm" << GetParam();
    Result<Context> made = emulated_context(("emulated:sm" + std::to_string(GetParam())).c_str());
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(*made));
  }
  const Context& context() const { return *context_; }

  /// Expects of a problem what is left where the same numbers are rounded: the errors of sums in f32, and the few P
  /// that these move over a tie of e4m3.
  void expect_sums_only(const kit::PrefillSpec& spec) {
    const kit::Outcome outcome = kit::check(context(), spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
    EXPECT_EQ(outcome.backend, "cuda_fp8");
    EXPECT_LT(outcome.error.max_rel, 1e-4) << outcome.line();
    EXPECT_LT(outcome.error.cosine_distance, 1e-10) << outcome.line();
    EXPECT_LT(outcome.error.max_lse, 4e-6) << outcome.line();
  }

 private:
  std::optional<Context> context_;
};

kit::PrefillSpec prefill_of(std::pair<int32_t, int32_t> widths) {
  kit::PrefillSpec spec;
  spec.d_qk = widths.first;
  spec.d_v = widths.second;
  spec.dtype = DType::kE4M3;
  spec.o_dtype = DType::kF32;
  spec.num_heads = 2;
  spec.options.compute = Compute::kFP8;
  return spec;
}

// Requests end within, at and behind tiles and runs of keys, and there are more queries than keys.
TEST_P(Fp8Prefill, ErrorsAreThoseOfSums) {
  for (const auto& widths : kPrefillWidths)
    for (bool causal : {false, true}) {
      kit::PrefillSpec spec = prefill_of(widths);
      spec.causal = causal;
      spec.q_len = {70, 3, 40, 0, 129};
      spec.kv_len = {200, 3, 17, 5, 128};
      expect_sums_only(spec);
    }
}

TEST_P(Fp8Prefill, Options) {
  for (const auto& widths : kPrefillWidths) {
    kit::PrefillSpec spec = prefill_of(widths);
    spec.q_len = {37, 70};
    spec.kv_len = {150, 66};
    spec.options.attn_sink = true;
    spec.lse_base = LseBase::kTwo;
    spec.options.window_left = 40;
    expect_sums_only(spec);
    spec.options.alibi_slopes = true;
    expect_sums_only(spec);
    spec.options.logits_soft_cap = 30.0F;
    expect_sums_only(spec);
  }
}

TEST_P(Fp8Prefill, NumbersOfKeys) {
  for (int32_t keys = 1; keys <= 130; ++keys) {
    kit::PrefillSpec spec = prefill_of(kPrefillWidths[keys % 4]);
    spec.q_len = {1 + keys % 3};
    spec.kv_len = {keys};
    spec.num_heads = 1;
    spec.causal = keys % 5 != 0;
    expect_sums_only(spec);
  }
}

// Rows that are not aligned are copied byte by byte, and stored element by element.
TEST_P(Fp8Prefill, UnalignedRows) {
  for (const auto& widths : kPrefillWidths)
    for (DType o_dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
      kit::PrefillSpec spec = prefill_of(widths);
      spec.o_dtype = o_dtype;
      spec.q_len = {35};
      spec.kv_len = {99};
      spec.q_head_extra = 1;
      spec.k_token_extra = 3;
      spec.v_head_extra = 5;
      spec.o_token_extra = 7;
      const kit::Outcome outcome = kit::check(context(), spec);
      EXPECT_TRUE(outcome.ok) << outcome.line();
      EXPECT_EQ(outcome.backend, "cuda_fp8");
    }
}

// A run of which a row sees one key only gives the value of that key, whatever its logit is, since the key rules the
// run's unit. What is left are four roundings of f32.
TEST_P(Fp8Prefill, OneKeyOfARunGivesItsValue) {
  for (const auto& widths : kPrefillWidths) {
    kit::PrefillSpec spec = prefill_of(widths);
    spec.q_len = spec.kv_len = {70};
    spec.num_heads = 1;
    spec.score_std = 40;
    spec.v_scale = 0.25F;
    spec.options.window_left = 0;
    const kit::PrefillCase problem(spec);
    const auto ran = kit::plan_and_run(context(), problem);
    ASSERT_TRUE(ran.ok()) << ran.status().message();
    for (int64_t i = 0; i < int64_t{70} * spec.d_v; ++i) {
      const float value = e4m3_to_f32(problem.v.as<uint8_t>()[i]) * spec.v_scale;
      ASSERT_NEAR(problem.o.as<float>()[i], value, 0x1p-21F * std::abs(value)) << widths.first << " " << i;
    }
  }
}

// Keys and values of NaN stand before the window, behind the causal edge, and behind the end of a request, in the next
// one: no row may see those of others, and those that see one of these become NaN.
TEST_P(Fp8Prefill, UnseenNaNStaysUnseen) {
  for (const auto& widths : kPrefillWidths)
    for (int32_t window_left : {-1, 20}) {
      kit::PrefillSpec spec = prefill_of(widths);
      spec.q_len = {60, 33};
      spec.kv_len = {75, 33};
      spec.options.window_left = window_left;
      const kit::PrefillCase problem(spec);
      const auto clear = [&](const kit::Buffer& of, int64_t width, int64_t key, int64_t channels) {
        std::fill_n(of.as<uint8_t>() + key * spec.num_heads * width, channels, uint8_t{0xFF});
      };
      clear(problem.k, spec.d_qk, 16, spec.d_qk);
      clear(problem.v, spec.d_v, 31, 1);
      clear(problem.v, spec.d_v, 74, spec.d_v);
      clear(problem.v, spec.d_v, 75 + 32, 3);
      clear(problem.k, spec.d_qk, 75 + 30, 1);
      const auto ran = kit::plan_and_run(context(), problem);
      ASSERT_TRUE(ran.ok()) << ran.status().message();
      const Result<kit::Expected> expected = kit::expected_of(problem);
      ASSERT_TRUE(expected.ok());
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, "cuda_fp8");
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

INSTANTIATE_TEST_SUITE_P(Archs, Fp8Prefill, testing::Values(89, 120),
                         [](const auto& test) { return "sm" + std::to_string(test.param); });

}  // namespace
}  // namespace mla::test

// SPDX-License-Identifier: Apache-2.0
// Tests how close prefill of e4m3 comes to the arithmetic that compute = fp8 stands for, on architectures whose
// multiplies differ.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
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

namespace mla::test {
namespace {

using Widths = std::pair<int32_t, int32_t>;
constexpr Widths kWidths[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

class Fp8Prefill : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (!emulates(GetParam())) GTEST_SKIP() << "this build does not emulate sm" << GetParam();
    const std::string device = "emulated:sm" + std::to_string(GetParam());
    Result<Context> made =
        Context::create({.num_threads = 2, .affinity = {}, .backend = "auto", .device = device.c_str()});
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(*made));
  }
  const Context& context() const { return *context_; }
  const char* backend() const { return GetParam() == 90 ? "cuda_sm90_fp8" : "cuda_fp8"; }

  /// Expects of a problem what is left where the same numbers are rounded: the errors of sums in f32, and the few P
  /// that these move over a tie of e4m3.
  void expect_sums_only(const kit::PrefillSpec& spec) const { EXPECT_TRUE(has_errors_of_sums(spec)); }
  /// Returns whether it has these only, and prints what else it has. With more, it is a P of little weight that was
  /// moved.
  bool has_errors_of_sums(const kit::PrefillSpec& spec) const {
    const SumsInF32 sums;
    const kit::Outcome outcome = kit::check(context(), spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
    EXPECT_EQ(outcome.backend, backend());
    EXPECT_LT(outcome.error.max_rel, 0x1p-12) << outcome.line();
    EXPECT_LT(outcome.error.max_lse, 4e-6) << outcome.line();
    const bool only = outcome.error.max_rel < 1e-4 && outcome.error.cosine_distance < 1e-10;
    if (!only) std::cout << "max_rel " << outcome.error.max_rel << ": " << outcome.line() << "\n";
    return only;
  }

 private:
  std::optional<Context> context_;
};

kit::PrefillSpec prefill_of(const Widths& widths) {
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
  for (const Widths& widths : kWidths)
    for (bool causal : {false, true}) {
      kit::PrefillSpec spec = prefill_of(widths);
      spec.causal = causal;
      spec.q_len = {70, 3, 40, 0, 129};
      spec.kv_len = {200, 3, 17, 5, 128};
      expect_sums_only(spec);
    }
}

TEST_P(Fp8Prefill, Options) {
  for (const Widths& widths : kWidths) {
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
    kit::PrefillSpec spec = prefill_of(kWidths[keys % 4]);
    spec.q_len = {1 + keys % 3};
    spec.kv_len = {keys};
    spec.num_heads = 1;
    spec.causal = keys % 5 != 0;
    expect_sums_only(spec);
  }
}

// Rows that are not aligned are copied byte by byte, and stored element by element.
TEST_P(Fp8Prefill, UnalignedRows) {
  for (const Widths& widths : kWidths)
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
      EXPECT_EQ(outcome.backend, backend());
    }
}

// Rows see many whole tiles between masked ones, and requests end in the middle of units. Of so many P one or two of
// little weight are moved over a tie.
TEST_P(Fp8Prefill, ManyTiles) {
  int moved = 0;
  for (const Widths& widths : kWidths)
    for (bool causal : {false, true})
      for (int32_t window_left : {-1, 300}) {
        kit::PrefillSpec spec = prefill_of(widths);
        spec.causal = causal;
        spec.num_heads = 1;
        spec.q_len = {150, 64};
        spec.kv_len = {700, 512};
        spec.options.window_left = window_left;
        moved += has_errors_of_sums(spec) ? 0 : 1;
      }
  EXPECT_LE(moved, GetParam() == 90 ? 0 : 2);  // of 16 problems
}

// Scores of few keys have no others that would hide what the tensor cores cut off: one sum over all channels is too
// long for the tolerance of some of these.
TEST_P(Fp8Prefill, ScoresOfFewKeys) {
  for (const Widths& widths : kWidths)
    for (int32_t seed = 1; seed <= 8; ++seed) {
      kit::PrefillSpec spec = prefill_of(widths);
      spec.seed = seed;
      spec.num_heads = 16;
      spec.q_len = {269, 14, 62, 50};
      spec.kv_len = {3, 2, 7, 9};
      const kit::Outcome outcome = kit::check(context(), spec);
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

// A run of which a row sees one key only gives the value of that key, whatever its logit is, since the key rules the
// run's unit. What is left are four roundings of f32.
TEST_P(Fp8Prefill, OneKeyOfARunGivesItsValue) {
  for (const Widths& widths : kWidths) {
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
  for (const Widths& widths : kWidths)
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
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, backend());
      EXPECT_TRUE(outcome.ok) << outcome.line();
    }
}

INSTANTIATE_TEST_SUITE_P(Archs, Fp8Prefill, testing::Values(89, 90, 120),
                         [](const auto& test) { return "sm" + std::to_string(test.param); });

}  // namespace
}  // namespace mla::test

// SPDX-License-Identifier: Apache-2.0
// Measures what a quantized format costs, apart from what a kernel costs: the same rows as bf16 and quantized.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "backend_test.h"

namespace mla {
namespace {

class FormatError : public BackendTest<Op::kDecode> {
 protected:
  /// Returns the distance of decode over `quantized` rows from decode over the same rows as bf16, of the channels both
  /// have.
  kit::Error error_of(const kit::CacheSpec& quantized) const {
    kit::DecodeSpec spec;
    spec.cache = quantized;
    spec.kv_len = {700, 300};
    spec.score_std = 0.5F;  // weights change by e to the power of the score errors
    spec.o_dtype = DType::kF32;
    const kit::DecodeCase with(spec);
    // bf16 rows divide as the format's do; the queries are equal bit for bit.
    spec.cache = kit::CacheSpec{};
    spec.cache.d_qk = quantized.d_qk;
    spec.cache.d_v = quantized.d_ckv();
    spec.cache.uneven_rows = true;
    spec.sm_scale = with.spec.effective_sm_scale();
    const kit::DecodeCase without(spec);
    EXPECT_EQ(bits_of(with.q), bits_of(without.q));
    MLA_EXPECT_OK(kit::plan_and_run(context(), with));
    // A d_v that a fast row does not have is the reference's.
    const Result<kit::Expected> expected = kit::expected_of(without);
    MLA_EXPECT_OK(expected);
    const auto wide = static_cast<size_t>(quantized.d_v), narrow = static_cast<size_t>(quantized.d_ckv());
    const std::vector<double> all = kit::to_dense(with.params().o);
    std::vector<double> o;
    for (size_t row = 0; row < all.size(); row += wide)
      o.insert(o.end(), all.begin() + static_cast<std::ptrdiff_t>(row),
               all.begin() + static_cast<std::ptrdiff_t>(row + narrow));
    return kit::compare(o, expected->o, quantized.d_ckv(), kit::to_dense(with.params().lse), expected->lse);
  }
};
MLA_FOR_EVERY_ROW(FormatError, Op::kDecode);

TEST_P(FormatError, IsThereAndSmall) {
  for (CacheFormat format : {CacheFormat::kFP8, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4}) {
    const kit::Error error = error_of(kit::usual_cache(format));
    EXPECT_TRUE(error.special_equal) << name(format);
    EXPECT_GT(error.max_rel, 1e-4) << name(format);
    EXPECT_LT(error.max_rel, 0.1) << name(format);
    EXPECT_GT(error.max_lse, 1e-5) << name(format);
    EXPECT_LT(error.max_lse, 0.1) << name(format);
    EXPECT_LT(error.cosine_distance, 5e-3) << name(format);
  }
}

TEST_P(FormatError, ScalesThatAreNoPowersOfTwoCostNoMore) {
  kit::CacheSpec cache = kit::usual_cache(CacheFormat::kFP8DsMla);
  const kit::Error power_of_two = error_of(cache);
  cache.power_of_two_scales = false;
  const kit::Error any = error_of(cache);
  EXPECT_NE(any.max_abs, power_of_two.max_abs);
  EXPECT_LT(any.cosine_distance, 2 * power_of_two.cosine_distance);
}

TEST_P(FormatError, ScalesOfEveryTokenServeSmallRows) {
  // One scale for the tensor leaves small rows to e4m3's subnormals.
  kit::DecodeSpec spec;
  spec.cache = kit::usual_cache(CacheFormat::kFP8);
  spec.kv_len = {64};
  double errors[2] = {};
  for (bool token_scales : {false, true}) {
    spec.cache.token_scales = spec.cache.own_kpe_scale = token_scales;
    const kit::DecodeCase problem(spec);
    std::vector<float> small(576, 0.0F);
    kit::fill_normal(small.data(), DType::kF32, 0, 512, 9, 1e-4F);
    const int32_t page = problem.memory.pages_of[0][0];
    problem.memory.write_row(page, 0, small);
    const std::vector<float> back = problem.memory.read_row(page, 0);
    for (size_t c = 0; c < 512; ++c) errors[token_scales ? 1 : 0] += std::abs(static_cast<double>(back[c] - small[c]));
    MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
    const Result<kit::Expected> expected = kit::expected_of(problem);
    MLA_EXPECT_OK(expected);
    const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }
  EXPECT_LT(errors[1], errors[0] / 4);
}

}  // namespace
}  // namespace mla

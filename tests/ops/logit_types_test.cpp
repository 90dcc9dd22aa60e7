// SPDX-License-Identifier: Apache-2.0
// Tests logits of bf16 and f16 on every row of the CPU and of every tested GPU: that they are those of f32, rounded,
// and that top_k chooses among them as they are stored.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "device_test.h"
#include "mla/numeric.h"

namespace mla {
namespace {

constexpr DType kShortTypes[] = {DType::kBF16, DType::kF16};

/// Runs tests with the row that the parameter names, on its device.
class RowTest : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void use_row_of(const Problem& usual) {
    const auto& [device, row] = GetParam();
    if (!takes(usual)) GTEST_SKIP() << row << " does not run here";
    Result<Context> made = Context::create({.num_threads = 2, .affinity = {}, .backend = row, .device = device});
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(made).value());
  }

  bool takes(const Problem& problem) const {
    const auto& [device, row] = GetParam();
    for (const BackendVerdict& verdict : explain(kit::on_device(problem, device), "auto").rows)
      if (verdict.name == row) return verdict.usable;
    return false;
  }

  template <class Spec>
  void expect_ok(const Spec& spec) const {
    if (!takes(kit::problem_of(spec))) return;
    const kit::Outcome outcome = kit::check(*context_, spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
  }

  /// Runs the problem where the context computes.
  template <class Case>
  void compute(const Case& problem) const {
    const Result<kit::DeviceImage> image = kit::DeviceImage::create(context_->device(), kit::buffers_of(problem));
    ASSERT_TRUE(image.ok()) << image.status().message();
    MLA_EXPECT_OK(run(*context_, image->there(problem.params())));
    MLA_EXPECT_OK(image->fetch());
  }

 private:
  std::optional<Context> context_;
};

class LogitTypes : public RowTest {
  void SetUp() override { use_row_of(kit::problem_of(kit::IndexerLogitsSpec{})); }
};
MLA_FOR_ALL_ROWS(LogitTypes, Op::kIndexerLogits);

std::vector<kit::IndexerLogitsSpec> specs_of_logits() {
  std::vector<kit::IndexerLogitsSpec> specs;
  const kit::IndexerLogitsSpec usual = {.q_len = {3, 0, 2}, .kv_len = {130, 10, 1}, .unowned_pages = 1};
  const auto add = [&](const auto& change) { change(specs.emplace_back(usual)); };
  for (const DType queries : {DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32})
    for (const IndexerFormat format : kAllIndexerFormats)
      add([&](auto& spec) { spec.q_dtype = queries, spec.format = format, spec.num_heads = 40; });
  add([](auto& spec) { spec.key_begin = spec.key_end = true; });
  add([](auto& spec) { spec.num_blocks = 21, spec.block_size = 5, spec.wild_share = 0.2; });
  add([](auto& spec) { spec.causal = false, spec.ratio = 4, spec.page_size = 3; });
  add([](auto& spec) { spec.num_heads = 130; });  // more than the CPU adds up at a time
  add([](auto& spec) { spec.q_len = {1}, spec.kv_len = {2500, 0}; });
  for (const Compute arithmetic : {Compute::kDefault, Compute::kExact})
    for (const int32_t q_len : {1, 2, 3}) {
      add([&](auto& spec) {
        spec.compute = arithmetic;
        spec.q_len = {q_len};
        spec.kv_len = {700, 64, 1};
        spec.omit_qo_indptr = true;
      });
    }
  return specs;
}

/// Every logit is what the same row computes in f32, rounded to nearest even, wherever rows begin.
TEST_P(LogitTypes, AreThoseOfF32Rounded) {
  for (kit::IndexerLogitsSpec spec : specs_of_logits()) {
    spec.logits_dtype = DType::kF32;
    if (!takes(kit::problem_of(spec))) continue;
    const kit::IndexerLogitsCase exact(spec);
    compute(exact);
    const TensorView wide = exact.params().logits;
    for (const DType dtype : kShortTypes)
      for (const int64_t extra : {0, 1, 2, 7}) {
        spec.logits_dtype = dtype;
        spec.logits_extra = extra;
        if (!takes(kit::problem_of(spec))) continue;
        const kit::IndexerLogitsCase problem(spec);
        compute(problem);
        const TensorView given = problem.params().logits;
        EXPECT_TRUE(problem.logits.guards_intact() && kit::gaps_hold(problem.logits, given, kit::kUntouched));
        for (int64_t t = 0; t < given.shape[0]; ++t)
          for (int64_t j = 0; j < given.shape[1]; ++j) {
            const float logit = static_cast<const float*>(wide.data)[t * wide.stride[0] + j];
            const uint16_t bits = static_cast<const uint16_t*>(given.data)[t * given.stride[0] + j];
            ASSERT_EQ(bits, dtype == DType::kF16 ? f32_to_f16(logit) : f32_to_bf16(logit))
                << kit::describe(spec) << ": logit " << j << " of token " << t << " is " << logit << " in f32";
          }
      }
  }
}

/// Makes every key's logit that key's scale: one channel of one head is 1, all others are 0.
void make_scales_logits(const kit::IndexerLogitsCase& problem, const std::vector<float>& logits) {
  problem.q.fill(0);
  problem.weights.fill(0);
  constexpr auto kOne = std::byte{0x38};
  for (int64_t t = 0; t < problem.num_tokens; ++t) {
    problem.q.as<std::byte>()[t * problem.spec.num_heads * kIndexerLayout.head_dim] = kOne;
    problem.weights.as<float>()[t * problem.spec.num_heads] = 1;
  }
  for (size_t j = 0; j < logits.size(); ++j) {
    const int64_t slot = problem.table.slot_of(0, static_cast<int64_t>(j));
    const int64_t page = slot / problem.spec.page_size, offset = slot % problem.spec.page_size;
    std::fill_n(problem.memory.key(page, offset), kIndexerLayout.head_dim, std::byte{0});
    *problem.memory.key(page, offset) = kOne;
    std::memcpy(problem.memory.scale(page, offset), &logits[j], sizeof(float));
  }
}

struct Rounded {
  float logit;
  uint16_t bf16, f16;
};
constexpr Rounded kRounded[] = {
    {1.0F + 0x1p-8F, 0x3F80, 0x3C04},             // halfway in bf16, whose last bit is even below
    {1.0F + 0x3p-8F, 0x3F82, 0x3C0C},             // and above
    {1.0F + 0x1p-8F + 0x1p-20F, 0x3F81, 0x3C04},  // more than halfway
    {1.0F + 0x1p-11F, 0x3F80, 0x3C00},            // halfway in f16
    {1.0F + 0x3p-11F, 0x3F80, 0x3C02},
    {-1.0F - 0x3p-11F, 0xBF80, 0xBC02},
    {1.0F + 0x1p-11F + 0x1p-20F, 0x3F80, 0x3C01},
    {0x3p-25F, 0x33C0, 0x0002},  // subnormal in f16
    {0x1p-24F, 0x3380, 0x0001},
    {0x1p-25F, 0x3300, 0x0000},
    {0.0F, 0x0000, 0x0000},
    {65504.0F, 0x4780, 0x7BFF},  // the largest f16
    {65519.99F, 0x4780, 0x7BFF},
    {65520.0F, 0x4780, 0x7BFF},  // which would round to infinity
    {-65520.0F, 0xC780, 0xFBFF},
    {1e30F, 0x714A, 0x7BFF},
    {0x1.FEp127F, 0x7F7F, 0x7BFF},  // the largest bf16
    {std::numeric_limits<float>::max(), 0x7F7F, 0x7BFF},
    {-std::numeric_limits<float>::max(), 0xFF7F, 0xFBFF},
    {kInfinity, 0x7F80, 0x7C00},  // infinities stay what they are
    {-kInfinity, 0xFF80, 0xFC00},
};

/// Logits are rounded to nearest even. What is finite stays finite, and what a query does not see is -inf.
TEST_P(LogitTypes, RoundToEvenAndSaturate) {
  std::vector<float> logits;
  for (const Rounded& one : kRounded) logits.push_back(one.logit);
  logits.push_back(std::nanf(""));
  for (const DType dtype : kShortTypes)
    for (const Compute arithmetic : {Compute::kDefault, Compute::kExact}) {
      kit::IndexerLogitsSpec spec = {.q_len = {2}, .kv_len = {static_cast<int32_t>(logits.size())}};
      spec.compute = arithmetic;
      spec.causal = false;
      spec.logits_dtype = dtype;
      spec.logits_columns = 100;
      spec.logits_extra = 1;
      const kit::IndexerLogitsCase problem(spec);
      make_scales_logits(problem, logits);
      compute(problem);
      const bool f16 = dtype == DType::kF16;
      for (int64_t t = 0; t < 2; ++t) {
        const uint16_t* const row = problem.logits.as<uint16_t>() + t * problem.params().logits.stride[0];
        for (size_t j = 0; j < std::size(kRounded); ++j)
          EXPECT_EQ(row[j], f16 ? kRounded[j].f16 : kRounded[j].bf16) << name(dtype) << ' ' << kRounded[j].logit;
        const size_t nan = std::size(kRounded);
        EXPECT_TRUE(std::isnan(f16 ? f16_to_f32(row[nan]) : bf16_to_f32(row[nan])));
        for (size_t j = nan + 1; j < static_cast<size_t>(problem.num_columns); ++j)
          EXPECT_EQ(row[j], f16 ? 0xFC00 : 0xFF80) << j;
      }
    }
}

/// GPUs whose kernels would add up the heads of several launches refuse 16-bit logits of them.
TEST(LogitTypesOfManyHeads, AreRefusedByName) {
  kit::IndexerLogitsSpec spec = {.num_heads = 121, .logits_dtype = DType::kBF16};
  for (const auto& [dtype, usable] : {std::pair(DType::kBF16, false), {DType::kF32, true}}) {
    spec.logits_dtype = dtype;
    const Explanation explanation = explain(kit::on_device(kit::problem_of(spec), "emulated:sm90"), "cuda_portable");
    EXPECT_EQ(explanation.selected.empty(), !usable) << explanation.error;
    EXPECT_EQ(explanation.error.find("takes at most 120 heads where logits are bf16, not 121") != std::string::npos,
              !usable);
  }
}

class IndexerTopKTypes : public RowTest {
  void SetUp() override { use_row_of(kit::problem_of(kit::IndexerTopKSpec{})); }
};
MLA_FOR_ALL_ROWS(IndexerTopKTypes, Op::kIndexerTopK);

/// Logits that differ in f32 alone are equal once they are rounded: then the lower indices are taken.
TEST_P(IndexerTopKTypes, TiesAfterRoundingGoToLowerIndices) {
  std::vector<float> logits;
  for (int j = 0; j < 10; ++j) logits.push_back(1.0F + static_cast<float>(j) * 0x1p-20F);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    kit::IndexerTopKSpec spec;
    spec.indexer.kv_len = {10};
    spec.indexer.logits_dtype = dtype;
    spec.topk = 3;
    const kit::IndexerTopKCase problem(spec);
    make_scales_logits(problem.indexer, logits);
    compute(problem);
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_EQ(problem.slots.as<int32_t>()[i], problem.table.slot_of(0, dtype == DType::kF32 ? 7 + i : i))
          << name(dtype);
  }
}

TEST_P(IndexerTopKTypes, ProblemsOfEveryForm) {
  for (const kit::IndexerLogitsSpec& indexer : specs_of_logits())
    for (const DType dtype : kShortTypes) {
      kit::IndexerTopKSpec spec = {.indexer = indexer, .topk = 40};
      spec.indexer.logits_dtype = dtype;
      spec.indexer.logits_extra = 3;
      expect_ok(spec);
    }
}

class TopKTypes : public RowTest {
  void SetUp() override { use_row_of(kit::problem_of(kit::TopKSpec{})); }
};
MLA_FOR_ALL_ROWS(TopKTypes, Op::kTopK);

TEST_P(TopKTypes, ProblemsOfEveryForm) {
  for (const DType dtype : kShortTypes)
    for (const int32_t num_logits : {1, 63, 5000})
      for (const int32_t levels : {0, 1, 5})
        for (const double share : {0.0, 0.4}) {
          kit::TopKSpec spec;
          spec.num_tokens = 5;  // whose rows begin at every address, with a stride of an odd number of logits
          spec.num_logits = num_logits;
          spec.levels = levels;
          spec.nan_share = spec.infinite_share = share;
          spec.logits_dtype = dtype;
          spec.logits_extra = num_logits % 2 == 0 ? 1 : 0;
          spec.lengths = levels == 1;
          for (const int32_t k : {1, 100, 2048}) {
            spec.k = k;
            expect_ok(spec);
          }
          spec.k = 50;
          spec.starts = true;
          expect_ok(spec);
          spec.starts = false;
          for (const int32_t block_size : {3, 8, 128, 1500}) {
            spec.block_size = block_size;
            spec.logits_extra = block_size == 8 ? (8 - num_logits % 8) % 8 : 1;
            expect_ok(spec);
            spec.num_blocks = num_logits / block_size + 1;
            expect_ok(spec);
            spec.num_blocks = 0;
          }
        }
}

/// -inf, the least and the largest finite number, infinity and NaN keep their order; both zeros are one.
TEST_P(TopKTypes, OrderOfSpecialLogits) {
  for (const DType dtype : kShortTypes) {
    const float most = dtype == DType::kF16 ? 65504.0F : 0x1.FEp127F;
    const std::vector<float> logits = {std::nanf(""), -kInfinity, -most, -0.0F, 0.0F, most, kInfinity, -std::nanf("")};
    const std::pair<int32_t, std::vector<int32_t>> chosen[] = {{1, {6}},
                                                               {2, {5, 6}},
                                                               {3, {3, 5, 6}},
                                                               {4, {3, 4, 5, 6}},
                                                               {5, {2, 3, 4, 5, 6}},
                                                               {6, {1, 2, 3, 4, 5, 6}},
                                                               {7, {0, 1, 2, 3, 4, 5, 6}}};
    for (const auto& [k, expected] : chosen) {
      kit::TopKSpec spec = {.num_tokens = 1, .num_logits = static_cast<int32_t>(logits.size()), .k = k};
      spec.logits_dtype = dtype;
      const kit::TopKCase problem(spec);
      for (size_t j = 0; j < logits.size(); ++j)
        kit::store_element(problem.logits.data(), dtype, static_cast<int64_t>(j), logits[j]);
      compute(problem);
      const auto* const indices = problem.indices.as<int32_t>();
      EXPECT_EQ(std::vector<int32_t>(indices, indices + k), expected) << name(dtype);
    }
  }
}

TEST_P(TopKTypes, Random) {
  for (uint64_t seed = 61000; seed < 61040; ++seed) expect_ok(kit::random_top_k_spec(seed));
}

}  // namespace
}  // namespace mla

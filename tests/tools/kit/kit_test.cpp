// SPDX-License-Identifier: Apache-2.0
// Tests the checks themselves: they must fail when something is wrong, and repeat what they did from a seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "kit/paged_memory.h"
#include "ops/backend_test.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSpec;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Compare, MeasuresEveryDistance) {
  const std::vector<double> reference = {1, -4, 0.5, 0.25}, o = {1, -4.1, 0.5, 0.26};
  const std::vector<double> lse = {2, 3}, reference_lse = {2, 3.5};
  const kit::Error error = kit::compare(o, reference, 2, lse, reference_lse);
  EXPECT_NEAR(error.max_abs, 0.1, 1e-12);
  EXPECT_NEAR(error.max_rel, 0.1 / 4, 1e-12);
  EXPECT_EQ(error.worst_row, 0);
  EXPECT_NEAR(error.max_lse, 0.5, 1e-12);
  EXPECT_GT(error.cosine_distance, 0);
  EXPECT_TRUE(error.special_equal);
}

TEST(Compare, PositionsOfInfAndNanCount) {
  const std::vector<double> none;
  EXPECT_TRUE(kit::compare(std::vector{kNan, 1.0}, std::vector{kNan, 1.0}, 1, none, none).special_equal);
  EXPECT_FALSE(kit::compare(std::vector{kNan, 1.0}, std::vector{1.0, 1.0}, 1, none, none).special_equal);
  EXPECT_FALSE(kit::compare(std::vector{1.0, 1.0}, std::vector{1.0, kNan}, 1, none, none).special_equal);
  EXPECT_FALSE(kit::compare(std::vector{kInfinity}, std::vector{-kInfinity}, 1, none, none).special_equal);
  const std::vector<double> zero = {0}, minus = {-kInfinity}, plus = {kInfinity};
  EXPECT_TRUE(kit::compare(zero, zero, 1, minus, minus).special_equal);
  EXPECT_FALSE(kit::compare(zero, zero, 1, plus, minus).special_equal);
  EXPECT_FALSE(kit::compare(zero, zero, 1, std::vector{-1e30}, minus).special_equal);
}

TEST(Compare, RowsOfZerosMustBeZero) {
  const std::vector<double> none, zero = {0, 0};
  EXPECT_EQ(kit::compare(std::vector{0.0, 1e-30}, zero, 2, none, none).max_rel, kInfinity);
  EXPECT_EQ(kit::compare(zero, zero, 2, none, none).max_rel, 0);
}

TEST(Compare, AnotherSizeIsNoResult) {
  const std::vector<double> none, two = {1, 2}, four = {1, 2, 1, 2};
  EXPECT_NE(kit::judge(kit::compare(two, four, 2, none, none), {1, 1, 1}), "");
}

TEST(Judge, NamesWhatIsTooLarge) {
  const kit::Tolerance tolerance = {.max_rel = 0.1, .cosine_distance = 0.1, .max_lse = 0.1};
  EXPECT_EQ(kit::judge({}, tolerance), "");
  kit::Error error;
  error.max_rel = kNan;
  EXPECT_NE(kit::judge(error, tolerance), "");
  error = {};
  error.max_lse = 0.2;
  EXPECT_NE(kit::judge(error, tolerance).find("lse"), std::string::npos);
  error = {};
  error.cosine_distance = 0.2;
  EXPECT_NE(kit::judge(error, tolerance).find("cosine"), std::string::npos);
}

TEST(CountSkipped, GroupsByRowAndReason) {
  std::vector<kit::Skipped> skipped;
  for (const BackendVerdict& row : std::vector<BackendVerdict>{{.name = "a", .usable = false, .reason = "old"},
                                                               {.name = "b", .usable = false, .reason = "old"},
                                                               {.name = "a", .usable = false, .reason = "odd"},
                                                               {.name = "a", .usable = false, .reason = "old"}})
    kit::count_skipped(row, skipped);
  ASSERT_EQ(skipped.size(), 3U);
  const kit::Skipped expected[] = {{"a", "old", 2}, {"b", "old", 1}, {"a", "odd", 1}};
  for (size_t i = 0; i < skipped.size(); ++i) {
    EXPECT_EQ(skipped[i].backend, expected[i].backend);
    EXPECT_EQ(skipped[i].reason, expected[i].reason);
    EXPECT_EQ(skipped[i].cases, expected[i].cases);
  }
}

/// Holds a decode that the reference has run, for tests to damage.
class Damage : public testing::Test {
 protected:
  Damage() : problem_(spec()) {
    const Result<Context> context = Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
    MLA_EXPECT_OK(context);
    MLA_EXPECT_OK(kit::plan_and_run(*context, problem_));
    Result<kit::Expected> expected = kit::expected_of(problem_);
    MLA_EXPECT_OK(expected);
    expected_ = std::move(expected).value();
  }
  static DecodeSpec spec() {
    DecodeSpec made;
    made.kv_len = {300, 40};
    made.o_head_extra = 4;
    made.lse_token_extra = 2;
    return made;
  }
  bool passes(std::string_view backend = "cpu_avx512_bf16") const {
    return kit::check_outputs(problem_, expected_, backend).ok;
  }

  DecodeCase problem_;
  kit::Expected expected_;
};

TEST_F(Damage, NoneIsFine) {
  EXPECT_TRUE(passes());
  EXPECT_TRUE(passes("cpu_avx2"));
}

TEST_F(Damage, OneWrongElement) {
  auto* o = problem_.o.as<uint16_t>();
  o[516 * 3 + 17] = f32_to_bf16(bf16_to_f32(o[516 * 3 + 17]) + 0.05F);
  EXPECT_FALSE(passes());
}

TEST_F(Damage, OneKeyTooFew) {
  DecodeSpec shorter = spec();
  shorter.kv_len = {299, 40};
  shorter.causal = false;
  const DecodeCase other(shorter);
  const Result<Context> context = Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
  MLA_EXPECT_OK(context);
  MLA_EXPECT_OK(kit::plan_and_run(*context, other));
  std::memcpy(problem_.o.data(), other.o.data(), other.o.size());
  EXPECT_FALSE(passes());
}

TEST_F(Damage, LseOffByAThousandth) {
  problem_.lse.as<float>()[5] += 1e-3F;
  EXPECT_FALSE(passes());
}

TEST_F(Damage, WriteIntoAGap) {
  problem_.o.as<uint16_t>()[513] = 0;
  EXPECT_FALSE(passes());
}

TEST_F(Damage, WriteIntoAGapOfLse) {
  problem_.lse.as<float>()[16] = 0;
  EXPECT_FALSE(passes());
}

TEST_F(Damage, WriteBeforeOrBehindTheBuffer) {
  problem_.o.data()[-1] = std::byte{0};
  EXPECT_FALSE(passes());
  problem_.o.data()[-1] = std::byte{0xC3};
  EXPECT_TRUE(passes());
  problem_.o.data()[problem_.o.size()] = std::byte{0};
  EXPECT_FALSE(passes());
}

TEST(Tolerance, IsTightAndOrdered) {
  DecodeSpec spec;
  const Numerics exact = {}, bf16_pairs = {.multiplied = Arithmetic::kBF16};
  const kit::Tolerance bf16 = kit::tolerance_of(spec, exact);
  const kit::Tolerance dot = kit::tolerance_of(spec, bf16_pairs);
  spec.o_dtype = DType::kF32;
  const kit::Tolerance f32 = kit::tolerance_of(spec, exact);
  EXPECT_LT(f32.max_rel, 1e-4);
  EXPECT_LT(f32.max_lse, 1e-4);
  EXPECT_LT(bf16.max_rel, 0.0045);
  EXPECT_LT(dot.max_rel, 0.011);
  EXPECT_LT(dot.max_lse, 1e-4);
  EXPECT_LT(dot.cosine_distance, 1e-4);
}

/// Says what a row multiplies, and whether on tensor cores.
std::string numerics_text(std::string_view backend, const Problem& problem) {
  const Numerics numerics = kit::numerics_of(backend, problem);
  return std::string(name(numerics.multiplied)) + (numerics.products_per_cut > 0 ? " mma" : "");
}

TEST(Numerics, OfPairsAreForWhatBf16Holds) {
  DecodeSpec spec;
  for (const DType q_dtype : {DType::kBF16, DType::kE4M3}) {
    spec.q_dtype = q_dtype;
    EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(spec)), "bf16");
    EXPECT_EQ(numerics_text("cpu_avx2", kit::problem_of(spec)), "f32");
  }
  spec.cache.format = CacheFormat::kF16;
  EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(spec)), "f32");
  spec.cache.format = CacheFormat::kFP8;
  EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(spec)), "bf16");
  EXPECT_EQ(numerics_text("reference", kit::problem_of(spec)), "f64");
  for (const DType q_dtype : {DType::kF32, DType::kF16}) {
    spec.q_dtype = q_dtype;
    EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(spec)), "f32");
  }
  kit::DecodeSparseSpec sparse;  // the coarser of its pools
  sparse.pool.cache.format = CacheFormat::kF16;
  EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(sparse)), "f32");
  sparse.extra_pool = kit::SparsePoolSpec{};
  EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(sparse)), "bf16");
  EXPECT_EQ(numerics_text("cpu_avx512_bf16", kit::problem_of(kit::AppendSpec{})), "f32");
}

/// Tolerances come from the numerics, whatever the row is called.
TEST(Numerics, OfAnUnknownRowAllowLeast) {
  EXPECT_EQ(kit::numerics_of("cuda_bf16_that_is_not", kit::problem_of(DecodeSpec{})), Numerics{});
}

TEST(Cases, ASpecDeterminesEveryBit) {
  for (uint64_t seed = 1; seed < 10; ++seed) {
    const DecodeSpec spec = kit::random_decode_spec(seed, CacheFormat::kF16);
    EXPECT_EQ(kit::describe(spec), kit::describe(kit::random_decode_spec(seed, CacheFormat::kF16)));
    const DecodeCase one(spec), two(spec);
    EXPECT_EQ(bits_of(one.q), bits_of(two.q));
    EXPECT_EQ(bits_of(one.memory.kv), bits_of(two.memory.kv));
    EXPECT_EQ(bits_of(one.memory.table), bits_of(two.memory.table));
  }
}

TEST(Cases, AnotherSeedIsAnotherProblem) {
  DecodeSpec spec;
  const DecodeCase one(spec);
  spec.seed = 2;
  const DecodeCase two(spec);
  EXPECT_NE(bits_of(one.q), bits_of(two.q));
  EXPECT_NE(bits_of(one.memory.kv), bits_of(two.memory.kv));
}

TEST(Cases, ScoresHaveTheSpreadTheyShould) {
  for (float score_std : {1.0F, 4.0F}) {
    DecodeSpec spec;
    spec.score_std = score_std;
    spec.kv_len = {2000};
    spec.num_heads = 1;
    spec.cache.shuffled_pages = false;
    const DecodeCase problem(spec);
    double sum = 0, squares = 0;
    for (int64_t j = 0; j < 2000; ++j) {
      double score = 0;
      for (int64_t c = 0; c < 576; ++c)
        score += kit::load_element(problem.q.data(), DType::kBF16, c) *
                 kit::load_element(problem.memory.kv.data(), DType::kBF16, j * 576 + c);
      score *= static_cast<double>(spec.effective_sm_scale());
      sum += score;
      squares += score * score;
    }
    EXPECT_NEAR(std::sqrt(squares / 2000), static_cast<double>(score_std), 0.1 * static_cast<double>(score_std));
    EXPECT_NEAR(sum / 2000, 0, 0.1 * static_cast<double>(score_std));
  }
}

TEST(Cases, PoisonCoversWhatNobodyOwns) {
  DecodeSpec spec;
  spec.kv_len = {70};
  spec.cache.token_stride_extra = 2;
  const DecodeCase problem(spec);
  const auto nan_at = [&](int64_t element) {
    return std::isnan(kit::load_element(problem.memory.kv.data(), DType::kBF16, element));
  };
  ASSERT_EQ(problem.memory.unowned.size(), 2U);
  EXPECT_TRUE(nan_at(problem.memory.ckv_offset(problem.memory.unowned[0], 63)));
  const int32_t last = problem.memory.pages_of[0][1];
  EXPECT_FALSE(nan_at(problem.memory.ckv_offset(last, 5)));
  EXPECT_TRUE(nan_at(problem.memory.ckv_offset(last, 6)));
  EXPECT_TRUE(nan_at(problem.memory.ckv_offset(last, 5) + 576));
}

TEST(PagedMemory, RowsComeBackAsQuantizationLeavesThem) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool token_scales : {false, true}) {
      kit::CacheSpec cache = kit::usual_cache(format);
      cache.token_scales = cache.two_tensors = format == CacheFormat::kFP8 && token_scales;
      const kit::PagedMemory memory = kit::make_paged(cache, std::vector<int32_t>{70}, 5);
      std::vector<float> values(static_cast<size_t>(cache.d_qk));
      kit::fill_row_values(values, 17);
      const int64_t page = memory.pages_of[0][1];
      memory.write_row(page, 3, values);
      const std::vector<float> back = memory.read_row(page, 3);
      ASSERT_EQ(back.size(), values.size());
      // Three bits of mantissa, and subnormals of the largest of a group; one bit of e2m1, whose scale is a little off.
      // Scales of e2m1 that are rounded up to powers of two, and so its subnormals, are up to twice as large.
      const Codec codec = kv_layout(format).nope;
      const bool e2m1 = codec.element == DType::kE2M1;
      const float step = e2m1 ? 0x1.4p-2F : 0x1p-4F;
      const float least = e2m1 && codec.scale_type == ScaleType::kUE8M0 ? 0.64F : 0.32F;
      for (size_t c = 0; c < back.size(); ++c)
        ASSERT_NEAR(back[c], values[c], std::abs(values[c]) * step + least * step) << name(format) << ' ' << c;
      for (float value : memory.read_row(page, 6)) ASSERT_TRUE(std::isnan(value)) << name(format);
      ASSERT_EQ(memory.unowned.size(), 2U);
      for (float value : memory.read_row(memory.unowned[1], 0)) ASSERT_TRUE(std::isnan(value)) << name(format);
    }
}

TEST(PagedMemory, LayoutsOfOneSeedHoldTheSameRows) {
  for (CacheFormat format : kAllCacheFormats) {
    kit::CacheSpec cache = kit::usual_cache(format);
    const std::vector<int32_t> kv_len = {100, 7};
    const kit::PagedMemory one = kit::make_paged(cache, kv_len, 5);
    cache.page_size = 16;
    cache.page_stride_extra = 64;
    cache.padded_pages = kv_layout(format).has_footer();
    const ContextParallel share = {.rank = 1, .world = 3, .interleave = 2};
    const kit::PagedMemory two = kit::make_paged(cache, kv_len, 5, share);
    for (size_t request = 0; request < 2; ++request)
      for (int64_t token = 0; token < local_length(share, kv_len[request]); ++token) {
        const int64_t here = two.slot_of(request, token), there = one.slot_of(request, global_position(share, token));
        ASSERT_EQ(two.read_row(here / 16, here % 16), one.read_row(there / 64, there % 64)) << name(format);
      }
  }
}

TEST(JudgeCodes, TakesWhatTheErrorAllowsAndNothingElse) {
  const std::vector<double> reference = {0.98, -0.5, 0.01, 0.0};
  std::vector<uint8_t> codes;
  for (double value : reference) codes.push_back(f32_to_e4m3(static_cast<float>(value / 0.01)));
  EXPECT_EQ(kit::judge_codes(codes, reference, 4, 0.01, 1e-3), "");
  codes[0] = static_cast<uint8_t>(codes[0] + 1);
  EXPECT_NE(kit::judge_codes(codes, reference, 4, 0.01, 1e-3), "");
  EXPECT_EQ(kit::judge_codes(codes, reference, 4, 0.01, 0.1), "");
  codes[0] = 0x7F;
  EXPECT_NE(kit::judge_codes(codes, reference, 4, 0.01, 0.1), "");
}

/// Runs a direct operation by the reference, and expects the check to fail when a byte of the output, or just before
/// it, is changed.
template <class Case, class Spec>
void expect_damage_shows(const Spec& spec) {
  const Case problem(spec);
  const Result<Context> context = Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
  MLA_EXPECT_OK(context);
  MLA_EXPECT_OK(run(*context, problem.params()));
  EXPECT_TRUE(kit::check_outputs(problem, "reference").ok) << describe(spec);
  const kit::Buffer& output = *problem.outputs()[0];
  std::byte& byte = output.data()[output.size() / 2 | 3];
  byte ^= std::byte{0x40};
  EXPECT_FALSE(kit::check_outputs(problem, "reference").ok) << describe(spec);
  byte ^= std::byte{0x40};
  EXPECT_TRUE(kit::check_outputs(problem, "reference").ok) << "the outputs were put back";
  output.data()[-1] ^= std::byte{1};
  EXPECT_FALSE(kit::check_outputs(problem, "reference").ok) << describe(spec);
}

TEST(DirectDamage, OneByteOfADirectOperation) {
  expect_damage_shows<kit::AppendCase>(kit::AppendSpec{});
  expect_damage_shows<kit::AppendRopeCase>(kit::AppendRopeSpec{});
  expect_damage_shows<kit::GatherCase>(kit::GatherSpec{});
  expect_damage_shows<kit::CopyPagesCase>(kit::CopyPagesSpec{});
  expect_damage_shows<kit::BlockTableToCsrCase>(kit::BlockTableToCsrSpec{});
  expect_damage_shows<kit::PhysicalSlotsCase>(kit::PhysicalSlotsSpec{});
  expect_damage_shows<kit::AppendIndexerCase>(kit::AppendIndexerSpec{});
  expect_damage_shows<kit::IndexerLogitsCase>(kit::IndexerLogitsSpec{});
  expect_damage_shows<kit::TopKCase>(kit::TopKSpec{});
  expect_damage_shows<kit::CompressCase>(kit::CompressSpec{});
  expect_damage_shows<kit::FinishOutputCase>(kit::FinishOutputSpec{});
}

/// The error of logits is in units of their tolerance.
TEST(DirectError, OfTheIndexersLogits) {
  const kit::IndexerLogitsCase problem(kit::IndexerLogitsSpec{});
  const Result<Context> context = Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
  MLA_EXPECT_OK(context);
  MLA_EXPECT_OK(run(*context, problem.params()));
  EXPECT_EQ(kit::check_outputs(problem, "reference").error.max_rel, 0.0);
  const double tolerance = kit::tolerance_of(problem.spec, Numerics{});
  float& logit = problem.logits.as<float>()[0];
  logit += static_cast<float>(problem.row_scales()[0] * tolerance / 2);
  const kit::Outcome outcome = kit::check_outputs(problem, "reference");
  EXPECT_TRUE(outcome.ok) << outcome.failure;
  EXPECT_NEAR(outcome.error.max_rel / tolerance, 0.5, 0.01);
}

TEST(DirectDamage, SlotsOfTheIndexer) {
  const kit::IndexerTopKCase problem(kit::IndexerTopKSpec{});
  const Result<Context> context = Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
  MLA_EXPECT_OK(context);
  MLA_EXPECT_OK(run(*context, problem.params()));
  EXPECT_TRUE(kit::check_outputs(problem, "reference").ok);
  auto* slots = problem.slots.as<int32_t>();
  const int32_t first = slots[0];
  for (int32_t wrong : {-1, slots[1], 2147483647}) {
    slots[0] = wrong;
    EXPECT_FALSE(kit::check_outputs(problem, "reference").ok) << wrong;
  }
  // The least of all keys is not among the 64 largest of 300.
  const float* logits = problem.indexer.logits.as<float>();
  slots[0] = static_cast<int32_t>(problem.table.slot_of(0, std::min_element(logits, logits + 300) - logits));
  EXPECT_FALSE(kit::check_outputs(problem, "reference").ok);
  slots[0] = first;
  problem.valid_count.as<int32_t>()[0] = 63;
  EXPECT_FALSE(kit::check_outputs(problem, "reference").ok);
}

TEST(Specs, RandomOnesReachEveryOption) {
  std::set<bool> sink, infinite, window, cap, alibi, parallel, extra_pool, fp8, sparse_fp8;
  std::set<kit::Tree> trees;
  std::set<DType> queries, outputs;
  std::set<kit::LengthForm> lengths;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const DecodeSpec spec = kit::random_decode_spec(seed, CacheFormat::kFP8DsMla);
    sink.insert(spec.options.attn_sink);
    infinite.insert(spec.options.infinite_sinks);
    window.insert(spec.options.window_left >= 0);
    cap.insert(spec.options.logits_soft_cap > 0);
    alibi.insert(spec.options.alibi_slopes);
    fp8.insert(spec.options.compute == Compute::kFP8);
    parallel.insert(spec.context_parallel.world > 1);
    trees.insert(spec.tree);
    queries.insert(spec.q_dtype);
    outputs.insert(spec.o_dtype);
    const kit::DecodeSparseSpec sparse = kit::random_decode_sparse_spec(seed, CacheFormat::kFP8DsV4);
    extra_pool.insert(sparse.extra_pool.has_value());
    sparse_fp8.insert(sparse.options.compute == Compute::kFP8);
    lengths.insert(sparse.pool.topk_length);
  }
  for (const auto& values : {sink, infinite, window, cap, alibi, parallel, extra_pool, fp8, sparse_fp8})
    EXPECT_EQ(values.size(), 2U);
  EXPECT_EQ(trees.size(), 3U);
  EXPECT_EQ(lengths.size(), 3U);
  EXPECT_EQ(queries.size(), 4U);
  EXPECT_EQ(outputs.size(), 4U);
}

TEST(Specs, RandomOnesReachEveryKnob) {
  std::set<int32_t> page_sizes, heads;
  std::set<bool> block_tables, two_tensors, splits, causal, empty, infinite_lse, invariant, strided;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const DecodeSpec spec = kit::random_decode_spec(seed, CacheFormat::kBF16);
    page_sizes.insert(spec.cache.page_size);
    heads.insert(spec.num_heads);
    block_tables.insert(spec.cache.block_table);
    two_tensors.insert(spec.cache.two_tensors);
    splits.insert(spec.split_q);
    causal.insert(spec.causal);
    empty.insert(spec.kv_len.empty());
    infinite_lse.insert(spec.lse_inf_without_keys);
    invariant.insert(spec.batch_invariant);
    strided.insert(spec.q_head_extra != 0);
  }
  for (int32_t size : {1, 2, 16, 32, 64, 128, 256}) EXPECT_TRUE(page_sizes.contains(size)) << size;
  for (int32_t count : {8, 12, 16, 20, 32, 64, 96, 128, 1024}) EXPECT_TRUE(heads.contains(count)) << count;
  for (const auto& values : {block_tables, two_tensors, splits, causal, empty, infinite_lse, invariant, strided})
    EXPECT_EQ(values.size(), 2U);
}

TEST(Specs, DescriptionsHoldTheSeedAndWhatIsUnusual) {
  DecodeSpec spec;
  spec.seed = 4711;
  EXPECT_NE(kit::describe(spec).find("seed=4711"), std::string::npos);
  EXPECT_EQ(kit::describe(spec).find("split_q"), std::string::npos);
  spec.split_q = true;
  EXPECT_NE(kit::describe(spec).find("split_q=1"), std::string::npos);
}

TEST(Specs, WorkCountsVisiblePairs) {
  DecodeSpec spec;
  spec.q_len = {3};
  spec.kv_len = {2, 5};  // 0 + 1 + 2 and 3 + 4 + 5 keys
  spec.num_heads = 2;
  EXPECT_EQ(kit::work_of(spec).flops, 2.0 * 15 * 2 * (576 + 512));
  spec.causal = false;
  EXPECT_EQ(kit::work_of(spec).flops, 2.0 * (6 + 15) * 2 * (576 + 512));
  spec.causal = true;
  spec.options.window_left = 1;  // 0 + 1 + 2 and 2 + 2 + 2 keys
  EXPECT_EQ(kit::work_of(spec).flops, 2.0 * 9 * 2 * (576 + 512));
  spec.options.window_left = -1;
  double of_ranks = 0;
  for (int32_t rank = 0; rank < 3; ++rank) {
    spec.context_parallel = {.rank = rank, .world = 3, .interleave = 1};
    of_ranks += kit::work_of(spec).flops;
  }
  EXPECT_EQ(of_ranks, 2.0 * 15 * 2 * (576 + 512));
}

TEST(Specs, WorkOfSparseDecodeCountsIndices) {
  kit::DecodeSparseSpec spec;
  spec.num_heads = 2;
  spec.pool.invalid_share = 0;
  spec.pool.topk = 10;
  EXPECT_EQ(kit::work_of(spec).flops, 2.0 * 4 * 10 * 2 * (576 + 512));
  spec.extra_pool = spec.pool;
  EXPECT_EQ(kit::work_of(spec).flops, 2.0 * 4 * 20 * 2 * (576 + 512));
}

TEST(Sweep, QuickSweepOfEverythingPasses) {
  kit::SweepOptions options;
  options.cases = 3;
  options.seed = 42;
  int64_t calls = 0, total = 0;
  const Result<kit::SweepResult> result = kit::sweep(options, [&](int64_t done, int64_t all, const kit::Outcome&) {
    EXPECT_EQ(done, ++calls);
    total = all;
    return true;
  });
  MLA_EXPECT_OK(result);
  EXPECT_EQ(result->cases, total);
  EXPECT_GE(result->cases, 3 * 40);
  EXPECT_EQ(result->failed, 0);
  for (const kit::Outcome& failure : result->failures) ADD_FAILURE() << failure.line();
}

TEST(Sweep, OneBackendOneOperation) {
  kit::SweepOptions options;
  options.quick = true;
  options.op = Op::kAppend;
  options.backend = "reference";
  options.cache = CacheFormat::kF16;
  const Result<kit::SweepResult> result = kit::sweep(options, [](int64_t, int64_t, const kit::Outcome& last) {
    EXPECT_EQ(last.backend, "reference");
    EXPECT_EQ(last.op, "append");
    EXPECT_NE(last.spec.find("cache=f16"), std::string::npos);
    return true;
  });
  MLA_EXPECT_OK(result);
  EXPECT_EQ(result->cases, 12);
}

TEST(Sweep, StopsWhenTold) {
  kit::SweepOptions options;
  options.op = Op::kAppend;
  const Result<kit::SweepResult> result =
      kit::sweep(options, [](int64_t done, int64_t, const kit::Outcome&) { return done < 3; });
  MLA_EXPECT_OK(result);
  EXPECT_EQ(result->cases, 3);
}

TEST(Sweep, OneFormatOfKeys) {
  kit::SweepOptions options;
  options.quick = true;
  options.backend = "reference";
  options.indexer_format = IndexerFormat::kMXFP4;
  const Result<kit::SweepResult> result = kit::sweep(options, [](int64_t, int64_t, const kit::Outcome& last) {
    EXPECT_NE(last.op.find("indexer"), std::string::npos);
    EXPECT_NE(last.spec.find("format=mxfp4"), std::string::npos) << last.spec;
    return true;
  });
  MLA_EXPECT_OK(result);
  EXPECT_EQ(result->cases, 3 * 12);
  options.op = Op::kDecode;
  EXPECT_EQ(kit::sweep(options).status().message(),
            "check: indexer_format: expected a format that decode takes, got mxfp4");
  options.cache = CacheFormat::kBF16;
  EXPECT_EQ(kit::sweep(options).status().message(),
            "check: indexer_format: expected none beside a cache format, got mxfp4");
}

TEST(Sweep, RefusesWhatItCannotRun) {
  kit::SweepOptions options;
  options.backend = "abacus";
  EXPECT_NE(kit::sweep(options).status().message().find("abacus"), std::string::npos);
  options.backend.clear();
  options.cache = CacheFormat::kFP8DsMla;
  options.op = Op::kTopK;
  EXPECT_NE(kit::sweep(options).status().message().find("fp8_ds_mla"), std::string::npos);
}

}  // namespace
}  // namespace mla

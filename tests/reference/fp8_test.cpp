// SPDX-License-Identifier: Apache-2.0
// Tests what compute = fp8 means: by hand, and random problems of every quantized format against the sentences of
// mla/params.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "problems.h"
#include "random_problems.h"
#include "test_cache.h"
#include "trace.h"

namespace mla::reference {
namespace {

std::vector<uint8_t> e4m3(const std::vector<float>& values) {
  std::vector<uint8_t> codes;
  for (float value : values) codes.push_back(encode_by_definition(value));
  return codes;
}

/// Holds one pool of rows of e4m3 elements, `width` latent channels wide, and no rotary ones. A row has one scale, or
/// one for each channel.
struct Pool {
  int32_t width = 1;
  std::vector<float> elements = {};
  std::vector<float> scales = {1};  // one for all rows, or [rows, width]
  std::vector<int32_t> indices = {};
  std::vector<uint8_t> codes = {};

  core::Cache view() {
    codes = e4m3(elements);
    codes.push_back(0);  // so that there is memory even for no row
    core::Cache cache = {.format = CacheFormat::kFP8,
                         .num_pages = static_cast<int64_t>(elements.size()) / width,
                         .page_size = 1,
                         .d_ckv = width,
                         .ckv = {reinterpret_cast<std::byte*>(codes.data()), width, width}};
    core::set_codecs(kv_layout(CacheFormat::kFP8), cache);
    if (scales.size() > 1) {
      cache.num_scales = width;
      cache.channels_per_scale = 1;
    }
    const int64_t stride = scales.size() > 1 ? int64_t{4} * width : 0;
    cache.scales = {reinterpret_cast<std::byte*>(scales.data()), stride, stride};
    return cache;
  }
};

/// Sets what decode and decode_sparse have in common: one head of queries as wide as the pool.
template <class Args>
void set_common(Args& args, const Pool& pool, const std::vector<float>& q, std::vector<float>& o,
                std::vector<float>& lse) {
  args.num_tokens = static_cast<int64_t>(q.size()) / pool.width;
  args.num_heads = 1;
  args.d_qk = args.d_v = pool.width;
  args.q_dtype = DType::kF32;
  args.q_nope = q.data();
  args.q_nope_stride_token = args.q_nope_stride_head = pool.width;
  args.sm_scale = 1;
  args.options.compute = Compute::kFP8;
  o.assign(q.size(), kNan);
  lse.assign(static_cast<size_t>(args.num_tokens), kNan);
  set_outputs(args, o, lse);
}

/// Holds one request over a pool: token j is row j.
struct SmallFp8 {
  Pool pool;
  std::vector<float> q = {};
  std::vector<float> o = {}, lse = {};

  void run(const std::function<void(core::DecodeArgs&)>& change = nullptr) {
    core::DecodeArgs args;
    set_common(args, pool, q, o, lse);
    args.cache = pool.view();
    const auto length = static_cast<int32_t>(args.cache.num_pages);
    std::vector<int32_t> table(static_cast<size_t>(length) + 1);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    args.batch_size = 1;
    args.queries.uniform_len = static_cast<int32_t>(args.num_tokens);
    args.pages = {.page_size = 1, .batch_size = 1, .table = table.data(), .kv_len = &length};
    if (change) change(args);
    run_in_workspace(args, decode);
  }
};

struct SmallSparseFp8 {
  Pool pool, extra = {};
  std::vector<float> q = {};
  std::vector<float> o = {}, lse = {};

  void run() {
    core::DecodeSparseArgs args;
    set_common(args, pool, q, o, lse);
    args.num_pools = extra.elements.empty() ? 1 : 2;
    for (int32_t i = 0; i < args.num_pools; ++i) {
      Pool& one = i == 0 ? pool : extra;
      args.pools[i] = {
          .cache = one.view(), .indices = one.indices.data(), .topk = static_cast<int32_t>(one.indices.size())};
    }
    run_in_workspace(args, decode_sparse);
  }
};

/// Holds a prefill of one query for each request, one head and one channel. A key has the score ln 3 times its element.
struct SmallPrefillFp8 {
  std::vector<float> k = {}, v = {};
  std::vector<int32_t> kv_indptr = {};
  std::vector<float> o = {}, lse = {};

  void run(Compute compute = Compute::kFP8, int32_t window_left = -1) {
    const float q_scale = 2, k_scale = 0.25F, v_scale = 3;
    const int64_t requests = std::ssize(kv_indptr) - 1;
    const std::vector<uint8_t> queries(static_cast<size_t>(requests), encode_by_definition(1)), keys = e4m3(k),
                                                                                                values = e4m3(v);
    std::vector<int32_t> qo_indptr;
    for (int32_t i = 0; i <= requests; ++i) qo_indptr.push_back(i);
    core::PrefillArgs args = {.batch_size = static_cast<int32_t>(requests),
                              .num_tokens = requests,
                              .num_keys = kv_indptr.back(),
                              .num_heads = 1,
                              .d_qk = 1,
                              .d_v = 1,
                              .dtype = DType::kE4M3,
                              .q = queries.data(),
                              .q_stride_token = 1,
                              .k = keys.data(),
                              .k_stride_token = 1,
                              .v = values.data(),
                              .v_stride_token = 1,
                              .qo_indptr = qo_indptr.data(),
                              .kv_indptr = kv_indptr.data(),
                              .options = {.window_left = window_left, .compute = compute},
                              .sm_scale = 2 * kLn3,
                              .q_scale = &q_scale,
                              .k_scale = &k_scale,
                              .v_scale = &v_scale};
    o.assign(queries.size(), kNan);
    lse.assign(queries.size(), kNan);
    set_outputs(args, o, lse);
    run_in_workspace(args, prefill);
  }
};

constexpr float kThird = 144.0F / 448;  // 1/3 of the largest: 149.33 of 448, between 144 and 160

TEST(ReferenceFp8, TheOnlyKeyIsElementTimesScale) {
  // 3.25 * 0.1 has more digits than bf16.
  SmallFp8 problem{.pool = {.elements = {3.25F}, .scales = {0.1F}}, .q = {1}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 3.25F * 0.1F);
  EXPECT_NE(problem.o[0], bf16_to_f32(f32_to_bf16(3.25F * 0.1F)));
  EXPECT_FLOAT_EQ(problem.lse[0], 3.25F * 0.1F);
  problem.run([](core::DecodeArgs& args) { args.options.compute = Compute::kDefault; });
  EXPECT_EQ(problem.o[0], bf16_to_f32(f32_to_bf16(3.25F * 0.1F)));
}

TEST(ReferenceFp8, QueriesHaveOneScaleForAllChannels) {
  // The scale is 14 / 448 = 1/32: 0.43 is 13.76 of it and becomes 14, 0.001 is 0.032 and becomes 1/32.
  SmallFp8 problem{.pool = {.width = 3, .elements = {0, 1, 16}, .scales = {0.5F}}, .q = {-14, 0.43F, 0.001F}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.lse[0], 0.5F * (14.0F / 32 + 16 * (1.0F / 1024)));
}

TEST(ReferenceFp8, QueriesThatHaveNoMagnitude) {
  SmallFp8 problem{.pool = {.width = 2, .elements = {1, 4}}, .q = {0, 0}};
  problem.run();
  EXPECT_EQ(problem.o, (std::vector<float>{1, 4}));
  EXPECT_EQ(problem.lse[0], 0.0F);
  // An infinity has no part in the scale and becomes the largest number, here 2.
  problem.q = {2, INFINITY};
  problem.run();
  EXPECT_FLOAT_EQ(problem.lse[0], 2 + 4 * 2);
  problem.q = {2, NAN};
  problem.run();
  EXPECT_TRUE(std::isnan(problem.o[0]) && std::isnan(problem.lse[0]));
}

TEST(ReferenceFp8, QueriesOfE4m3AreTakenAsTheyAre) {
  // A scale of 96 / 448 would not keep 1/64.
  const std::vector<uint8_t> q = e4m3({0.015625F, 96});
  const float q_scale = 0.5F;
  SmallFp8 problem{.pool = {.width = 2, .elements = {64, 0}}, .q = {0, 0}};
  problem.run([&](core::DecodeArgs& args) {
    args.q_dtype = DType::kE4M3;
    args.q_nope = q.data();
    args.q_scale = &q_scale;
  });
  EXPECT_FLOAT_EQ(problem.lse[0], 0.5F);
}

TEST(ReferenceFp8, WeightsAreRoundedAndTheirSumIsNot) {
  // Scores ln 3 and 2 ln 3: weights 1/3 and 1 of the larger.
  SmallFp8 problem{.pool = {.elements = {1, 2}}, .q = {kLn3}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], (kThird * 1 + 2) / (4.0F / 3));
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(12.0F));
}

TEST(ReferenceFp8, WeightsAreRoundedWithTheScaleOfTheirGroup) {
  // The same weights. In the second channel the first key's scale makes both products 1.
  SmallFp8 problem{.pool = {.width = 2, .elements = {1, 5, 2, 7}, .scales = {1, 3, 1, 1}}, .q = {kLn3, 0}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], (kThird * 1 + 2) / (4.0F / 3));
  EXPECT_FLOAT_EQ(problem.o[1], (5 + 7) / (4.0F / 3));
  // With one scale for all channels of a row they are rounded alike.
  problem.pool = {.width = 2, .elements = {1, 5, 2, 7}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[1], (kThird * 5 + 7) / (4.0F / 3));
}

TEST(ReferenceFp8, TheUnitIsOneOf32Keys) {
  // Key 31 has three times the weight of the others. Keys 0 to 31 are rounded in its unit, key 32 in its own.
  std::vector<float> elements(33, 1);
  elements[31] = 2;
  SmallFp8 problem{.pool = {.elements = elements}, .q = {kLn3}};
  problem.run();
  const float expected = (31 * kThird + 2 + 1.0F / 3) / (32.0F / 3 + 1);
  EXPECT_FLOAT_EQ(problem.o[0], expected);
  // A rank counts its own keys: the even tokens of 65.
  const int32_t length = 65;
  problem.run([&](core::DecodeArgs& args) {
    args.context_parallel = {.rank = 0, .world = 2, .interleave = 1};
    args.pages.kv_len = &length;
  });
  EXPECT_FLOAT_EQ(problem.o[0], expected);
}

TEST(ReferenceFp8, KeysOutOfSightSetNoUnit) {
  // Of keys NaN, 1 and 2 the first query sees those before the last, as far as its window goes.
  SmallFp8 problem{.pool = {.elements = {NAN, 1, 2}}, .q = {kLn3, kLn3}};
  problem.run([](core::DecodeArgs& args) { args.options.window_left = 1; });
  EXPECT_TRUE(std::isnan(problem.o[0]));  // sees keys 0 and 1
  EXPECT_FLOAT_EQ(problem.o[1], (kThird * 1 + 2) / (4.0F / 3));
  problem.run([](core::DecodeArgs& args) { args.options.window_left = 0; });
  EXPECT_FLOAT_EQ(problem.o[0], 1);
  EXPECT_FLOAT_EQ(problem.lse[0], kLn3);
}

TEST(ReferenceFp8, PoolsHaveBlocksOfTheirOwn) {
  // Weights of 1/3 beside one of 1: skipped entries count, and a second pool begins a block.
  SmallSparseFp8 problem{.pool = {.elements = {1, 2}}, .q = {kLn3}};
  problem.pool.indices.assign(32, -1);
  problem.pool.indices[3] = 0;
  problem.pool.indices[31] = 1;
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], (kThird * 1 + 2) / (4.0F / 3));
  problem.pool.indices[3] = -1;
  problem.pool.indices.push_back(0);  // entry 32
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], (1.0F / 3 * 1 + 2) / (4.0F / 3));
  problem.pool.indices = {1};
  problem.extra = {.elements = {7, 1}, .indices = {1}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], (1.0F / 3 * 1 + 2) / (4.0F / 3));
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(12.0F));
  problem.extra.scales = {5, 1};  // one for each row
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], (1.0F / 3 * 1 + 2) / (4.0F / 3));
}

TEST(ReferenceFp8, PrefillRoundsWeightsAndMultipliesByEveryScale) {
  // Scores ln 3 and 2 ln 3, as above; values 3 and 6.
  SmallPrefillFp8 problem{.k = {1, 2}, .v = {1, 2}, .kv_indptr = {0, 2}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 3 * (kThird * 1 + 2) / (4.0F / 3));
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(12.0F));
  problem.run(Compute::kDefault);
  EXPECT_FLOAT_EQ(problem.o[0], 3 * (1.0F / 3 * 1 + 2) / (4.0F / 3));
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(12.0F));
}

TEST(ReferenceFp8, PrefillCountsRunsFromTheFirstKeyOfTheRequest) {
  // As above: key 31 of the second request, whose keys begin at row 2, has three times the weight of the others.
  SmallPrefillFp8 problem{.k = std::vector<float>(35, 1), .v = std::vector<float>(35, 1), .kv_indptr = {0, 2, 35}};
  problem.k[2 + 31] = problem.v[2 + 31] = 2;
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 3);
  EXPECT_FLOAT_EQ(problem.o[1], 3 * (31 * kThird + 2 + 1.0F / 3) / (32.0F / 3 + 1));
  // What a window hides sets no unit, and moves no run: of keys 31 and 32 each is alone in its own.
  problem.v[2 + 30] = NAN;
  problem.run(Compute::kFP8, 1);
  EXPECT_FLOAT_EQ(problem.o[1], 3 * (2 + 1.0F / 3) / (4.0F / 3));
}

TEST(ReferenceFp8, NoKeyIsZeroAndMinusInfinity) {
  SmallSparseFp8 problem{.pool = {.elements = {NAN}, .indices = {-1, 5}}, .q = {1}};
  problem.run();
  EXPECT_EQ(problem.o[0], 0.0F);
  EXPECT_EQ(problem.lse[0], kMinusInfinity);
}

double nearest_e4m3(double value) { return e4m3_by_definition(encode_by_definition(static_cast<float>(value))); }

/// Returns a query as it is multiplied.
std::vector<double> rounded_query(const std::vector<double>& q, DType dtype, const Variant& variant) {
  if (dtype == DType::kE4M3) return q;
  const bool narrow_rope = variant.format == CacheFormat::kFP8 || variant.format == CacheFormat::kNvFP4DsMla368;
  const auto quantized = static_cast<size_t>(narrow_rope ? variant.d_ckv + variant.d_kpe : variant.d_ckv);
  float amax = 0;
  for (size_t c = 0; c < quantized; ++c) amax = std::fmax(amax, std::fabs(static_cast<float>(q[c])));
  const float scale = amax / 448.0F;
  std::vector<double> rounded;
  for (size_t c = 0; c < q.size(); ++c) {
    const auto value = static_cast<float>(q[c]);
    const auto bf16_value = static_cast<double>(bf16_to_f32(f32_to_bf16(value)));
    rounded.push_back(c < quantized ? nearest_e4m3(static_cast<double>(value / scale)) * static_cast<double>(scale)
                                    : bf16_value);
  }
  return rounded;
}

/// Returns channel `c` of the output, for weights that need not be relative to anything.
double output(const std::vector<TestCache::Exact>& keys, const std::vector<long double>& weights, size_t c,
              bool quantized) {
  long double sum = 0, weighted = 0;
  for (size_t block = 0; block < keys.size(); block += 32) {
    const size_t end = std::min(keys.size(), block + 32);
    long double largest = 0;
    for (size_t j = block; j < end; ++j)
      largest = std::max(largest, weights[j] * static_cast<long double>(keys[j].factors[c]));
    for (size_t j = block; j < end; ++j) {
      const long double product = weights[j] * static_cast<long double>(keys[j].factors[c]), unit = largest / 448;
      sum += weights[j];
      weighted +=
          static_cast<long double>(keys[j].elements[c]) *
          (quantized ? unit * static_cast<long double>(nearest_e4m3(static_cast<double>(product / unit))) : product);
    }
  }
  return static_cast<double>(weighted / sum);
}

TEST(ReferenceFp8, EveryQuantizedFormatByTheTextbook) {
  std::vector<Variant> variants;
  for (const Variant& variant : all_variants())
    if (is_quantized(kv_layout(variant.format).nope.element)) variants.push_back(variant);
  for (uint32_t seed = 0; seed < 10 * variants.size(); ++seed) {
    Random random(seed);
    const Variant& variant = variants[seed % variants.size()];
    MLA_TRACE(testing::Message() << "seed " << seed << ' ' << variant);
    const int32_t d_ckv = variant.d_ckv, d_kpe = variant.d_kpe, d_qk = d_ckv + d_kpe;
    const bool with_rope = kv_layout(variant.format).value_has_rope;
    const int32_t d_v = with_rope ? d_qk : d_ckv, heads = random.integer(1, 3);
    const int32_t kv_len = random.of({1, 31, 32, 33, 70}), page_size = random.of({1, 5, 64});
    const int32_t pages = (kv_len + page_size - 1) / page_size;
    TestCache cache(variant, pages, page_size);
    std::vector<TestCache::Exact> keys;
    std::vector<int32_t> table;
    for (int32_t page = 0; page < pages; ++page) table.push_back(page);
    for (int32_t j = 0; j < kv_len; ++j) {
      std::vector<float> row;
      const float size = random.of({0.5F, 1.0F, 3.0F});
      for (int32_t c = 0; c < d_qk; ++c) row.push_back(size * random.normal());
      cache.pack(j, row);
      keys.push_back(cache.exact(j));
    }
    Tensor q(random.of({DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}), heads, d_qk);
    q.fill(random, 0.3F);
    const float q_scale = 0.7F;
    const Options options(random, heads);
    std::vector<float> o(static_cast<size_t>(heads * d_v), kNan), lse(static_cast<size_t>(heads), kNan);

    core::DecodeArgs args;
    args.batch_size = 1;
    args.num_tokens = 1;
    args.num_heads = heads;
    args.d_qk = d_qk;
    args.d_v = d_v;
    args.q_dtype = q.dtype;
    args.q_scale = q.dtype == DType::kE4M3 ? &q_scale : nullptr;
    args.q_nope = q.bytes.data();
    args.q_pe = d_kpe > 0 ? q.bytes.data() + bytes_of(q.dtype, d_ckv) : nullptr;
    args.q_nope_stride_token = args.q_pe_stride_token = int64_t{heads} * d_qk;
    args.q_nope_stride_head = args.q_pe_stride_head = d_qk;
    args.cache = cache.view();
    args.pages = {.page_size = page_size, .batch_size = 1, .table = table.data(), .kv_len = &kv_len};
    args.options = options.args;
    args.options.window_left = -1;
    args.options.compute = Compute::kFP8;
    args.sm_scale = 0.2F;
    set_outputs(args, o, lse);
    run_in_workspace(args, decode);

    for (int32_t h = 0; h < heads; ++h) {
      std::vector<double> given;
      for (int32_t c = 0; c < d_qk; ++c) given.push_back(q.at(h, c));
      const std::vector<double> query = rounded_query(given, q.dtype, variant);
      const double scale =
          static_cast<double>(args.sm_scale) * (args.q_scale != nullptr ? static_cast<double>(q_scale) : 1);
      std::vector<double> scores;
      for (int32_t j = 0; j < kv_len; ++j) {
        const TestCache::Exact& key = keys[static_cast<size_t>(j)];
        double dot = 0;
        for (size_t c = 0; c < query.size(); ++c) dot += query[c] * key.elements[c] * key.factors[c];
        scores.push_back(options.score(scale * dot, h, j, kv_len - 1));
      }
      const Expected expected(scores);
      check_lse(lse[static_cast<size_t>(h)], expected);
      const double factor = 1 / (1 + std::exp(options.sink(h) - expected.lse));
      double worst = 0;
      for (int32_t c = 0; c < d_v; ++c) {
        const double right = factor * output(keys, expected.weights, static_cast<size_t>(c), c < d_ckv);
        worst = std::max(worst, std::fabs(right - static_cast<double>(o[static_cast<size_t>(h * d_v + c)])));
      }
      EXPECT_LT(worst, 1e-5) << "head " << h;
    }
  }
}

}  // namespace
}  // namespace mla::reference

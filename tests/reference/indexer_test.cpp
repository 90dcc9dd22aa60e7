// SPDX-License-Identifier: Apache-2.0
// Tests the indexer's cache, logits and selection.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "definitions.h"
#include "random_problems.h"
#include "reference/reference.h"
#include "trace.h"

namespace mla::reference {
namespace {

/// Holds pages of `page_size` keys of 128 bytes, then as many f32 scales, then a gap of 3: scales are mostly unaligned.
struct IndexerCache {
  int64_t num_pages;
  int32_t page_size;
  std::vector<uint8_t> bytes;

  IndexerCache(int64_t pages, int32_t tokens)
      : num_pages(pages), page_size(tokens), bytes(static_cast<size_t>(pages * (tokens * 132 + 3)), 0xA5) {}
  int64_t stride() const { return page_size * 132 + 3; }
  core::IndexerPages view() {
    return {.base = reinterpret_cast<std::byte*>(bytes.data()),
            .stride_page = stride(),
            .num_pages = num_pages,
            .page_size = page_size};
  }
  uint8_t* key(int64_t slot) {
    return &bytes[static_cast<size_t>(slot / page_size * stride() + slot % page_size * 128)];
  }
  uint8_t* scale(int64_t slot) {
    return &bytes[static_cast<size_t>(slot / page_size * stride() + page_size * 128 + slot % page_size * 4)];
  }
};

TEST(ReferenceAppendIndexer, WritesKeysAndFooterScales) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (bool power_of_two : {true, false}) {
    IndexerCache cache(3, 4), expected(3, 4);
    const std::vector<int64_t> slots = {11, -1, 0, 6};
    std::vector<float> k(4 * 130);
    for (float& value : k) value = 20 * normal(random);
    k[5] = INFINITY;
    k[6] = NAN;
    std::fill_n(k.begin() + 2 * 130, 128, 0.0F);
    core::AppendIndexerArgs args;
    args.num_tokens = 4;
    args.dtype = DType::kF32;
    args.k = k.data();
    args.k_stride_token = 130;
    args.slot_mapping = slots.data();
    args.power_of_two_scales = power_of_two;
    args.cache = cache.view();
    append_indexer(args);
    for (size_t t : {0U, 2U, 3U}) {
      const float* key = &k[t * 130];
      float amax = 0;
      for (int c = 0; c < 128; ++c)
        if (std::isfinite(key[c])) amax = std::max(amax, std::fabs(key[c]));
      const float scale =
          power_of_two ? static_cast<float>(power_of_two_by_definition(amax)) : std::max(amax / 448.0F, 0x1p-126F);
      std::memcpy(expected.scale(slots[t]), &scale, 4);
      for (int c = 0; c < 128; ++c) expected.key(slots[t])[c] = encode_by_definition(key[c] / scale);
    }
    EXPECT_EQ(cache.bytes, expected.bytes);
  }
}

/// Tests keys of MXFP4 against the words of their definition: pages of 64 bytes of elements a key, then 4 of scales.
TEST(ReferenceAppendIndexer, WritesMxfp4) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  constexpr int64_t kPageSize = 4, kStride = kPageSize * 68 + 3;
  std::vector<uint8_t> bytes(3 * kStride, 0xA5), expected = bytes;
  const std::vector<int64_t> slots = {11, -1, 0, 6, 7};
  std::vector<float> k(5 * 130);
  for (float& value : k) value = 20 * normal(random);
  k[5] = INFINITY;
  k[6] = NAN;
  std::fill_n(k.begin() + 2 * 130 + 32, 32, 0.0F);
  std::fill_n(k.begin() + 2 * 130 + 64, 32, 1e-6F);  // below 1e-4
  for (int c = 0; c < 32; ++c) k[3 * 130 + 96 + static_cast<size_t>(c)] = 0.25F * static_cast<float>(c % 25);  // ties
  std::fill_n(k.begin() + 4 * 130, 32, 3e38F);
  core::AppendIndexerArgs args;
  args.num_tokens = 5;
  args.dtype = DType::kF32;
  args.k = k.data();
  args.k_stride_token = 130;
  args.slot_mapping = slots.data();
  args.cache = {.base = reinterpret_cast<std::byte*>(bytes.data()),
                .stride_page = kStride,
                .num_pages = 3,
                .page_size = kPageSize,
                .format = IndexerFormat::kMXFP4};
  append_indexer(args);
  for (size_t t : {0U, 2U, 3U, 4U}) {
    uint8_t* const page = &expected[static_cast<size_t>(slots[t] / kPageSize * kStride)];
    uint8_t* const key = page + slots[t] % kPageSize * 64;
    uint8_t* const scales = page + kPageSize * 64 + slots[t] % kPageSize * 4;
    for (int group = 0; group < 4; ++group) {
      const float* values = &k[t * 130 + static_cast<size_t>(group) * 32];
      float amax = 1e-4F;
      for (int c = 0; c < 32; ++c)
        if (std::isfinite(values[c])) amax = std::max(amax, std::fabs(values[c]));
      int exponent = 0;
      const double fraction = std::frexp(static_cast<double>(amax) / 6, &exponent);
      if (fraction == 0.5) --exponent;
      scales[group] = static_cast<uint8_t>(exponent + 127);
      for (int c = 0; c < 32; c += 2) {
        const auto code = [&](int at) {
          return encode_e2m1_by_definition(static_cast<float>(std::ldexp(static_cast<double>(values[at]), -exponent)));
        };
        key[group * 16 + c / 2] = static_cast<uint8_t>(code(c) | code(c + 1) << 4);
      }
    }
  }
  EXPECT_EQ(bytes, expected);
}

/// Tests the logits of one query over keys of MXFP4, all of whose scales differ: 0, NaN and the largest among them.
TEST(ReferenceIndexerLogits, Mxfp4) {
  std::mt19937 random(3);
  constexpr int32_t kPageSize = 3, kKeys = 9, kStride = kPageSize * 68;
  std::vector<uint8_t> bytes(3 * kStride);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const int32_t table[] = {2, 0, 1}, kv_len = kKeys;
  const auto page = [&](int32_t j) { return &bytes[static_cast<size_t>(table[j / kPageSize] * kStride)]; };
  const auto key = [&](int32_t j) { return page(j) + j % kPageSize * 64; };
  const auto scales = [&](int32_t j) { return page(j) + kPageSize * 64 + j % kPageSize * 4; };
  for (int32_t j = 0; j < kKeys; ++j)
    for (int group = 0; group < 4; ++group) scales(j)[group] = static_cast<uint8_t>(100 + 8 * group + j);
  scales(1)[2] = 0;
  scales(4)[3] = 255;
  scales(7)[0] = 1;
  std::fill_n(scales(8), 4, uint8_t{254});
  for (int i = 0; i < 64; ++i) key(8)[i] = i == 40 ? 0x3D : 0;  // -3 and 1.5, in units of 2^127
  std::vector<float> q(128), logits(kKeys);
  for (float& value : q) value = static_cast<float>(static_cast<int>(random() % 15)) - 7;
  q[80] = q[81] = 1;
  const float weight = 1;
  core::IndexerLogitsArgs args;
  args.batch_size = args.num_heads = 1;
  args.num_tokens = 1;
  args.q_dtype = DType::kF32;
  args.q = q.data();
  args.weights = &weight;
  args.cache = {.base = reinterpret_cast<std::byte*>(bytes.data()),
                .stride_page = kStride,
                .num_pages = 3,
                .page_size = kPageSize,
                .format = IndexerFormat::kMXFP4};
  args.pages = {.page_size = kPageSize, .batch_size = 1, .table = table, .table_stride_request = 3, .kv_len = &kv_len};
  args.num_logits = kKeys;
  args.logits = logits.data();
  indexer_logits(args);
  for (int32_t j = 0; j < kKeys - 1; ++j) {
    double dot = 0;
    for (int c = 0; c < 128; ++c) {
      const int scale = scales(j)[c / 32];
      const double value = e2m1_by_definition(key(j)[c / 2] >> (c % 2 * 4) & 15);
      dot += static_cast<double>(q[static_cast<size_t>(c)]) * (scale == 0 ? 0 : std::ldexp(value, scale - 127));
    }
    if (j == 4)
      EXPECT_TRUE(std::isnan(logits[static_cast<size_t>(j)]));
    else
      EXPECT_EQ(logits[static_cast<size_t>(j)], static_cast<float>(std::max(dot, 0.0))) << j;
  }
  // -3 * 2^127 is no bf16: it is -inf, and so is the product with a query of 1.
  EXPECT_EQ(logits[8], 0.0F);
}

/// Tests the logits of one query with two heads over keys of one channel: scale 2, keys 1, -1, 3.
TEST(ReferenceIndexerLogits, ByHand) {
  IndexerCache cache(2, 2);
  const float keys[] = {1, -1, 3};
  const int32_t table[] = {1, 0}, kv_len = 3;
  for (int64_t j = 0; j < 3; ++j) {
    const int64_t slot = table[j / 2] * 2 + j % 2;
    std::fill_n(cache.key(slot), 128, uint8_t{0});
    cache.key(slot)[9] = encode_by_definition(keys[j]);
    const float scale = 2;
    std::memcpy(cache.scale(slot), &scale, 4);
  }
  const float nan = NAN;
  std::memcpy(cache.scale(1), &nan, 4);  // token 3, past kv_len
  std::vector<float> q(2 * 128, 0.0F);
  q[9] = 5;
  q[128 + 9] = -7;
  const float weights[] = {0.5F, -1};
  std::vector<float> logits(5, 9.0F);
  core::IndexerLogitsArgs args;
  args.batch_size = 1;
  args.num_tokens = 1;
  args.num_heads = 2;
  args.q_dtype = DType::kF32;
  args.q = q.data();
  args.q_stride_head = 128;
  args.weights = weights;
  args.cache = cache.view();
  args.pages = {.page_size = 2, .batch_size = 1, .table = table, .table_stride_request = 2, .kv_len = &kv_len};
  args.num_logits = 4;
  args.logits = logits.data();
  indexer_logits(args);
  // 2 * 0.5 * 5; 2 * -1 * 7; 2 * 0.5 * 15
  EXPECT_EQ(logits, (std::vector<float>{5, -14, 15, kMinusInfinity, 9}));
}

/// Holds ragged requests over shuffled pages, with slots that no request owns full of NaN.
struct RandomIndexer {
  int32_t heads, batch = 3, width = 40;
  std::vector<int32_t> kv_len, qo_indptr = {0}, table;
  IndexerCache cache;
  Tensor q;
  std::vector<float> weights, logits;
  core::IndexerLogitsArgs args;

  explicit RandomIndexer(Random& random)
      : heads(random.integer(1, 5)),
        cache(30, random.of({1, 3, 8})),
        q(random.of({DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32}),
          lengths(random, 30 / 3 * cache.page_size) * heads, 128) {
    q.fill(random, 1.0F);
    table.resize(30);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random.engine());
    for (uint8_t& byte : cache.bytes) byte = 0x7F;
    for (int32_t b = 0; b < batch; ++b)
      for (int32_t j = 0; j < kv_len[static_cast<size_t>(b)]; ++j) {
        const float scale = std::fabs(random.normal());
        std::memcpy(cache.scale(slot(b, j)), &scale, 4);
        for (int c = 0; c < 128; ++c) cache.key(slot(b, j))[c] = encode_by_definition(random.normal());
      }
    const int32_t tokens = qo_indptr.back();
    for (int32_t i = 0; i < tokens * heads; ++i) weights.push_back(random.normal());
    logits.assign(static_cast<size_t>(tokens * 90), 9.0F);
    args.batch_size = batch;
    args.num_tokens = tokens;
    args.num_heads = heads;
    args.q_dtype = q.dtype;
    args.q = q.bytes.data();
    args.q_stride_token = heads * 128;
    args.q_stride_head = 128;
    args.weights = weights.data();
    args.weights_stride_token = heads;
    args.cache = cache.view();
    args.pages = {.page_size = cache.page_size,
                  .batch_size = batch,
                  .table = table.data(),
                  .table_stride_request = 10,
                  .kv_len = kv_len.data()};
    args.queries.indptr = qo_indptr.data();
    args.causal = random.of({true, false});
    args.num_logits = 85;
    args.logits = logits.data();
    args.logits_stride_token = 90;
  }
  int32_t lengths(Random& random, int32_t most) {
    for (int32_t b = 0; b < batch; ++b) {
      kv_len.push_back(random.integer(0, most));
      qo_indptr.push_back(qo_indptr.back() + random.integer(0, 3));
    }
    return qo_indptr.back();
  }
  int64_t slot(int32_t b, int32_t j) const {
    return table[static_cast<size_t>(b * 10 + j / cache.page_size)] * cache.page_size + j % cache.page_size;
  }
  bool sees(int32_t b, int32_t i, int32_t j) const {
    const int32_t q_len = qo_indptr[static_cast<size_t>(b) + 1] - qo_indptr[static_cast<size_t>(b)],
                  length = kv_len[static_cast<size_t>(b)];
    return j < length && (!args.causal || j <= length - q_len + i);
  }
};

TEST(ReferenceIndexerLogits, EqualsTheFormula) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    RandomIndexer problem(random);
    indexer_logits(problem.args);
    for (int32_t b = 0; b < problem.batch; ++b)
      for (int32_t t = problem.qo_indptr[static_cast<size_t>(b)]; t < problem.qo_indptr[static_cast<size_t>(b) + 1];
           ++t)
        for (int32_t j = 0; j < 90; ++j) {
          const float logit = problem.logits[static_cast<size_t>(t * 90 + j)];
          if (j >= 85) {
            ASSERT_EQ(logit, 9.0F);
            continue;
          }
          if (!problem.sees(b, t - problem.qo_indptr[static_cast<size_t>(b)], j)) {
            ASSERT_EQ(logit, kMinusInfinity);
            continue;
          }
          float scale = 0;
          std::memcpy(&scale, problem.cache.scale(problem.slot(b, j)), 4);
          double sum = 0, size = 0;
          for (int32_t h = 0; h < problem.heads; ++h) {
            double dot = 0;
            for (int c = 0; c < 128; ++c)
              dot +=
                  problem.q.at(t * problem.heads + h, c) * e4m3_by_definition(problem.cache.key(problem.slot(b, j))[c]);
            const double term = static_cast<double>(problem.weights[static_cast<size_t>(t * problem.heads + h)]) *
                                std::max(dot, 0.0) * static_cast<double>(scale);
            sum += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(static_cast<double>(logit), sum, 0x1p-24 * std::fabs(sum) + 1e-12 * size) << t << ' ' << j;
        }
  }
}

std::vector<int32_t> selected(const std::vector<float>& logits, int32_t k, const int32_t* length = nullptr) {
  std::vector<int32_t> indices(static_cast<size_t>(k), -5);
  core::TopKArgs args;
  args.num_tokens = 1;
  args.num_logits = static_cast<int64_t>(logits.size());
  args.logits = logits.data();
  args.lengths = length;
  args.k = k;
  args.indices = indices.data();
  top_k(args);
  return indices;
}

TEST(ReferenceTopK, LargestInAscendingOrder) {
  EXPECT_EQ(selected({3, -1, 7, 0, 5}, 3), (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(selected({3, -1, 7, 0, 5}, 1), (std::vector<int32_t>{2}));
  EXPECT_EQ(selected({3, -1, 7, 0, 5}, 5), (std::vector<int32_t>{0, 1, 2, 3, 4}));
}

TEST(ReferenceTopK, LowerIndexWinsAmongEquals) {
  EXPECT_EQ(selected({1, 2, 2, 2, 1}, 2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(selected({1, 2, 1, 3, 1}, 3), (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(selected({-0.0F, 0.0F, 0.0F}, 2), (std::vector<int32_t>{0, 1}));  // zeros are equal
}

TEST(ReferenceTopK, NanIsLessThanMinusInfinity) {
  EXPECT_EQ(selected({NAN, kMinusInfinity, -NAN, kMinusInfinity}, 2), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(selected({NAN, kMinusInfinity, -NAN, 1}, 3), (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(selected({NAN, INFINITY, 1e38F}, 1), (std::vector<int32_t>{1}));
}

TEST(ReferenceTopK, ShortRowsEndInMinusOne) {
  EXPECT_EQ(selected({1, NAN}, 4), (std::vector<int32_t>{0, 1, -1, -1}));
  EXPECT_EQ(selected({}, 2), (std::vector<int32_t>{-1, -1}));
  for (int32_t length : {2, 0, 5}) {
    const std::vector<int32_t> expected = length == 2   ? std::vector<int32_t>{0, 1, -1}
                                          : length == 0 ? std::vector<int32_t>{-1, -1, -1}
                                                        : std::vector<int32_t>{1, 3, 4};
    EXPECT_EQ(selected({1, 2, 0, 9, 8}, 3, &length), expected) << length;
  }
}

/// Returns the top k by a stable sort, by the words of the contract.
std::vector<int32_t> sorted_top_k(const float* logits, int32_t n, int32_t k) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    if (std::isnan(logits[a]) || std::isnan(logits[b])) return !std::isnan(logits[a]) && std::isnan(logits[b]);
    return logits[a] > logits[b];
  });
  order.resize(static_cast<size_t>(std::min(n, k)));
  std::sort(order.begin(), order.end());
  order.resize(static_cast<size_t>(k), -1);
  return order;
}

TEST(ReferenceTopK, EqualsAStableSort) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int32_t n = random.integer(0, 50), k = random.integer(1, 60);
    std::vector<float> logits;
    for (int32_t i = 0; i < n; ++i)
      logits.push_back(random.of({random.normal(), 1.0F, -1.0F, 0.0F, -0.0F, INFINITY, kMinusInfinity, NAN, 1e-40F}));
    ASSERT_EQ(selected(logits, k), sorted_top_k(logits.data(), n, k)) << seed;
  }
}

TEST(ReferenceIndexerTopK, IsItsThreeSteps) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    RandomIndexer problem(random);
    const int32_t tokens = problem.qo_indptr.back(), topk = random.integer(1, 40), latent_page = 4;
    std::vector<int32_t> table(3 * 20), slots(static_cast<size_t>(tokens * topk), -5),
        count(static_cast<size_t>(tokens), -5);
    std::iota(table.begin(), table.end(), 100);
    core::IndexerTopKArgs args;
    args.indexer = problem.args;
    args.top_k.num_tokens = tokens;
    args.top_k.num_logits = problem.args.num_logits;
    args.top_k.logits = problem.args.logits;
    args.top_k.logits_stride_token = problem.args.logits_stride_token;
    args.top_k.k = topk;
    args.top_k.indices = slots.data();
    args.top_k.indices_stride_token = topk;
    args.slots.num_tokens = tokens;
    args.slots.topk = args.slots.num_slots = topk;
    args.slots.indices = args.slots.slots = slots.data();
    args.slots.indices_stride_token = args.slots.slots_stride_token = topk;
    args.slots.queries = problem.args.queries;
    args.slots.pages = {.page_size = latent_page,
                        .batch_size = 3,
                        .table = table.data(),
                        .table_stride_request = 20,
                        .kv_len = problem.kv_len.data()};
    args.slots.valid_count = count.data();
    indexer_top_k(args);

    for (int32_t b = 0; b < 3; ++b)
      for (int32_t t = problem.qo_indptr[static_cast<size_t>(b)]; t < problem.qo_indptr[static_cast<size_t>(b) + 1];
           ++t) {
        int32_t visible = 0;
        while (problem.sees(b, t - problem.qo_indptr[static_cast<size_t>(b)], visible)) ++visible;
        std::vector<int32_t> expected = sorted_top_k(&problem.logits[static_cast<size_t>(t * 90)], visible, topk);
        for (int32_t& index : expected)
          if (index >= 0) index = (100 + b * 20 + index / latent_page) * latent_page + index % latent_page;
        EXPECT_EQ(std::vector<int32_t>(slots.begin() + t * topk, slots.begin() + (t + 1) * topk), expected);
        EXPECT_EQ(count[static_cast<size_t>(t)], std::min(visible, topk));
      }
  }
}

}  // namespace
}  // namespace mla::reference

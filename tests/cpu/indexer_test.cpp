// SPDX-License-Identifier: Apache-2.0
// Tests the indexer and top-k of every instruction set this machine has, against the reference.
#include "row_operations.h"

namespace mla::cpu {
namespace {

/// Holds an indexer's cache.
struct TestIndexer {
  TestIndexer(IndexerFormat format, int64_t num_pages, int32_t page_size)
      : bytes(static_cast<size_t>(num_pages * (indexer_page_bytes(page_size, format) + 6)), std::byte{0xA5}),
        pages{bytes.data(), indexer_page_bytes(page_size, format) + 6, num_pages, page_size, format} {}
  std::vector<std::byte> bytes;
  core::IndexerPages pages;
};

class IndexerTest : public RowOperationsTest {};

TEST_P(IndexerTest, AppendIndexerWritesTheBytesOfTheReference) {
  const std::pair<IndexerFormat, bool> kinds[] = {
      {IndexerFormat::kFP8, false}, {IndexerFormat::kFP8, true}, {IndexerFormat::kMXFP4, true}};
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (const auto& [format, power_of_two] : kinds)
      for (bool special : {false, true}) {
        TestIndexer expected(format, 5, 16), actual(format, 5, 16);
        const auto keys = random_rows(80 * 130, dtype, special);
        const std::vector<int64_t> slots = random_slots(80);
        core::AppendIndexerArgs args = {.num_tokens = 80,
                                        .dtype = dtype,
                                        .k = keys.data(),
                                        .k_stride_token = 130,
                                        .slot_mapping = slots.data(),
                                        .power_of_two_scales = power_of_two,
                                        .cache = expected.pages};
        reference::append_indexer(args);
        args.cache = actual.pages;
        run_append_indexer(set_, args, pool_);
        EXPECT_EQ(expected.bytes, actual.bytes) << name(dtype) << name(format) << power_of_two << special;
      }
}

struct IndexerCase {
  int32_t num_heads;
  DType q_dtype;
  int32_t page_size;
  bool causal;
  IndexerFormat format = IndexerFormat::kFP8;
};

/// Holds queries, weights and keys of a ragged batch.
struct IndexerProblem {
  std::vector<int32_t> kv_len = {3, 0, 150, 77, 1}, qo_indptr = {0, 2, 3, 7, 8, 12}, table;
  TestIndexer cache;
  std::vector<std::byte> q;
  std::vector<float> weights, logits;
  core::IndexerLogitsArgs args;

  IndexerProblem(const IndexerCase& c, int32_t num_pages) : cache(c.format, num_pages, c.page_size) {}
};

TEST_P(IndexerTest, IndexerLogitsAndSelectionAsTheReference) {
  for (const IndexerCase& c :
       {IndexerCase{64, DType::kE4M3, 64, true}, IndexerCase{64, DType::kBF16, 16, false},
        IndexerCase{64, DType::kF16, 64, true}, IndexerCase{5, DType::kF32, 1, true},
        IndexerCase{1, DType::kE4M3, 256, true}, IndexerCase{130, DType::kBF16, 64, true},
        IndexerCase{32, DType::kE4M3, 64, true}, IndexerCase{64, DType::kE4M3, 64, true, IndexerFormat::kMXFP4},
        IndexerCase{130, DType::kBF16, 16, false, IndexerFormat::kMXFP4},
        IndexerCase{33, DType::kF16, 1, true, IndexerFormat::kMXFP4},
        IndexerCase{5, DType::kF32, 256, true, IndexerFormat::kMXFP4}}) {
    const int32_t max_pages = 160 / c.page_size + 1;
    IndexerProblem p(c, 5 * max_pages);
    p.table.resize(static_cast<size_t>(5 * max_pages));
    std::iota(p.table.begin(), p.table.end(), 0);
    std::shuffle(p.table.begin(), p.table.end(), random_);
    std::vector<int64_t> slots(static_cast<size_t>(5 * max_pages * c.page_size));
    std::iota(slots.begin(), slots.end(), 0);
    const auto keys = random_rows(static_cast<int64_t>(slots.size()) * 128, DType::kF32, false);
    reference::append_indexer({.num_tokens = static_cast<int64_t>(slots.size()),
                               .dtype = DType::kF32,
                               .k = keys.data(),
                               .k_stride_token = 128,
                               .slot_mapping = slots.data(),
                               .power_of_two_scales = c.format == IndexerFormat::kMXFP4,
                               .cache = p.cache.pages});
    p.q = random_rows(12 * c.num_heads * 128, c.q_dtype, false);
    const auto weights = random_rows(12 * c.num_heads, DType::kF32, false);
    constexpr int64_t kWidth = 155;
    std::vector<float> expected(12 * kWidth, 7.0F), actual(12 * kWidth, 7.0F);
    core::IndexerLogitsArgs args = {.batch_size = 5,
                                    .num_tokens = 12,
                                    .num_heads = c.num_heads,
                                    .q_dtype = c.q_dtype,
                                    .q = p.q.data(),
                                    .q_stride_token = c.num_heads * 128,
                                    .q_stride_head = 128,
                                    .weights = reinterpret_cast<const float*>(weights.data()),
                                    .weights_stride_token = c.num_heads,
                                    .cache = p.cache.pages,
                                    .pages = {.page_size = c.page_size,
                                              .batch_size = 5,
                                              .table = p.table.data(),
                                              .table_stride_request = max_pages,
                                              .kv_len = p.kv_len.data()},
                                    .queries = {.indptr = p.qo_indptr.data()},
                                    .causal = c.causal,
                                    .num_logits = kWidth - 2,
                                    .logits = expected.data(),
                                    .logits_stride_token = kWidth};
    reference::indexer_logits(args);
    args.logits = actual.data();
    run_indexer_logits(set_, args, pool_);
    float largest = 0.0F;
    for (float logit : expected)
      if (std::isfinite(logit)) largest = std::max(largest, std::fabs(logit));
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!std::isfinite(expected[i]))
        ASSERT_EQ(actual[i], expected[i]);
      else
        ASSERT_NEAR(actual[i], expected[i], 2e-5F * largest) << i;
    }

    // Logits of 16 bits are these, rounded; a row begins at an odd one.
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      std::vector<uint16_t> rounded(actual.size(), 7);
      args.logits_dtype = dtype;
      args.logits = rounded.data();
      run_indexer_logits(set_, args, pool_);
      for (size_t i = 0; i < rounded.size(); ++i) {
        const uint16_t bits = dtype == DType::kF16 ? f32_to_finite_f16(actual[i]) : f32_to_finite_bf16(actual[i]);
        ASSERT_EQ(rounded[i], i % kWidth < kWidth - 2 ? bits : 7) << name(dtype) << ' ' << i;
      }
    }
    args.logits_dtype = DType::kF32;
    args.logits = actual.data();

    // The whole way, on logits of this backend: the selection is then exact.
    std::vector<int32_t> selected(12 * 20), expected_slots(12 * 20), counts(12), expected_counts(12);
    core::IndexerTopKArgs all = {.indexer = args,
                                 .top_k = {.num_tokens = 12,
                                           .num_logits = args.num_logits,
                                           .logits = actual.data(),
                                           .logits_stride_token = kWidth,
                                           .k = 20,
                                           .indices = selected.data(),
                                           .indices_stride_token = 20},
                                 .slots = {.num_tokens = 12,
                                           .topk = 20,
                                           .num_slots = 20,
                                           .indices = selected.data(),
                                           .indices_stride_token = 20,
                                           .queries = args.queries,
                                           .pages = args.pages,
                                           .slots = selected.data(),
                                           .slots_stride_token = 20,
                                           .valid_count = counts.data()}};
    run_indexer_top_k(set_, all, pool_);
    std::vector<int32_t> lengths(12);
    for (int32_t b = 0; b < 5; ++b)
      for (int32_t i = 0; i < args.queries.len(b); ++i)
        lengths[static_cast<size_t>(args.queries.begin(b) + i)] =
            c.causal ? std::max(0, p.kv_len[static_cast<size_t>(b)] - args.queries.len(b) + i + 1)
                     : p.kv_len[static_cast<size_t>(b)];
    core::TopKArgs top_k = all.top_k;
    top_k.lengths = lengths.data();
    top_k.indices = expected_slots.data();
    reference::top_k(top_k);
    core::PhysicalSlotsArgs expected_args = all.slots;
    expected_args.indices = expected_args.slots = expected_slots.data();
    expected_args.valid_count = expected_counts.data();
    reference::physical_slots(expected_args);
    EXPECT_EQ(selected, expected_slots);
    EXPECT_EQ(counts, expected_counts);
  }
}

/// A NaN in a key reaches that key's logit only.
TEST_P(IndexerTest, IndexerKeepsNaNWhereItIs) {
  TestIndexer cache(IndexerFormat::kFP8, 1, 64);
  std::fill(cache.bytes.begin(), cache.bytes.end(), std::byte{0x38});
  const float one = 1.0F;
  for (int64_t j = 0; j < 64; ++j) std::memcpy(cache.pages.scale(0, j), &one, sizeof one);
  *cache.pages.key(0, 5) = std::byte{0x7F};
  *cache.pages.key(0, 40) = std::byte{0xFF};  // not visible
  const std::vector<uint8_t> q(3 * 128, 0x38);
  const std::vector<float> weights = {1.0F, -2.0F, 4.0F};
  const std::vector<int32_t> kv_len = {40}, table = {0};
  std::vector<float> logits(64);
  run_indexer_logits(set_,
                     {.batch_size = 1,
                      .num_tokens = 1,
                      .num_heads = 3,
                      .q_dtype = DType::kE4M3,
                      .q = q.data(),
                      .q_stride_token = 3 * 128,
                      .q_stride_head = 128,
                      .weights = weights.data(),
                      .weights_stride_token = 3,
                      .cache = cache.pages,
                      .pages = {.page_size = 64, .batch_size = 1, .table = table.data(), .kv_len = kv_len.data()},
                      .num_logits = 64,
                      .logits = logits.data(),
                      .logits_stride_token = 64},
                     pool_);
  for (size_t j = 0; j < 64; ++j) {
    if (j == 5)
      EXPECT_TRUE(std::isnan(logits[j]));
    else
      EXPECT_EQ(logits[j], j < 40 ? 3.0F * 128.0F : -kInfinity);
  }
}

/// Scales of every size multiply their own channels: 0, the least and the largest, those that overflow, and NaN.
TEST_P(IndexerTest, Mxfp4ScalesOfEverySize) {
  constexpr int32_t kKeys = 256;
  TestIndexer cache(IndexerFormat::kMXFP4, 1, kKeys);
  for (int32_t j = 0; j < kKeys; ++j) {
    // Of elements that overflow, nothing else makes the sum infinite.
    std::fill_n(cache.pages.key(0, j), 64, j < 253 ? std::byte{0x21} : std::byte{0});                 // 0.5 and 1
    for (int32_t group = 0; group < 4; ++group) cache.pages.key(0, j)[group * 16] = std::byte{0x67};  // 6 and 4
    std::fill_n(cache.pages.scale(0, j), 4, std::byte{100});
    cache.pages.scale(0, j)[j % 4] = static_cast<std::byte>(j);
  }
  const std::vector<float> q(2 * 128, 0.75F), weights = {1.0F, 0.5F};
  const std::vector<int32_t> kv_len = {kKeys}, table = {0};
  std::vector<float> expected(kKeys), actual(kKeys);
  core::IndexerLogitsArgs args = {
      .batch_size = 1,
      .num_tokens = 1,
      .num_heads = 2,
      .q_dtype = DType::kF32,
      .q = q.data(),
      .q_stride_token = 2 * 128,
      .q_stride_head = 128,
      .weights = weights.data(),
      .weights_stride_token = 2,
      .cache = cache.pages,
      .pages = {.page_size = kKeys, .batch_size = 1, .table = table.data(), .kv_len = kv_len.data()},
      .num_logits = kKeys,
      .logits = expected.data(),
      .logits_stride_token = kKeys};
  reference::indexer_logits(args);
  args.logits = actual.data();
  run_indexer_logits(set_, args, pool_);
  EXPECT_TRUE(std::isinf(expected[254]) && std::isnan(expected[255]) && expected[200] > 0x1p75F);
  const std::vector<uint8_t> narrow(2 * 128, 0x34);  // 0.75 in e4m3
  args.q_dtype = DType::kE4M3;
  args.q = narrow.data();
  std::vector<float> of_pairs(kKeys);
  args.logits = of_pairs.data();
  run_indexer_logits(set_, args, pool_);
  for (size_t j = 0; j < kKeys; ++j)
    for (float logit : {actual[j], of_pairs[j]}) {
      if (std::isnan(expected[j]))
        EXPECT_TRUE(std::isnan(logit));
      else if (j >= 253)  // an infinite element times a query's padding is NaN
        EXPECT_FALSE(std::isfinite(logit)) << j;
      else if (std::isinf(expected[j]))
        EXPECT_EQ(logit, expected[j]);
      else  // 128 positive products, each added with a rounding
        EXPECT_NEAR(logit, expected[j], 128 * 0x1p-24F * expected[j]) << j;
    }
}

std::vector<float> row_of_kind(int kind, int64_t n, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<float> logits(static_cast<size_t>(n));
  for (size_t i = 0; i < logits.size(); ++i) {
    const float x = normal(random);
    switch (kind) {
      case 0: logits[i] = x; break;
      case 1: logits[i] = std::floor(x * 2.0F); break;                            // many ties
      case 2: logits[i] = 1.0F; break;                                            // nothing else
      case 3: logits[i] = i % 3 == 0 ? 0.0F : -0.0F; break;                       // one value
      case 4: logits[i] = i % 5 == 0 ? std::nanf("") : -kInfinity; break;         // NaN lowest
      case 5: logits[i] = 1.0F + static_cast<float>(i % 1000) * 0x1p-23F; break;  // the last bits decide
      case 6: logits[i] = x * 1e-40F; break;                                      // subnormal
      default: logits[i] = i % 11 == 0 ? kInfinity : (i % 7 == 0 ? -std::nanf("") : x * 1e30F); break;
    }
  }
  return logits;
}

TEST_P(IndexerTest, TopKAsTheReference) {
  for (int kind = 0; kind < 8; ++kind)
    for (int64_t n : {1, 15, 100, 5000}) {
      constexpr int64_t kRows = 3;
      std::vector<float> logits;
      for (int64_t row = 0; row < kRows; ++row) {
        const auto one = row_of_kind(kind, n, random_);
        logits.insert(logits.end(), one.begin(), one.end());
      }
      const std::vector<int32_t> lengths = {static_cast<int32_t>(n), static_cast<int32_t>(n / 2), 0};
      for (int32_t k : {1, 7, 64, 2048})
        for (bool ragged : {false, true}) {
          std::vector<int32_t> expected(static_cast<size_t>(kRows * (k + 5)), -77), actual = expected;
          core::TopKArgs args = {.num_tokens = kRows,
                                 .num_logits = n,
                                 .logits = logits.data(),
                                 .logits_stride_token = n,
                                 .lengths = ragged ? lengths.data() : nullptr,
                                 .k = k,
                                 .indices_stride_token = k + 5};
          for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
            std::vector<uint16_t> rounded;
            for (float logit : logits) rounded.push_back(dtype == DType::kF16 ? f32_to_f16(logit) : f32_to_bf16(logit));
            args.logits_dtype = dtype;
            if (dtype != DType::kF32) args.logits = rounded.data();
            args.indices = expected.data();
            reference::top_k(args);
            args.indices = actual.data();
            run_top_k(set_, args, pool_);
            ASSERT_EQ(expected, actual) << name(dtype) << " kind " << kind << " n " << n << " k " << k;
          }
        }
    }
}

MLA_FOR_EVERY_LEVEL(IndexerTest);

}  // namespace
}  // namespace mla::cpu

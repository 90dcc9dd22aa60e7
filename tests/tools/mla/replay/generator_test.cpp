// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

ModelConfig test_model() {
  ModelConfig model;
  model.name = "test";
  model.num_attention_heads = 4;
  model.num_hidden_layers = 1;
  model.kv_lora_rank = 128;
  model.qk_nope_head_dim = 32;
  model.qk_rope_head_dim = 16;
  model.v_head_dim = 32;
  return model;
}

Request test_request(int64_t line, std::vector<int64_t> ids) {
  Request request;
  request.line = line;
  request.input_length = static_cast<int32_t>(std::ssize(ids)) * kBlockTokens;
  request.output_length = 10;
  request.hash_ids = std::move(ids);
  return request;
}

std::vector<float> latent(const Generator& generator, uint64_t seed, int32_t position) {
  std::vector<float> row(static_cast<size_t>(test_model().d_qk()));
  generator.latent(seed, position, row.data());
  return row;
}

struct Query {
  std::vector<float> q_nope, q_pe;
};

Query query(const Generator& generator, uint64_t seed, int32_t position) {
  const ModelConfig model = test_model();
  Query q{std::vector<float>(4 * 32), std::vector<float>(4 * 16)};
  generator.query(seed, position,
                  {.q_nope = q.q_nope.data(), .q_nope_stride_head = 32, .q_pe = q.q_pe.data(), .q_pe_stride_head = 16});
  return q;
}

double rms(const float* values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += double{values[i]} * values[i];
  return std::sqrt(sum / static_cast<double>(count));
}

TEST(Generator, EqualPrefixesGiveEqualTokens) {
  const Generator generator(test_model(), 1, DType::kF32);
  const Request a = test_request(1, {5, 6}), b = test_request(2, {5, 7}), c = test_request(3, {4, 6});
  const auto seeds = [&](const Request& request, int32_t start, int32_t count) {
    return generator.token_seeds(request, request.line, start, count);
  };
  EXPECT_EQ(seeds(a, 0, 512), seeds(b, 0, 512));
  EXPECT_NE(seeds(a, 512, 1), seeds(b, 512, 1));  // another block
  EXPECT_NE(seeds(a, 512, 1), seeds(c, 512, 1));  // the same block behind another one
  EXPECT_NE(seeds(a, 3, 1), seeds(a, 515, 1));
  EXPECT_NE(seeds(a, 1024, 1), seeds(b, 1024, 1));  // answers are the request's own
  // Tokens do not depend on how a prompt is cut into pieces.
  const auto whole = seeds(a, 500, 100), tail = seeds(a, 550, 50);
  EXPECT_THAT(tail, ::testing::ElementsAreArray(std::span(whole).last(50)));
}

TEST(Generator, IsAFunctionOfItsSeed) {
  const Generator a(test_model(), 1, DType::kF32), b(test_model(), 1, DType::kF32), c(test_model(), 2, DType::kF32);
  const Request request = test_request(1, {5});
  const uint64_t seed_a = a.token_seeds(request, 1, 9, 1)[0], seed_c = c.token_seeds(request, 1, 9, 1)[0];
  EXPECT_EQ(latent(a, seed_a, 9), latent(b, seed_a, 9));
  EXPECT_NE(seed_a, seed_c);
  EXPECT_NE(latent(a, seed_a, 9), latent(a, seed_c, 9));
  EXPECT_EQ(a.weights().w_uk, b.weights().w_uk);
  EXPECT_NE(a.weights().w_uk, c.weights().w_uk);
}

TEST(Generator, LatentsHaveRootMeanSquareOneAndOutliers) {
  const Generator generator(test_model(), 1, DType::kF32);
  double outlier = 0.0, ordinary = 0.0;
  for (uint64_t token = 1; token <= 200; ++token) {
    const auto row = latent(generator, token * 77, static_cast<int32_t>(token));
    EXPECT_NEAR(rms(row.data(), 128), 1.0, 1e-3);
    outlier += double{row[63]} * row[63];
    ordinary += double{row[50]} * row[50];
  }
  EXPECT_GT(outlier, 9 * ordinary);
}

TEST(Generator, RotationKeepsTheDistanceOfPositions) {
  const Generator generator(test_model(), 1, DType::kF32);
  const auto score = [&](int32_t q_position, int32_t k_position) {
    const Query q = query(generator, 11, q_position);
    const auto row = latent(generator, 22, k_position);
    double sum = 0.0;
    for (size_t i = 0; i < 16; ++i) sum += double{q.q_pe[i]} * row[128 + i];
    return sum;
  };
  EXPECT_NEAR(score(110, 100), score(20010, 20000), 1e-3);
  EXPECT_GT(std::abs(score(110, 100) - score(113, 100)), 1e-2);
}

TEST(Generator, TokenZeroIsAnAttentionSink) {
  const ModelConfig model = test_model();
  const Generator generator(model, 1, DType::kF32);
  const Weights weights = generator.weights();
  const auto* w_uk = reinterpret_cast<const float*>(weights.w_uk.data());
  const auto nope_score = [&](const Query& q, const std::vector<float>& row, size_t head) {
    double sum = 0.0;
    for (size_t d = 0; d < 32; ++d)
      for (size_t c = 0; c < 128; ++c)
        sum += double{q.q_nope[head * 32 + d]} * w_uk[(head * 32 + d) * 128 + c] * row[c];
    return sum * model.sm_scale();
  };
  const auto sink = latent(generator, 5, 0);
  double sum = 0.0, squares = 0.0, sink_sum = 0.0;
  constexpr int kTokens = 50;
  for (uint64_t token = 1; token <= kTokens; ++token) {
    const Query q = query(generator, token * 31, 100);
    const size_t head = token % 4;
    const double ordinary = nope_score(q, latent(generator, token * 131, 7), head);
    sum += ordinary;
    squares += ordinary * ordinary;
    sink_sum += nope_score(q, sink, head);
  }
  EXPECT_NEAR(sink_sum / kTokens, 9.0, 2.0);
  EXPECT_NEAR(sum / kTokens, 0.0, 1.0);
  EXPECT_LT(std::sqrt(squares / kTokens), 3.0);
}

TEST(Generator, WithoutProjectionsQueriesLookAtTokenZeroDirectly) {
  ModelConfig model = *load_model("deepseek-v4-flash");
  model.num_attention_heads = 2;
  const Generator generator(model, 1, DType::kF32);
  EXPECT_TRUE(generator.weights().w_uk.empty());
  std::vector<float> q(2 * 512), sink(512), other(512);
  generator.latent(5, 0, sink.data());
  double sink_sum = 0.0, other_sum = 0.0;
  for (uint64_t token = 1; token <= 50; ++token) {
    generator.query(token * 31, 100,
                    {.q_nope = q.data(), .q_nope_stride_head = 512, .q_pe = q.data() + 448, .q_pe_stride_head = 512});
    generator.latent(token * 77, 7, other.data());
    for (size_t c = 0; c < 448; ++c) {
      sink_sum += double{q[c]} * sink[c] * model.sm_scale();
      other_sum += double{q[c]} * other[c] * model.sm_scale();
    }
  }
  EXPECT_NEAR(sink_sum / 50, 9.0, 2.0);
  EXPECT_NEAR(other_sum / 50, 0.0, 1.0);
}

TEST(Generator, IndexerQueriesBelongToTheToken) {
  const Generator generator(test_model(), 1, DType::kBF16);
  constexpr int32_t kHeads = 4;
  std::vector<uint8_t> a(kHeads * 128), b(kHeads * 128);
  std::vector<float> weights_a(kHeads), weights_b(kHeads);
  generator.indexer_query(7, 2, kHeads, a.data(), weights_a.data());
  generator.indexer_query(7, 2, kHeads, b.data(), weights_b.data());
  EXPECT_EQ(a, b);
  EXPECT_EQ(weights_a, weights_b);
  generator.indexer_query(8, 2, kHeads, b.data(), weights_b.data());
  EXPECT_NE(a, b);
  generator.indexer_query(7, 3, kHeads, b.data(), weights_b.data());
  EXPECT_NE(a, b) << "the same queries in two layers would choose the same keys";
  double squares = 0.0;
  for (uint8_t code : a) squares += double{e4m3_to_f32(code)} * e4m3_to_f32(code);
  EXPECT_NEAR(squares / static_cast<double>(a.size()), 1.0, 0.2);
  EXPECT_EQ(generator.attn_sink().size(), static_cast<size_t>(test_model().num_attention_heads));
}

TEST(Generator, ProjectionsBelongToTokenAndCompressor) {
  const ModelConfig model = *load_model("deepseek-v4-flash");
  const Generator generator(model, 1, DType::kF32);
  const CompressorShape rows = pool_compressor(model, 4), keys = *key_compressor(model, 4);
  ASSERT_EQ(rows.width(), 1024);
  ASSERT_EQ(keys.width(), 256);
  const auto projections = [&](const CompressorShape& shape, uint64_t seed) {
    std::vector<float> values(static_cast<size_t>(2 * shape.width()));
    generator.projections(seed, 9, shape, values.data(), values.data() + shape.width());
    return values;
  };
  const std::vector<float> first = projections(rows, 7);
  EXPECT_EQ(first, projections(rows, 7));
  EXPECT_NE(first, projections(rows, 8));
  CompressorShape other = rows;
  other.id = keys.id;
  EXPECT_NE(first, projections(other, 7));
  EXPECT_NE(std::vector(first.begin(), first.begin() + 512), std::vector(first.begin() + 512, first.begin() + 1024));
  EXPECT_GT(rms(first.data(), 512), 1.0);  // with outliers, as rows have them
  EXPECT_NEAR(rms(projections(keys, 7).data(), 512), 1.0, 0.1);

  EXPECT_EQ(generator.norm_weight(rows).size(), 512U);
  EXPECT_EQ(generator.position_bias(rows).size(), 4U * 1024);
  EXPECT_TRUE(generator.position_bias(pool_compressor(model, 2)).empty());
  EXPECT_TRUE(generator.norm_weight(pooled_key_compressor(4)).empty());
  EXPECT_FALSE(key_compressor(model, 2).has_value()) << "keys of V4.1 are made of latents";
}

// Norms bring the rows of models with projections to what latent() gives but for their weights; rotary parts are those
// of position 0, which nothing turns.
TEST(Generator, ProjectedRowsAreNotNormalizedAndNotTurned) {
  const Generator generator(test_model(), 1, DType::kF32);
  std::vector<float> row(144), other(144);
  generator.projected_latent(22, 7, row.data());
  generator.projected_latent(22, 8, other.data());
  EXPECT_EQ(row, other);
  const std::vector<float> normal = latent(generator, 22, 7);
  const double size = rms(row.data(), 128);
  EXPECT_GT(size, 2.0);
  for (size_t c = 0; c < 128; ++c) EXPECT_NEAR(row[c] / size, normal[c], 1e-4);
  EXPECT_NEAR(rms(row.data() + 128, 16), rms(normal.data() + 128, 16), 1e-4);
  EXPECT_NE(row[130], normal[130]);
  const std::vector<float> weight = generator.latent_norm_weight();
  EXPECT_EQ(weight.size(), 128U);
  EXPECT_NEAR(rms(weight.data(), 128), 1.0, 0.05);
  EXPECT_NE(weight[0], weight[1]);

  const Query turned = query(generator, 11, 9);
  Query plain = turned;
  generator.projected_query(
      11, {.q_nope = plain.q_nope.data(), .q_nope_stride_head = 32, .q_pe = plain.q_pe.data(), .q_pe_stride_head = 16});
  EXPECT_EQ(plain.q_nope, turned.q_nope);
  EXPECT_NE(plain.q_pe, turned.q_pe);
  EXPECT_EQ(plain.q_pe, query(generator, 11, 0).q_pe);

  const ModelConfig v4 = *load_model("deepseek-v4-flash");
  const Generator whole(v4, 1, DType::kF32);
  EXPECT_EQ(whole.latent_norm_weight().size(), 512U);
  std::vector<float> q(64 * 512), normal_q(64 * 512);
  const auto row_of = [](std::vector<float>& values) {
    return QueryRow{
        .q_nope = values.data(), .q_nope_stride_head = 512, .q_pe = values.data() + 448, .q_pe_stride_head = 512};
  };
  whole.projected_query(11, row_of(q));
  whole.query(11, 0, row_of(normal_q));
  EXPECT_NEAR(rms(q.data(), q.size()), 3.0 * rms(normal_q.data(), q.size()), 1e-3);
}

TEST(Generator, Bf16IsTheRoundedF32) {
  const Generator narrow(test_model(), 3, DType::kBF16), wide(test_model(), 3, DType::kF32);
  std::vector<uint16_t> bits(static_cast<size_t>(test_model().d_qk()));
  narrow.latent(99, 4, bits.data());
  const auto row = latent(wide, 99, 4);
  for (size_t i = 0; i < row.size(); ++i) {
    const float value = std::bit_cast<float>(uint32_t{bits[i]} << 16);
    EXPECT_NEAR(value, row[i], std::abs(row[i]) / 256 + 1e-30);
  }
}

}  // namespace
}  // namespace mla::cli::replay

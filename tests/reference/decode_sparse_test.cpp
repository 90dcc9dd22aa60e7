// SPDX-License-Identifier: Apache-2.0
// Tests sparse attention: by hand, and random problems of one and two pools against the textbook.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "problems.h"
#include "random_problems.h"
#include "test_cache.h"
#include "trace.h"

namespace mla::reference {
namespace {

/// Holds one query of one head over one or two bf16 pools of width 1; q = 0 unless changed, so that all keys have the
/// same P.
struct SmallSparse {
  std::vector<float> pool = {}, extra = {};
  std::vector<int32_t> indices = {}, extra_indices = {};
  float q = 0;
  float o = NAN, lse = NAN, max_logits = NAN;

  void run(const std::function<void(core::DecodeSparseArgs&)>& change = nullptr) {
    std::vector<uint16_t> rows = bf16(pool), extra_rows = bf16(extra);
    core::DecodeSparseArgs args;
    args.num_tokens = args.num_heads = args.d_qk = args.d_v = 1;
    args.q_dtype = DType::kF32;
    args.q_nope = &q;
    args.num_pools = extra.empty() ? 1 : 2;
    args.pools[0] = pool_of(rows, 2, indices);
    args.pools[1] = pool_of(extra_rows, 1, extra_indices);
    args.sm_scale = 1;
    args.o_dtype = DType::kF32;
    args.o = &o;
    args.lse = &lse;
    args.max_logits = &max_logits;
    if (change) change(args);
    run_in_workspace(args, decode_sparse);
  }
  static core::PoolArgs pool_of(std::vector<uint16_t>& rows, int32_t page_size, const std::vector<int32_t>& indices) {
    return {.cache = {.num_pages = static_cast<int64_t>(rows.size()) / page_size,
                      .page_size = page_size,
                      .d_ckv = 1,
                      .ckv = {reinterpret_cast<std::byte*>(rows.data()), int64_t{2} * page_size, 2}},
            .indices = indices.data(),
            .topk = static_cast<int32_t>(indices.size())};
  }
};

TEST(ReferenceDecodeSparse, TakesTheNamedRows) {
  SmallSparse problem{.pool = {NAN, 3, NAN, 9}, .indices = {3, 1}};
  problem.run();
  EXPECT_EQ(problem.o, 6.0F);
  EXPECT_FLOAT_EQ(problem.lse, std::log(2.0F));
  EXPECT_EQ(problem.max_logits, 0.0F);
}

TEST(ReferenceDecodeSparse, RepeatedIndicesCountAsOftenAsTheyStand) {
  SmallSparse problem{.pool = {0, 4}, .indices = {1, 0, 1, 1}};
  problem.run();
  EXPECT_EQ(problem.o, 3.0F);
  EXPECT_FLOAT_EQ(problem.lse, std::log(4.0F));
}

TEST(ReferenceDecodeSparse, InvalidIndicesAreSkippedWhereverTheyStand) {
  SmallSparse problem{.pool = {2, NAN, NAN, 6}, .indices = {-1, 0, 4, -2147483647 - 1, 3, 2147483647}};
  problem.run();
  EXPECT_EQ(problem.o, 4.0F);
}

TEST(ReferenceDecodeSparse, LengthsCutAndClamp) {
  SmallSparse problem{.pool = {2, 6, NAN, 30}, .indices = {0, 1, 3}};
  for (auto [length, expected] :
       {std::pair{1, 2.0F}, {2, 4.0F}, {3, 38.0F / 3}, {99, 38.0F / 3}, {0, 0.0F}, {-5, 0.0F}}) {
    problem.run([length = &length](core::DecodeSparseArgs& args) { args.pools[0].topk_length = length; });
    EXPECT_FLOAT_EQ(problem.o, expected) << length;
  }
  EXPECT_EQ(problem.lse, kMinusInfinity);
  EXPECT_EQ(problem.max_logits, kMinusInfinity);
}

TEST(ReferenceDecodeSparse, LengthPerRequest) {
  // Requests of 2, 0 and 1 queries, with 1, 9 and 2 entries.
  std::vector<uint16_t> rows = bf16({2, 6});
  const std::vector<int32_t> indices = {0, 1, 1, 0, 0, 1};
  const int32_t lengths[] = {1, 9, 2}, qo_indptr[] = {0, 2, 2, 3};
  const float q[] = {0, 0, 0};
  float o[3] = {NAN, NAN, NAN};
  core::DecodeSparseArgs args;
  args.num_tokens = 3;
  args.num_heads = args.d_qk = args.d_v = 1;
  args.q_dtype = args.o_dtype = DType::kF32;
  args.q_nope = q;
  args.q_nope_stride_token = args.o_stride_token = 1;
  args.pools[0] = SmallSparse::pool_of(rows, 2, indices);
  args.pools[0].topk = 2;
  args.pools[0].indices_stride_token = 2;
  args.pools[0].topk_length = lengths;
  args.pools[0].length_per_request = true;
  args.batch_size = 3;
  args.queries.indptr = qo_indptr;
  args.sm_scale = 1;
  args.o = o;
  run_in_workspace(args, decode_sparse);
  EXPECT_EQ(o[0], 2.0F);
  EXPECT_EQ(o[1], 6.0F);
  EXPECT_EQ(o[2], 4.0F);
}

TEST(ReferenceDecodeSparse, TwoPoolsUnderOneSoftmax) {
  // Scores 0 and ln 3 from the first, 2 ln 3 from the second: weights 1, 3, 9.
  SmallSparse problem{.pool = {0, 1}, .extra = {NAN, 2}, .indices = {1, 0, -1}, .extra_indices = {-1, 1, 2}, .q = kLn3};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o, 21.0F / 13);
  EXPECT_FLOAT_EQ(problem.lse, std::log(13.0F));
  EXPECT_FLOAT_EQ(problem.max_logits, 2 * kLn3);
  const int32_t none = 0;
  problem.run([&](core::DecodeSparseArgs& args) { args.pools[0].topk_length = &none; });
  EXPECT_FLOAT_EQ(problem.o, 2);
  problem.run([&](core::DecodeSparseArgs& args) { args.pools[1].topk_length = &none; });
  EXPECT_FLOAT_EQ(problem.o, 0.75F);
}

TEST(ReferenceDecodeSparse, AllInvalidWithAnySink) {
  for (float sink : {-INFINITY, 2.0F, INFINITY}) {
    SmallSparse problem{.pool = {NAN, NAN}, .indices = {-1, 2, -1}};
    problem.run([&](core::DecodeSparseArgs& args) { args.options.attn_sink = &sink; });
    EXPECT_EQ(problem.o, 0.0F);
    EXPECT_EQ(problem.lse, kMinusInfinity);
  }
}

TEST(ReferenceDecodeSparse, EmptyPool) {
  SmallSparse problem{.pool = {}, .extra = {5}, .indices = {0, 1}, .extra_indices = {0}};
  problem.run([](core::DecodeSparseArgs& args) { args.pools[0].cache.page_size = 0; });
  EXPECT_EQ(problem.o, 5.0F);
}

TEST(ReferenceDecodeSparse, MaxLogitsIsTheCappedScaledScore) {
  SmallSparse problem{.pool = {-1, -2}, .indices = {0, 1}, .q = 4};
  problem.run([](core::DecodeSparseArgs& args) {
    args.sm_scale = 0.5F;
    args.options.logits_soft_cap = 3;
  });
  EXPECT_FLOAT_EQ(problem.max_logits, static_cast<float>(3 * std::tanh(-2 / 3.0)));
}

TEST(ReferenceDecodeSparse, NanOfANamedRowIsNotHidden) {
  SmallSparse problem{.pool = {0, NAN}, .indices = {0, 1, 0}, .q = 1};
  problem.run();
  EXPECT_TRUE(std::isnan(problem.o));
  EXPECT_TRUE(std::isnan(problem.lse));
  EXPECT_TRUE(std::isnan(problem.max_logits));
}

/// Holds a pool of random rows, of which those that nobody names are NaN.
struct RandomPool {
  TestCache cache;
  int32_t topk;
  std::vector<int32_t> indices, lengths;
  bool has_lengths;

  RandomPool(Random& random, const Variant& variant, int32_t tokens)
      : cache(variant, random.integer(1, 4), random.of({1, 2, 5})),
        topk(random.integer(1, 9)),
        has_lengths(random.of({true, false})) {
    const auto slots = static_cast<int32_t>(cache.num_slots());
    const auto d_qk = static_cast<size_t>(variant.d_ckv + variant.d_kpe);
    for (int32_t slot = 0; slot < slots; ++slot) cache.pack(slot, std::vector<float>(d_qk, NAN));
    for (int32_t t = 0; t < tokens; ++t) {
      lengths.push_back(random.integer(-1, topk + 1));
      for (int32_t e = 0; e < topk; ++e) {
        indices.push_back(random.integer(-1, slots));
        if (!counts(t, e)) continue;
        std::vector<float> row(d_qk);
        for (float& value : row) value = random.normal();
        cache.pack(indices.back(), row);
      }
    }
  }
  bool counts(int32_t t, int32_t e) const {
    const int32_t slot = indices[static_cast<size_t>(t * topk + e)];
    return slot >= 0 && slot < cache.num_slots() && (!has_lengths || e < lengths[static_cast<size_t>(t)]);
  }
  core::PoolArgs args() {
    return {.cache = cache.view(),
            .indices = indices.data(),
            .indices_stride_token = topk,
            .topk = topk,
            .topk_length = has_lengths ? lengths.data() : nullptr};
  }
  void add_rows(int32_t t, std::vector<std::vector<float>>& rows) const {
    for (int32_t e = 0; e < topk; ++e)
      if (counts(t, e)) rows.push_back(cache.unpack(indices[static_cast<size_t>(t * topk + e)]));
  }
};

TEST(ReferenceDecodeSparse, EveryFormatByTheTextbook) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const std::vector<Variant> variants = all_variants();
    const Variant variant = variants[seed % variants.size()];
    MLA_TRACE(testing::Message() << variant);
    const int32_t d_ckv = variant.d_ckv, d_kpe = variant.d_kpe, d_qk = d_ckv + d_kpe;
    const int32_t d_v = variant.format == CacheFormat::kFP8DsV4 ? d_qk : d_ckv;
    const int32_t tokens = random.integer(0, 4), heads = random.of({1, 3, 70});
    RandomPool first(random, variant, tokens), second(random, variant, tokens);
    Tensor q(random.of({DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}), tokens * heads, d_ckv + 1);
    Tensor q_pe(q.dtype, tokens * heads, d_kpe + 2);
    q.fill(random, 0.3F);
    q_pe.fill(random, 0.3F);
    const auto query = [&](int64_t row, int32_t c) { return c < d_ckv ? q.at(row, c) : q_pe.at(row, c - d_ckv); };
    Tensor o(random.of({DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}), tokens * heads, d_v + 3);
    std::vector<float> lse(static_cast<size_t>(tokens * heads), NAN), max_logits(lse);
    const float q_scale = 0.7F, o_scale = 0.05F;
    Options options(random, heads);
    options.args.window_left = -1;
    options.args.alibi_slopes = nullptr;

    core::DecodeSparseArgs args;
    args.num_tokens = tokens;
    args.num_heads = heads;
    args.d_qk = d_qk;
    args.d_v = d_v;
    args.q_dtype = q.dtype;
    args.q_scale = q.dtype == DType::kE4M3 ? &q_scale : nullptr;
    args.q_nope = q.bytes.data();
    args.q_pe = d_kpe > 0 ? q_pe.bytes.data() : nullptr;
    args.q_nope_stride_token = heads * q.width;
    args.q_nope_stride_head = q.width;
    args.q_pe_stride_token = heads * q_pe.width;
    args.q_pe_stride_head = q_pe.width;
    args.num_pools = random.integer(1, 2);
    args.pools[0] = first.args();
    args.pools[1] = second.args();
    args.options = options.args;
    args.sm_scale = 0.2F;
    args.o_dtype = o.dtype;
    args.o_scale = o.dtype == DType::kE4M3 ? &o_scale : nullptr;
    args.o = o.bytes.data();
    args.o_stride_token = heads * o.width;
    args.o_stride_head = o.width;
    args.max_logits = max_logits.data();
    args.lse = lse.data();
    args.max_logits_stride_token = heads;
    args.max_logits_stride_head = args.lse_stride_token = 1;
    args.lse_stride_head = tokens;
    run_in_workspace(args, decode_sparse);

    const double scale =
        static_cast<double>(args.sm_scale) * (args.q_scale != nullptr ? static_cast<double>(q_scale) : 1);
    for (int32_t t = 0; t < tokens; ++t) {
      std::vector<std::vector<float>> rows;
      first.add_rows(t, rows);
      if (args.num_pools > 1) second.add_rows(t, rows);
      for (int32_t h = 0; h < heads; ++h) {
        const int64_t at = t * heads + h;
        std::vector<double> scores;
        for (const std::vector<float>& row : rows) {
          double sum = 0;
          for (int32_t c = 0; c < d_qk; ++c) sum += query(at, c) * static_cast<double>(row[static_cast<size_t>(c)]);
          scores.push_back(options.score(scale * sum, h, 0, 0));
        }
        const Expected expected(scores);
        check_lse(lse[static_cast<size_t>(h * tokens + t)], expected);
        EXPECT_FLOAT_EQ(max_logits[static_cast<size_t>(at)], static_cast<float>(expected.max));
        for (int32_t c = 0; c < d_v; c += h < 3 ? 1 : 37) {
          double value = expected.o([&](size_t n) { return static_cast<double>(rows[n][static_cast<size_t>(c)]); },
                                    options.sink(h));
          if (o.dtype == DType::kE4M3) value = std::clamp(value / static_cast<double>(o_scale), -448.0, 448.0);
          ASSERT_NEAR(o.at(at, c), value, tolerance(o.dtype, value)) << t << ' ' << h << ' ' << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace mla::reference

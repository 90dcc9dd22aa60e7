// SPDX-License-Identifier: Apache-2.0
// Decode and prefill of the oracle: problems solved by hand, and a second, independent writing of the formula.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "mla/numeric.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLn3 = 1.0986123F;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

std::vector<uint16_t> bf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (float value : values) bits.push_back(f32_to_bf16(value));
  return bits;
}

/// Runs `compute` (decode, prefill) in a workspace of the size it asks for.
template <class Args>
void run_in_workspace(const Args& args, void (*compute)(const Args&, std::span<std::byte>)) {
  std::vector<double> workspace(workspace_size(args) / sizeof(double));
  compute(args, std::as_writable_bytes(std::span(workspace)));
}

/// f32 outputs o [T, H, d_v] and lse [T, H] without gaps.
template <class Args>
void set_outputs(Args& args, std::vector<float>& o, std::vector<float>& lse) {
  args.o_dtype = DType::kF32;
  args.o = o.data();
  args.o_stride_token = args.num_heads * args.d_v;
  args.o_stride_head = args.d_v;
  args.lse = lse.data();
  args.lse_stride_token = args.num_heads;
  args.lse_stride_head = 1;
}

/// One request's f32 queries [T, H, d_ckv + d_kpe] with the strides given, and a cache [pages, page_size, d_ckv +
/// d_kpe].
core::DecodeArgs decode_args(const float* q, int64_t q_stride_token, int64_t q_stride_head, CacheFormat format,
                             std::vector<uint16_t>& kv, int32_t page_size, int32_t d_ckv, int32_t d_kpe) {
  const int32_t d_qk = d_ckv + d_kpe;
  core::DecodeArgs args;
  args.batch_size = 1;
  args.d_qk = d_qk;
  args.d_v = d_ckv;
  args.q_dtype = DType::kF32;
  args.q_nope = q;
  args.q_pe = d_kpe > 0 ? q + d_ckv : nullptr;
  args.q_nope_stride_token = args.q_pe_stride_token = q_stride_token;
  args.q_nope_stride_head = args.q_pe_stride_head = q_stride_head;
  args.cache = {.format = format,
                .num_pages = static_cast<int64_t>(kv.size()) / (page_size * d_qk),
                .page_size = page_size,
                .d_ckv = d_ckv,
                .d_kpe = d_kpe,
                .ckv = kv.data(),
                .ckv_stride_page = page_size * d_qk,
                .ckv_stride_token = d_qk,
                .kpe = kv.data() + d_ckv,
                .kpe_stride_page = page_size * d_qk,
                .kpe_stride_token = d_qk};
  args.pages.page_size = page_size;
  args.pages.batch_size = 1;
  return args;
}

/// One request, one head, f32 queries and outputs, bf16 cache [pages, page_size, d_ckv + d_kpe].
struct SmallDecode {
  int32_t d_ckv = 1, d_kpe = 0, page_size = 2, q_len = 1, kv_len = 2;
  std::vector<float> q;
  std::vector<float> cache;
  std::vector<int32_t> table = {0};
  bool causal = true;
  float sm_scale = 1.0F;
  LseBase lse_base = LseBase::kE;

  std::vector<float> o = {}, lse = {};

  void run() {
    std::vector<uint16_t> kv = bf16(cache);
    const int32_t d_qk = d_ckv + d_kpe;
    o.assign(static_cast<size_t>(q_len * d_ckv), kNan);
    lse.assign(static_cast<size_t>(q_len), kNan);
    core::DecodeArgs args = decode_args(q.data(), d_qk, d_qk, CacheFormat::kBF16, kv, page_size, d_ckv, d_kpe);
    args.num_tokens = q_len;
    args.num_heads = 1;
    args.pages.table = table.data();
    args.pages.table_stride_request = static_cast<int64_t>(table.size());
    args.pages.kv_len = &kv_len;
    args.queries.uniform_len = q_len;
    args.causal = causal;
    args.sm_scale = sm_scale;
    args.lse_base = lse_base;
    set_outputs(args, o, lse);
    run_in_workspace(args, decode);
  }
};

TEST(ReferenceDecode, TwoKeysByHand) {
  // scores 0 and ln 3: weights 1/4 and 3/4
  SmallDecode problem{.q = {kLn3}, .cache = {0, 1}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 0.75F);
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(4.0F));
}

TEST(ReferenceDecode, ScaleMultipliesScores) {
  SmallDecode problem{.q = {2 * kLn3}, .cache = {0, 1}, .sm_scale = 0.5F};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 0.75F);
}

TEST(ReferenceDecode, RotaryPartScoresButIsNoValue) {
  // [ckv | kpe]: equal latents score equally, kpe decides; the values are 4 and 8
  SmallDecode problem{.d_kpe = 1, .q = {0, kLn3}, .cache = {4, 0, 8, 1}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 4 * 0.25F + 8 * 0.75F);
}

TEST(ReferenceDecode, LseInBaseTwo) {
  SmallDecode problem{.q = {kLn3}, .cache = {0, 1}, .lse_base = LseBase::kTwo};
  problem.run();
  EXPECT_FLOAT_EQ(problem.lse[0], 2.0F);
}

TEST(ReferenceDecode, CausalMaskIsAlignedToTheLastKey) {
  SmallDecode problem{.page_size = 4, .q_len = 2, .kv_len = 3, .q = {0, 0}, .cache = {3, 6, 12, kNan}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 4.5F);  // keys 0, 1
  EXPECT_FLOAT_EQ(problem.o[1], 7.0F);  // all three
  EXPECT_FLOAT_EQ(problem.lse[0], std::log(2.0F));
  problem.causal = false;
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 7.0F);
}

TEST(ReferenceDecode, RowsWithoutVisibleKey) {
  SmallDecode problem{.q_len = 3, .kv_len = 1, .q = {0, 0, 0}, .cache = {5, kNan}};
  problem.run();
  EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 5}));
  EXPECT_EQ(problem.lse, (std::vector<float>{kMinusInfinity, kMinusInfinity, 0}));
  problem.kv_len = 0;
  for (bool causal : {true, false}) {
    problem.causal = causal;
    problem.run();
    EXPECT_EQ(problem.o, (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(problem.lse, (std::vector<float>(3, kMinusInfinity)));
  }
}

TEST(ReferenceDecode, PagesInTableOrderAndNothingBeyondKvLen) {
  // pages 2, 0 hold 3 tokens; page 1 and the last slot hold NaN, the table's tail is garbage
  SmallDecode problem{.kv_len = 3, .q = {kLn3}, .cache = {1, kNan, kNan, kNan, 0, 2}};
  problem.table = {2, 0, 2147483647};
  problem.run();
  const double sum = 1 + 9 + 3;  // scores 0, 2 ln 3, ln 3 of the values 0, 2, 1
  EXPECT_FLOAT_EQ(problem.o[0], static_cast<float>((2 * 9 + 1 * 3) / sum));
  EXPECT_FLOAT_EQ(problem.lse[0], static_cast<float>(std::log(sum)));
}

TEST(ReferenceDecode, NanOfAVisibleKeyIsNotHidden) {
  SmallDecode problem{.q = {1}, .cache = {0, kNan}};
  problem.run();
  EXPECT_TRUE(std::isnan(problem.o[0]));
  EXPECT_TRUE(std::isnan(problem.lse[0]));
}

TEST(ReferenceDecode, HugeScoresDoNotOverflow) {
  SmallDecode problem{.q = {30000}, .cache = {100, 101}};
  problem.run();
  EXPECT_FLOAT_EQ(problem.o[0], 101);
  EXPECT_FLOAT_EQ(problem.lse[0], 3030000);
}

/// f32 [T, H, width] with a gap behind every head.
struct Rows {
  int64_t heads, width, gap;
  std::vector<float> values;

  Rows(int64_t heads_in, int64_t width_in, std::vector<float> values_in)
      : heads(heads_in), width(width_in), gap(0), values(std::move(values_in)) {}
  Rows(int64_t tokens, int64_t heads_in, int64_t width_in, int64_t gap_in, std::mt19937& random)
      : heads(heads_in), width(width_in), gap(gap_in) {
    std::normal_distribution<float> normal;
    values.resize(static_cast<size_t>(tokens * heads * (width + gap)));
    for (float& value : values) value = normal(random);
  }
  int64_t stride_head() const { return width + gap; }
  int64_t stride_token() const { return heads * stride_head(); }
  double at(int64_t token, int64_t head, int64_t c) const {
    return static_cast<double>(values[static_cast<size_t>(token * stride_token() + head * stride_head() + c)]);
  }
};

core::PrefillArgs prefill_args(const Rows& q, const Rows& k, const Rows& v, const std::vector<int32_t>& qo_indptr,
                               const std::vector<int32_t>& kv_indptr) {
  core::PrefillArgs args;
  args.batch_size = static_cast<int32_t>(qo_indptr.size()) - 1;
  args.num_tokens = qo_indptr.back();
  args.num_keys = kv_indptr.back();
  args.num_heads = static_cast<int32_t>(q.heads);
  args.d_qk = static_cast<int32_t>(q.width);
  args.d_v = static_cast<int32_t>(v.width);
  args.dtype = DType::kF32;
  args.q = q.values.data();
  args.q_stride_token = q.stride_token();
  args.q_stride_head = q.stride_head();
  args.k = k.values.data();
  args.k_stride_token = k.stride_token();
  args.k_stride_head = k.stride_head();
  args.v = v.values.data();
  args.v_stride_token = v.stride_token();
  args.v_stride_head = v.stride_head();
  args.qo_indptr = qo_indptr.data();
  args.kv_indptr = kv_indptr.data();
  return args;
}

/// The textbook formula, one output element at a time, without subtracting a maximum.
template <class Score, class Value>
void textbook(int64_t visible, const Score& score, const Value& value, double& o, double& lse) {
  long double numerator = 0, denominator = 0;
  for (int64_t j = 0; j < visible; ++j) {
    const long double weight = std::exp(static_cast<long double>(score(j)));
    numerator += weight * static_cast<long double>(value(j));
    denominator += weight;
  }
  o = denominator == 0 ? 0 : static_cast<double>(numerator / denominator);
  lse = static_cast<double>(std::log(denominator));
}

TEST(ReferencePrefill, EqualsTheTextbookFormula) {
  std::mt19937 random(7);
  const std::vector<int32_t> qo_indptr = {0, 3, 3, 8, 10}, kv_indptr = {0, 5, 6, 11, 12};  // the last: 2 queries, 1 key
  const int64_t heads = 3, d_qk = 11, d_v = 5;
  Rows q(10, heads, d_qk, 2, random), k(12, heads, d_qk, 0, random), v(12, heads, d_v, 4, random);
  for (bool causal : {true, false}) {
    std::vector<float> o(10 * heads * d_v, kNan), lse(10 * heads, kNan);
    core::PrefillArgs args = prefill_args(q, k, v, qo_indptr, kv_indptr);
    args.causal = causal;
    args.sm_scale = 0.25F;
    set_outputs(args, o, lse);
    run_in_workspace(args, prefill);

    for (size_t b = 0; b < 4; ++b) {
      const int64_t q_len = qo_indptr[b + 1] - qo_indptr[b], kv_len = kv_indptr[b + 1] - kv_indptr[b];
      for (int64_t i = 0; i < q_len; ++i) {
        int64_t visible = 0;
        for (int64_t j = 0; j < kv_len; ++j) visible += !causal || j <= kv_len - q_len + i ? 1 : 0;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t token = qo_indptr[b] + i;
          for (int64_t c = 0; c < d_v; ++c) {
            double expected_o = 0, expected_lse = 0;
            textbook(
                visible,
                [&](int64_t j) {
                  double sum = 0;
                  for (int64_t e = 0; e < d_qk; ++e) sum += q.at(token, h, e) * k.at(kv_indptr[b] + j, h, e);
                  return 0.25 * sum;
                },
                [&](int64_t j) { return v.at(kv_indptr[b] + j, h, c); }, expected_o, expected_lse);
            const auto row = static_cast<size_t>(token * heads + h);
            EXPECT_NEAR(o[row * d_v + static_cast<size_t>(c)], expected_o, 1e-6) << b << ' ' << i << ' ' << h;
            if (visible == 0)
              EXPECT_EQ(lse[row], kMinusInfinity);
            else
              EXPECT_NEAR(lse[row], expected_lse, 1e-6);
          }
        }
      }
    }
  }
}

TEST(ReferenceDecode, EqualsPrefillOfTheSameKeysForEveryHead) {
  // Decode of 70 heads (more than one block of rows) over shuffled pages = prefill whose keys are the cache's rows
  // repeated for each head.
  std::mt19937 random(11);
  constexpr int32_t kHeads = 70, kDckv = 6, kDkpe = 3, kDqk = kDckv + kDkpe, kPage = 4, kQ = 2;
  const int32_t kv_len = 9;
  const std::vector<int32_t> pages = {3, 0, 1}, qo_indptr = {0, kQ}, kv_indptr = {0, kv_len};
  Rows q(kQ, kHeads, kDqk, 1, random);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> cache(4 * kPage * kDqk, 0xFFFF);
  std::vector<float> k, v;
  for (int32_t j = 0; j < kv_len; ++j) {
    uint16_t* row = &cache[static_cast<size_t>((pages[static_cast<size_t>(j / kPage)] * kPage + j % kPage) * kDqk)];
    for (int32_t c = 0; c < kDqk; ++c) row[c] = f32_to_f16(normal(random));
    for (int32_t h = 0; h < kHeads; ++h)
      for (int32_t c = 0; c < kDqk; ++c) {
        k.push_back(f16_to_f32(row[c]));
        if (c < kDckv) v.push_back(f16_to_f32(row[c]));
      }
  }
  std::vector<float> o(kQ * kHeads * kDckv), lse(kQ * kHeads), expected_o(o), expected_lse(lse);

  core::DecodeArgs args =
      decode_args(q.values.data(), q.stride_token(), q.stride_head(), CacheFormat::kF16, cache, kPage, kDckv, kDkpe);
  args.num_tokens = kQ;
  args.num_heads = kHeads;
  const int32_t pages_indptr[] = {0, 3};
  args.pages.table = pages.data();
  args.pages.kv_indptr = pages_indptr;
  args.pages.kv_len = &kv_len;
  args.queries.indptr = qo_indptr.data();
  args.sm_scale = 0.5F;
  set_outputs(args, o, lse);
  run_in_workspace(args, decode);

  const Rows keys(kHeads, kDqk, k), values(kHeads, kDckv, v);
  core::PrefillArgs other = prefill_args(q, keys, values, qo_indptr, kv_indptr);
  other.sm_scale = 0.5F;
  set_outputs(other, expected_o, expected_lse);
  run_in_workspace(other, prefill);
  EXPECT_EQ(o, expected_o);
  EXPECT_EQ(lse, expected_lse);
}

TEST(ReferencePrefill, RoundsTheOutputOnce) {
  // The mean of 1 + 2^-8 and 1 + 2^-8 + 2^-23 needs 25 bits; through f32 it would become a tie and round down to 1.
  const Rows q(1, 1, {0}), k(1, 1, {0, 0}), v(1, 1, {1 + 0x1p-8F, 1 + 0x1p-8F + 0x1p-23F});
  const std::vector<int32_t> qo_indptr = {0, 1}, kv_indptr = {0, 2};
  uint16_t o = 0;
  core::PrefillArgs args = prefill_args(q, k, v, qo_indptr, kv_indptr);
  args.sm_scale = 1;
  args.o_dtype = DType::kBF16;
  args.o_stride_token = args.o_stride_head = 1;
  args.o = &o;
  run_in_workspace(args, prefill);
  EXPECT_EQ(bf16_to_f32(o), 1 + 0x1p-7F);
}

}  // namespace
}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
// Tests decode against the reference: the shapes that users run, every form of the arguments, random problems.
#include <gtest/gtest.h>

#include "backend_test.h"

namespace mla {
namespace {

using kit::DecodeSpec;

class DecodeTest : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeTest, Op::kDecode);

TEST_P(DecodeTest, HeadCounts) {
  for (int32_t heads : {1, 2, 3, 7, 8, 12, 16, 17, 20, 31, 32, 33, 64, 65, 96, 128, 129, 256}) {
    DecodeSpec spec;
    spec.num_heads = heads;
    spec.kv_len = {131, 64};
    expect_ok(spec);
  }
}

TEST_P(DecodeTest, HeadsGatheredOverEightRanks) {
  DecodeSpec spec;
  spec.num_heads = 1024;
  spec.kv_len = {40};
  expect_ok(spec);
}

TEST_P(DecodeTest, PageSizes) {
  for (int32_t page_size : {1, 2, 3, 5, 16, 32, 48, 64, 100, 128, 256}) {
    DecodeSpec spec;
    spec.cache.page_size = page_size;
    spec.kv_len = {2 * page_size, 2 * page_size - 1, 2 * page_size + 1, 777};
    expect_ok(spec);
  }
}

TEST_P(DecodeTest, HeadDimsAndTypes) {
  const int32_t dims[][2] = {{576, 512}, {512, 512}, {320, 256}, {1088, 1024}};
  for (const auto& [d_qk, d_v] : dims)
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16})
      for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32})
        for (bool wide_output : {false, true}) {
          DecodeSpec spec;
          spec.cache.format = format;
          spec.cache.d_qk = d_qk;
          spec.cache.d_v = d_v;
          spec.q_dtype = q_dtype;
          spec.o_dtype = wide_output ? DType::kF32 : q_dtype;
          spec.kv_len = {300};
          spec.num_heads = 20;
          expect_ok(spec);
        }
}

TEST_P(DecodeTest, QueryLengths) {
  for (bool causal : {true, false})
    for (int32_t q_len = 1; q_len <= 16; ++q_len) {
      DecodeSpec spec;
      spec.q_len = {q_len};
      spec.kv_len = {70, q_len, 130};
      spec.causal = causal;
      spec.num_heads = 12;
      expect_ok(spec);
    }
}

TEST_P(DecodeTest, RaggedQueries) {
  DecodeSpec spec;
  spec.q_len = {3, 0, 1, 16, 5, 0};
  spec.kv_len = {500, 12, 1, 16, 3, 0};
  for (bool causal : {true, false}) {
    spec.causal = causal;
    expect_ok(spec);
  }
}

TEST_P(DecodeTest, EveryFormOfTheArguments) {
  for (int form = 0; form < 32; ++form) {
    DecodeSpec spec;
    spec.cache.block_table = (form & 1) != 0;
    spec.cache.two_tensors = (form & 2) != 0;
    spec.split_q = (form & 4) != 0;
    spec.omit_qo_indptr = (form & 8) != 0;
    spec.want_lse = (form & 16) != 0;
    spec.q_len = {2};
    spec.kv_len = {100, 33, 0, 250};
    expect_ok(spec);
  }
}

TEST_P(DecodeTest, EveryStride) {
  for (int64_t extra : {1, 8, 100}) {
    DecodeSpec spec;
    spec.kv_len = {200, 65};
    spec.q_len = {2};
    for (int64_t* stride : {&spec.q_head_extra, &spec.q_token_extra, &spec.o_head_extra, &spec.o_token_extra,
                            &spec.lse_token_extra, &spec.cache.page_stride_extra, &spec.cache.token_stride_extra}) {
      *stride = extra;
      expect_ok(spec);
      spec.split_q = spec.cache.two_tensors = true;
      expect_ok(spec);
      spec.split_q = spec.cache.two_tensors = false;
      *stride = 0;
    }
  }
}

TEST_P(DecodeTest, LongSequence) {
  DecodeSpec spec;
  spec.num_heads = 1;
  spec.kv_len = {131072};
  expect_ok(spec);
}

TEST_P(DecodeTest, ManyShortRequests) {
  DecodeSpec spec;
  spec.num_heads = 8;
  spec.kv_len.clear();
  for (int32_t b = 0; b < 1024; ++b) spec.kv_len.push_back(b % 7);
  expect_ok(spec);
}

TEST_P(DecodeTest, OneLongRequestAmongShortOnes) {
  DecodeSpec spec;
  spec.num_heads = 16;
  spec.kv_len = {3, 17, 6001, 0, 64, 5};
  expect_ok(spec);
}

TEST_P(DecodeTest, LargeScores) {
  for (float score_std : {20.0F, 100.0F}) {
    DecodeSpec spec;
    spec.score_std = score_std;
    spec.kv_len = {400};
    expect_ok(spec);
  }
}

TEST_P(DecodeTest, FlatScores) {
  DecodeSpec spec;
  spec.score_std = 1e-4F;
  spec.kv_len = {400};
  expect_ok(spec);
}

TEST_P(DecodeTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 1000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 60; ++seed)
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16}) expect_ok(kit::random_decode_spec(seed, format));
}

TEST_P(DecodeTest, AnyNumberOfThreads) {
  for (int32_t threads : {1, 3, 5, 16}) {
    const Context other = make_context(threads);
    for (uint64_t seed = 2000; seed < 2010; ++seed) {
      const kit::Outcome outcome = kit::check(other, kit::random_decode_spec(seed, CacheFormat::kBF16));
      EXPECT_TRUE(outcome.ok) << threads << " threads: " << outcome.line();
    }
  }
}

}  // namespace
}  // namespace mla

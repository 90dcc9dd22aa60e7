// SPDX-License-Identifier: Apache-2.0
// Tests decode_sparse and prefill_sparse against the reference: formats, pools, lengths, and what must be skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend_test.h"
#include "turns.h"

namespace mla {
namespace {

using kit::DecodeSparseCase;
using kit::DecodeSparseSpec;
using kit::PrefillSparseSpec;

constexpr kit::LengthForm kLengthForms[] = {kit::LengthForm::kNone, kit::LengthForm::kPerToken,
                                            kit::LengthForm::kPerRequest};

class DecodeSparseTest : public BackendTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_ROW(DecodeSparseTest, Op::kDecodeSparse);

DecodeSparseSpec sparse_spec_of(CacheFormat format) {
  DecodeSparseSpec spec;
  spec.pool.cache = kit::usual_cache(format);
  return spec;
}

TEST_P(DecodeSparseTest, FormatsQueriesAndOutputs) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
      for (DType o_dtype : {q_dtype == DType::kE4M3 ? DType::kBF16 : q_dtype, DType::kF32, DType::kE4M3}) {
        if (!has_turn(format, turn++)) continue;
        DecodeSparseSpec spec = sparse_spec_of(format);
        spec.q_dtype = q_dtype;
        spec.o_dtype = o_dtype;
        spec.options.attn_sink = true;
        expect_ok(spec);
      }
}

/// max_logits are the largest scores over both pools, of every format. Sinks do not count.
TEST_P(DecodeSparseTest, MaxLogits) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool two : {false, true}) {
      DecodeSparseSpec spec = sparse_spec_of(format);
      spec.q_len = {1, 3};
      spec.pool.empty_share = 0.3;
      spec.want_max_logits = true;
      spec.max_logits_head_extra = two ? 2 : 0;
      spec.max_logits_token_extra = two ? 5 : 0;
      spec.options.attn_sink = two;
      if (two) spec.extra_pool = spec.pool;
      expect_ok(spec);
    }
}

/// The window and the compressed pool of V4.1 are in two formats; either has more keys, and so the largest score of
/// most rows.
TEST_P(DecodeSparseTest, MaxLogitsOfUnlikePools) {
  for (bool swapped : {false, true}) {
    DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsV41);
    spec.extra_pool = sparse_spec_of(CacheFormat::kFP4DsV41).pool;
    spec.pool.topk = 7;
    spec.extra_pool->topk = 90;
    if (swapped) std::swap(spec.pool.topk, spec.extra_pool->topk);
    spec.options.attn_sink = true;
    spec.want_max_logits = true;
    expect_ok(spec);
  }
}

TEST_P(DecodeSparseTest, HeadsAndTopk) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4})
    for (int32_t heads : {1, 7, 16, 64, 128})
      for (int32_t topk : {1, 2, 15, 64, 129}) {
        DecodeSparseSpec spec = sparse_spec_of(format);
        spec.num_heads = heads;
        spec.pool.topk = topk;
        spec.q_len = {1, 2};
        expect_ok(spec);
      }
}

TEST_P(DecodeSparseTest, UsualTopk) {
  for (int32_t topk : {512, 1024, 1152, 2048, 2176}) {
    DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsMla);
    spec.pool.topk = topk;
    spec.pool.num_tokens = 3000;
    spec.q_len = {1};
    expect_ok(spec);
  }
}

TEST_P(DecodeSparseTest, PageSizesAndLengths) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t page_size : {1, 2, 64, 256})
      for (kit::LengthForm length : kLengthForms) {
        if (!has_turn(format, turn++)) continue;
        DecodeSparseSpec spec = sparse_spec_of(format);
        spec.pool.cache.page_size = page_size;
        spec.pool.topk_length = length;
        spec.q_len = {3, 0, 1};
        spec.num_heads = 8;
        expect_ok(spec);
        if (length == kit::LengthForm::kPerRequest) {
          spec.q_len = {2, 2, 2};
          spec.omit_qo_indptr = true;
          expect_ok(spec);
        }
      }
}

TEST_P(DecodeSparseTest, AsManyTokensAsRequests) {
  for (kit::LengthForm length : kLengthForms) {
    DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kBF16);
    spec.q_len = {2, 0, 1, 1};
    spec.pool.topk_length = kit::LengthForm::kPerRequest;
    spec.extra_pool = spec.pool;
    spec.extra_pool->topk_length = length;
    expect_ok(spec);
  }
}

TEST_P(DecodeSparseTest, TwoPoolsUnderOneSoftmax) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (kit::LengthForm length : kLengthForms)
      for (bool sink : {false, true}) {
        if (!has_turn(format, turn++)) continue;
        DecodeSparseSpec spec = sparse_spec_of(format);
        spec.pool.cache.page_size = 256;
        spec.pool.topk = 128;
        spec.extra_pool = spec.pool;
        spec.extra_pool->cache.page_size = 2;
        spec.extra_pool->topk = 77;
        spec.extra_pool->topk_length = length;
        spec.q_len = {2, 1, 2};
        spec.options.attn_sink = sink;
        expect_ok(spec);
      }
}

TEST_P(DecodeSparseTest, PoolsOfDifferentFormats) {
  constexpr CacheFormat kUnpacked[] = {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8};
  for (CacheFormat first : kUnpacked)
    for (CacheFormat second : kUnpacked) {
      DecodeSparseSpec spec = sparse_spec_of(first);
      spec.extra_pool = spec.pool;
      spec.extra_pool->cache.format = second;
      if (can_run(spec)) expect_ok(spec);
    }
}

/// The window is in one quantized format, the compressed pool in another, under one softmax.
TEST_P(DecodeSparseTest, WindowAndCompressedPoolOfV41) {
  for (int32_t heads : {5, 64}) {
    DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsV41);
    spec.q_dtype = spec.o_dtype = heads == 5 ? DType::kF32 : DType::kBF16;
    spec.num_heads = heads;
    spec.pool.topk = 128;
    spec.pool.cache.page_size = 128;
    spec.extra_pool = spec.pool;
    spec.extra_pool->cache.format = CacheFormat::kFP4DsV41;
    spec.extra_pool->cache.page_size = 64;
    spec.extra_pool->cache.page_stride_extra = 34;
    spec.extra_pool->topk = 200;
    spec.extra_pool->topk_length = kit::LengthForm::kPerToken;
    spec.q_len = {2, 1};
    spec.options.attn_sink = heads == 64;
    expect_ok(spec);
    std::swap(spec.pool, *spec.extra_pool);
    expect_ok(spec);
  }
}

TEST_P(DecodeSparseTest, OnePoolCutInTwoIsTheSame) {
  // The second half of the indices as a pool of its own, on the same cache.
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsV4}) {
    DecodeSparseSpec spec = sparse_spec_of(format);
    spec.o_dtype = DType::kF32;
    spec.pool.topk = 200;
    const DecodeSparseCase problem(spec);
    MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
    const std::vector<double> whole = kit::to_dense(problem.params().o), lse = kit::to_dense(problem.params().lse);
    problem.reset_outputs();
    DecodeSparseParams params = problem.params();
    params.extra_pool = params.pool;
    params.pool.indices.shape[1] = 90;
    params.extra_pool.indices.shape[1] = 110;
    params.extra_pool.indices.data = static_cast<int32_t*>(params.pool.indices.data) + 90;
    MLA_EXPECT_OK(planned_run(context(), params));
    const kit::Error error =
        kit::compare(kit::to_dense(params.o), whole, params.o.shape[2], kit::to_dense(params.lse), lse);
    kit::Tolerance tolerance = kit::tolerance_of(spec, kit::numerics_of(GetParam(), kit::problem_of(spec)));
    tolerance.max_rel *= 2;
    tolerance.cosine_distance *= 4;
    tolerance.max_lse *= 2;
    EXPECT_EQ(kit::judge(error, tolerance), "") << name(format);
  }
}

TEST_P(DecodeSparseTest, RepeatedIndicesCountAsOftenAsTheyStand) {
  DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsMla);
  spec.pool.invalid_share = 0;
  spec.pool.duplicate_share = 1;  // one row, 64 times: its own value, and lse larger by log 64
  spec.o_dtype = DType::kF32;
  const DecodeSparseCase problem(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  const std::vector<double> often = kit::to_dense(problem.params().o), often_lse = kit::to_dense(problem.params().lse);
  DecodeSparseParams params = problem.params();
  params.pool.indices.shape[1] = 1;
  MLA_EXPECT_OK(planned_run(context(), params));
  const std::vector<double> once = kit::to_dense(params.o), once_lse = kit::to_dense(params.lse);
  for (size_t i = 0; i < often_lse.size(); ++i) EXPECT_NEAR(often_lse[i], once_lse[i] + std::log(64.0), 2e-5);
  for (size_t i = 0; i < often.size(); ++i) ASSERT_NEAR(often[i], once[i], 1e-2 * std::abs(once[i]) + 1e-6);
}

TEST_P(DecodeSparseTest, NothingValid) {
  for (double invalid_share : {0.0, 1.0})
    for (bool sink : {false, true}) {
      DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsMla);
      spec.pool.invalid_share = invalid_share;
      spec.pool.empty_share = 1 - invalid_share;
      spec.options.attn_sink = spec.options.infinite_sinks = sink;
      for (bool inf : {false, true}) {
        spec.lse_inf_without_keys = inf;
        const DecodeSparseCase problem(spec);
        MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
        for (double value : kit::to_dense(problem.params().o)) ASSERT_EQ(value, 0);
        for (double value : kit::to_dense(problem.params().lse)) ASSERT_EQ(value, inf ? HUGE_VAL : -HUGE_VAL);
      }
    }
}

TEST_P(DecodeSparseTest, EmptyBatchesAndPools) {
  DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kBF16);
  spec.q_len = {};
  expect_ok(spec);
  spec.q_len = {0, 0};
  expect_ok(spec);
  spec.q_len = {1, 1};
  spec.pool.num_tokens = 0;
  expect_ok(spec);
  spec.pool.cache.unowned_pages = 0;
  expect_ok(spec);
}

/// Outputs of every type, with every gate, in groups or not, are finished as finish_output does it.
TEST_P(DecodeSparseTest, FinishedOutputs) {
  uint64_t turn = 0;
  for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
    for (DType o_dtype : {q_dtype == DType::kE4M3 ? DType::kBF16 : q_dtype, DType::kF32, DType::kE4M3})
      for (const kit::FinishSpec::Gate gate :
           {kit::FinishSpec::Gate::kNone, kit::FinishSpec::Gate::kHead, kit::FinishSpec::Gate::kChannel})
        for (int32_t rotary : {0, 64, 512}) {
          DecodeSparseSpec spec = sparse_spec_of(turn % 2 == 0 ? CacheFormat::kFP8DsV4 : CacheFormat::kBF16);
          spec.q_dtype = q_dtype;
          spec.o_dtype = o_dtype;
          spec.num_heads = 8;
          spec.q_len = {1, 2};
          spec.options.attn_sink = turn % 3 == 0;
          spec.finish = kit::FinishSpec{.d_rotary = rotary,
                                        .interleaved = turn % 4 < 2,
                                        .max_positions = 50,
                                        .gate = gate,
                                        .num_groups = turn % 3 == 0 ? 0 : 4,
                                        .channels_per_scale = 32 << turn % 3,
                                        .power_of_two_scales = turn % 5 != 0,
                                        .tokens_innermost = turn % 2 == 1};
          ++turn;
          expect_ok(spec);
        }
}

TEST_P(DecodeSparseTest, ScalesOfFinishedOutputs) {
  for (DType type : {DType::kF32, DType::kU8, DType::kI32})
    for (int32_t channels : {32, 64, 128})
      for (bool tokens_innermost : {false, true}) {
        DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsMla);
        spec.o_dtype = DType::kE4M3;
        spec.num_heads = 4;
        spec.finish = kit::FinishSpec{.num_groups = tokens_innermost ? 2 : 0,
                                      .channels_per_scale = channels,
                                      .scale_dtype = type,
                                      .tokens_innermost = tokens_innermost};
        expect_ok(spec);
      }
}

/// Without a key, and without a sink that weakens it, o is 0 and its scales are the smallest.
TEST_P(DecodeSparseTest, FinishedOutputsOfNothing) {
  DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kBF16);
  spec.o_dtype = DType::kE4M3;
  spec.pool.invalid_share = 1.0;
  spec.finish = kit::FinishSpec{};
  expect_ok(spec);
  spec.q_len = {};
  expect_ok(spec);
}

TEST_P(DecodeSparseTest, SoftCap) {
  for (float cap : {1.0F, 30.0F}) {
    DecodeSparseSpec spec = sparse_spec_of(CacheFormat::kFP8DsMla);
    spec.options.logits_soft_cap = cap;
    spec.options.attn_sink = true;
    expect_ok(spec);
  }
}

TEST_P(DecodeSparseTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 21000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 30; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      if (has_turn(format, seed)) expect_ok_if_taken(kit::random_decode_sparse_spec(seed, format));
}

class PrefillSparseTest : public BackendTest<Op::kPrefillSparse> {};
MLA_FOR_EVERY_ROW(PrefillSparseTest, Op::kPrefillSparse);

TEST_P(PrefillSparseTest, ShapesAndTypes) {
  for (int32_t d_qk : {576, 512})
    for (DType kv_dtype : {DType::kBF16, DType::kF16})
      for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32})
        for (bool wide : {false, true}) {
          PrefillSparseSpec spec;
          spec.d_qk = d_qk;
          spec.kv_dtype = kv_dtype;
          spec.q_dtype = q_dtype;
          spec.o_dtype = wide ? DType::kF32 : q_dtype;
          spec.num_heads = wide ? 20 : 8;
          expect_ok(spec);
        }
}

TEST_P(PrefillSparseTest, OutputsThatAreNotWanted) {
  for (int form = 0; form < 4; ++form) {
    PrefillSparseSpec spec;
    spec.want_lse = (form & 1) != 0;
    spec.want_max_logits = (form & 2) != 0;
    expect_ok(spec);
  }
}

TEST_P(PrefillSparseTest, LengthsSinksAndEmptyRows) {
  for (int form = 0; form < 16; ++form) {
    PrefillSparseSpec spec;
    spec.lse_inf_without_keys = (form & 8) != 0;
    spec.topk_length = (form & 1) != 0;
    spec.options.attn_sink = (form & 2) != 0;
    spec.options.infinite_sinks = (form & 2) != 0;
    spec.empty_share = (form & 4) != 0 ? 0.5 : 0;
    spec.topk = 100;
    expect_ok(spec);
  }
}

TEST_P(PrefillSparseTest, UsualTopk) {
  PrefillSparseSpec spec;
  spec.num_tokens = 3;
  spec.topk = 2048;
  spec.num_keys = 5000;
  spec.num_heads = 128;
  spec.duplicate_share = 0;
  expect_ok(spec);
}

TEST_P(PrefillSparseTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 22000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 30; ++seed)
    for (DType kv_dtype : {DType::kBF16, DType::kF16}) expect_ok(kit::random_prefill_sparse_spec(seed, kv_dtype));
}

}  // namespace
}  // namespace mla

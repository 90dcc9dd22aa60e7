// SPDX-License-Identifier: Apache-2.0
// Tests attention on GPUs: every format, head count, page size and option, in small problems.
#include <gtest/gtest.h>

#include "device_test.h"
#include "turns.h"

namespace mla {
namespace {

using kit::DecodeSparseSpec;
using kit::DecodeSpec;
using kit::PrefillSparseSpec;
using kit::PrefillSpec;

class DecodeOnDevice : public DeviceTest<Op::kDecode> {};
MLA_FOR_EVERY_DEVICE(DecodeOnDevice, Op::kDecode);

DecodeSpec small_decode(CacheFormat format = CacheFormat::kBF16) {
  DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.q_dtype = spec.o_dtype = format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
  spec.kv_len = {70, 0, 33};
  return spec;
}

TEST_P(DecodeOnDevice, EveryFormat) {
  for (CacheFormat format : kAllCacheFormats) {
    DecodeSpec spec = small_decode(format);
    expect_ok(spec);
    spec.num_heads = 40;  // large blocks have ways of their own
    expect_ok(spec);
    spec.cache.power_of_two_scales = false;
    spec.cache.padded_pages = kv_layout(format).has_footer();
    spec.cache.token_scales = spec.cache.two_tensors = format == CacheFormat::kFP8;
    expect_ok(spec);
    spec.num_heads = 16;
    expect_ok(spec);
  }
}

// One scale for all rows: whether it is 1, a power of two, short, or long, and that of kpe alike or not. Kernels for
// such rows have blocks of 16 and, of 512 query rows or more, of 64, and leave some types of queries to others.
TEST_P(DecodeOnDevice, OneScale) {
  struct Scales {
    float latent, rope;
  };
  for (const Scales scales : {Scales{1, 1},
                              {0x1p-6F, 0x1p-9F},
                              {0x1.4p-6F, 0x1.4p-3F},
                              {0x1.4p-6F, 0x1p-6F},
                              {0x1.3p-6F, 0x1.3p-6F},
                              {0x1.6p-6F, 0x1.62p-6F},
                              {0.018F, 0.018F},
                              {0x1p-70F, 0x1p-70F},
                              {0x1p66F, 0x1p66F}})
    for (int32_t heads : {16, 33})
      for (DType q_dtype : {DType::kBF16, DType::kE4M3, DType::kF16}) {
        DecodeSpec spec = small_decode(CacheFormat::kFP8);
        spec.cache.own_kpe_scale = spec.cache.two_tensors = scales.latent != scales.rope;
        spec.cache.tensor_scale = scales.latent;
        spec.cache.kpe_scale = scales.rope;
        spec.num_heads = heads;
        spec.q_dtype = q_dtype;
        spec.o_dtype = DType::kF32;
        spec.kv_len = {170, 0, 33, 1, 64, 65, 2, 31, 5, 3, 32, 63, 96, 7, 0, 130};
        expect_ok(spec);
      }
}

// Kernels that go by how many bits scales have meet rows of either kind, at any place of a step.
TEST_P(DecodeOnDevice, FewLongScales) {
  for (CacheFormat format : {CacheFormat::kFP8DsMla, CacheFormat::kFP8}) {
    DecodeSpec spec = small_decode(format);
    spec.kv_len = {300, 45};
    spec.num_heads = 5;
    spec.cache.power_of_two_scales = false;
    spec.cache.few_long_scales = true;
    spec.cache.token_scales = spec.cache.two_tensors = format == CacheFormat::kFP8;
    expect_ok(spec);
  }
}

TEST_P(DecodeOnDevice, HeadCounts) {
  for (int32_t heads : {1, 8, 17, 33, 64, 96, 130}) {
    DecodeSpec spec = small_decode();
    spec.num_heads = heads;
    expect_ok(spec);
  }
}

TEST_P(DecodeOnDevice, PageSizes) {
  for (int32_t page_size : {1, 3, 16, 100, 256})
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsV4}) {
      DecodeSpec spec = small_decode(format);
      spec.cache.page_size = page_size;
      spec.cache.block_table = page_size > 10;
      expect_ok(spec);
    }
}

TEST_P(DecodeOnDevice, HeadDimsAndTypes) {
  const int32_t dims[][2] = {{576, 512}, {512, 512}, {320, 256}};
  for (const auto& [d_qk, d_v] : dims)
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8})
      for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}) {
        DecodeSpec spec = small_decode(format);
        spec.cache.d_qk = d_qk;
        spec.cache.d_v = d_v;
        spec.q_dtype = q_dtype;
        spec.o_dtype = q_dtype == DType::kE4M3 ? DType::kBF16 : DType::kF32;
        spec.kv_len = {41};
        if (can_run(spec)) expect_ok(spec);
      }
}

TEST_P(DecodeOnDevice, RaggedQueriesAndEmptyRequests) {
  DecodeSpec spec = small_decode();
  spec.num_heads = 12;
  spec.q_len = {3, 0, 1, 5, 0};
  spec.kv_len = {100, 12, 0, 3, 0};
  for (bool causal : {true, false}) {
    spec.causal = causal;
    expect_ok(spec);
  }
  spec.q_len = {1};
  spec.kv_len = {};
  expect_ok(spec);
}

TEST_P(DecodeOnDevice, DraftTrees) {
  for (kit::Tree tree : {kit::Tree::kMask, kit::Tree::kParents}) {
    DecodeSpec spec = small_decode();
    spec.tree = tree;
    spec.q_len = {7};
    spec.kv_len = {60, 7, 67, 35};  // in two of them the tree begins in one step and ends in the next
    expect_ok(spec);
  }
}

TEST_P(DecodeOnDevice, OptionsAndRanks) {
  for (int which = 0; which < 6; ++which) {
    DecodeSpec spec = small_decode(which % 2 == 0 ? CacheFormat::kBF16 : CacheFormat::kFP8DsMla);
    spec.q_len = {2};
    spec.options.attn_sink = which == 0 || which == 5;
    spec.options.infinite_sinks = which == 5;
    if (which == 1 || which == 5) spec.options.window_left = 17;
    if (which == 2 || which == 5) spec.options.logits_soft_cap = 30.0F;
    spec.options.alibi_slopes = which == 3;
    if (which == 4) spec.context_parallel = {.rank = 2, .world = 3, .interleave = 2};
    if (which == 5) spec.lse_base = LseBase::kTwo;
    expect_ok(spec);
  }
}

TEST_P(DecodeOnDevice, LongRequestsAreSplit) {
  for (bool batch_invariant : {false, true})
    for (int32_t heads : {1, 40}) {
      DecodeSpec spec = small_decode();
      spec.num_heads = heads;
      spec.kv_len = {2100, 3, 500};
      spec.batch_invariant = batch_invariant;
      expect_ok(spec);
    }
}

TEST_P(DecodeOnDevice, LargeAndFlatScores) {
  for (float score_std : {1e-4F, 40.0F, 300.0F})
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8DsMla}) {
      DecodeSpec spec = small_decode(format);
      spec.score_std = score_std;
      spec.kv_len = {400, 1, 2, 33};  // all scores of a short request may be far below 0
      expect_ok(spec);
    }
}

TEST_P(DecodeOnDevice, SlopesMakeTheFirstKeysVanish) {
  DecodeSpec spec = small_decode();
  spec.options.alibi_slopes = true;
  spec.kv_len = {1200};
  expect_ok(spec);
}

TEST_P(DecodeOnDevice, StridesAndParts) {
  DecodeSpec spec = small_decode();
  spec.split_q = spec.cache.two_tensors = true;
  for (int64_t extra : {1, 8}) {
    spec.q_head_extra = spec.q_token_extra = spec.o_head_extra = spec.o_token_extra = spec.lse_token_extra = extra;
    spec.cache.page_stride_extra = spec.cache.token_stride_extra = extra;
    spec.workspace_misalign = static_cast<int32_t>(extra);
    expect_ok(spec);
  }
}

TEST_P(DecodeOnDevice, RandomProblems) {
  for (CacheFormat format : formats())
    expect_random(turns_of(format, 16), [&](uint64_t seed) { return kit::random_decode_spec(seed, format); });
}

class DecodeSparseOnDevice : public DeviceTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_DEVICE(DecodeSparseOnDevice, Op::kDecodeSparse);

DecodeSparseSpec small_sparse(CacheFormat format) {
  DecodeSparseSpec spec;
  spec.pool.cache = kit::usual_cache(format);
  spec.q_dtype = spec.o_dtype = format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
  spec.pool.num_tokens = 200;
  spec.pool.topk = 70;
  spec.q_len = {1, 2};
  return spec;
}

TEST_P(DecodeSparseOnDevice, EveryFormatAndLength) {
  for (CacheFormat format : kAllCacheFormats)
    for (kit::LengthForm form : {kit::LengthForm::kNone, kit::LengthForm::kPerToken, kit::LengthForm::kPerRequest}) {
      DecodeSparseSpec spec = small_sparse(format);
      spec.pool.topk_length = form;
      spec.pool.empty_share = 0.3;
      expect_ok(spec);
    }
}

TEST_P(DecodeSparseOnDevice, MaxLogits) {
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t heads : {12, 64}) {
      DecodeSparseSpec spec = small_sparse(format);
      spec.num_heads = heads;
      spec.pool.topk = 200;  // splits
      spec.pool.empty_share = 0.3;
      spec.want_max_logits = true;
      spec.max_logits_token_extra = 3;
      spec.options.attn_sink = heads == 12;
      if (heads == 64) spec.extra_pool = spec.pool;
      expect_ok(spec);
    }
}

/// The lists are split, and no split finds a key: combine finishes rows without keys.
TEST_P(DecodeSparseOnDevice, LongListsWithoutKeys) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla})
    for (bool inf : {false, true}) {
      DecodeSparseSpec spec = small_sparse(format);
      spec.pool.topk = 700;
      spec.pool.empty_share = 1;
      spec.options.attn_sink = true;
      spec.lse_inf_without_keys = inf;
      expect_ok(spec);
    }
}

TEST_P(DecodeSparseOnDevice, TwoPoolsWithSinks) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsV4}) {
    DecodeSparseSpec spec = small_sparse(format);
    spec.extra_pool = spec.pool;
    spec.extra_pool->topk = 130;
    spec.extra_pool->cache.page_size = 2;
    spec.num_heads = 64;
    spec.options.attn_sink = true;
    spec.options.infinite_sinks = true;
    spec.pool.empty_share = 0.5;
    expect_ok(spec);
  }
}

/// The window is in one quantized format, the compressed pool in another.
TEST_P(DecodeSparseOnDevice, WindowAndCompressedPoolOfV41) {
  if (!takes_rows_of(CacheFormat::kFP8DsV41)) GTEST_SKIP() << row() << " takes no rows of V4.1";
  for (int32_t heads : {3, 64})
    for (bool swapped : {false, true}) {
      DecodeSparseSpec spec = small_sparse(CacheFormat::kFP8DsV41);
      spec.num_heads = heads;
      spec.extra_pool = small_sparse(CacheFormat::kFP4DsV41).pool;
      spec.extra_pool->topk = 75;
      spec.extra_pool->cache.page_size = 64;
      spec.extra_pool->topk_length = kit::LengthForm::kPerToken;
      spec.options.attn_sink = true;
      spec.want_max_logits = heads == 3;
      if (swapped) std::swap(spec.pool, *spec.extra_pool);
      expect_ok(spec);
    }
}

TEST_P(DecodeSparseOnDevice, PoolsThatAreMultipliedAlike) {
  if (is_fp8_only()) GTEST_SKIP() << row() << " takes no pools of 16 bits";
  const CacheFormat formats[] = {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8};
  for (CacheFormat first : formats)
    for (CacheFormat second : formats) {
      DecodeSparseSpec spec = small_sparse(first);
      spec.extra_pool = small_sparse(second).pool;
      spec.extra_pool->topk = 11;
      if (first == second) {
        expect_ok(spec);
      } else {
        EXPECT_FALSE(can_run(spec));
        const kit::Outcome outcome = kit::check(context(), spec);
        EXPECT_FALSE(outcome.ok);
        EXPECT_NE(outcome.failure.find("two pools"), std::string::npos) << outcome.failure;
      }
    }
}

/// Few tokens of long lists are split, so that combine has all rows of their units; many of short lists are not, and
/// tokens without a key lie between them.
TEST_P(DecodeSparseOnDevice, FinishedOutputs) {
  using Gate = kit::FinishSpec::Gate;
  uint64_t turn = 0;
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8, CacheFormat::kFP8DsV4, CacheFormat::kFP8DsMla})
    for (const bool split : {true, false})
      for (int32_t heads : {8, 64})
        for (DType o_dtype : {DType::kBF16, DType::kE4M3}) {
          DecodeSparseSpec spec = small_sparse(format);
          spec.num_heads = heads;
          spec.o_dtype = o_dtype;
          spec.pool.topk = split ? 700 : 20;
          spec.pool.num_tokens = split ? 800 : 200;
          spec.q_len = std::vector<int32_t>(split ? 2 : 7, 1);
          spec.pool.topk_length = turn % 2 == 0 ? kit::LengthForm::kNone : kit::LengthForm::kPerToken;
          spec.options.attn_sink = turn % 3 == 0;
          spec.finish = kit::FinishSpec{.d_rotary = turn % 4 == 3 ? 0 : 64,
                                        .interleaved = turn % 5 != 4,
                                        .max_positions = 50,
                                        .gate = static_cast<Gate>(turn % 3),
                                        .num_groups = turn % 2 == 0 ? 4 : 0,
                                        .channels_per_scale = 32 << turn / 2 % 3,
                                        .scale_dtype = turn % 7 == 0 ? DType::kI32 : DType::kF32,
                                        .power_of_two_scales = turn % 7 == 0 || turn % 5 != 1,
                                        .tokens_innermost = turn % 3 == 1};
          ++turn;
          expect_ok(spec);
        }
}

/// Some tokens are split and others are not: a long list beside short ones.
TEST_P(DecodeSparseOnDevice, FinishedOutputsOfTokensSplitAndWhole) {
  for (int32_t heads : {5, 32, 128})
    for (DType o_dtype : {DType::kBF16, DType::kE4M3}) {
      DecodeSparseSpec spec = small_sparse(CacheFormat::kBF16);
      spec.num_heads = heads;
      spec.o_dtype = o_dtype;
      spec.pool.num_tokens = 1200;
      spec.pool.topk = 1024;
      spec.pool.topk_length = kit::LengthForm::kPerToken;
      spec.pool.lengths = {1024, 3, 70, 0, 1, 200, 3};
      spec.q_len = std::vector<int32_t>(7, 1);
      spec.finish = kit::FinishSpec{.gate = kit::FinishSpec::Gate::kHead};
      expect_ok(spec);
      spec.o_head_extra = o_dtype == DType::kE4M3 ? 1 : 3;  // no vector of outputs is aligned
      expect_ok(spec);
    }
}

TEST_P(DecodeSparseOnDevice, LargeScores) {
  DecodeSparseSpec spec = small_sparse(CacheFormat::kBF16);
  spec.score_std = 40.0F;
  spec.q_len = {5, 5};
  spec.pool.topk_length = kit::LengthForm::kPerToken;
  expect_ok(spec);
}

TEST_P(DecodeSparseOnDevice, NothingValid) {
  DecodeSparseSpec spec = small_sparse(CacheFormat::kBF16);
  spec.pool.invalid_share = 1.0;
  expect_ok(spec);
  spec.options.attn_sink = true;
  expect_ok(spec);
  spec.pool.num_tokens = 0;
  expect_ok(spec);
}

TEST_P(DecodeSparseOnDevice, HeadsAndWidths) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla})
    for (int32_t heads : {1, 20, 64, 128}) {
      DecodeSparseSpec spec = small_sparse(format);
      spec.num_heads = heads;
      spec.pool.topk = heads == 1 ? 1152 : heads == 64 ? 70 : 33;
      expect_ok(spec);
    }
}

TEST_P(DecodeSparseOnDevice, RandomProblems) {
  for (CacheFormat format : formats())
    expect_random(turns_of(format, 12), [&](uint64_t seed) { return kit::random_decode_sparse_spec(seed, format); });
}

class PrefillOnDevice : public DeviceTest<Op::kPrefill> {};
MLA_FOR_EVERY_DEVICE(PrefillOnDevice, Op::kPrefill);

TEST_P(PrefillOnDevice, RaggedAndEmptyRequests) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (const auto& [d_qk, d_v] : kPrefillDims)
      for (bool causal : {true, false}) {
        PrefillSpec spec;
        spec.num_heads = 3;
        spec.dtype = spec.o_dtype = dtype;
        spec.d_qk = d_qk;
        spec.d_v = d_v;
        spec.causal = causal;
        spec.q_len = {65, 0, 1, 20, 9};
        spec.kv_len = {65, 7, 40, 131, 0};
        expect_ok(spec);
      }
}

TEST_P(PrefillOnDevice, OptionsAndStrides) {
  for (const auto& [d_qk, d_v] : kPrefillDims)
    for (int which = 0; which < 4; ++which) {
      PrefillSpec spec;
      spec.num_heads = 2;
      spec.d_qk = d_qk;
      spec.d_v = d_v;
      spec.q_len = {50, 17};
      spec.kv_len = {90, 17};
      spec.options.attn_sink = which == 0;
      if (which == 1) spec.options.window_left = 20;
      if (which == 2) spec.options.logits_soft_cap = 30.0F;
      spec.options.alibi_slopes = which == 3;
      spec.o_dtype = which == 3 ? DType::kF32 : DType::kBF16;
      spec.q_head_extra = spec.k_token_extra = spec.v_head_extra = spec.o_token_extra = which * 3;
      expect_ok(spec);
    }
}

// Blocks take the units of up to 32 heads in turns: 35 heads are two such groups.
TEST_P(PrefillOnDevice, MoreHeadsThanTakeTurns) {
  PrefillSpec spec;
  spec.num_heads = 35;
  spec.d_qk = 192;
  spec.d_v = 128;
  spec.q_len = {9, 0, 20};
  spec.kv_len = {9, 7, 33};
  expect_ok(spec);
}

// Between masked tiles, at the window's edge and on the diagonal, there are tiles that all rows see whole.
TEST_P(PrefillOnDevice, TilesThatAllRowsSeeWhole) {
  for (const auto& [d_qk, d_v] : kPrefillDims)
    for (int32_t window : {-1, 420}) {
      PrefillSpec spec;
      spec.num_heads = 1;
      spec.d_qk = d_qk;
      spec.d_v = d_v;
      spec.q_len = {70};
      spec.kv_len = {661};
      spec.options.window_left = window;
      expect_ok(spec);
    }
}

TEST_P(PrefillOnDevice, RandomProblems) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}) {
    PrefillSpec usual;
    usual.dtype = dtype;
    if (!leaves(usual)) expect_random(16, [&](uint64_t seed) { return kit::random_prefill_spec(seed, dtype); });
  }
}

class PrefillSparseOnDevice : public DeviceTest<Op::kPrefillSparse> {};
MLA_FOR_EVERY_DEVICE(PrefillSparseOnDevice, Op::kPrefillSparse);

TEST_P(PrefillSparseOnDevice, IndicesOfEveryKind) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (bool lengths : {false, true}) {
      PrefillSparseSpec spec;
      spec.num_tokens = 5;
      spec.num_keys = 150;
      spec.topk = 50;
      spec.q_dtype = spec.o_dtype = spec.kv_dtype = dtype;
      spec.topk_length = lengths;
      spec.empty_share = 0.3;
      spec.options.attn_sink = lengths;
      spec.kv_extra = lengths ? 3 : 0;
      expect_ok(spec);
    }
}

TEST_P(PrefillSparseOnDevice, RandomProblems) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    expect_random(12, [&](uint64_t seed) { return kit::random_prefill_sparse_spec(seed, dtype); });
}

class MergeStatesOnDevice : public DeviceTest<Op::kMergeStates> {};
MLA_FOR_EVERY_DEVICE(MergeStatesOnDevice, Op::kMergeStates);

TEST_P(MergeStatesOnDevice, RandomProblems) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    expect_random(16, [&](uint64_t seed) { return kit::random_merge_spec(seed, dtype); });
}

}  // namespace
}  // namespace mla

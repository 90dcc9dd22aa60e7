// SPDX-License-Identifier: Apache-2.0
// Tests decode over every cache format, with every type of queries and outputs and every option.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "backend_test.h"
#include "turns.h"

namespace mla {
namespace {

using kit::DecodeSpec;

class DecodeFormats : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeFormats, Op::kDecode);

DecodeSpec spec_of(CacheFormat format) {
  DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.kv_len = {131, 64, 0};
  return spec;
}

TEST_P(DecodeFormats, QueriesAndOutputs) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
      for (DType o_dtype : {q_dtype == DType::kE4M3 ? DType::kBF16 : q_dtype, DType::kF32, DType::kE4M3}) {
        if (!has_turn(format, turn++)) continue;
        DecodeSpec spec = spec_of(format);
        spec.q_dtype = q_dtype;
        spec.o_dtype = o_dtype;
        spec.num_heads = 20;
        expect_ok(spec);
      }
}

TEST_P(DecodeFormats, Heads) {
  for (CacheFormat format : {CacheFormat::kFP8, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4})
    for (int32_t heads : {1, 3, 8, 16, 17, 64, 128}) {
      DecodeSpec spec = spec_of(format);
      spec.num_heads = heads;
      expect_ok(spec);
    }
}

TEST_P(DecodeFormats, PageSizesAndStrides) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t page_size : {1, 2, 16, 64, 128, 256})
      for (bool wide : {false, true}) {
        if (!has_turn(format, turn++)) continue;
        DecodeSpec spec = spec_of(format);
        spec.cache.page_size = page_size;
        spec.cache.padded_pages = wide && kv_layout(format).has_footer();
        spec.cache.page_stride_extra = wide ? 3000 : 0;
        if (wide && !kv_layout(format).has_footer()) spec.cache.token_stride_extra = 32;
        spec.kv_len = {2 * page_size + 1, 300};
        expect_ok(spec);
      }
}

TEST_P(DecodeFormats, ScalesOfFp8) {
  const int32_t dims[][2] = {{576, 512}, {512, 512}, {320, 256}, {1088, 1024}};
  for (const auto& [d_qk, d_v] : dims)
    for (int form = 0; form < 8; ++form) {
      DecodeSpec spec = spec_of(CacheFormat::kFP8);
      spec.cache.d_qk = d_qk;
      spec.cache.d_v = d_v;
      spec.cache.token_scales = (form & 1) != 0;
      spec.cache.own_kpe_scale = (form & 2) != 0;
      spec.cache.two_tensors = (form & 4) != 0;
      expect_ok(spec);
    }
}

TEST_P(DecodeFormats, AnyScaleOfFp8DsMla) {
  for (bool power_of_two : {false, true}) {
    DecodeSpec spec = spec_of(CacheFormat::kFP8DsMla);
    spec.cache.power_of_two_scales = power_of_two;
    expect_ok(spec);
  }
}

TEST_P(DecodeFormats, RaggedQueries) {
  for (CacheFormat format : kAllCacheFormats)
    for (bool causal : {true, false}) {
      DecodeSpec spec = spec_of(format);
      spec.q_len = {3, 0, 1, 16, 5, 0};
      spec.kv_len = {500, 12, 1, 16, 3, 0};
      spec.causal = causal;
      expect_ok(spec);
    }
}

class DecodeOptions : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeOptions, Op::kDecode);

/// Calls f with every combination of the options and its spec.
template <class Spec, class F>
void for_every_option(Spec spec, const F& f) {
  for (int form = 0; form < 16; ++form) {
    spec.options.attn_sink = (form & 1) != 0;
    spec.options.window_left = (form & 2) != 0 ? 20 : -1;
    spec.options.logits_soft_cap = (form & 4) != 0 ? 5.0F : 0.0F;
    spec.options.alibi_slopes = (form & 8) != 0;
    f(spec);
  }
}

TEST_P(DecodeOptions, EveryCombination) {
  DecodeSpec spec;
  spec.q_len = {4};
  spec.kv_len = {150, 3, 40};
  spec.num_heads = 12;
  for (bool causal : {true, false}) {
    spec.causal = causal;
    for_every_option(spec, [&](const DecodeSpec& with) { expect_ok(with); });
  }
}

TEST_P(DecodeOptions, EveryCombinationWithTrees) {
  DecodeSpec spec;
  spec.q_len = {7};
  spec.kv_len = {150, 7, 40};
  spec.num_heads = 6;
  for (kit::Tree tree : {kit::Tree::kMask, kit::Tree::kParents}) {
    spec.tree = tree;
    for_every_option(spec, [&](const DecodeSpec& with) { expect_ok(with); });
  }
}

TEST_P(DecodeOptions, TreesOfRaggedQueries) {
  for (kit::Tree tree : {kit::Tree::kMask, kit::Tree::kParents})
    for (uint64_t seed = 1; seed < 6; ++seed) {
      DecodeSpec spec;
      spec.seed = seed;
      spec.tree = tree;
      spec.q_len = {1, 16, 0, 5, 64};
      spec.kv_len = {70, 16, 9, 700, 65};
      expect_ok(spec);
    }
}

TEST_P(DecodeOptions, Windows) {
  for (int32_t window : {0, 1, 63, 64, 65, 127, 100000})
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsV4}) {
      DecodeSpec spec = spec_of(format);
      spec.options.window_left = window;
      spec.q_len = {3};
      spec.kv_len = {500, 64, 2, 1000};
      expect_ok(spec);
    }
}

TEST_P(DecodeOptions, InfiniteSinks) {
  DecodeSpec spec;
  spec.q_len = {3};
  spec.kv_len = {100, 2, 0};
  spec.options.attn_sink = spec.options.infinite_sinks = true;
  spec.num_heads = 12;
  expect_ok(spec);
}

TEST_P(DecodeOptions, RanksOfEveryWorld) {
  for (int32_t world : {2, 3, 8})
    for (int32_t interleave : {1, 3, 16})
      for (int32_t rank = 0; rank<world; rank += world> 4 ? 3 : 1) {
        DecodeSpec spec;
        spec.q_len = {1, 4, 9, 2};
        spec.kv_len = {300, 5, 9, 64};
        spec.num_heads = 4;
        spec.context_parallel = {.rank = rank, .world = world, .interleave = interleave};
        expect_ok(spec);
        spec.options.window_left = 10;
        spec.tree = kit::Tree::kParents;
        expect_ok(spec);
      }
}

TEST_P(DecodeOptions, RanksMergeToTheWhole) {
  // o and lse of every rank, merged by lse, are those of one process; the sink is the merger's to apply.
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla})
    for (int32_t world : {2, 3, 4}) {
      DecodeSpec spec = spec_of(format);
      spec.q_len = {4};
      spec.kv_len = {300, 3, 7};
      spec.num_heads = 8;
      spec.o_dtype = DType::kF32;
      const kit::DecodeCase whole(spec);
      MLA_EXPECT_OK(kit::plan_and_run(context(), whole));
      const TensorView o = whole.params().o, lse = whole.params().lse;
      const auto rows = static_cast<size_t>(lse.numel()), elements = static_cast<size_t>(o.numel());
      const auto states = static_cast<size_t>(world);
      std::vector<float> partial_o(states * elements), partial_lse(states * rows), merged(elements), merged_lse(rows);
      for (size_t rank = 0; rank < states; ++rank) {
        DecodeSpec of_rank = spec;
        of_rank.context_parallel = {.rank = static_cast<int32_t>(rank), .world = world, .interleave = 2};
        const kit::DecodeCase part(of_rank);
        MLA_EXPECT_OK(kit::plan_and_run(context(), part));
        std::copy_n(part.o.as<float>(), elements, &partial_o[rank * elements]);
        std::copy_n(part.lse.as<float>(), rows, &partial_lse[rank * rows]);
      }
      MergeStatesParams merge;
      merge.partial_o = contiguous(partial_o.data(), DType::kF32, {world, o.shape[0], o.shape[1], o.shape[2]});
      merge.partial_lse = contiguous(partial_lse.data(), DType::kF32, {world, o.shape[0], o.shape[1]});
      merge.o = contiguous(merged.data(), DType::kF32, {o.shape[0], o.shape[1], o.shape[2]});
      merge.lse = contiguous(merged_lse.data(), DType::kF32, {o.shape[0], o.shape[1]});
      MLA_EXPECT_OK(run(context(), merge));
      const kit::Error error = kit::compare(kit::to_dense(merge.o), kit::to_dense(o), o.shape[2],
                                            kit::to_dense(merge.lse), kit::to_dense(lse));
      kit::Tolerance tolerance = kit::tolerance_of(spec, kit::numerics_of(GetParam(), kit::problem_of(spec)));
      tolerance.max_rel *= 2;
      tolerance.cosine_distance *= 4;
      tolerance.max_lse *= 2;
      EXPECT_EQ(kit::judge(error, tolerance), "") << world << ' ' << name(format);
    }
}

TEST_P(DecodeOptions, RandomProblemsOfEveryFormat) {
  constexpr uint64_t kFirstSeed = 20000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 40; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      if (has_turn(format, seed)) expect_ok_if_taken(kit::random_decode_spec(seed, format));
}

class PrefillOptions : public BackendTest<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillOptions, Op::kPrefill);

TEST_P(PrefillOptions, EveryCombination) {
  for (DType dtype : {DType::kBF16, DType::kF32})
    for (bool causal : {true, false}) {
      kit::PrefillSpec spec;
      spec.dtype = spec.o_dtype = dtype;
      spec.num_heads = 3;
      spec.q_len = {40, 9};
      spec.kv_len = {70, 9};
      spec.causal = causal;
      for_every_option(spec, [&](const kit::PrefillSpec& with) { expect_ok(with); });
    }
}

TEST_P(PrefillOptions, InfiniteSinksAndWindows) {
  for (int32_t window : {0, 15, 64, 200}) {
    kit::PrefillSpec spec;
    spec.num_heads = 6;
    spec.q_len = {150, 40};
    spec.kv_len = {300, 20};
    spec.options.window_left = window;
    spec.options.attn_sink = spec.options.infinite_sinks = true;
    expect_ok(spec);
  }
}

}  // namespace
}  // namespace mla

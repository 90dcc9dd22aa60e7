// SPDX-License-Identifier: Apache-2.0
// Tests how options of attention are validated: sinks, windows, soft caps, slopes, draft trees, scales of queries and
// outputs, ranks.
#include <cmath>
#include <limits>

#include "core/validate.h"
#include "formats.h"
#include "problems.h"
#include "sparse_problems.h"

namespace mla::test {
namespace {

/// Holds a decode with room for every option.
struct OptionsDecode : Decode {
  std::vector<float> per_head = std::vector<float>(kHeads + 1, 0.5F);
  std::vector<float> scale = {2.0F};
  std::vector<uint16_t> mask = std::vector<uint16_t>(16, 0);
  std::vector<int32_t> parents = {-1, -1, 0};
  std::vector<uint16_t> narrow_o = std::vector<uint16_t>(3 * kHeads * kCkv / 2, kSentinel);

  TensorView heads(int64_t count = kHeads) { return contiguous(per_head.data(), DType::kF32, {count}); }
  TensorView one() { return contiguous(scale.data(), DType::kF32, {1}); }
  void use_e4m3() {
    params.q.dtype = DType::kE4M3;
    params.q_scale = one();
  }
  void use_narrow_o() {
    params.o = of(narrow_o, {3, kHeads, kCkv}, DType::kE4M3);
    params.o_scale = one();
  }
  bool untouched() const { return all_sentinels({&o, &lse, &narrow_o}); }
};

using OptionsCases = std::vector<BadCase<OptionsDecode>>;

core::DecodeArgs accepted_options(const DecodeParams& params) {
  core::DecodeArgs args;
  Device device;
  EXPECT_EQ(core::validate(params, core::Scope::kAll, args, device).message(), "");
  return args;
}

TEST(ValidateOptions, RefusesBadOptions) {
  expect_refused(OptionsCases{
      {"sink of other heads", [](OptionsDecode& p) { p.params.options.attn_sink = p.heads(3); },
       "decode: options.attn_sink: expected shape [H = 2], got [3]"},
      {"sink in bf16", [](OptionsDecode& p) { p.params.options.attn_sink = of(p.q, {kHeads}); },
       "decode: options.attn_sink: expected f32, got bf16"},
      {"NaN sink",
       [](OptionsDecode& p) {
         p.params.options.attn_sink = p.heads();
         p.per_head[1] = NAN;
       },
       "decode: options.attn_sink: expected numbers, got NaN for head 1", false},
      {"window below -1", [](OptionsDecode& p) { p.params.options.window_left = -2; },
       "decode: options.window_left: expected at least -1, got -2"},
      {"negative cap", [](OptionsDecode& p) { p.params.options.logits_soft_cap = -1.0F; },
       "decode: options.logits_soft_cap: expected 0 or a finite number above it, got -1"},
      {"infinite cap", [](OptionsDecode& p) { p.params.options.logits_soft_cap = INFINITY; },
       "decode: options.logits_soft_cap: expected 0 or a finite number above it, got inf"},
      {"slopes of other heads", [](OptionsDecode& p) { p.params.options.alibi_slopes = p.heads(1); },
       "decode: options.alibi_slopes: expected shape [H = 2], got [1]"},
      {"infinite slope",
       [](OptionsDecode& p) {
         p.params.options.alibi_slopes = p.heads();
         p.per_head[0] = INFINITY;
       },
       "decode: options.alibi_slopes: expected finite numbers, got inf for head 0", false},
  });
}

TEST(ValidateOptions, RefusesTheArithmeticOfQuantizedKeysElsewhere) {
  const auto set_fp8 = [](auto& p) { p.params.options.compute = Compute::kFP8; };
  expect_refused(
      OptionsCases{{"cache of bf16", set_fp8,
                    "decode: options.compute: expected default, since bf16 caches are not quantized, got fp8"},
                   {"no arithmetic", [](OptionsDecode& p) { p.params.options.compute = static_cast<Compute>(7); },
                    "decode: options.compute: expected kDefault, kFP8 or kExact, got 7"}});
  expect_refused(std::vector<BadCase<Prefill>>{
      {"prefill", set_fp8, "prefill: options.compute: expected default, since keys are bf16, not e4m3, got fp8"}});
  expect_refused(std::vector<BadCase<PrefillSparse>>{
      {"prefill_sparse", set_fp8,
       "prefill_sparse: options.compute: expected default, since keys are bf16, not e4m3, got fp8"}});
  expect_refused(std::vector<BadCase<DecodeSparse>>{
      {"second pool of bf16",
       [](DecodeSparse& p) {
         p.use_extra_pool();
         p.params.q = of(p.q, {4, kHeads, kCkv + kKpe});
         p.params.o = of(p.o, {4, kHeads, kCkv});
         p.params.pool.cache = p.quantized.fp8();
         p.params.extra_pool.cache = p.rows.whole();
         p.params.options.compute = Compute::kFP8;
       },
       "decode_sparse: options.compute: expected default, since bf16 caches are not quantized, got fp8"},
      {"rotary channels of two kinds",
       [](DecodeSparse& p) {
         p.use_extra_pool();
         p.params.pool.cache = p.quantized.fp8();
         p.params.pool.cache.kv = of(p.quantized.bytes, {kPages, kPageSize, 576}, DType::kE4M3);
         p.params.options.compute = Compute::kFP8;
       },
       "decode_sparse: options.compute: expected default, since rotary channels are e4m3 in one pool and bf16 in the "
       "other, got fp8"}});
}

TEST(ValidateOptions, QuantizedCachesHaveAnArithmeticOfTheirOwn) {
  Fp8Decode decode;
  EXPECT_EQ(accepted_options(decode.params).options.compute, Compute::kDefault);
  decode.params.options.compute = Compute::kFP8;
  EXPECT_EQ(accepted_options(decode.params).options.compute, Compute::kFP8);
  decode.params.options.compute = Compute::kExact;  // is the default
  EXPECT_EQ(accepted_options(decode.params).options.compute, Compute::kDefault);
  DecodeSparse sparse;
  sparse.use_extra_pool();
  sparse.params.options.compute = Compute::kFP8;
  core::DecodeSparseArgs args;
  Device device;
  EXPECT_EQ(core::validate(sparse.params, core::Scope::kAll, args, device).message(), "");
  EXPECT_EQ(args.options.compute, Compute::kFP8);
}

TEST(ValidateOptions, InfiniteSinksAreLegal) {
  OptionsDecode p;
  p.params.options = {.attn_sink = p.heads(), .window_left = 0, .logits_soft_cap = 30.0F, .alibi_slopes = {}};
  p.per_head = {INFINITY, -INFINITY};
  const core::DecodeArgs args = accepted_options(p.params);
  EXPECT_EQ(args.options.attn_sink, p.per_head.data());
  EXPECT_EQ(args.options.window_left, 0);
  EXPECT_EQ(args.options.logits_soft_cap, 30.0F);
  EXPECT_EQ(args.options.alibi_slopes, nullptr);
}

TEST(ValidateOptions, RefusesBadScalesOfQueriesAndOutputs) {
  expect_refused(OptionsCases{
      {"e4m3 queries without a scale", [](OptionsDecode& p) { p.params.q.dtype = DType::kE4M3; },
       "decode: q_scale: expected a tensor, since q is e4m3, got none"},
      {"bf16 queries with a scale", [](OptionsDecode& p) { p.params.q_scale = p.one(); },
       "decode: q_scale: expected none, since q is bf16, got a tensor"},
      {"scale of 0",
       [](OptionsDecode& p) {
         p.use_e4m3();
         p.scale[0] = 0.0F;
       },
       "decode: q_scale: expected a finite number above 0, got 0", false},
      {"f16 output of e4m3 queries",
       [](OptionsDecode& p) {
         p.use_e4m3();
         p.params.o.dtype = DType::kF16;
       },
       "decode: o: expected bf16, f32 or e4m3, got f16"},
      {"e4m3 output without a scale",
       [](OptionsDecode& p) {
         p.use_narrow_o();
         p.params.o_scale = {};
       },
       "decode: o_scale: expected a tensor, since o is e4m3, got none"},
      {"bf16 output with a scale", [](OptionsDecode& p) { p.params.o_scale = p.one(); },
       "decode: o_scale: expected none, since o is bf16, got a tensor"},
      {"output scale of two",
       [](OptionsDecode& p) {
         p.use_narrow_o();
         p.params.o_scale = p.heads();
       },
       "decode: o_scale: expected shape [1], got [2]"},
      {"NaN as output scale",
       [](OptionsDecode& p) {
         p.use_narrow_o();
         p.scale[0] = NAN;
       },
       "decode: o_scale: expected a finite number above 0, got nan", false},
  });
  OptionsDecode p;
  p.use_e4m3();
  p.use_narrow_o();
  const core::DecodeArgs args = accepted_options(p.params);
  EXPECT_EQ(args.q_scale, p.scale.data());
  EXPECT_EQ(args.o_scale, p.scale.data());
  EXPECT_EQ(args.q_dtype, DType::kE4M3);
  EXPECT_EQ(args.o_dtype, DType::kE4M3);
}

TEST(ValidateOptions, RefusesBadTrees) {
  const auto mask = [](OptionsDecode& p, int64_t width) { return contiguous(p.mask.data(), DType::kU8, {3, width}); };
  expect_refused(OptionsCases{
      {"both forms",
       [mask](OptionsDecode& p) {
         p.params.tree_mask = mask(p, 2);
         p.params.tree_parents = of(p.parents);
       },
       "decode: tree_mask: expected either tree_mask or tree_parents, got both"},
      {"mask without causal",
       [mask](OptionsDecode& p) {
         p.params.tree_mask = mask(p, 2);
         p.params.causal = false;
       },
       "decode: tree_mask: expected none, since causal is not set, got a tensor"},
      {"parents without causal",
       [](OptionsDecode& p) {
         p.params.tree_parents = of(p.parents);
         p.params.causal = false;
       },
       "decode: tree_parents: expected none, since causal is not set, got a tensor"},
      {"mask too narrow", [mask](OptionsDecode& p) { p.params.tree_mask = mask(p, 1); },
       "decode: tree_mask: expected rows of at least 2 (the most queries of a request), got 1"},
      {"mask too narrow for uniform queries",
       [mask](OptionsDecode& p) {
         p.params.qo_indptr = {};
         p.params.pages.kv_len = contiguous(p.kv_len.data(), DType::kI32, {1});
         p.params.pages.block_table = contiguous(p.block_table.data(), DType::kI32, {1, 6});
         p.params.tree_mask = mask(p, 2);
       },
       "decode: tree_mask: expected rows of at least 3 (the most queries of a request), got 2"},
      {"mask of other tokens",
       [](OptionsDecode& p) {
         p.params.tree_mask = contiguous(p.mask.data(), DType::kU8, {2, 2});
       },
       "decode: tree_mask: expected shape [T = 3, q_len_max], got [2, 2]"},
      {"mask of i32",
       [](OptionsDecode& p) {
         p.params.tree_mask = contiguous(p.mask.data(), DType::kI32, {3, 2});
       },
       "decode: tree_mask: expected uint8, got int32"},
      {"parents of other tokens",
       [](OptionsDecode& p) {
         p.params.tree_parents = of(p.parents);
         set_extent(p.params.tree_parents, 0, 2);
       },
       "decode: tree_parents: expected shape [T = 3], got [2]"},
      {"its own parent",
       [](OptionsDecode& p) {
         p.params.tree_parents = of(p.parents);
         p.parents = {-1, -1, 1};
       },
       "decode: tree_parents: expected -1 to 0 for draft 1 of request 1, got 1", false},
      {"parent below -1",
       [](OptionsDecode& p) {
         p.params.tree_parents = of(p.parents);
         p.parents = {-2, -1, 0};
       },
       "decode: tree_parents: expected -1 to -1 for draft 0 of request 0, got -2", false},
  });
  OptionsDecode p;
  p.params.tree_parents = of(p.parents);
  EXPECT_EQ(accepted_options(p.params).tree_parents, p.parents.data());
  p.params.tree_parents = {};
  p.params.tree_mask = mask(p, 5);
  const core::DecodeArgs args = accepted_options(p.params);
  EXPECT_EQ(args.tree_mask, reinterpret_cast<uint8_t*>(p.mask.data()));
  EXPECT_EQ(args.tree_mask_stride_token, 5);
}

TEST(ValidateOptions, RefusesBadRanks) {
  expect_refused(OptionsCases{
      {"no ranks", [](OptionsDecode& p) { p.params.context_parallel.world = 0; },
       "decode: context_parallel.world: expected at least 1, got 0"},
      {"rank beyond the world", [](OptionsDecode& p) { p.params.context_parallel = {.rank = 2, .world = 2}; },
       "decode: context_parallel.rank: expected 0 to 1, got 2"},
      {"negative rank", [](OptionsDecode& p) { p.params.context_parallel.rank = -1; },
       "decode: context_parallel.rank: expected 0 to 0, got -1"},
      {"no interleave", [](OptionsDecode& p) { p.params.context_parallel.interleave = 0; },
       "decode: context_parallel.interleave: expected at least 1, got 0"},
      {"more on the rank than its pages hold",
       [](OptionsDecode& p) {
         p.params.context_parallel = {.rank = 0, .world = 2, .interleave = 1};
         p.kv_len = {5, 25};
       },
       "decode: kv_len: expected at most 12 tokens on the rank (3 pages of 4), got 13 of 25 for request 1"},
  });
}

TEST(ValidateOptions, ARankHoldsItsOwnPagesOnly) {
  OptionsDecode p;
  p.params.context_parallel = {.rank = 1, .world = 2, .interleave = 4};
  p.kv_len = {4, 24};                     // 0 and 12 tokens here
  p.block_table = {-5, -5, -5, 2, 3, 4};  // no page of request 0 is read
  const core::DecodeArgs args = accepted_options(p.params);
  EXPECT_EQ(args.context_parallel, (ContextParallel{.rank = 1, .world = 2, .interleave = 4}));
  EXPECT_EQ(args.pages.kv_len[1], 24);
  p.block_table[5] = 8;
  core::DecodeArgs ignored;
  Device device;
  EXPECT_EQ(core::validate(p.params, core::Scope::kAll, ignored, device).message(),
            "decode: block_table: expected page numbers from 0 to 7, got 8 as page 2 of request 1");
}

TEST(ValidateOptions, PrefillTakesThemToo) {
  Prefill p;
  std::vector<float> sink = {0.0F, 1.0F, 2.0F};
  p.params.options = {.attn_sink = contiguous(sink.data(), DType::kF32, {3})};
  core::PrefillArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, core::Scope::kAll, args, device).message(),
            "prefill: options.attn_sink: expected shape [H = 2], got [3]");
  p.params.options.attn_sink = contiguous(sink.data(), DType::kF32, {2});
  p.params.options.window_left = 7;
  p.params.options.alibi_slopes = p.params.options.attn_sink;
  p.params.options.logits_soft_cap = 2.0F;
  EXPECT_EQ(core::validate(p.params, core::Scope::kAll, args, device).message(), "");
  EXPECT_EQ(args.options.attn_sink, sink.data());
  EXPECT_EQ(args.options.alibi_slopes, sink.data());
  EXPECT_EQ(args.options.window_left, 7);
  EXPECT_EQ(args.options.logits_soft_cap, 2.0F);
}

}  // namespace
}  // namespace mla::test

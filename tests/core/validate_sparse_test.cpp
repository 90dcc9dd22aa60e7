// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "core/validate.h"
#include "sparse_problems.h"

namespace mla::test {
namespace {

using SparseCases = std::vector<BadCase<DecodeSparse>>;

core::DecodeSparseArgs accepted_sparse(const DecodeSparseParams& params) {
  core::DecodeSparseArgs args;
  Device device;
  EXPECT_EQ(core::validate(params, core::Scope::kAll, args, device).message(), "");
  return args;
}

TEST(ValidateDecodeSparse, RefusesBadInput) {
  expect_refused(SparseCases{
      {"no indices", [](DecodeSparse& p) { p.params.pool.indices = {}; },
       "decode_sparse: pool.indices: expected a tensor, got none"},
      {"indices in i64", [](DecodeSparse& p) { p.params.pool.indices.dtype = DType::kI64; },
       "decode_sparse: pool.indices: expected int32, got int64"},
      {"indices of other tokens", [](DecodeSparse& p) { set_extent(p.params.pool.indices, 0, 3); },
       "decode_sparse: pool.indices: expected shape [T = 4, topk], got [3, 4]"},
      {"topk of 0", [](DecodeSparse& p) { set_extent(p.params.pool.indices, 1, 0); },
       "decode_sparse: pool.topk: expected at least 1, got 0"},
      {"lengths of neither", [](DecodeSparse& p) { set_extent(p.params.pool.topk_length, 0, 3); },
       "decode_sparse: qo_indptr: expected a tensor, since 4 query tokens are not a multiple of 3 requests, got none"},
      {"lengths of neither, with qo_indptr",
       [](DecodeSparse& p) {
         set_extent(p.params.pool.topk_length, 0, 3);
         p.params.qo_indptr = of(p.qo_indptr);
       },
       "decode_sparse: pool.topk_length: expected shape [T = 4] or [B = 2], got [3]"},
      {"requests that differ",
       [](DecodeSparse& p) {
         p.use_per_request();
         p.use_extra_pool();
         p.params.extra_pool.topk_length = contiguous(p.lengths.data(), DType::kI32, {1});
       },
       "decode_sparse: extra_pool.topk_length: expected shape [T = 4] or [B = 2], got [1]"},
      {"max_logits of other tokens",
       [](DecodeSparse& p) {
         p.params.max_logits = of(p.lse, {3, kHeads}, DType::kF32);
       },
       "decode_sparse: max_logits: expected shape [T = 4, H = 2], got [3, 2]"},
      {"max_logits of 16 bits",
       [](DecodeSparse& p) {
         p.params.max_logits = of(p.lse, {4, kHeads});
       },
       "decode_sparse: max_logits: expected f32, got bf16"},
      {"qo_indptr for nothing", [](DecodeSparse& p) { p.params.qo_indptr = of(p.qo_indptr); },
       "decode_sparse: qo_indptr: expected none, since no topk_length is per request, got a tensor"},
      {"qo_indptr beside lengths of tokens alone",
       [](DecodeSparse& p) {
         p.use_equal_counts();
         p.params.pool.topk_length_per = LengthPer::kToken;
       },
       "decode_sparse: qo_indptr: expected none, since no topk_length is per request, got a tensor"},
      {"lengths of as many tokens as requests", [](DecodeSparse& p) { p.use_equal_counts(); },
       "decode_sparse: pool.topk_length_per: expected token or request, since qo_indptr is given and T = B = 4, got "
       "none"},
      {"lengths of as many tokens as requests in the second pool",
       [](DecodeSparse& p) {
         p.use_equal_counts();
         p.use_extra_pool();
         p.params.extra_pool.topk_length = of(p.lengths);
         p.params.pool.topk_length_per = LengthPer::kRequest;
       },
       "decode_sparse: extra_pool.topk_length_per: expected token or request, since qo_indptr is given and T = B = 4, "
       "got none"},
      {"lengths of tokens, of requests by shape",
       [](DecodeSparse& p) {
         p.use_per_request();
         p.params.pool.topk_length_per = LengthPer::kToken;
       },
       "decode_sparse: pool.topk_length: expected shape [T = 4], got [2]"},
      {"lengths of requests, of tokens by shape",
       [](DecodeSparse& p) {
         p.params.qo_indptr = of(p.qo_indptr);
         p.params.pool.topk_length_per = LengthPer::kRequest;
       },
       "decode_sparse: pool.topk_length: expected shape [B = 2], got [4]"},
      {"lengths of nobody", [](DecodeSparse& p) { p.params.pool.topk_length_per = static_cast<LengthPer>(7); },
       "decode_sparse: pool.topk_length_per: expected by shape, token or request, got unknown value 7"},
      {"qo_indptr not to T",
       [](DecodeSparse& p) {
         p.use_per_request();
         p.params.qo_indptr = of(p.qo_indptr);
         p.qo_indptr[2] = 3;
       },
       "decode_sparse: qo_indptr: expected exactly 4 (query tokens) as the last entry, got 3"},
      {"sink of the wrong length", [](DecodeSparse& p) { set_extent(p.params.options.attn_sink, 0, 1); },
       "decode_sparse: options.attn_sink: expected shape [H = 2], got [1]"},
      {"window", [](DecodeSparse& p) { p.params.options.window_left = 128; },
       "decode_sparse: options.window_left: expected -1, since keys named by indices have no positions, got 128"},
      {"slopes", [](DecodeSparse& p) { p.params.options.alibi_slopes = p.params.options.attn_sink; },
       "decode_sparse: options.alibi_slopes: expected none, since keys named by indices have no positions, got a "
       "tensor"},
      {"two pools of different width",
       [](DecodeSparse& p) {
         p.use_extra_pool();
         p.params.extra_pool.cache = p.rows.whole();
       },
       "decode_sparse: extra_pool.cache.kv: expected shape [num_pages, page_size, d_qk = 576], got [8, 4, 12]"},
      {"two pools of different values",
       [](DecodeSparse& p) {
         p.use_extra_pool();
         p.params.extra_pool.cache = p.extra_quantized.dsv4();
       },
       "decode_sparse: extra_pool.cache.format: expected fp8_dsv4 in both pools or in none, got fp8_dsv4 beside "
       "fp8_ds_mla"},
      {"packed pool beside rows of another width",
       [](DecodeSparse& p) {
         p.use_extra_pool();
         p.params.pool.cache = p.rows.whole();
         p.params.q = of(p.q, {4, kHeads, kCkv + kKpe});
         p.params.o = of(p.o, {4, kHeads, kCkv});
       },
       "decode_sparse: extra_pool.cache.format: expected rows of 12 channels, got fp8_ds_mla with 576"},
      {"unknown format in the second pool",
       [](DecodeSparse& p) {
         p.use_extra_pool();
         p.params.extra_pool.cache.format = static_cast<CacheFormat>(77);
       },
       "decode_sparse: extra_pool.cache.format: expected a cache format, got unknown value 77"},
      {"a second pool without indices", [](DecodeSparse& p) { p.params.extra_pool.cache = p.extra_quantized.ds_mla(); },
       "decode_sparse: extra_pool.cache.kv: expected none, since extra_pool.indices are not given, got a tensor"},
      {"lengths of no pool", [](DecodeSparse& p) { p.params.extra_pool.topk_length = of(p.lengths); },
       "decode_sparse: extra_pool.topk_length: expected none, since extra_pool.indices are not given, got a tensor"},
      {"footer page too small",
       [](DecodeSparse& p) {
         p.params.q = of(p.q, {4, kHeads, 512});
         p.params.pool.cache = p.quantized.dsv4();
         set_extent(p.params.pool.cache.kv, 1, 2304);
       },
       "decode_sparse: pool.cache.kv: expected pages of at least 2336 bytes (4 tokens), got 2304"},
      {"e4m3 queries without a scale", [](DecodeSparse& p) { p.params.q.dtype = DType::kE4M3; },
       "decode_sparse: q_scale: expected a tensor, since q is e4m3, got none"},
      {"no scale", [](DecodeSparse& p) { p.params.sm_scale = 0.0F; },
       "decode_sparse: sm_scale: expected a finite number above 0, got 0"},
      {"null indices", [](DecodeSparse& p) { p.params.pool.indices.data = nullptr; },
       "decode_sparse: pool.indices: expected data, got a null pointer", false},
      {"on another device",
       [](DecodeSparse& p) {
         p.params.pool.cache.kv.device = {DeviceType::kCuda, 0};
       },
       "decode_sparse: pool.cache.kv: expected on cpu:0, where q is, got cuda:0"},
  });
}

TEST(ValidateDecodeSparse, RefusesWrongFinishes) {
  const auto with = [](void (*change)(DecodeSparse&)) {
    return [change](DecodeSparse& p) {
      p.finish();
      change(p);
    };
  };
  expect_refused(SparseCases{
      {"positions alone", with([](DecodeSparse& p) { p.params.finish.cos_sin = {}; }),
       "decode_sparse: finish.positions: expected none, since finish.cos_sin is not given, got a tensor"},
      {"a position without angles", with([](DecodeSparse& p) { p.positions[1] = 10; }),
       "decode_sparse: finish.positions: expected 0 to 9 (the rows of finish.cos_sin), got 10 for token 1", false},
      {"more rotary channels than channels", with([](DecodeSparse& p) {
         p.params.finish.cos_sin = contiguous(p.cos_sin.data(), DType::kF32, {1, 514});
       }),
       "decode_sparse: finish.cos_sin: expected an even number of rotary channels from 2 to d_v = 512, got 514"},
      {"gates of other heads", with([](DecodeSparse& p) { set_extent(p.params.finish.gate, 1, 3); }),
       "decode_sparse: finish.gate: expected shape [T = 4, H = 2, d_v = 1], got [4, 3, 1]"},
      {"groups of other heads", with([](DecodeSparse& p) {
         p.params.o = contiguous(p.o.data(), DType::kE4M3, {4, 1, 1, 512});
       }),
       "decode_sparse: o: expected G * (H / G) = 2 heads, got 1 * 1"},
      {"e4m3 without scales", with([](DecodeSparse& p) { p.params.finish.scale = {}; }),
       "decode_sparse: finish.scale: expected a tensor, got none"},
      {"one scale of all outputs",
       with([](DecodeSparse& p) { p.params.o_scale = contiguous(p.per_head.data(), DType::kF32, {1}); }),
       "decode_sparse: o_scale: expected none, since outputs are finished, got a tensor"},
      {"scales of what is not quantized", with([](DecodeSparse& p) {
         p.params.o = of(p.o, {4, kHeads, 1, 512});
       }),
       "decode_sparse: finish.scale: expected none, since o is not e4m3, got a tensor"},
      {"scales of other groups", with([](DecodeSparse& p) {
         p.params.finish.scale = contiguous(p.scale.data(), DType::kI32, {4, 1, kHeads, 1});
       }),
       "decode_sparse: finish.scale: expected 2 groups as in o, got 1"},
      {"exponents of any numbers", with([](DecodeSparse& p) { p.params.finish.power_of_two_scales = false; }),
       "decode_sparse: finish.power_of_two_scales: expected true for scales of int32, got false"},
      {"f16 outputs of bf16 queries", with([](DecodeSparse& p) {
         p.params.o = of(p.o, {4, kHeads, 1, 512}, DType::kF16);
         p.params.finish.scale = {};
       }),
       "decode_sparse: o: expected bf16, f32 or e4m3, got f16"},
      {"a value of another width", with([](DecodeSparse& p) {
         p.params.o = contiguous(p.o.data(), DType::kE4M3, {4, kHeads, 1, 256});
       }),
       "decode_sparse: o: expected shape [T = 4, G, H / G, kv_lora_rank = 512], got [4, 2, 1, 256]"},
      {"scales on outputs", with([](DecodeSparse& p) { p.params.finish.scale.data = p.o.data(); }),
       "decode_sparse: o: expected memory apart from that of finish.scale, got ranges with 32 bytes in common", false},
  });
}

TEST(ValidateDecodeSparse, FinishedOutputs) {
  DecodeSparse p;
  EXPECT_FALSE(accepted_sparse(p.params).finishes);
  p.finish();
  const core::DecodeSparseArgs args = accepted_sparse(p.params);
  EXPECT_TRUE(args.finishes);
  EXPECT_EQ(args.o, nullptr);
  EXPECT_EQ(args.finish.out, p.o.data());
  EXPECT_EQ(args.finish.heads_per_group, 1);
  EXPECT_EQ(args.finish.d_rotary, 64);
  EXPECT_EQ(args.finish.channels_per_scale, 128);
  p.params.finish = {};
  p.params.o = of(p.o, {4, kHeads, 1, 512});
  EXPECT_TRUE(accepted_sparse(p.params).finishes) << "groups alone";
}

TEST(ValidateDecodeSparse, LengthsAreClamped) {
  DecodeSparse p;
  const core::DecodeSparseArgs args = accepted_sparse(p.params);
  EXPECT_EQ(args.topk_length(0, 0), kTopk);
  EXPECT_EQ(args.topk_length(0, 1), 0);
  EXPECT_EQ(args.topk_length(0, 2), 3);
  EXPECT_EQ(args.topk_length(0, 3), 0);
}

TEST(ValidateDecodeSparse, LengthsOfRequests) {
  DecodeSparse p;
  p.lengths = {1, 3, 2, 2};
  p.use_per_request();
  core::DecodeSparseArgs args = accepted_sparse(p.params);  // two queries each
  EXPECT_EQ(args.topk_length(0, 1), 1);
  EXPECT_EQ(args.topk_length(0, 2), 3);
  p.params.qo_indptr = of(p.qo_indptr);
  args = accepted_sparse(p.params);  // one query, and three
  EXPECT_EQ(args.topk_length(0, 0), 1);
  EXPECT_EQ(args.topk_length(0, 1), 3);
  EXPECT_EQ(args.topk_length(0, 3), 3);
  p.use_extra_pool();
  p.params.extra_pool.topk_length = of(p.lengths);  // of queries, beside those of requests
  args = accepted_sparse(p.params);
  EXPECT_TRUE(args.pools[0].length_per_request);
  EXPECT_FALSE(args.pools[1].length_per_request);
  EXPECT_EQ(args.topk_length(1, 1), 2);
}

TEST(ValidateDecodeSparse, AsManyTokensAsRequests) {
  DecodeSparse p;
  p.use_equal_counts();  // queries 0 and 1 are the first request's, 2 the third's, 3 the fourth's
  p.lengths = {1, 2, 3, 4};
  p.use_extra_pool();
  p.params.extra_pool.topk_length = of(p.lengths);
  p.params.pool.topk_length_per = LengthPer::kRequest;
  p.params.extra_pool.topk_length_per = LengthPer::kToken;
  const core::DecodeSparseArgs args = accepted_sparse(p.params);
  for (const auto& [token, request] : {std::pair(0, 0), std::pair(1, 0), std::pair(2, 2), std::pair(3, 3)}) {
    EXPECT_EQ(args.topk_length(0, token), p.lengths[static_cast<size_t>(request)]);
    EXPECT_EQ(args.topk_length(1, token), std::min(p.lengths[static_cast<size_t>(token)], 2));
  }
}

TEST(ValidateDecodeSparse, AtMostOneTokenNeedsNoMeaning) {
  DecodeSparse p;
  p.use_equal_counts();
  for (int32_t count : {1, 0}) {
    p.qo_indptr = {0, count};
    for (TensorView* view :
         {&p.params.q, &p.params.o, &p.params.lse, &p.params.pool.indices, &p.params.pool.topk_length})
      set_extent(*view, 0, count);
    set_extent(p.params.qo_indptr, 0, count + 1);
    EXPECT_EQ(accepted_sparse(p.params).num_tokens, count);
  }
}

TEST(ValidateDecodeSparse, TwoPoolsOfTheirOwn) {
  DecodeSparse p;
  p.use_extra_pool();
  p.params.q = of(p.q, {4, kHeads, 512});
  p.params.pool.cache = p.quantized.dsv4();
  p.params.extra_pool.cache = p.extra_quantized.dsv4();
  p.params.extra_pool.cache.kv = of(p.extra_quantized.bytes, {3, 2 * 584}, DType::kU8);
  p.params.extra_pool.cache.page_size = 2;
  const core::DecodeSparseArgs args = accepted_sparse(p.params);
  EXPECT_EQ(args.num_pools, 2);
  EXPECT_EQ(args.d_qk, 512);
  EXPECT_EQ(args.d_v, 512);
  EXPECT_EQ(args.pools[0].cache.page_size, 4);
  EXPECT_EQ(args.pools[1].cache.page_size, 2);
  EXPECT_EQ(args.pools[1].cache.num_slots(), 6);
  EXPECT_EQ(args.pools[1].topk, 2);
  EXPECT_EQ(args.topk_length(1, 3), 2);
  EXPECT_EQ(args.options.attn_sink, p.per_head.data());
}

TEST(ValidatePrefillSparse, RefusesBadInput) {
  expect_refused(std::vector<BadCase<PrefillSparse>>{
      {"e4m3 queries", [](PrefillSparse& p) { p.params.q.dtype = DType::kE4M3; },
       "prefill_sparse: q: expected bf16, f16 or f32, got e4m3"},
      {"rows of another width",
       [](PrefillSparse& p) {
         p.params.kv = of(p.kv, {6, 5});
       },
       "prefill_sparse: kv: expected shape [S, d_qk = 6], got [6, 5]"},
      {"f32 rows", [](PrefillSparse& p) { p.params.kv.dtype = DType::kF32; },
       "prefill_sparse: kv: expected bf16 or f16, got f32"},
      {"values wider than rows",
       [](PrefillSparse& p) {
         p.params.o = of(p.q, {3, kHeads, 7});
       },
       "prefill_sparse: o: expected d_v of at most d_qk = 6, got 7"},
      {"values of width 0", [](PrefillSparse& p) { set_extent(p.params.o, 2, 0); },
       "prefill_sparse: d_v: expected at least 1, got 0"},
      {"e4m3 output", [](PrefillSparse& p) { p.params.o.dtype = DType::kE4M3; },
       "prefill_sparse: o: expected bf16 or f32, got e4m3"},
      {"lengths of requests", [](PrefillSparse& p) { set_extent(p.params.topk_length, 0, 1); },
       "prefill_sparse: topk_length: expected shape [T = 3], got [1]"},
      {"max_logits of other heads", [](PrefillSparse& p) { set_extent(p.params.max_logits, 1, 1); },
       "prefill_sparse: max_logits: expected shape [T = 3, H = 2], got [3, 1]"},
      {"topk of 0", [](PrefillSparse& p) { set_extent(p.params.indices, 1, 0); },
       "prefill_sparse: topk: expected at least 1, got 0"},
      {"window", [](PrefillSparse& p) { p.params.options.window_left = 0; },
       "prefill_sparse: options.window_left: expected -1, since keys named by indices have no positions, got 0"},
      {"null rows", [](PrefillSparse& p) { p.params.kv.data = nullptr; },
       "prefill_sparse: kv: expected data, got a null pointer", false},
  });
}

TEST(ValidatePrefillSparse, RowsAreOnePage) {
  PrefillSparse p;
  core::DecodeSparseArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, core::Scope::kAll, args, device).message(), "");
  const core::Cache& cache = args.pools[0].cache;
  EXPECT_EQ(cache.num_pages, 1);
  EXPECT_EQ(cache.page_size, 5);
  EXPECT_EQ(cache.d_ckv, 4);
  EXPECT_EQ(cache.d_kpe, 2);
  EXPECT_EQ(cache.kpe.base - cache.ckv.base, 8);
  EXPECT_EQ(cache.kpe.stride_token, 12);
  EXPECT_EQ(args.d_qk, 6);
  EXPECT_EQ(args.d_v, 4);
  EXPECT_EQ(args.topk_length(0, 2), 2);
  EXPECT_EQ(args.max_logits, reinterpret_cast<float*>(p.max_logits.data()));

  p.params.kv = of(p.kv, {0, 6}, DType::kF16);
  p.o.resize(3 * kHeads * 6);
  p.params.o = of(p.o, {3, kHeads, 6});
  ASSERT_EQ(core::validate(p.params, core::Scope::kAll, args, device).message(), "");
  EXPECT_EQ(cache.num_slots(), 0);
  EXPECT_EQ(cache.format, CacheFormat::kF16);
  EXPECT_EQ(cache.d_kpe, 0);
  EXPECT_EQ(args.q_pe, nullptr);
}

}  // namespace
}  // namespace mla::test

// SPDX-License-Identifier: Apache-2.0
// Tests how calls of prefill and merge_states are validated.
#include <gmock/gmock.h>

#include <cmath>

#include "problems.h"

namespace mla::test {
namespace {

TEST(ValidatePrefill, RefusesBadInput) {
  expect_refused(std::vector<BadCase<Prefill>>{
      {"no query", [](Prefill& p) { p.params.q = {}; }, "prefill: q: expected a tensor, got none"},
      {"unknown type", [](Prefill& p) { p.params.q.dtype = static_cast<DType>(99); },
       "prefill: q: expected bf16, f16, f32 or e4m3, got unknown element type 99"},
      {"k of another type", [](Prefill& p) { p.params.k.dtype = DType::kF16; }, "prefill: k: expected bf16, got f16"},
      {"k of other heads", [](Prefill& p) { set_extent(p.params.k, 1, 1); },
       "prefill: k: expected shape [S, H = 2, d_qk = 6], got [5, 1, 6]"},
      {"v of other tokens", [](Prefill& p) { set_extent(p.params.v, 0, 4); },
       "prefill: v: expected shape [S = 5, H = 2, d_v], got [4, 2, 4]"},
      {"o of another width", [](Prefill& p) { set_extent(p.params.o, 2, 3); },
       "prefill: o: expected shape [T = 3, H = 2, d_v = 4], got [3, 2, 3]"},
      {"lse of another shape", [](Prefill& p) { set_extent(p.params.lse, 1, 1); },
       "prefill: lse: expected shape [T = 3, H = 2], got [3, 1]"},
      {"no heads",
       [](Prefill& p) {
         for (TensorView* view : {&p.params.q, &p.params.k, &p.params.v, &p.params.o}) set_extent(*view, 1, 0);
       },
       "prefill: num_heads: expected at least 1, got 0"},
      {"more rows than int32 counts",
       [](Prefill& p) {
         for (TensorView* view : {&p.params.q, &p.params.k, &p.params.v, &p.params.o}) {
           set_extent(*view, 0, 1 << 16);
           set_extent(*view, 1, 1 << 15);
         }
       },
       "prefill: num_tokens: expected at most 65535 with 32768 heads, got 65536"},
      {"more sequences than int32 counts",
       [](Prefill& p) {
         for (TensorView* view : {&p.params.q, &p.params.k, &p.params.v, &p.params.o}) {
           set_extent(*view, 0, 0);
           set_extent(*view, 1, 1 << 15);
         }
         p.params.lse = {};
         for (TensorView* view : {&p.params.qo_indptr, &p.params.kv_indptr}) set_extent(*view, 0, (1 << 16) + 1);
       },
       "prefill: batch_size: expected at most 65535 with 32768 heads, got 65536"},
      {"more keys than a request may have",
       [](Prefill& p) {
         for (TensorView* view : {&p.params.k, &p.params.v}) {
           set_extent(*view, 0, INT32_MAX);
           set_stride(*view, 0, 0);
         }
         p.kv_indptr[2] = INT32_MAX;
       },
       "prefill: kv_indptr: expected at most 1073741824 keys, got 2147483645 for request 1"},
      {"scale infinite in base 2", [](Prefill& p) { p.params.sm_scale = 3e38F; },
       "prefill: sm_scale: expected a number whose product with log2(e) is finite in f32, got 3e+38"},
      {"no channels",
       [](Prefill& p) {
         set_extent(p.params.q, 2, 0);
         set_extent(p.params.k, 2, 0);
       },
       "prefill: d_qk: expected at least 1, got 0"},
      {"stride", [](Prefill& p) { set_stride(p.params.v, 2, 3); },
       "prefill: v: expected stride 1 in the innermost dimension, got 3"},
      {"overlapping output", [](Prefill& p) { set_stride(p.params.o, 0, 0); },
       "prefill: o: expected an output whose elements do not overlap, got shape [3, 2, 4] with stride 0 in dimension "
       "0"},
      {"mixed devices", [](Prefill& p) { p.params.v.device.type = DeviceType::kCuda; },
       "prefill: v: expected on cpu:0, where q is, got cuda:0"},
      {"null keys", [](Prefill& p) { p.params.k.data = nullptr; }, "prefill: k: expected data, got a null pointer",
       false},
      {"NaN scale", [](Prefill& p) { p.params.sm_scale = NAN; },
       "prefill: sm_scale: expected a finite number above 0, got nan"},
      {"no qo_indptr", [](Prefill& p) { p.params.qo_indptr = {}; }, "prefill: qo_indptr: expected a tensor, got none"},
      {"empty qo_indptr", [](Prefill& p) { set_extent(p.params.qo_indptr, 0, 0); },
       "prefill: qo_indptr: expected shape [B + 1] of 1 to 2147483647, got [0]"},
      {"indptrs of two batches", [](Prefill& p) { set_extent(p.params.kv_indptr, 0, 2); },
       "prefill: kv_indptr: expected shape [B + 1 = 3], got [2]"},
      {"qo_indptr not to T", [](Prefill& p) { p.qo_indptr[2] = 4; },
       "prefill: qo_indptr: expected exactly 3 (query tokens) as the last entry, got 4"},
      {"kv_indptr decreases", [](Prefill& p) { p.kv_indptr[1] = 6; },
       "prefill: kv_indptr: expected entries that never decrease, got 5 after 6 for request 1"},
      {"kv_indptr not from 0", [](Prefill& p) { p.kv_indptr[0] = 2; },
       "prefill: kv_indptr: expected 0 as the first entry, got 2"},
      {"kv_indptr not to S", [](Prefill& p) { p.kv_indptr[2] = 3; },
       "prefill: kv_indptr: expected exactly 5 (key tokens) as the last entry, got 3"},
      {"null kv_indptr", [](Prefill& p) { p.params.kv_indptr.data = nullptr; },
       "prefill: kv_indptr: expected data, got a null pointer"},
  });
}

TEST(ValidatePrefill, RefusesE4m3WithoutItsScalesAndBesideOtherTypes) {
  expect_refused(std::vector<BadCase<Prefill>>{
      {"queries alone", [](Prefill& p) { p.params.q.dtype = DType::kE4M3; }, "prefill: k: expected e4m3, got bf16"},
      {"keys alone", [](Prefill& p) { p.params.k.dtype = DType::kE4M3; }, "prefill: k: expected bf16, got e4m3"},
      {"all but values",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.v.dtype = DType::kBF16;
       },
       "prefill: v: expected e4m3, got bf16"},
      {"no scale of queries",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.q_scale = {};
       },
       "prefill: q_scale: expected a tensor, since q is e4m3, got none"},
      {"no scale of keys",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.k_scale = {};
       },
       "prefill: k_scale: expected a tensor, since k is e4m3, got none"},
      {"no scale of values",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.v_scale = {};
       },
       "prefill: v_scale: expected a tensor, since v is e4m3, got none"},
      {"bf16 queries with a scale", [](Prefill& p) { p.params.q_scale = p.scale(0); },
       "prefill: q_scale: expected none, since q is bf16, got a tensor"},
      {"bf16 keys with a scale", [](Prefill& p) { p.params.k_scale = p.scale(0); },
       "prefill: k_scale: expected none, since k is bf16, got a tensor"},
      {"bf16 values with a scale", [](Prefill& p) { p.params.v_scale = p.scale(0); },
       "prefill: v_scale: expected none, since v is bf16, got a tensor"},
      {"scale of 0",
       [](Prefill& p) {
         p.use_e4m3();
         p.scales[1] = 0;
       },
       "prefill: k_scale: expected a finite number above 0, got 0", false},
      {"two scales",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.v_scale = contiguous(p.scales.data(), DType::kF32, {2});
       },
       "prefill: v_scale: expected shape [1], got [2]"},
      {"f16 output",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.o.dtype = DType::kF16;
       },
       "prefill: o: expected bf16, f32 or e4m3, got f16"},
      {"e4m3 output of bf16 tensors", [](Prefill& p) { p.params.o.dtype = DType::kE4M3; },
       "prefill: o: expected bf16 or f32, got e4m3"},
      {"e4m3 output without a scale",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.o.dtype = DType::kE4M3;
       },
       "prefill: o_scale: expected a tensor, since o is e4m3, got none"},
      {"bf16 output with a scale",
       [](Prefill& p) {
         p.use_e4m3();
         p.params.o_scale = p.scale(3);
       },
       "prefill: o_scale: expected none, since o is bf16, got a tensor"},
  });
}

TEST(ValidateMergeStates, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<MergeStates>>{
      {"no states", [](MergeStates& p) { p.params.partial_o = {}; },
       "merge_states: partial_o: expected a tensor, got none"},
      {"zero states",
       [](MergeStates& p) {
         set_extent(p.params.partial_o, 0, 0);
         set_extent(p.params.partial_lse, 0, 0);
       },
       "merge_states: num_states: expected at least 1, got 0"},
      {"three dimensions",
       [](MergeStates& p) {
         p.params.partial_o = of(p.partial_o, {3, kHeads, 4});
       },
       "merge_states: partial_o: expected shape [N, T, H, d_v], got [3, 2, 4]"},
      {"integer states", [](MergeStates& p) { p.params.partial_o.dtype = DType::kU8; },
       "merge_states: partial_o: expected bf16, f16 or f32, got uint8"},
      {"lse of other states", [](MergeStates& p) { set_extent(p.params.partial_lse, 0, 1); },
       "merge_states: partial_lse: expected shape [N = 2, T = 3, H = 2], got [1, 3, 2]"},
      {"no partial lse", [](MergeStates& p) { p.params.partial_lse = {}; },
       "merge_states: partial_lse: expected a tensor, got none"},
      {"o of another width", [](MergeStates& p) { set_extent(p.params.o, 2, 2); },
       "merge_states: o: expected shape [T = 3, H = 2, d_v = 4], got [3, 2, 2]"},
      {"in place without lse",
       [](MergeStates& p) {
         p.params.in_place = true;
         p.params.lse = {};
       },
       "merge_states: lse: expected a tensor, since in_place is set, got none"},
      {"overlapping lse", [](MergeStates& p) { set_stride(p.params.lse, 0, 0); },
       "merge_states: lse: expected an output whose elements do not overlap, got shape [3, 2] with stride 0 in "
       "dimension 0"},
      {"null output", [](MergeStates& p) { p.params.o.data = nullptr; },
       "merge_states: o: expected data, got a null pointer"},
      {"mixed devices", [](MergeStates& p) { p.params.lse.device.type = DeviceType::kCuda; },
       "merge_states: lse: expected on cpu:0, where partial_o is, got cuda:0"},
      {"unknown base", [](MergeStates& p) { p.params.lse_base = static_cast<LseBase>(2); },
       "merge_states: lse_base: expected kE or kTwo, got 2"},
  });
}

TEST(ValidateAttention, HeadDimsThatNoBackendHas) {
  const Context context = reference_context();
  std::vector<uint16_t> wide(4097);
  Prefill p;
  p.qo_indptr = p.kv_indptr = {0, 0, 1};
  for (TensorView* view : {&p.params.q, &p.params.k}) *view = of(wide, {1, 1, 4097});
  p.params.v = of(p.v, {1, 1, 4});
  p.params.o = of(p.o, {1, 1, 4});
  p.params.lse = {};
  const Result<size_t> size = workspace_size(context, p.params);
  EXPECT_EQ(size.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(size.status().message(),
            "prefill: backend: \"reference\" cannot run this: reference: takes head dims from 1 to 4096, not 4097");
}

}  // namespace
}  // namespace mla::test

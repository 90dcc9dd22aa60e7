// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of prefill and merge_states.
#include <cstdint>

#include "core/batch_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// Checks the number of keys of every request of a prefill.
bool check_key_ranges(Checks& check, const int32_t* kv_indptr, int64_t batch_size) {
  for (int64_t b = 0; b < batch_size; ++b)
    if (const int32_t count = kv_indptr[b + 1] - kv_indptr[b]; count > kMaxKvLen)
      return check.fail("kv_indptr", "expected at most {} keys, got {} for request {}", kMaxKvLen, count, b);
  return true;
}

/// Checks that o and lse are given if they hold a state that is merged in place.
bool check_state(Checks& check, std::string_view field, const TensorView& view, bool in_place) {
  return check.require(view.given() || !in_place, field, "expected a tensor, since `in_place` is set, got none");
}

}  // namespace

Status validate(const PrefillParams& params, Scope scope, PrefillArgs& args, Device& device, Memory memory,
                std::span<const std::byte> workspace) {
  Checks check(Op::kPrefill, scope, memory);
  check.workspace(workspace);
  BatchShape batch;
  int64_t num_keys = kUnbound;
  int64_t d_qk = kUnbound;
  int64_t d_v = kUnbound;
  int64_t indptr_extent = kUnbound;
  Options options;
  const DTypes of_q = set_of({params.q.dtype});
  const bool shapes = check.tensor("q", params.q, kFloatsAndE4M3,
                                   {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_qk", &d_qk}}) &&
                      check_batch_and_rows(check, batch) &&
                      check.tensor("k", params.k, of_q, {{"S", &num_keys}, {"H", &batch.num_heads}, {"d_qk", &d_qk}}) &&
                      check.tensor("v", params.v, of_q, {{"S", &num_keys}, {"H", &batch.num_heads}, {"d_v", &d_v}}) &&
                      check_scale_of(check, "q_scale", params.q_scale, "q", params.q.dtype) &&
                      check_scale_of(check, "k_scale", params.k_scale, "k", params.k.dtype) &&
                      check_scale_of(check, "v_scale", params.v_scale, "v", params.v.dtype) &&
                      check.tensor("o", params.o, output_types(params.q.dtype, params.q.dtype == DType::kE4M3),
                                   {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_v", &d_v}}, Role::kOutput) &&
                      check_scale_of(check, "o_scale", params.o_scale, "o", params.o.dtype) &&
                      check_statistics(check, "lse", params.lse, batch) && check.at_least("d_qk", d_qk, 1) &&
                      check.fits_int32("d_qk", d_qk) && check.at_least("d_v", d_v, 1) && check.fits_int32("d_v", d_v) &&
                      check.fits_int32("num_keys", num_keys) && check.sm_scale(params.sm_scale) &&
                      check.lse_base(params.lse_base) &&
                      check_options(check, params.options, batch.num_heads, true, options) &&
                      check_compute(check, params.options, params.k.dtype, options) &&
                      check.lengths("qo_indptr", params.qo_indptr, {"B + 1", &indptr_extent}) &&
                      check_indptr_extent(check, "qo_indptr", indptr_extent) &&
                      check.lengths("kv_indptr", params.kv_indptr, {"B + 1", &indptr_extent});
  if (!shapes) return check.take();
  const int64_t batch_size = indptr_extent - 1;
  if (!check_rows_of_batch(check, "batch_size", batch_size, batch.num_heads)) return check.take();
  const auto* qo_indptr = static_cast<const int32_t*>(params.qo_indptr.data);
  const auto* kv_indptr = static_cast<const int32_t*>(params.kv_indptr.data);
  if (check.on_cpu() && (!check_indptr(check, "qo_indptr", qo_indptr, batch_size, "query tokens", batch.num_tokens) ||
                         !check_indptr(check, "kv_indptr", kv_indptr, batch_size, "key tokens", num_keys) ||
                         !check_key_ranges(check, kv_indptr, batch_size)))
    return check.take();

  const TensorView lse = if_given(params.lse);
  args = {.batch_size = static_cast<int32_t>(batch_size),
          .num_tokens = batch.num_tokens,
          .num_keys = num_keys,
          .num_heads = static_cast<int32_t>(batch.num_heads),
          .d_qk = static_cast<int32_t>(d_qk),
          .d_v = static_cast<int32_t>(d_v),
          .dtype = params.q.dtype,
          .q = params.q.data,
          .q_stride_token = params.q.stride[0],
          .q_stride_head = params.q.stride[1],
          .k = params.k.data,
          .k_stride_token = params.k.stride[0],
          .k_stride_head = params.k.stride[1],
          .v = params.v.data,
          .v_stride_token = params.v.stride[0],
          .v_stride_head = params.v.stride[1],
          .qo_indptr = qo_indptr,
          .kv_indptr = kv_indptr,
          .causal = params.causal,
          .options = options,
          .batch_invariant = params.batch_invariant,
          .sm_scale = params.sm_scale,
          .lse_form = {.base = params.lse_base},
          .o_dtype = params.o.dtype,
          .o = params.o.data,
          .o_stride_token = params.o.stride[0],
          .o_stride_head = params.o.stride[1],
          .lse = static_cast<float*>(lse.data),
          .lse_stride_token = lse.stride[0],
          .lse_stride_head = lse.stride[1],
          .q_scale = static_cast<const float*>(if_given(params.q_scale).data),
          .k_scale = static_cast<const float*>(if_given(params.k_scale).data),
          .v_scale = static_cast<const float*>(if_given(params.v_scale).data),
          .o_scale = static_cast<const float*>(if_given(params.o_scale).data)};
  return check.finish(device);
}

Status validate(const MergeStatesParams& params, MergeStatesArgs& args, Device& device, Memory memory) {
  Checks check(Op::kMergeStates, Scope::kAll, memory);
  int64_t num_states = kUnbound;
  BatchShape batch;
  int64_t d_v = kUnbound;
  const bool shapes =
      check.tensor("partial_o", params.partial_o, kFloats,
                   {{"N", &num_states}, {"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_v", &d_v}}) &&
      check_batch(check, batch) && check.at_least("num_states", num_states, 1) &&
      check.fits_int32("num_states", num_states) && check.at_least("d_v", d_v, 1) && check.fits_int32("d_v", d_v) &&
      check.strided("partial_lse", params.partial_lse, kF32Only,
                    {{"N", &num_states}, {"T", &batch.num_tokens}, {"H", &batch.num_heads}}) &&
      check_state(check, "o", params.o, params.in_place) &&
      check.tensor("o", params.o, kFloats, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_v", &d_v}},
                   Role::kOutput) &&
      check_state(check, "lse", params.lse, params.in_place) && check_statistics(check, "lse", params.lse, batch) &&
      check.lse_base(params.lse_base);
  if (!shapes) return check.take();

  const TensorView lse = if_given(params.lse);
  args = {.num_states = static_cast<int32_t>(num_states),
          .num_tokens = batch.num_tokens,
          .num_heads = static_cast<int32_t>(batch.num_heads),
          .d_v = static_cast<int32_t>(d_v),
          .in_place = params.in_place,
          .lse_form = {.base = params.lse_base},
          .partial_dtype = params.partial_o.dtype,
          .partial_o = params.partial_o.data,
          .partial_o_stride_state = params.partial_o.stride[0],
          .partial_o_stride_token = params.partial_o.stride[1],
          .partial_o_stride_head = params.partial_o.stride[2],
          .partial_lse = static_cast<const float*>(params.partial_lse.data),
          .partial_lse_stride_state = params.partial_lse.stride[0],
          .partial_lse_stride_token = params.partial_lse.stride[1],
          .partial_lse_stride_head = params.partial_lse.stride[2],
          .o_dtype = params.o.dtype,
          .o = params.o.data,
          .o_stride_token = params.o.stride[0],
          .o_stride_head = params.o.stride[1],
          .lse = static_cast<float*>(lse.data),
          .lse_stride_token = lse.stride[0],
          .lse_stride_head = lse.stride[1]};
  return check.finish(device);
}

}  // namespace mla::core

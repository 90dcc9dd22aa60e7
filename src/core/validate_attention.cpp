// SPDX-License-Identifier: Apache-2.0
// decode, prefill and merge_states.
#include <cstdint>

#include "core/cache_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// The batch as int32: CSR pointers and the backends' arguments hold no more.
bool check_batch(Checks& check, int64_t num_tokens, int64_t num_heads) {
  return check.fits_int32("num_tokens", num_tokens) && check.at_least("num_heads", num_heads, 1) &&
         check.fits_int32("num_heads", num_heads);
}

/// Backends count the rows of an attention batch, and the sequences of a prefill, in int32.
bool check_rows_of_batch(Checks& check, std::string_view field, int64_t count, int64_t num_heads) {
  return check.require(count * num_heads <= INT32_MAX, field, "expected at most {} with {} heads, got {}",
                       INT32_MAX / num_heads, num_heads, count);
}

/// Keys of every request of a prefill.
bool check_key_ranges(Checks& check, const int32_t* kv_indptr, int64_t batch_size) {
  for (int64_t b = 0; b < batch_size; ++b)
    if (const int32_t count = kv_indptr[b + 1] - kv_indptr[b]; count > kMaxKvLen)
      return check.fail("kv_indptr", "expected at most {} keys, got {} for request {}", kMaxKvLen, count, b);
  return true;
}

bool check_queries(Checks& check, const TensorView& qo_indptr, int64_t batch_size, int64_t num_tokens,
                   QueryRanges& queries) {
  if (qo_indptr.given()) {
    int64_t extent = batch_size + 1;
    if (!check.lengths("qo_indptr", qo_indptr, {"B + 1", &extent})) return false;
    queries.indptr = static_cast<const int32_t*>(qo_indptr.data);
    return !check.on_cpu() || check_indptr(check, "qo_indptr", queries.indptr, batch_size, "query tokens", num_tokens);
  }
  if (batch_size == 0 ? num_tokens != 0 : num_tokens % batch_size != 0)
    return check.fail("qo_indptr",
                      "expected a tensor, since {} query tokens are not a multiple of {} requests, got none",
                      num_tokens, batch_size);
  queries.uniform_len = batch_size == 0 ? 0 : static_cast<int32_t>(num_tokens / batch_size);
  return check.ok();
}

/// The optional [T, H] output of the statistics.
bool check_lse(Checks& check, const TensorView& lse, int64_t& num_tokens, int64_t& num_heads) {
  return check.ok() &&
         (!lse.given() || check.strided("lse", lse, kF32Only, {{"T", &num_tokens}, {"H", &num_heads}}, Role::kOutput));
}

}  // namespace

Status validate(const DecodeParams& params, Scope scope, DecodeArgs& args, Device& device) {
  Checks check(Op::kDecode, scope);
  RowWidths widths;
  int64_t num_tokens = kUnbound;
  int64_t num_heads = kUnbound;
  int64_t batch_size = kUnbound;
  int64_t num_pages = kUnbound;
  int64_t page_size = kUnbound;
  const RowForms q{.whole_name = "q",
                   .ckv_name = "q_nope",
                   .kpe_name = "q_pe",
                   .whole = params.q,
                   .ckv = params.q_nope,
                   .kpe = params.q_pe};
  const bool shapes =
      check_rows(check, q, kFloats, {{"T", &num_tokens}, {"H", &num_heads}}, Role::kInput, widths) &&
      check_batch(check, num_tokens, num_heads) && check_rows_of_batch(check, "num_tokens", num_tokens, num_heads) &&
      check.tensor("o", params.o, set_of({q.first().dtype, DType::kF32}),
                   {{"T", &num_tokens}, {"H", &num_heads}, {"kv_lora_rank", &widths.ckv}}, Role::kOutput) &&
      widths.settle(check, "o") && check_lse(check, params.lse, num_tokens, num_heads) &&
      check_cache(check, params.cache, Role::kInput, widths, num_pages, page_size) && widths.finish(check) &&
      check.sm_scale(params.sm_scale) && check.lse_base(params.lse_base);
  Pages pages;
  QueryRanges queries;
  if (!shapes || !check_page_table(check, params.pages, page_size, batch_size, pages) ||
      !check_queries(check, params.qo_indptr, batch_size, num_tokens, queries))
    return check.take();
  if (check.full() && check.on_cpu() && !check_used_pages(check, pages, num_pages)) return check.take();

  const RowPointers at = point_to_rows(q, widths);
  const TensorView lse = if_given(params.lse);
  args = {.batch_size = static_cast<int32_t>(batch_size),
          .num_tokens = num_tokens,
          .num_heads = static_cast<int32_t>(num_heads),
          .d_qk = static_cast<int32_t>(widths.total),
          .d_v = static_cast<int32_t>(widths.ckv),
          .q_dtype = q.first().dtype,
          .q_nope = at.ckv,
          .q_nope_stride_token = at.ckv_stride[0],
          .q_nope_stride_head = at.ckv_stride[1],
          .q_pe = at.kpe,
          .q_pe_stride_token = at.kpe_stride[0],
          .q_pe_stride_head = at.kpe_stride[1],
          .cache = make_cache(params.cache, widths, num_pages, page_size),
          .pages = pages,
          .queries = queries,
          .causal = params.causal,
          .batch_invariant = params.batch_invariant,
          .sm_scale = params.sm_scale,
          .lse_base = params.lse_base,
          .o_dtype = params.o.dtype,
          .o = params.o.data,
          .o_stride_token = params.o.stride[0],
          .o_stride_head = params.o.stride[1],
          .lse = static_cast<float*>(lse.data),
          .lse_stride_token = lse.stride[0],
          .lse_stride_head = lse.stride[1]};
  device = check.device();
  return check.take();
}

Status validate(const PrefillParams& params, Scope scope, PrefillArgs& args, Device& device) {
  Checks check(Op::kPrefill, scope);
  int64_t num_tokens = kUnbound;
  int64_t num_keys = kUnbound;
  int64_t num_heads = kUnbound;
  int64_t d_qk = kUnbound;
  int64_t d_v = kUnbound;
  int64_t indptr_extent = kUnbound;
  const DTypes of_q = set_of({params.q.dtype});
  const bool shapes =
      check.tensor("q", params.q, kFloats, {{"T", &num_tokens}, {"H", &num_heads}, {"d_qk", &d_qk}}) &&
      check_batch(check, num_tokens, num_heads) && check_rows_of_batch(check, "num_tokens", num_tokens, num_heads) &&
      check.tensor("k", params.k, of_q, {{"S", &num_keys}, {"H", &num_heads}, {"d_qk", &d_qk}}) &&
      check.tensor("v", params.v, of_q, {{"S", &num_keys}, {"H", &num_heads}, {"d_v", &d_v}}) &&
      check.tensor("o", params.o, set_of({params.q.dtype, DType::kF32}),
                   {{"T", &num_tokens}, {"H", &num_heads}, {"d_v", &d_v}}, Role::kOutput) &&
      check_lse(check, params.lse, num_tokens, num_heads) && check.at_least("d_qk", d_qk, 1) &&
      check.fits_int32("d_qk", d_qk) && check.at_least("d_v", d_v, 1) && check.fits_int32("d_v", d_v) &&
      check.fits_int32("num_keys", num_keys) && check.sm_scale(params.sm_scale) && check.lse_base(params.lse_base) &&
      check.lengths("qo_indptr", params.qo_indptr, {"B + 1", &indptr_extent}) &&
      check.at_least("qo_indptr: B + 1", indptr_extent, 1) && check.fits_int32("qo_indptr: B + 1", indptr_extent) &&
      check.lengths("kv_indptr", params.kv_indptr, {"B + 1", &indptr_extent});
  if (!shapes) return check.take();
  const int64_t batch_size = indptr_extent - 1;
  if (!check_rows_of_batch(check, "batch_size", batch_size, num_heads)) return check.take();
  const auto* qo_indptr = static_cast<const int32_t*>(params.qo_indptr.data);
  const auto* kv_indptr = static_cast<const int32_t*>(params.kv_indptr.data);
  if (check.on_cpu() && (!check_indptr(check, "qo_indptr", qo_indptr, batch_size, "query tokens", num_tokens) ||
                         !check_indptr(check, "kv_indptr", kv_indptr, batch_size, "key tokens", num_keys) ||
                         !check_key_ranges(check, kv_indptr, batch_size)))
    return check.take();

  const TensorView lse = if_given(params.lse);
  args = {.batch_size = static_cast<int32_t>(batch_size),
          .num_tokens = num_tokens,
          .num_keys = num_keys,
          .num_heads = static_cast<int32_t>(num_heads),
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
          .batch_invariant = params.batch_invariant,
          .sm_scale = params.sm_scale,
          .lse_base = params.lse_base,
          .o_dtype = params.o.dtype,
          .o = params.o.data,
          .o_stride_token = params.o.stride[0],
          .o_stride_head = params.o.stride[1],
          .lse = static_cast<float*>(lse.data),
          .lse_stride_token = lse.stride[0],
          .lse_stride_head = lse.stride[1]};
  device = check.device();
  return check.take();
}

Status validate(const MergeStatesParams& params, MergeStatesArgs& args, Device& device) {
  Checks check(Op::kMergeStates, Scope::kAll);
  int64_t num_states = kUnbound;
  int64_t num_tokens = kUnbound;
  int64_t num_heads = kUnbound;
  int64_t d_v = kUnbound;
  const bool shapes =
      check.tensor("partial_o", params.partial_o, kFloats,
                   {{"N", &num_states}, {"T", &num_tokens}, {"H", &num_heads}, {"d_v", &d_v}}) &&
      check_batch(check, num_tokens, num_heads) && check.at_least("num_states", num_states, 1) &&
      check.fits_int32("num_states", num_states) && check.at_least("d_v", d_v, 1) && check.fits_int32("d_v", d_v) &&
      check.strided("partial_lse", params.partial_lse, kF32Only,
                    {{"N", &num_states}, {"T", &num_tokens}, {"H", &num_heads}}) &&
      check.tensor("o", params.o, kFloats, {{"T", &num_tokens}, {"H", &num_heads}, {"d_v", &d_v}}, Role::kOutput) &&
      check.require(params.lse.given() || !params.in_place, "lse",
                    "expected a tensor, since in_place is set, got none") &&
      check_lse(check, params.lse, num_tokens, num_heads) && check.lse_base(params.lse_base);
  if (!shapes) return check.take();

  const TensorView lse = if_given(params.lse);
  args = {.num_states = static_cast<int32_t>(num_states),
          .num_tokens = num_tokens,
          .num_heads = static_cast<int32_t>(num_heads),
          .d_v = static_cast<int32_t>(d_v),
          .in_place = params.in_place,
          .lse_base = params.lse_base,
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
  device = check.device();
  return check.take();
}

}  // namespace mla::core

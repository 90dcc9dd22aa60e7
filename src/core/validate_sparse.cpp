// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of decode_sparse and prefill_sparse.
#include <algorithm>
#include <cstdint>

#include "core/batch_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// Checks the indices, which name the rows that each query attends to.
bool check_indices(Checks& check, const TensorView& indices, int64_t num_tokens, PoolArgs& pool) {
  int64_t topk = kUnbound;
  if (!check.tensor("indices", indices, kI32Only, {{"T", &num_tokens}, {"topk", &topk}}) ||
      !check.at_least("topk", topk, 1) || !check.fits_int32("topk", topk))
    return false;
  pool.indices = static_cast<const int32_t*>(indices.data);
  pool.indices_stride_token = indices.stride[0];
  pool.topk = static_cast<int32_t>(topk);
  return true;
}

/// Checks the lengths of a pool, which are per query or per request; binds `batch_size`. Only shapes and arguments
/// decide which of the two they are, since qo_indptr may be in a GPU's memory.
bool check_topk_length(Checks& check, const SparsePool& given, bool ragged, int64_t num_tokens, int64_t& batch_size,
                       PoolArgs& pool) {
  const LengthPer per = given.topk_length_per;
  if (!check.require(per == LengthPer::kByShape || per == LengthPer::kToken || per == LengthPer::kRequest,
                     "topk_length_per", "expected by shape, token or request, got unknown value {}",
                     static_cast<unsigned>(per)))
    return false;
  if (!given.topk_length.given()) return check.ok();
  int64_t count = kUnbound;
  const Dim dim = per == LengthPer::kToken     ? Dim{"T", &num_tokens}
                  : per == LengthPer::kRequest ? Dim{"B", &batch_size}
                                               : Dim{"T or B", &count};
  if (!check.tensor("topk_length", given.topk_length, kI32Only, {dim})) return false;
  pool.topk_length = static_cast<const int32_t*>(given.topk_length.data);
  pool.length_per_request = per == LengthPer::kRequest;
  if (per != LengthPer::kByShape) return true;
  const bool of_tokens = count == num_tokens;
  const bool of_requests = ragged && count == batch_size;
  if (of_tokens && of_requests && count > 1)
    return check.fail("topk_length_per", "expected token or request, since qo_indptr is given and T = B = {}, got none",
                      count);
  if (of_tokens && !of_requests) return true;
  if (batch_size == kUnbound) batch_size = count;
  pool.length_per_request = true;
  return count == batch_size ||
         check.fail("topk_length", "expected shape [T = {}] or [B = {}], got [{}]", num_tokens, batch_size, count);
}

bool check_pool_lengths(Checks& check, const DecodeSparseParams& params, DecodeSparseArgs& args) {
  int64_t batch_size = kUnbound;
  const bool ragged = params.qo_indptr.given();
  if (ragged) {
    int64_t extent = kUnbound;
    if (!check.lengths("qo_indptr", params.qo_indptr, {"B + 1", &extent}) ||
        !check_indptr_extent(check, "qo_indptr", extent))
      return false;
    batch_size = extent - 1;
  }
  const SparsePool* const pools[] = {&params.pool, &params.extra_pool};
  for (int32_t i = 0; i < args.num_pools; ++i) {
    const Checks::Within within(check, i == 0 ? "pool" : "extra_pool");
    if (!check_topk_length(check, *pools[i], ragged, args.num_tokens, batch_size, args.pools[i])) return false;
  }
  if (!args.pools[0].length_per_request && !args.pools[1].length_per_request)
    return check.absent("qo_indptr", params.qo_indptr, "no topk_length is per request");
  args.batch_size = static_cast<int32_t>(batch_size);
  return check.fits_int32("batch_size", batch_size) &&
         check_queries(check, params.qo_indptr, batch_size, args.num_tokens, args.queries);
}

/// Copies the parameters that both operations have under the same names.
template <class Params>
void copy_common(const Params& params, const BatchShape& batch, DecodeSparseArgs& args) {
  const TensorView lse = if_given(params.lse);
  args.num_tokens = batch.num_tokens;
  args.num_heads = static_cast<int32_t>(batch.num_heads);
  args.batch_invariant = params.batch_invariant;
  args.sm_scale = params.sm_scale;
  args.lse_form = {.base = params.lse_base, .inf_without_keys = params.lse_inf_without_keys};
  args.o_dtype = params.o.dtype;
  args.o = params.o.data;
  args.o_stride_token = params.o.stride[0];
  args.o_stride_head = params.o.stride[1];
  args.lse = static_cast<float*>(lse.data);
  args.lse_stride_token = lse.stride[0];
  args.lse_stride_head = lse.stride[1];
  const TensorView max_logits = if_given(params.max_logits);
  args.max_logits = static_cast<float*>(max_logits.data);
  args.max_logits_stride_token = max_logits.stride[0];
  args.max_logits_stride_head = max_logits.stride[1];
}

void point_to_queries(const RowForms& q, const RowWidths& widths, DecodeSparseArgs& args) {
  const RowPointers at = point_to_rows(q, widths);
  args.d_qk = static_cast<int32_t>(widths.total);
  args.q_dtype = q.first().dtype;
  args.q_nope = at.ckv;
  args.q_nope_stride_token = at.ckv_stride[0];
  args.q_nope_stride_head = at.ckv_stride[1];
  args.q_pe = at.kpe;
  args.q_pe_stride_token = at.kpe_stride[0];
  args.q_pe_stride_head = at.kpe_stride[1];
}

/// Checks that a value is the same in both pools: the whole row, or the row's latent part.
bool check_same_values(Checks& check, const DecodeSparseParams& params) {
  const KvLayout first = kv_layout(params.pool.cache.format), second = kv_layout(params.extra_pool.cache.format);
  return first.value_has_rope == second.value_has_rope ||
         check.fail("extra_pool.cache.format", "expected {} in both pools or in none, got {} beside {}",
                    first.value_has_rope ? first.name : second.name, second.name, first.name);
}

/// Checks that a pool without indices has no other field set.
bool check_no_pool(Checks& check, const SparsePool& pool) {
  const Checks::Within within(check, "extra_pool");
  constexpr std::string_view kWhy = "`indices` are not given";
  return check.absent("cache.kv", pool.cache.kv, kWhy) && check.absent("cache.ckv", pool.cache.ckv, kWhy) &&
         check.absent("topk_length", pool.topk_length, kWhy);
}

/// Returns whether something is asked for that becomes of outputs.
bool finishes(const DecodeSparseParams& params) {
  const OutputFinish& finish = params.finish;
  return params.o.ndim == 4 || finish.cos_sin.given() || finish.positions.given() || finish.gate.given() ||
         finish.scale.given();
}

/// Checks the outputs, finished or not.
bool check_outputs(Checks& check, const DecodeSparseParams& params, DType queries, Dim d_v, RowWidths& widths,
                   BatchShape& batch, DecodeSparseArgs& args) {
  const DTypes dtypes = output_types(queries, true);
  args.finishes = finishes(params);
  if (!args.finishes)
    return check.tensor("o", params.o, dtypes, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, d_v},
                        Role::kOutput) &&
           widths.settle(check, "o") && check_scale_of(check, "o_scale", params.o_scale, "o", params.o.dtype);
  return check_finish(check, params.finish, "o", params.o, dtypes, batch, d_v, args.finish) &&
         widths.settle(check, "o") && check.absent("o_scale", params.o_scale, "outputs are finished");
}

}  // namespace

Status validate(const DecodeSparseParams& params, Scope scope, DecodeSparseArgs& args, Device& device, Memory memory,
                std::span<const std::byte> workspace) {
  Checks check(Op::kDecodeSparse, scope, memory);
  check.workspace(workspace);
  RowWidths widths;
  BatchShape batch;
  CacheShape shape;
  CacheShape extra_shape;
  const RowForms q{.whole_name = "q",
                   .ckv_name = "q_nope",
                   .kpe_name = "q_pe",
                   .whole = params.q,
                   .ckv = params.q_nope,
                   .kpe = params.q_pe};
  const DecodeSparseArgs empty;  // a variable, because a temporary crashes GCC 12
  args = empty;
  args.num_pools = params.extra_pool.indices.given() ? 2 : 1;
  const bool two = args.num_pools == 2;
  const Dim d_v = value_dim(params.pool.cache.format, widths);
  const bool shapes =
      widths.begin(check, "pool.cache", params.pool.cache.format) &&
      check_rows(check, q, kFloatsAndE4M3, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}}, Role::kInput, widths) &&
      check_batch_and_rows(check, batch) && check_scale_of(check, "q_scale", params.q_scale, "q", q.first().dtype) &&
      check_outputs(check, params, q.first().dtype, d_v, widths, batch, args) &&
      check_statistics(check, "lse", params.lse, batch) &&
      check_statistics(check, "max_logits", params.max_logits, batch) &&
      check_cache(check, "pool.cache", params.pool.cache, Role::kInput, widths, shape) &&
      (!two || (check_same_values(check, params) &&
                check_cache(check, "extra_pool.cache", params.extra_pool.cache, Role::kInput, widths, extra_shape))) &&
      widths.finish(check) &&
      finish_cache(check, "pool.cache", params.pool.cache, Role::kInput, widths, shape, args.pools[0].cache) &&
      (!two || finish_cache(check, "extra_pool.cache", params.extra_pool.cache, Role::kInput, widths, extra_shape,
                            args.pools[1].cache)) &&
      check.sm_scale(params.sm_scale) && check.lse_base(params.lse_base) &&
      check_options(check, params.options, batch.num_heads, false, args.options) &&
      check_compute(check, params.options, args.pools[0].cache, two ? &args.pools[1].cache : nullptr, args.options);
  if (!shapes) return check.take();
  {
    const Checks::Within within(check, "pool");
    if (!check_indices(check, params.pool.indices, batch.num_tokens, args.pools[0])) return check.take();
  }
  if (two) {
    const Checks::Within within(check, "extra_pool");
    if (!check_indices(check, params.extra_pool.indices, batch.num_tokens, args.pools[1])) return check.take();
  } else if (!check_no_pool(check, params.extra_pool)) {
    return check.take();
  }

  copy_common(params, batch, args);
  if (args.finishes) args.o = nullptr;
  point_to_queries(q, widths, args);
  args.d_v = static_cast<int32_t>(*d_v.extent);
  args.q_scale = static_cast<const float*>(if_given(params.q_scale).data);
  args.o_scale = static_cast<const float*>(if_given(params.o_scale).data);
  check_pool_lengths(check, params, args);
  return check.finish(device);
}

Status validate(const PrefillSparseParams& params, Scope scope, DecodeSparseArgs& args, Device& device, Memory memory,
                std::span<const std::byte> workspace) {
  Checks check(Op::kPrefillSparse, scope, memory);
  check.workspace(workspace);
  RowWidths widths;
  BatchShape batch;
  int64_t num_keys = kUnbound;
  const DecodeSparseArgs empty;  // a variable, because a temporary crashes GCC 12
  args = empty;
  PoolArgs& pool = args.pools[0];
  const bool shapes =
      check.tensor("q", params.q, kFloats,
                   {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_qk", &widths.total}}) &&
      check_batch_and_rows(check, batch) &&
      check.tensor("o", params.o, output_types(params.q.dtype, false),
                   {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_v", &widths.ckv}}, Role::kOutput) &&
      check.require(widths.ckv <= widths.total, "o", "expected d_v of at most d_qk = {}, got {}", widths.total,
                    widths.ckv) &&
      check.at_least("d_v", widths.ckv, 1) && check.fits_int32("d_qk", widths.total) &&
      check_statistics(check, "max_logits", params.max_logits, batch) &&
      check_statistics(check, "lse", params.lse, batch) &&
      check.tensor("kv", params.kv, set_of({DType::kBF16, DType::kF16}), {{"S", &num_keys}, {"d_qk", &widths.total}}) &&
      check.at_most("num_keys", num_keys, kMaxKvLen) && check.sm_scale(params.sm_scale) &&
      check.lse_base(params.lse_base) && check_options(check, params.options, batch.num_heads, false, args.options) &&
      check_compute(check, params.options, params.kv.dtype, args.options) &&
      check_indices(check, params.indices, batch.num_tokens, pool) &&
      (!params.topk_length.given() ||
       check.tensor("topk_length", params.topk_length, kI32Only, {{"T", &batch.num_tokens}}));
  if (!shapes) return check.take();

  widths.kpe = widths.total - widths.ckv;
  const TensorView none;
  const RowForms kv{.whole_name = "kv", .ckv_name = "", .kpe_name = "", .whole = params.kv, .ckv = none, .kpe = none};
  const RowPointers rows = point_to_rows(kv, widths);
  const int64_t stride_token = params.kv.stride[0] * static_cast<int64_t>(size_of(params.kv.dtype));
  const auto plane = [&](void* base) {
    return Plane{.base = static_cast<std::byte*>(base), .stride_page = 0, .stride_token = stride_token};
  };
  pool.cache = {.format = format_of_elements(params.kv.dtype).value_or(CacheFormat::kBF16),
                .num_pages = num_keys > 0 ? 1 : 0,
                .page_size = static_cast<int32_t>(std::max<int64_t>(num_keys, 1)),
                .d_ckv = static_cast<int32_t>(widths.ckv),
                .d_kpe = static_cast<int32_t>(widths.kpe),
                .ckv_dtype = params.kv.dtype,
                .kpe_dtype = params.kv.dtype,
                .ckv = plane(rows.ckv),
                .kpe = widths.kpe > 0 ? plane(rows.kpe) : Plane{}};
  pool.topk_length = static_cast<const int32_t*>(if_given(params.topk_length).data);
  copy_common(params, batch, args);
  point_to_queries({.whole_name = "q", .ckv_name = "", .kpe_name = "", .whole = params.q, .ckv = none, .kpe = none},
                   widths, args);
  args.d_v = static_cast<int32_t>(widths.ckv);
  return check.finish(device);
}

}  // namespace mla::core

// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of append, append_rope, gather and copy_pages.
#include <cmath>
#include <cstdint>

#include "core/batch_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// Checks the token ranges of a gather against kv_len, and the page numbers that they use.
bool check_ranges(Checks& check, const GatherArgs& args) {
  for (int32_t b = 0; b < args.batch_size; ++b) {
    const int64_t start = args.token_start != nullptr ? args.token_start[b] : 0;
    const int64_t count = int64_t{args.out_indptr[b + 1]} - args.out_indptr[b];
    if (start < 0) return check.fail("token_start", "expected at least 0, got {} for request {}", start, b);
    if (start + count > args.pages.kv_len[b])
      return check.fail("out_indptr",
                        "expected `token_start` + rows of at most `kv_len` = {}, got {} + {} for request {}",
                        args.pages.kv_len[b], start, count, b);
    if (count == 0) continue;
    const int64_t page_size = args.pages.page_size;
    if (!check_pages(check, args.pages.kv_indptr != nullptr ? "kv_indices" : "block_table", args.pages.of(b),
                     start / page_size, (start + count - 1) / page_size + 1, args.cache.num_pages, b))
      return false;
  }
  return check.ok();
}

bool check_slot_mapping(Checks& check, const TensorView& slots, int64_t num_tokens, const CacheShape& shape) {
  return check.tensor("slot_mapping", slots, kI64Only, {{"T", &num_tokens}}) &&
         (!check.on_cpu() ||
          check_slots(check, "slot_mapping", static_cast<const int64_t*>(slots.data), num_tokens, shape.num_slots()));
}

constexpr std::string_view kNothingTurns = "the rows of `cache.format` have no rotary channels";

/// Binds the widths of what append_rope takes, which a format fixes. Rows of others have rotary channels if the caller
/// gives anything of them.
bool begin_rope(Checks& check, const AppendRopeParams& params, RowWidths& widths) {
  if (!widths.begin(check, "cache", params.cache.format)) return false;
  const KvLayout layout = kv_layout(params.cache.format);
  if (layout.is_packed()) {
    widths.ckv = layout.nope_dim - layout.rotary_in_nope;
    widths.kpe = layout.rope_dim + layout.rotary_in_nope;
  } else if (!params.kpe.given() && !params.q_pe.given() && !params.cos_sin.given() && !params.positions.given()) {
    widths.kpe = 0;
  }
  return true;
}

/// Checks the rotary channels of keys and what turns them, none of which is given unless rows have such channels.
bool check_turned_keys(Checks& check, const AppendRopeParams& params, bool turns, int64_t num_tokens,
                       RowWidths& widths) {
  if (!turns)
    return check.absent("kpe", params.kpe, kNothingTurns) && check.absent("cos_sin", params.cos_sin, kNothingTurns) &&
           check.absent("positions", params.positions, kNothingTurns) && widths.settle(check, "ckv");
  int64_t max_positions = kUnbound;
  return check.tensor("kpe", params.kpe, set_of({params.ckv.dtype}),
                      {{"T", &num_tokens}, {"qk_rope_head_dim", &widths.kpe}}) &&
         widths.settle(check, "kpe") && check.at_least("qk_rope_head_dim", widths.kpe, 2) &&
         check.require(widths.kpe % 2 == 0, "qk_rope_head_dim", "expected an even number, got {}", widths.kpe) &&
         check.tensor("cos_sin", params.cos_sin, kF32Only,
                      {{"max_positions", &max_positions}, {"qk_rope_head_dim", &widths.kpe}}) &&
         check_positions(check, params.positions, num_tokens, max_positions);
}

/// Checks the queries, of which either all tensors are given or none.
bool check_rope_queries(Checks& check, const AppendRopeParams& params, bool turns, BatchShape& batch,
                        RowWidths& widths) {
  if (!params.q_nope.given())
    return check.absent("q_pe", params.q_pe, "`q_nope` is not given") &&
           check.absent("q_out", params.q_out, "`q_nope` is not given") &&
           check.absent("q_scale", params.q_scale, "`q_nope` is not given");
  return check.tensor("q_nope", params.q_nope, kFloats,
                      {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"kv_lora_rank", &widths.ckv}}) &&
         (turns ? check.tensor("q_pe", params.q_pe, set_of({params.q_nope.dtype}),
                               {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"qk_rope_head_dim", &widths.kpe}})
                : check.absent("q_pe", params.q_pe, kNothingTurns)) &&
         widths.settle(check, turns ? "q_pe" : "q_nope") && check_batch_and_rows(check, batch) &&
         check.tensor("q_out", params.q_out, kFloatsAndE4M3,
                      {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"d_qk", &widths.total}}, Role::kOutput) &&
         check_scale_of(check, "q_scale", params.q_scale, "q_out", params.q_out.dtype);
}

/// Checks the weights of norms, and `norm_channels`, the channels of a key that its norm has.
bool check_norms(Checks& check, const AppendRopeParams& params, RowWidths& widths, int64_t& norm_channels) {
  if (!params.q_norm && !check.absent("q_norm_weight", params.q_norm_weight, "`q_norm` is not set")) return false;
  if (params.q_norm && !check.require(params.q_nope.given(), "q_norm", "expected `q_nope` with it")) return false;
  int64_t width = widths.ckv + widths.kpe;
  const TensorView& weight = params.norm_weight;
  if (params.q_norm || weight.given())
    check.require(width <= kMaxNormChannels, params.q_norm ? "q_norm" : "norm_weight",
                  "expected rows of at most {} channels with a norm, got {}", kMaxNormChannels, width);
  if (weight.given() && weight.ndim == 1 && weight.shape[0] != width)
    check.require(weight.shape[0] == widths.ckv, "norm_weight",
                  "expected shape [kv_lora_rank = {}] or [kv_lora_rank + qk_rope_head_dim = {}], got [{}]", widths.ckv,
                  width, weight.shape[0]);
  norm_channels = kUnbound;
  return check.ok() &&
         (!params.q_norm_weight.given() || check.tensor("q_norm_weight", params.q_norm_weight, kFloats,
                                                        {{"kv_lora_rank + qk_rope_head_dim", &width}})) &&
         (!weight.given() || check.tensor("norm_weight", weight, kFloats, {{"channels", &norm_channels}})) &&
         check.require(std::isfinite(params.norm_eps) && params.norm_eps >= 0, "norm_eps",
                       "expected a finite number of at least 0, got {}", params.norm_eps);
}

/// Checks a list of the pages to copy.
bool check_page_list(Checks& check, std::string_view field, const TensorView& pages, Dim count, int64_t num_pages) {
  if (!check.tensor(field, pages, kI32Only, {count}) || !check.fits_int32(field, *count.extent)) return false;
  const auto* values = static_cast<const int32_t*>(pages.data);
  if (!check.on_cpu() || all_below(values, *count.extent, num_pages)) return true;
  int64_t i = 0;
  while (values[i] >= 0 && values[i] < num_pages) ++i;
  return check.fail(field, "expected page numbers from 0 to {}, got {} as entry {}", num_pages - 1, values[i], i);
}

}  // namespace

Status validate(const AppendParams& params, AppendArgs& args, Device& device, Memory memory) {
  Checks check(Op::kAppend, Scope::kAll, memory);
  RowWidths widths;
  int64_t num_tokens = kUnbound;
  CacheShape shape;
  args = {};
  const RowForms rows{.whole_name = "kv",
                      .ckv_name = "ckv",
                      .kpe_name = "kpe",
                      .whole = params.kv,
                      .ckv = params.ckv,
                      .kpe = params.kpe};
  if (!widths.begin(check, "cache", params.cache.format) ||
      !check_rows(check, rows, kFloats, {{"T", &num_tokens}}, Role::kInput, widths) ||
      !check_cache(check, "cache", params.cache, Role::kOutput, widths, shape) || !widths.finish(check) ||
      !finish_cache(check, "cache", params.cache, Role::kOutput, widths, shape, args.cache) ||
      !check_slot_mapping(check, params.slot_mapping, num_tokens, shape))
    return check.take();

  const RowPointers at = point_to_rows(rows, widths);
  args.num_tokens = num_tokens;
  args.dtype = rows.first().dtype;
  args.ckv = at.ckv;
  args.ckv_stride_token = at.ckv_stride[0];
  args.kpe = at.kpe;
  args.kpe_stride_token = at.kpe_stride[0];
  args.slot_mapping = static_cast<const int64_t*>(params.slot_mapping.data);
  return check.finish(device);
}

Status validate(const GatherParams& params, GatherArgs& args, Device& device, Memory memory) {
  Checks check(Op::kGather, Scope::kAll, memory);
  RowWidths widths;
  int64_t batch_size = kUnbound;
  int64_t num_rows = kUnbound;
  CacheShape shape;
  args = {};
  const RowForms out{.whole_name = "out_kv",
                     .ckv_name = "out_ckv",
                     .kpe_name = "out_kpe",
                     .whole = params.out_kv,
                     .ckv = params.out_ckv,
                     .kpe = params.out_kpe};
  if (!check_cache(check, "cache", params.cache, Role::kInput, widths, shape) ||
      !check_rows(check, out, kFloats, {{"S", &num_rows}}, Role::kOutput, widths) || !widths.finish(check) ||
      !finish_cache(check, "cache", params.cache, Role::kInput, widths, shape, args.cache) ||
      !check_page_table(check, params.pages, shape.page_size, {}, batch_size, args.pages))
    return check.take();
  int64_t indptr_extent = batch_size + 1;
  if (params.token_start.given() && !check.lengths("token_start", params.token_start, {"B", &batch_size}))
    return check.take();
  if (!check.lengths("out_indptr", params.out_indptr, {"B + 1", &indptr_extent})) return check.take();

  const RowPointers at = point_to_rows(out, widths);
  args.batch_size = static_cast<int32_t>(batch_size);
  args.num_rows = num_rows;
  args.token_start = static_cast<const int32_t*>(if_given(params.token_start).data);
  args.out_indptr = static_cast<const int32_t*>(params.out_indptr.data);
  args.out_dtype = out.first().dtype;
  args.out_ckv = at.ckv;
  args.out_ckv_stride_token = at.ckv_stride[0];
  args.out_kpe = at.kpe;
  args.out_kpe_stride_token = at.kpe_stride[0];
  if (check.on_cpu() && check_indptr(check, "out_indptr", args.out_indptr, batch_size, "rows of the output", num_rows))
    check_ranges(check, args);
  return check.finish(device);
}

bool check_append_rope(Checks& check, const AppendRopeParams& params, int64_t num_tokens, AppendRopeArgs& args) {
  RowWidths widths;  // of the queries and keys that come
  RowWidths joined;  // of the cache's rows, where their latent part ends with the rotary channels
  RowWidths& row_widths = kv_layout(params.cache.format).rotary_in_nope > 0 ? joined : widths;
  BatchShape batch = {.num_tokens = num_tokens};
  CacheShape shape;
  int64_t norm_channels = kUnbound;
  if (!begin_rope(check, params, widths)) return false;
  const bool turns = widths.kpe != 0;
  const bool shapes =
      check_rope_queries(check, params, turns, batch, widths) &&
      check.tensor("ckv", params.ckv, kFloats, {{"T", &batch.num_tokens}, {"kv_lora_rank", &widths.ckv}}) &&
      check_turned_keys(check, params, turns, batch.num_tokens, widths) &&
      check_norms(check, params, widths, norm_channels) &&
      check_cache(check, "cache", params.cache, Role::kOutput, row_widths, shape) && row_widths.finish(check) &&
      finish_cache(check, "cache", params.cache, Role::kOutput, row_widths, shape, args.cache) &&
      check_slot_mapping(check, params.slot_mapping, batch.num_tokens, shape);
  if (!shapes) return false;

  args.num_tokens = batch.num_tokens;
  if (params.q_nope.given()) {
    args.num_heads = static_cast<int32_t>(batch.num_heads);
    args.q_dtype = params.q_nope.dtype;
    args.q_nope = params.q_nope.data;
    args.q_nope_stride_token = params.q_nope.stride[0];
    args.q_nope_stride_head = params.q_nope.stride[1];
    const TensorView& q_pe = if_given(params.q_pe);
    args.q_pe = q_pe.data;
    args.q_pe_stride_token = q_pe.stride[0];
    args.q_pe_stride_head = q_pe.stride[1];
    args.q_out_dtype = params.q_out.dtype;
    args.q_out = params.q_out.data;
    args.q_out_stride_token = params.q_out.stride[0];
    args.q_out_stride_head = params.q_out.stride[1];
    args.q_scale = static_cast<const float*>(if_given(params.q_scale).data);
  }
  args.dtype = params.ckv.dtype;
  args.ckv = params.ckv.data;
  args.ckv_stride_token = params.ckv.stride[0];
  args.kpe = if_given(params.kpe).data;
  args.kpe_stride_token = if_given(params.kpe).stride[0];
  args.cos_sin = static_cast<const float*>(if_given(params.cos_sin).data);
  args.cos_sin_stride_position = if_given(params.cos_sin).stride[0];
  args.positions = static_cast<const int64_t*>(if_given(params.positions).data);
  args.interleaved = params.interleaved;
  args.slot_mapping = static_cast<const int64_t*>(params.slot_mapping.data);
  args.q_norm = params.q_norm;
  if (params.q_norm_weight.given()) {
    args.q_norm_weight = params.q_norm_weight.data;
    args.q_norm_weight_dtype = params.q_norm_weight.dtype;
  }
  if (params.norm_weight.given()) {
    args.norm_weight = params.norm_weight.data;
    args.norm_weight_dtype = params.norm_weight.dtype;
    args.norm_channels = static_cast<int32_t>(norm_channels);
  }
  args.norm_eps = params.norm_eps;
  return true;
}

Status validate(const AppendRopeParams& params, AppendRopeArgs& args, Device& device, Memory memory) {
  Checks check(Op::kAppendRope, Scope::kAll, memory);
  args = {};
  return check_append_rope(check, params, kUnbound, args) ? check.finish(device) : check.take();
}

Status validate(const CopyPagesParams& params, CopyPagesArgs& args, Device& device, Memory memory) {
  Checks check(Op::kCopyPages, Scope::kAll, memory);
  RowWidths widths;
  CacheShape from;
  CacheShape to;
  int64_t num_from = kUnbound;
  int64_t num_to = kUnbound;
  args = {};
  const bool shapes = check_cache(check, "from", params.from, Role::kSharedInput, widths, from) &&
                      check_cache(check, "to", params.to, Role::kOutput, widths, to) && widths.finish(check) &&
                      finish_cache(check, "from", params.from, Role::kSharedInput, widths, from, args.from) &&
                      finish_cache(check, "to", params.to, Role::kOutput, widths, to, args.to) &&
                      check_page_list(check, "from_pages", params.from_pages, {"N", &num_from}, from.num_pages) &&
                      check_page_list(check, "to_pages", params.to_pages, {"M", &num_to}, to.num_pages) &&
                      check.require(num_to * to.page_size == num_from * from.page_size, "to_pages",
                                    "expected pages for {} tokens ({} pages of {}), got {} pages of {}",
                                    num_from * from.page_size, num_from, from.page_size, num_to, to.page_size);
  if (!shapes) return check.take();
  args.num_from = num_from;
  args.num_to = num_to;
  args.from_pages = static_cast<const int32_t*>(params.from_pages.data);
  args.to_pages = static_cast<const int32_t*>(params.to_pages.data);
  return check.finish(device);
}

}  // namespace mla::core

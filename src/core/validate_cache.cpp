// SPDX-License-Identifier: Apache-2.0
// append and gather.
#include <cstdint>

#include "core/cache_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// Token ranges of a gather against kv_len, and the pages they touch.
bool check_ranges(Checks& check, const GatherArgs& args) {
  for (int32_t b = 0; b < args.batch_size; ++b) {
    const int64_t start = args.token_start != nullptr ? args.token_start[b] : 0;
    const int64_t count = int64_t{args.out_indptr[b + 1]} - args.out_indptr[b];
    if (start < 0) return check.fail("token_start", "expected at least 0, got {} for request {}", start, b);
    if (start + count > args.pages.kv_len[b])
      return check.fail("out_indptr", "expected token_start + rows of at most kv_len = {}, got {} + {} for request {}",
                        args.pages.kv_len[b], start, count, b);
    if (count == 0) continue;
    const int64_t page_size = args.pages.page_size;
    if (!check_pages(check, args.pages.kv_indptr != nullptr ? "kv_indices" : "block_table", args.pages.of(b),
                     start / page_size, (start + count - 1) / page_size + 1, args.cache.num_pages, b))
      return false;
  }
  return check.ok();
}

}  // namespace

Status validate(const AppendParams& params, AppendArgs& args, Device& device) {
  Checks check(Op::kAppend, Scope::kAll);
  RowWidths widths;
  int64_t num_tokens = kUnbound;
  int64_t num_pages = kUnbound;
  int64_t page_size = kUnbound;
  const RowForms rows{.whole_name = "kv",
                      .ckv_name = "ckv",
                      .kpe_name = "kpe",
                      .whole = params.kv,
                      .ckv = params.ckv,
                      .kpe = params.kpe};
  if (!check_rows(check, rows, kFloats, {{"T", &num_tokens}}, Role::kInput, widths) ||
      !check_cache(check, params.cache, Role::kOutput, widths, num_pages, page_size) || !widths.finish(check) ||
      !check.tensor("slot_mapping", params.slot_mapping, kI64Only, {{"T", &num_tokens}}))
    return check.take();
  const auto* slots = static_cast<const int64_t*>(params.slot_mapping.data);
  if (check.on_cpu() && !check_slots(check, "slot_mapping", slots, num_tokens, num_pages * page_size))
    return check.take();

  const RowPointers at = point_to_rows(rows, widths);
  args = {.num_tokens = num_tokens,
          .dtype = rows.first().dtype,
          .ckv = at.ckv,
          .ckv_stride_token = at.ckv_stride[0],
          .kpe = at.kpe,
          .kpe_stride_token = at.kpe_stride[0],
          .slot_mapping = slots,
          .cache = make_cache(params.cache, widths, num_pages, page_size)};
  device = check.device();
  return check.take();
}

Status validate(const GatherParams& params, GatherArgs& args, Device& device) {
  Checks check(Op::kGather, Scope::kAll);
  RowWidths widths;
  int64_t batch_size = kUnbound;
  int64_t num_rows = kUnbound;
  int64_t num_pages = kUnbound;
  int64_t page_size = kUnbound;
  Pages pages;
  const RowForms out{.whole_name = "out_kv",
                     .ckv_name = "out_ckv",
                     .kpe_name = "out_kpe",
                     .whole = params.out_kv,
                     .ckv = params.out_ckv,
                     .kpe = params.out_kpe};
  if (!check_cache(check, params.cache, Role::kInput, widths, num_pages, page_size) ||
      !check_rows(check, out, kFloats, {{"S", &num_rows}}, Role::kOutput, widths) || !widths.finish(check) ||
      !check_page_table(check, params.pages, page_size, batch_size, pages))
    return check.take();
  int64_t indptr_extent = batch_size + 1;
  if (params.token_start.given() && !check.lengths("token_start", params.token_start, {"B", &batch_size}))
    return check.take();
  if (!check.lengths("out_indptr", params.out_indptr, {"B + 1", &indptr_extent})) return check.take();

  const RowPointers at = point_to_rows(out, widths);
  args = {.batch_size = static_cast<int32_t>(batch_size),
          .num_rows = num_rows,
          .cache = make_cache(params.cache, widths, num_pages, page_size),
          .pages = pages,
          .token_start = static_cast<const int32_t*>(if_given(params.token_start).data),
          .out_indptr = static_cast<const int32_t*>(params.out_indptr.data),
          .out_dtype = out.first().dtype,
          .out_ckv = at.ckv,
          .out_ckv_stride_token = at.ckv_stride[0],
          .out_kpe = at.kpe,
          .out_kpe_stride_token = at.kpe_stride[0]};
  if (check.on_cpu() && check_indptr(check, "out_indptr", args.out_indptr, batch_size, "rows of the output", num_rows))
    check_ranges(check, args);
  device = check.device();
  return check.take();
}

}  // namespace mla::core

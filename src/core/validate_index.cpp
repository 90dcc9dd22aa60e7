// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of block_table_to_csr, physical_slots and top_k.
#include <cstdint>

#include "core/batch_checks.h"
#include "core/index_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

/// Returns whether both tensors have the same memory, row by row.
bool same_rows(const TensorView& a, const TensorView& b) {
  return a.data == b.data && (a.stride[0] == b.stride[0] || a.shape[0] == 1);
}

}  // namespace

bool check_slot_pages(Checks& check, const Pages& pages, const PagedRows& rows) {
  return !check.reads_data() || check_used_pages(check, pages, rows, (int64_t{INT32_MAX} + 1) / pages.page_size);
}

Status validate(const BlockTableToCsrParams& params, BlockTableToCsrArgs& args, Device& device, Memory memory) {
  Checks check(Op::kBlockTableToCsr, Scope::kAll, memory);
  int64_t batch_size = kUnbound;
  int64_t room = kUnbound;
  Pages pages;
  args = {};
  const PageTable table{.block_table = params.block_table, .kv_len = params.kv_len};
  if (!check_page_size(check, params.page_size) ||
      !check_page_table(check, table, params.page_size, {}, batch_size, pages))
    return check.take();
  int64_t indptr_extent = batch_size + 1;
  if (!check.tensor("kv_indptr", params.kv_indptr, kI32Only, {{"B + 1", &indptr_extent}}, Role::kOutput) ||
      !check.tensor("kv_indices", params.kv_indices, kI32Only, {{"num_indices", &room}}, Role::kOutput))
    return check.take();
  if (check.on_cpu()) {
    int64_t needed = 0;
    for (int64_t b = 0; b < batch_size; ++b)
      needed += (int64_t{pages.kv_len[b]} + pages.page_size - 1) / pages.page_size;
    if (!check.fits_int32("number of pages", needed) ||
        !check.require(room >= needed, "kv_indices", "expected room for {} pages, got {}", needed, room))
      return check.take();
  }
  args = {.batch_size = pages.batch_size,
          .page_size = pages.page_size,
          .block_table = pages.table,
          .block_table_stride_request = pages.table_stride_request,
          .kv_len = pages.kv_len,
          .kv_indptr = static_cast<int32_t*>(params.kv_indptr.data),
          .kv_indices = static_cast<int32_t*>(params.kv_indices.data)};
  return check.finish(device);
}

namespace {

bool check_groups(Checks& check, const PhysicalSlotsParams& params, int64_t topk) {
  return check.at_least("ratio", params.ratio, 1) &&
         check_ratio_of_rank(check, "ratio", params.context_parallel, params.ratio, params.list_tokens) &&
         check.fits_int32("number of listed tokens", params.list_tokens ? topk * params.ratio + params.ratio : topk);
}

/// Returns which rows of a request the pages hold.
PagedRows rows_of(const PhysicalSlotsParams& params) {
  return {.share = params.context_parallel, .ratio = params.list_tokens ? 1 : params.ratio};
}

}  // namespace

bool check_ratio_of_rank(Checks& check, std::string_view field, const ContextParallel& share, int32_t ratio,
                         bool list_tokens) {
  return check.require(ratio == 1 || list_tokens || share.world == 1, field,
                       "expected 1 where rows belong to ranks, got {}", ratio);
}

bool check_listed(Checks& check, int64_t topk, int64_t ratio, int64_t num_slots) {
  const int64_t needed = topk * ratio + ratio - 1;
  return check.fits_int32("W", num_slots) &&
         check.require(num_slots >= needed, "slots",
                       "expected rows of at least {} slots, for {} groups of {} tokens and {} more, got {}", needed,
                       topk, ratio, ratio - 1, num_slots);
}

Status validate(const PhysicalSlotsParams& params, PhysicalSlotsArgs& args, Device& device, Memory memory) {
  Checks check(Op::kPhysicalSlots, Scope::kAll, memory);
  int64_t num_tokens = kUnbound;
  int64_t topk = kUnbound;
  int64_t batch_size = kUnbound;
  int64_t num_slots = kUnbound;
  args = {};
  const bool shapes =
      check.tensor("indices", params.indices, kI32Only, {{"T", &num_tokens}, {"topk", &topk}},
                   same_rows(params.indices, params.slots) ? Role::kSharedInput : Role::kInput) &&
      check.fits_int32("num_tokens", num_tokens) && check.at_least("topk", topk, 1) && check.fits_int32("topk", topk) &&
      (!params.topk_length.given() ||
       check.tensor("topk_length", params.topk_length, kI32Only, {{"T", &num_tokens}})) &&
      check_page_size(check, params.page_size) && check_context_parallel(check, params.context_parallel) &&
      check_groups(check, params, topk) &&
      check_page_table(check, params.pages, params.page_size, rows_of(params), batch_size, args.pages) &&
      check_queries(check, params.qo_indptr, batch_size, num_tokens, args.queries) &&
      check_slot_pages(check, args.pages, rows_of(params)) &&
      check.tensor("slots", params.slots, kI32Only,
                   {{"T", &num_tokens}, params.list_tokens ? Dim{"W", &num_slots} : Dim{"topk", &topk}},
                   Role::kOutput) &&
      (!params.list_tokens || check_listed(check, topk, params.ratio, num_slots)) &&
      check_valid_count(check, params.valid_count, num_tokens);
  if (!shapes) return check.take();
  args.num_tokens = num_tokens;
  args.topk = static_cast<int32_t>(topk);
  args.indices = static_cast<const int32_t*>(params.indices.data);
  args.indices_stride_token = params.indices.stride[0];
  args.topk_length = static_cast<const int32_t*>(if_given(params.topk_length).data);
  args.context_parallel = params.context_parallel;
  args.ratio = params.ratio;
  args.list_tokens = params.list_tokens;
  args.num_slots = static_cast<int32_t>(params.list_tokens ? num_slots : topk);
  args.compact = params.compact;
  args.slots = static_cast<int32_t*>(params.slots.data);
  args.slots_stride_token = params.slots.stride[0];
  args.valid_count = static_cast<int32_t*>(if_given(params.valid_count).data);
  return check.finish(device);
}

bool check_valid_count(Checks& check, const TensorView& valid_count, int64_t num_tokens) {
  return !valid_count.given() ||
         check.tensor("valid_count", valid_count, kI32Only, {{"T", &num_tokens}}, Role::kOutput);
}

Status validate(const TopKParams& params, TopKArgs& args, Device& device, Memory memory) {
  Checks check(Op::kTopK, Scope::kAll, memory);
  int64_t num_tokens = kUnbound;
  int64_t num_logits = kUnbound;
  int64_t k = kUnbound;
  args = {};
  const bool shapes =
      check.tensor("logits", params.logits, kFloats, {{"T", &num_tokens}, {"N", &num_logits}}) &&
      check.fits_int32("num_logits", num_logits) &&
      check_per_token(check, "lengths", params.lengths, num_tokens, args.lengths) &&
      check_per_token(check, "starts", params.starts, num_tokens, args.starts) &&
      check_key_blocks(check, params.blocks, params.block_size, num_tokens, args.blocks) &&
      (!params.starts.given() || (check.absent("blocks", params.blocks, "`starts` are given") &&
                                  check.require(params.block_size == 1, "block_size",
                                                "expected 1, since `starts` are given, got {}", params.block_size))) &&
      check.tensor("indices", params.indices, kI32Only, {{"T", &num_tokens}, {"k", &k}}, Role::kOutput) &&
      check.at_least("k", k, 1) && check.fits_int32("k", k);
  if (!shapes) return check.take();
  args = {.num_tokens = num_tokens,
          .num_logits = num_logits,
          .logits_dtype = params.logits.dtype,
          .logits = params.logits.data,
          .logits_stride_token = params.logits.stride[0],
          .lengths = args.lengths,
          .starts = args.starts,
          .blocks = args.blocks,
          .block_size = args.blocks.given() ? 1 : params.block_size,
          .k = static_cast<int32_t>(k),
          .indices = static_cast<int32_t*>(params.indices.data),
          .indices_stride_token = params.indices.stride[0]};
  if (check.on_cpu() && args.lengths != nullptr)
    for (int64_t t = 0; t < num_tokens; ++t)
      if (args.lengths[t] < 0 || args.lengths[t] > num_logits) {
        check.fail("lengths", "expected 0 to {} (the logits of a row), got {} for token {}", num_logits,
                   args.lengths[t], t);
        break;
      }
  if (check.on_cpu() && args.starts != nullptr)
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t length = args.lengths != nullptr ? args.lengths[t] : num_logits;
      if (args.starts[t] < 0 || args.starts[t] > length) {
        check.fail("starts", "expected 0 to {} (the logits that count), got {} for token {}", length, args.starts[t],
                   t);
        break;
      }
    }
  return check.finish(device);
}

}  // namespace mla::core

// SPDX-License-Identifier: Apache-2.0
// block_table_to_csr and physical_slots convert page tables and token indices from one form to another.
#include <algorithm>

#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Returns the slot of a request's token, or of the row of a group; -1 if it is not valid or belongs to another rank.
int32_t slot_of(const core::PhysicalSlotsArgs& args, int32_t request, int64_t token) {
  const int64_t rows = args.pages.kv_len[request] / (args.list_tokens ? 1 : args.ratio);
  if (token < 0 || token >= rows || !owns(args.context_parallel, token)) return -1;
  const int64_t local = local_length(args.context_parallel, token);  // how many earlier tokens the rank owns
  const int64_t page = args.pages.of(request)[local / args.pages.page_size];
  return static_cast<int32_t>(page * args.pages.page_size + local % args.pages.page_size);
}

/// Returns what entry i of a query's row stands for: a token, a row of a pool, or nothing (-1). The query sees `seen`
/// tokens.
int64_t entry(const core::PhysicalSlotsArgs& args, const int32_t* indices, int32_t length, int64_t seen, int32_t i) {
  if (!args.list_tokens) return i < length ? indices[i] : -1;
  const int64_t group = i / args.ratio, in_group = i % args.ratio;
  if (group < args.topk)
    return group < length && indices[group] >= 0 ? int64_t{indices[group]} * args.ratio + in_group : -1;
  const int64_t rest = seen / args.ratio * args.ratio + (i - int64_t{args.topk} * args.ratio);
  return rest < seen ? rest : -1;
}

/// Writes the slots of one row. `slots` may be `indices`, since each entry is read before it is written.
void fill_row(const core::PhysicalSlotsArgs& args, int32_t request, int32_t query) {
  const int64_t token = args.queries.begin(request) + query;
  const int64_t seen =
      std::max<int64_t>(int64_t{args.pages.kv_len[request]} - args.queries.len(request) + query + 1, 0);
  const int32_t* indices = args.indices + token * args.indices_stride_token;
  int32_t* slots = args.slots + token * args.slots_stride_token;
  const int32_t length = args.topk_length != nullptr ? args.topk_length[token] : args.topk;
  int32_t valid = 0;
  for (int32_t i = 0; i < args.num_slots; ++i) {
    const int32_t slot = slot_of(args, request, entry(args, indices, length, seen, i));
    if (!args.compact) slots[i] = slot;
    if (slot < 0) continue;
    if (args.compact) slots[valid] = slot;
    ++valid;
  }
  if (args.compact) std::fill(slots + valid, slots + args.num_slots, -1);
  if (args.valid_count != nullptr) args.valid_count[token] = valid;
}

}  // namespace

void block_table_to_csr(const core::BlockTableToCsrArgs& args) {
  args.kv_indptr[0] = 0;
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int64_t num_pages = (int64_t{args.kv_len[request]} + args.page_size - 1) / args.page_size;
    const int32_t* pages = args.block_table + request * args.block_table_stride_request;
    const int32_t begin = args.kv_indptr[request];
    std::copy(pages, pages + num_pages, args.kv_indices + begin);
    args.kv_indptr[request + 1] = static_cast<int32_t>(begin + num_pages);
  }
}

void physical_slots(const core::PhysicalSlotsArgs& args) {
  for (int32_t request = 0; request < args.pages.batch_size; ++request)
    for (int32_t i = 0; i < args.queries.len(request); ++i) fill_row(args, request, i);
}

}  // namespace mla::reference

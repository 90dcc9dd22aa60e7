// SPDX-License-Identifier: Apache-2.0
// block_table_to_csr and physical_slots convert page tables and token indices from one form to another.
#include <algorithm>

#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Returns the slot of a request's token; -1 if the token is not valid or belongs to another rank.
int32_t slot_of(const core::PhysicalSlotsArgs& args, int32_t request, int32_t token) {
  if (token < 0 || token >= args.pages.kv_len[request] || !owns(args.context_parallel, token)) return -1;
  const int64_t local = local_length(args.context_parallel, token);  // how many earlier tokens the rank owns
  const int64_t page = args.pages.of(request)[local / args.pages.page_size];
  return static_cast<int32_t>(page * args.pages.page_size + local % args.pages.page_size);
}

/// Writes the slots of one row. `slots` may be `indices`, since each entry is read before it is written.
void fill_row(const core::PhysicalSlotsArgs& args, int32_t request, int64_t token) {
  const int32_t* indices = args.indices + token * args.indices_stride_token;
  int32_t* slots = args.slots + token * args.slots_stride_token;
  const int32_t length = args.topk_length != nullptr ? args.topk_length[token] : args.topk;
  int32_t valid = 0;
  for (int32_t i = 0; i < args.topk; ++i) {
    const int32_t slot = i < length ? slot_of(args, request, indices[i]) : -1;
    if (!args.compact) slots[i] = slot;
    if (slot < 0) continue;
    if (args.compact) slots[valid] = slot;
    ++valid;
  }
  if (args.compact) std::fill(slots + valid, slots + args.topk, -1);
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
    for (int32_t i = 0; i < args.queries.len(request); ++i) fill_row(args, request, args.queries.begin(request) + i);
}

}  // namespace mla::reference

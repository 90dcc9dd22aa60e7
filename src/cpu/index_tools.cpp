// SPDX-License-Identifier: Apache-2.0
// block_table_to_csr and physical_slots convert page tables and token indices from one form to another.
#include <algorithm>
#include <cstring>

#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

/// Finds the slots of one request's tokens.
class SlotFinder {
 public:
  SlotFinder(const core::PhysicalSlotsArgs& args, int32_t request)
      : share_(args.context_parallel),
        pages_(args.pages.of(request)),
        page_size_(static_cast<uint32_t>(args.pages.page_size)),
        num_rows_(static_cast<uint32_t>(args.num_rows(request))) {}

  /// Returns the slot of a token or row; -1 if it is not valid or belongs to another rank.
  int32_t operator()(int64_t token) const {
    if (token < 0 || token >= num_rows_) return -1;
    auto local = static_cast<uint32_t>(token);
    if (share_.world > 1) {
      if (!owns(share_, token)) return -1;
      local = static_cast<uint32_t>(local_length(share_, token));  // how many earlier tokens the rank owns
    }
    const uint32_t page = local / page_size_;
    return static_cast<int32_t>(static_cast<uint32_t>(pages_[page]) * page_size_ + (local - page * page_size_));
  }

 private:
  ContextParallel share_;
  const int32_t* pages_;
  uint32_t page_size_, num_rows_;
};

/// Writes the slots of one row. `slots` may be `indices`, since each entry is read before it is written.
void fill_row(const core::PhysicalSlotsArgs& args, const SlotFinder& find, int32_t request, int64_t token) {
  const int32_t* indices = args.indices + token * args.indices_stride_token;
  int32_t* slots = args.slots + token * args.slots_stride_token;
  const int32_t length = args.topk_length != nullptr ? std::clamp(args.topk_length[token], 0, args.topk) : args.topk;
  const int32_t seen = args.num_seen(request, token), entries = args.list_tokens ? args.num_slots : length;
  int32_t valid = 0;
  for (int32_t i = 0; i < entries; ++i) {
    const int32_t slot = find(args.row_of_entry(indices, length, seen, i));
    slots[args.compact ? valid : i] = slot;  // where rows are compacted, the next slot overwrites an invalid one
    valid += slot >= 0 ? 1 : 0;
  }
  std::fill(slots + (args.compact ? valid : entries), slots + args.num_slots, -1);
  if (args.valid_count != nullptr) args.valid_count[token] = valid;
}

}  // namespace

void run_block_table_to_csr(const KernelSet&, const core::BlockTableToCsrArgs& args, core::ThreadPool& pool) {
  args.kv_indptr[0] = 0;
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int64_t num_pages = (int64_t{args.kv_len[request]} + args.page_size - 1) / args.page_size;
    args.kv_indptr[request + 1] = static_cast<int32_t>(args.kv_indptr[request] + num_pages);
  }
  const int64_t bytes = args.kv_indptr[args.batch_size] * static_cast<int64_t>(sizeof(int32_t));
  share(pool, args.batch_size, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) {
      const int32_t first = args.kv_indptr[request];
      const int32_t* pages = args.block_table + request * args.block_table_stride_request;
      std::copy_n(pages, args.kv_indptr[request + 1] - first, args.kv_indices + first);
    }
  });
}

void run_physical_slots(const KernelSet&, const core::PhysicalSlotsArgs& args, core::ThreadPool& pool) {
  // An entry costs a division, which takes longer than its 4 bytes.
  const int64_t bytes = 16 * args.num_tokens * args.num_slots;
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int32_t request = 0; request < args.pages.batch_size; ++request) {
      const int64_t first = std::max<int64_t>(begin, args.queries.begin(request));
      const int64_t last = std::min<int64_t>(end, int64_t{args.queries.begin(request)} + args.queries.len(request));
      if (first >= last) continue;
      const SlotFinder find(args, request);
      for (int64_t token = first; token < last; ++token) fill_row(args, find, request, token);
    }
  });
}

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// This file computes absorbed decode with one KV head: a key is a row [ckv | kpe], a value its first d_v channels, and
// rows are found through the page table.
#include "reference/attention.h"
#include "reference/cache_rows.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Gives the rank's keys of one request.
struct DecodeKeys {
  const core::DecodeArgs& args;
  int32_t request;

  int64_t kv_len() const { return args.pages.kv_len[request]; }
  int64_t q_len() const { return args.queries.len(request); }
  int64_t count() const { return local_length(args.context_parallel, kv_len()); }
  int64_t position(int64_t j) const { return global_position(args.context_parallel, j); }

  bool sees(const QueryRow& row, int64_t j) const {
    const int64_t draft = position(j) - (kv_len() - q_len());
    const bool in_tree = draft >= 0 && (args.tree_mask != nullptr || args.tree_parents != nullptr);
    if (!is_visible(args.options, args.causal && !in_tree, row.position, position(j))) return false;
    if (!in_tree) return true;
    if (args.tree_mask != nullptr) return args.tree_mask[row.token * args.tree_mask_stride_token + draft] != 0;
    return is_ancestor(draft, row);
  }

  /// Returns whether a draft is an ancestor of the row's query, or the query itself.
  bool is_ancestor(int64_t draft, const QueryRow& row) const {
    const int32_t* parents = args.tree_parents + row.token - row.index;
    int64_t i = row.index;
    while (i > draft) i = parents[i];
    return i == draft;
  }

  void load(int64_t j, RowBlock& block) const {
    const int32_t page = args.pages.of(request)[j / args.pages.page_size];
    load_absorbed_key({args.cache, page, j % args.pages.page_size}, j, block);
  }

  int64_t run_end(int64_t j) const { return end_of_run(args.options.p_run, j, 0, count()); }
  ValueScales scales_of(int64_t) const { return value_scales(args.cache); }
};

}  // namespace

size_t workspace_size(const core::DecodeArgs& args) { return block_bytes(args); }

void decode(const core::DecodeArgs& args, std::span<std::byte> workspace) {
  RowBlock block = make_block(args, workspace);
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const DecodeKeys keys{args, request};
    const int64_t q_begin = args.queries.begin(request), heads = args.num_heads;
    attend_rows(
        block, args, keys, keys.q_len() * heads,
        [&](int64_t i) -> QueryRow {
          const int64_t query = i / heads;
          return {.token = q_begin + query,
                  .head = i % heads,
                  .index = query,
                  .position = keys.kv_len() - keys.q_len() + query};
        },
        [&](const QueryRow& row, double* q) { load_absorbed_query(args, args.cache, row, q); });
  }
}

}  // namespace mla::reference

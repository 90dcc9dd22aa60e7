// SPDX-License-Identifier: Apache-2.0
// This file computes sparse attention in the absorbed form, where every query names its own keys in one or two pools.
#include "reference/attention.h"
#include "reference/cache_rows.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Gives the keys that one token's rows of indices name, one pool after the other. Every key that exists is visible,
/// since callers mask by their choice of indices.
struct SparseKeys {
  const core::DecodeSparseArgs& args;
  int64_t token;
  int64_t first_length = args.topk_length(0, token);  // entries of pools[0]; those of pools[1] follow
  int64_t second_length = args.num_pools > 1 ? args.topk_length(1, token) : 0;

  int64_t count() const { return first_length + second_length; }
  static int64_t position(int64_t) { return 0; }

  const core::PoolArgs& pool_of(int64_t j) const { return args.pools[j < first_length ? 0 : 1]; }
  int64_t slot(int64_t j) const {
    const int64_t entry = j < first_length ? j : j - first_length;
    return pool_of(j).indices[token * pool_of(j).indices_stride_token + entry];
  }

  bool sees(const QueryRow&, int64_t j) const { return slot(j) >= 0 && slot(j) < pool_of(j).cache.num_slots(); }

  void load(int64_t j, RowBlock& block) const { load_absorbed_key(CacheRow::at_slot(cache_of(j), slot(j)), j, block); }

  int64_t run_end(int64_t j) const {
    const int64_t first = j < first_length ? 0 : first_length;  // entry 0 of the pool
    return end_of_run(args.options.p_run, j, first, j < first_length ? first_length : count());
  }
  const core::Cache& cache_of(int64_t j) const { return pool_of(j).cache; }
  ValueScales scales_of(int64_t j) const { return value_scales(cache_of(j)); }
};

}  // namespace

size_t workspace_size(const core::DecodeSparseArgs& args) { return block_bytes(args); }

void decode_sparse(const core::DecodeSparseArgs& args, std::span<std::byte> workspace) {
  RowBlock block = make_block(args, workspace);
  for (int64_t token = 0; token < args.num_tokens; ++token)
    attend_rows(
        block, args, SparseKeys{args, token}, args.num_heads,
        [&](int64_t i) -> QueryRow { return {.token = token, .head = i}; },
        [&](const QueryRow& row, double* q) { load_absorbed_query(args, args.pools[0].cache, row, q); });
}

}  // namespace mla::reference

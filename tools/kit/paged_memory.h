// SPDX-License-Identifier: Apache-2.0
// Builds paged caches and page tables.
#pragma once

#include <cstdint>
#include <span>

#include "kit/cases.h"

namespace mla::kit {

/// Returns the element type of a cache's tensors; u8 for packed formats.
DType dtype_of(CacheFormat format);

/// Describes how a page table lies in memory, and which pages and tokens it distributes.
struct TableSpec {
  int32_t page_size = 64;
  bool block_table = false;
  int64_t row_extra = 0;  ///< entries between the rows of a block table
  bool garbage_tail = true;
  bool shuffled = true;
  int32_t unowned_pages = 0;
  std::vector<int32_t> shared_pages = {};
  ContextParallel context_parallel = {};
};

/// Returns the table of requests with (global) lengths kv_len; it places their local tokens.
TableMemory make_table(const TableSpec& spec, std::span<const int32_t> kv_len, uint64_t seed);

/// Fills `values` with row `key` of a cache: d_qk values.
void fill_row_values(std::span<float> values, uint64_t key);

/// Returns a cache and its page table; of kv_len[b] random rows of every request it holds the local ones. The rows
/// depend on the seed, the request and the token's global position only, so two layouts of one seed hold the same
/// values. Rows of quantized formats, and uneven ones, are the same before they are quantized.
PagedMemory make_paged(const CacheSpec& spec, std::span<const int32_t> kv_len, uint64_t seed,
                       const ContextParallel& context_parallel = {});

/// Returns a cache of `num_pages` pages without a page table.
PagedMemory make_pool(const CacheSpec& spec, int64_t num_pages);

/// Returns pages of an indexer's cache, filled with bytes that read as NaN if `poison` is set, else uninitialized.
IndexerMemory make_indexer_pool(IndexerFormat format, int32_t page_size, int64_t num_pages, int64_t page_stride_extra,
                                bool poison);

/// Quantizes a key of 128 channels into a slot, with a power of two for a scale.
void write_indexer_key(const IndexerMemory& memory, int64_t page, int64_t slot, std::span<const float> key);

/// Returns slots for `num_tokens` tokens among `num_slots`, all different but for a share of negative ones.
Buffer make_slot_mapping(int64_t num_tokens, int64_t num_slots, double skip_share, uint64_t seed);

}  // namespace mla::kit

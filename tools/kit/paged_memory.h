// SPDX-License-Identifier: Apache-2.0
// Builds paged caches and page tables.
#pragma once

#include <cstdint>
#include <span>

#include "kit/cases.h"

namespace mla::kit {

/// The element type of a cache that is not quantized.
DType dtype_of(CacheFormat format);

/// A cache that holds kv_len[b] random rows of every request, and its page table. The rows depend on the seed, the
/// request and the token only, so two layouts of one seed hold the same values.
PagedMemory make_paged(const CacheSpec& spec, std::span<const int32_t> kv_len, uint64_t seed);

/// A cache of `num_pages` pages without a page table.
PagedMemory make_pool(const CacheSpec& spec, int64_t num_pages);

}  // namespace mla::kit

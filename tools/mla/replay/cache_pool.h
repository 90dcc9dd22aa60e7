// SPDX-License-Identifier: Apache-2.0
// A paged cache of any format with its memory.
#pragma once

#include <cstdint>

#include "mla/bench/memory.h"
#include "mla/mla.h"

namespace mla::cli::replay {

class CachePool {
 public:
  CachePool() = default;
  /// Rows of d_qk channels, of root mean square 1 (d_rms of them together): from that follows the one scale of fp8.
  CachePool(CacheFormat format, int64_t d_qk, int64_t d_rms, int32_t page_size, int64_t num_pages);

  const KvCache& cache() const { return cache_; }

 private:
  bench::Buffer memory_, scale_;
  KvCache cache_;
};

/// The indexer's keys beside a cache.
class IndexerPool {
 public:
  IndexerPool() = default;
  IndexerPool(int32_t page_size, int64_t num_pages);

  const IndexerCache& cache() const { return cache_; }

 private:
  bench::Buffer memory_;
  IndexerCache cache_;
};

/// Heads of the indexer, in DeepSeek V3.2 and V4.
inline constexpr int32_t kIndexerHeads = 64;

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// A paged cache of any format with its memory, where the layer computes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "mla/bench/memory.h"
#include "mla/mla.h"
#include "mla/replay/operations.h"

namespace mla::cli::replay {

/// Pages, zeroed: in the host's memory, or in that of a GPU.
class PageMemory {
 public:
  PageMemory() = default;
  PageMemory(int64_t page_bytes, int64_t num_pages, const Gpu* gpu);

  std::byte* host() const { return host_.data(); }
  /// `view`, of host memory, as the layer's operations take it.
  TensorView where_it_computes(TensorView view) const;
  /// Copies what the pages hold now to the host.
  Status fetch(std::span<const int32_t> pages) const;

 private:
  bench::Buffer host_;  // of a GPU's pages those that were fetched; the others take no memory
  std::optional<Gpu> gpu_;
  GpuBuffer there_;
  int64_t page_bytes_ = 0;
};

/// A cache, KvCache or IndexerCache, with the memory of its pages.
template <class Cache>
class PagedPool {
 public:
  /// Where the layer computes.
  const Cache& cache() const { return there_; }
  /// Where `operations` compute, which may be the host's memory: there only these pages are what the layer's are.
  Result<Cache> cache(const Operations& operations, std::span<const int32_t> pages) const {
    if (operations.gpu() != nullptr) return there_;
    if (Status status = pages_.fetch(pages); !status.ok()) return status;
    return host_;
  }

 protected:
  PagedPool() = default;
  explicit PagedPool(PageMemory pages) : pages_(std::move(pages)) {}
  /// `cache` lies in the host's memory of the pages.
  void describe(const Cache& cache) {
    host_ = there_ = cache;
    there_.kv = pages_.where_it_computes(cache.kv);
  }

  PageMemory pages_;

 private:
  Cache host_, there_;
};

class CachePool : public PagedPool<KvCache> {
 public:
  CachePool() = default;
  /// Rows of d_qk channels, of root mean square 1 (d_rms of them together): from that follows the one scale of fp8.
  CachePool(CacheFormat format, int64_t d_qk, int64_t d_rms, int32_t page_size, int64_t num_pages, const Gpu* gpu);

 private:
  bench::Buffer scale_;
};

/// The indexer's keys beside a cache.
class IndexerPool : public PagedPool<IndexerCache> {
 public:
  IndexerPool() = default;
  IndexerPool(int32_t page_size, int64_t num_pages, const Gpu* gpu);
};

/// Heads of the indexer, in DeepSeek V3.2 and V4.
inline constexpr int32_t kIndexerHeads = 64;

}  // namespace mla::cli::replay

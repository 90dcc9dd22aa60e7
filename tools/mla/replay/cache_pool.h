// SPDX-License-Identifier: Apache-2.0
// Holds a paged cache of any format and its memory, which lies where the layer computes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/mla.h"
#include "mla/replay/operations.h"

namespace mla::cli::replay {

/// Holds pages, zeroed at first, in the host's memory or in that of a GPU.
class PageMemory {
 public:
  PageMemory() = default;
  PageMemory(int64_t page_bytes, int64_t num_pages, const Gpu* gpu);

  std::byte* host() const { return host_.data(); }
  /// Returns a view of the host's memory as the layer's operations take it: with a GPU, the same place in the GPU's
  /// memory.
  TensorView where_it_computes(TensorView view) const;
  /// Copies what these pages hold now from the GPU to the host; does nothing without a GPU.
  Status fetch(std::span<const int32_t> pages) const;
  /// Copies all of the host's memory to the GPU; does nothing without a GPU. Throws UsageError if that fails.
  void send() const;

 private:
  bench::Buffer host_;  // with a GPU: the pages that were fetched; the others take no memory
  std::optional<Gpu> gpu_;
  GpuBuffer there_;
  int64_t page_bytes_ = 0;
};

/// Holds a cache, KvCache or IndexerCache, and the memory of its pages.
template <class Cache>
class PagedPool {
 public:
  /// Returns the cache where the layer computes.
  const Cache& cache() const { return there_; }
  /// Returns the cache where `operations` compute. If that is the host's memory and the layer computes on a GPU, only
  /// `pages` hold what the layer's do.
  Result<Cache> cache(const Operations& operations, std::span<const int32_t> pages) const {
    if (operations.gpu() != nullptr) return there_;
    if (Status status = pages_.fetch(pages); !status.ok()) return status;
    return host_;
  }

 protected:
  PagedPool() = default;
  explicit PagedPool(PageMemory pages) : pages_(std::move(pages)) {}
  /// Takes a cache whose pages lie in host memory, and derives the one where the layer computes.
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
  /// Makes a cache for rows of d_qk channels, d_rms of which have a root mean square of 1: the one scale of fp8 follows
  /// from that.
  CachePool(CacheFormat format, int64_t d_qk, int64_t d_rms, int32_t page_size, int64_t num_pages, const Gpu* gpu);
  /// Returns these rows of a request, f32 [rows, d_qk], read by `operations`.
  Result<std::vector<float>> rows(Operations& operations, int64_t d_qk, int32_t page_size,
                                  std::span<const int32_t> pages, std::span<const int32_t> rows) const;

 private:
  bench::Buffer scale_;
};

/// Holds the indexer's keys beside a cache.
class IndexerPool : public PagedPool<IndexerCache> {
 public:
  IndexerPool() = default;
  IndexerPool(int32_t page_size, int64_t num_pages, const Gpu* gpu);
  /// Returns these keys of a request, [keys, 128], dequantized. `operations` compute in the host's memory.
  Result<std::vector<float>> keys(const Operations& operations, std::span<const int32_t> pages,
                                  std::span<const int32_t> keys) const;
};

/// Returns how many heads the model's indexer has: where the model has none, but its layers choose, DeepSeek V3.2's 64.
inline int32_t indexer_heads(const ModelConfig& model) { return model.index_n_heads > 0 ? model.index_n_heads : 64; }

}  // namespace mla::cli::replay

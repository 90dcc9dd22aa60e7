// SPDX-License-Identifier: Apache-2.0
// One attention layer over a paged cache, computed by the library: what an engine would do between two projections.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/mla.h"
#include "mla/replay/projector.h"
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

/// Tokens `start` .. `start + count` of a request, all of them in the cache.
struct TokenRange {
  std::span<const int32_t> pages;  ///< of the whole request
  int32_t start = 0;
  int32_t count = 0;
};

struct LayerOptions {
  ModelConfig model;
  CacheFormat cache = CacheFormat::kBF16;
  int32_t page_size = 64;
  int32_t num_pages = 0;
  int32_t chunk = 4096;        ///< most prompt tokens of one call, and most keys that are up-projected at once
  DType dtype = DType::kBF16;  ///< of the activations
};

/// Memory that the library plans in; grows to the largest need.
class Workspace {
 public:
  std::span<std::byte> reserve(size_t bytes) {
    if (bytes > memory_.size()) memory_.resize(bytes + bytes / 2);
    return memory_;
  }

 private:
  std::vector<std::byte> memory_;
};

/// Errors are the library's. A recorder that is null records nothing.
class Layer {
 public:
  Layer(const LayerOptions& options, const Context& context, Projector& projector, const std::atomic<bool>& stop);

  const LayerOptions& options() const { return options_; }
  const Context& context() const { return context_; }
  const KvCache& cache() const { return cache_; }

  /// Writes latent rows [T, d_qk] into the cache's slots [T].
  Status append(const void* latents, std::span<const int64_t> slots, Recorder* recorder);

  /// Chunked prefill of new tokens, T in all: q and o (f32) are [T, heads.count, d] views of the heads `heads`, lse
  /// [T, heads.count] is scratch. The new tokens of all requests in one causal call, the tokens before them in unmasked
  /// calls of at most `chunk` keys, merged into o. Stops between calls once `stop` is set; was_cut_short() tells.
  Status prefill(const TensorView& q, std::span<const TokenRange> fresh, Heads heads, const TensorView& o,
                 const TensorView& lse, Recorder* recorder);

  /// Absorbed decode of one token per request (each range's only one) on `context`; the views hold [B, heads, d].
  Status decode(const Context& context, const TensorView& q_nope, const TensorView& q_pe,
                std::span<const TokenRange> requests, const TensorView& o, Recorder* recorder);

  bool was_cut_short() const { return cut_short_; }

 private:
  PageTable page_table(std::span<const TokenRange> ranges);
  Status load_keys(std::span<const TokenRange> ranges, Heads heads, Recorder* recorder);
  Status attend(const TensorView& q, std::span<const int32_t> qo_indptr, std::span<const int32_t> kv_indptr,
                Heads heads, bool causal, const TensorView& o, const TensorView& lse, Recorder* recorder);

  Status merge_context(const TensorView& q, const TokenRange& context, Heads heads, const TensorView& o,
                       const TensorView& lse, Recorder* recorder);

  LayerOptions options_;
  const Context& context_;
  Projector& projector_;
  const std::atomic<bool>& stop_;
  bool cut_short_ = false;
  bench::Buffer cache_memory_, latents_, keys_, values_, partial_o_, partial_lse_;
  KvCache cache_;
  Workspace workspace_;
  std::vector<int32_t> table_indptr_, table_, lengths_, starts_, out_indptr_;  // tables of the current call, reused
};

/// `view` restricted to `count` entries of dimension `dim`, beginning with `begin`.
TensorView slice(TensorView view, int32_t dim, int64_t begin, int64_t count);

}  // namespace mla::cli::replay

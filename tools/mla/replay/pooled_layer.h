// SPDX-License-Identifier: Apache-2.0
// Computes the kinds of attention layers of DeepSeek V4 and V4.1 over shared pools: a window pool holds every token's
// row, and compressed pools hold one row for every 4 and for every 128 tokens (V4), or for every 2 and for every token
// (V4.1). A page number stands for the same tokens in all of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mla/mla.h"
#include "mla/replay/cache_pool.h"
#include "mla/replay/layer.h"
#include "mla/replay/operations.h"
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

/// Says what a layer attends to beside the sliding window: rows of a pool.
struct PooledKind {
  std::string name = {};  ///< "window", which has no other rows, or "c4": rows that stand for 4 tokens each
  int32_t ratio = 1;      ///< tokens of a row; 1 for the window's
  int32_t topk = 0;       ///< so many rows, those with the indexer's largest logits; 0: all rows

  bool chooses() const { return topk > 0; }
};

/// Returns a model's kinds of layers, each once, behind that of the window alone. A kind's number is also its pool's;
/// layers that write a pool and layers that read it are one kind here.
std::vector<PooledKind> pooled_kinds(const ModelConfig& model);
inline constexpr size_t kWindow = 0;  ///< the number of the first

/// Describes one token that attends: its request's pages, and its position.
struct TokenPlace {
  std::span<const int32_t> pages;
  int32_t position = 0;

  /// Returns how many compressed rows of a kind's pool the token sees: those of groups that ended.
  int32_t visible(const PooledKind& kind) const { return (position + 1) / kind.ratio; }
};

/// Computes layers of all kinds. Errors are the library's. A recorder that is null records nothing.
class PooledLayer {
 public:
  /// Reads these of the options: model, cache, pool_cache, page_size (tokens), num_pages, dtype. attn_sink holds one
  /// logit per head.
  PooledLayer(const LayerOptions& options, Operations& operations, std::vector<float> attn_sink);

  static int64_t cache_bytes(const LayerOptions& options);

  /// Writes rows [T, d_qk] into the window pool's slots [T].
  Status append(const void* latents, std::span<const int64_t> slots, Recorder* recorder);
  /// Fills the compressed rows of all groups that end inside the ranges: the mean of the group's rows as the window
  /// pool holds them.
  Status compress(std::span<const TokenRange> ranges, Recorder* recorder);

  /// Chooses what each token attends to in a layer of the kind; attend() uses it until the next call.
  Status select(size_t kind, std::span<const TokenPlace> tokens, const IndexerQueries& queries, Phase phase,
                Recorder* recorder);
  /// Computes attention of the chosen tokens from `first` on, by `operations`; q and o [T, heads, d] are those of the
  /// heads from `first_head` on.
  Status attend(Operations& operations, const TensorView& q, int64_t first, int32_t first_head, const TensorView& o,
                Phase phase, Recorder* recorder);
  /// Returns the slots of the second pool that the token got, up to the first -1.
  std::span<const int32_t> selected(int64_t token) const;

  /// Computes the same attention of one token another way: its keys are gathered, those of `positions` from the second
  /// pool, and attended to by prefill_sparse. o is [1, H, d_v] f32.
  Status attend_gathered(size_t kind, const TokenPlace& token, std::span<const int32_t> positions, const TensorView& q,
                         const TensorView& o);
  /// Returns the indexer's logits of every row of the kind's pool that the token sees, computed by `operations`.
  Result<std::vector<float>> indexer_logits(Operations& operations, size_t kind, const TokenPlace& token,
                                            const IndexerQueries& query);
  /// Returns rows `start` ... `start + count - 1` of a request from a kind's pool (the window's: tokens), as f32
  /// [count, d_qk].
  Result<std::vector<float>> rows(size_t pool, std::span<const int32_t> pages, int32_t start, int32_t count);

  const LayerOptions& options() const { return options_; }
  const std::vector<PooledKind>& kinds() const { return kinds_; }
  int32_t rows_per_page(size_t kind) const { return options_.page_size / kinds_[kind].ratio; }

 private:
  Status gather(size_t kind, std::span<const TokenRange> row_ranges, const TensorView& out, Recorder* recorder);
  Status compress(size_t kind, std::span<const TokenRange> ranges, Recorder* recorder);
  void select_window(std::span<const TokenPlace> tokens);
  void select_all(const PooledKind& kind, int32_t page_rows, std::span<const TokenPlace> tokens);
  IndexerLogitsParams indexer_params(size_t kind, std::span<const TokenPlace> tokens, const IndexerQueries& queries,
                                     std::vector<float>& logits);

  LayerOptions options_;
  Operations& operations_;
  std::vector<float> attn_sink_;
  std::vector<PooledKind> kinds_;
  std::vector<CachePool> pools_;       // by kind
  std::vector<IndexerPool> indexers_;  // by kind; empty where nothing is chosen
  // These are what select() chose.
  size_t kind_ = kWindow;
  int32_t window_width_ = 0, extra_width_ = 0;
  std::vector<int32_t> window_, window_length_, extra_, extra_length_;
  // These are of the current call; their memory is reused.
  std::vector<int32_t> indptr_, table_, lengths_, starts_, out_indptr_;
  std::vector<int64_t> group_slots_;
  std::vector<float> logits_, group_rows_, pooled_;
};

}  // namespace mla::cli::replay

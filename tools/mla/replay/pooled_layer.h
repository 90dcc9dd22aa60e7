// SPDX-License-Identifier: Apache-2.0
// Computes the kinds of attention layers of DeepSeek V4 and V4.1 over shared pools: a window pool holds every token's
// row, and compressed pools hold one row for every 4 and for every 128 tokens (V4), or for every 2 and for every token
// (V4.1). A page number stands for the same tokens in all of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mla/mla.h"
#include "mla/replay/cache_pool.h"
#include "mla/replay/chooser.h"
#include "mla/replay/compressor.h"
#include "mla/replay/epilogue.h"
#include "mla/replay/generator.h"
#include "mla/replay/layer.h"
#include "mla/replay/operations.h"
#include "mla/replay/prologue.h"
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

/// Says what a layer attends to beside the sliding window: rows of a pool.
struct PooledKind {
  /// "window", which has no other rows, or "c4": rows that stand for 4 tokens each. "c1 within": rows of the same pool
  /// as "c1", chosen within the candidate blocks that "c1" picked (V4.1).
  std::string name = {};
  size_t pool = 0;    ///< the kind whose pool it reads: itself, if it writes one
  int32_t ratio = 1;  ///< tokens of a row; 1 for the window's
  int32_t topk = 0;   ///< so many rows, those with the indexer's largest logits; 0: all rows
  CandidateBlocks candidates = CandidateBlocks::kNone;

  bool chooses() const { return topk > 0; }
};

/// Names the phases in which new tokens are appended: without a pool of the layer's own, and with one.
struct AppendPhases {
  Phase prologue, compress;
};
inline constexpr AppendPhases kPrefillAppend = {Phase::kPrefillPrologue, Phase::kPrefillCompress};
inline constexpr AppendPhases kDecodeAppend = {Phase::kDecodePrologue, Phase::kDecodeCompress};

inline constexpr int32_t kCandidateBlock = 8;  ///< keys of a candidate block of V4.1

/// Returns a model's kinds of layers, each once, behind that of the window alone. Layers that read another layer's pool
/// and its choice of rows are of that layer's kind here; those that choose within its candidate blocks are not.
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
  /// The sink logits, and the weights of the compressors, are the generator's.
  PooledLayer(const LayerOptions& options, const Generator& generator, Operations& operations);
  PooledLayer(const PooledLayer&) = delete;
  PooledLayer& operator=(const PooledLayer&) = delete;

  /// Returns the bytes of all pages: rows, keys, and the state that compressors keep of every page.
  static int64_t cache_bytes(const LayerOptions& options);
  /// Returns the bytes of the compressors' activations, and of what they keep of every request.
  static int64_t compressor_bytes(const LayerOptions& options);
  /// Returns the numbers of tokens of which a page must be a multiple.
  static std::vector<int32_t> page_units(const LayerOptions& options);

  /// Returns the compressors, whose activations have to be generated for the tokens of each step.
  std::vector<Compressor*> compressors();
  /// Does what a layer of the kind does with new tokens: writes their rows into the window pool, and their queries; and
  /// where the kind has a pool of its own, pools the same tokens, in one call with that, and appends the indexer's
  /// keys.
  Status append(size_t kind, const NewTokens& tokens, const NewQueries& queries, const PooledTokens& pooled,
                const AppendPhases& phases, Recorder* recorder);

  /// Chooses what each token of the ranges attends to in a layer of the kind; attend() uses it until the next call. A
  /// kind that picks candidate blocks must come before those that choose within them.
  Status select(size_t kind, std::span<const TokenRange> ranges, const IndexerQueries& queries,
                const ChoicePhases& phases, Recorder* recorder);
  /// Computes attention of the chosen tokens from `first` on, by `operations`; q and o [T, heads, d] are those of the
  /// heads from `first_head` on.
  Status attend(Operations& operations, const TensorView& q, int64_t first, int32_t first_head, const TensorView& o,
                Phase phase, Recorder* recorder);
  /// Makes attention's outputs o [T, H, d_v] of tokens at these positions ready for the projection; epilogue() has
  /// them.
  Status finish(const TensorView& o, std::span<const int64_t> positions, Phase phase, Recorder* recorder);
  const Epilogue& epilogue() const { return epilogue_; }
  /// Returns the slots of the second pool that the token got, up to the first -1.
  std::span<const int32_t> selected(int64_t token) const;
  /// Returns the candidate blocks that were picked last for the token, with -1 behind them.
  std::span<const int32_t> candidates(int64_t token) const { return chooser_.candidates(token); }

  /// Computes the same attention of one token another way: its keys are gathered, those of `positions` from the second
  /// pool, and attended to by prefill_sparse. o is [1, H, d_v] f32.
  Status attend_gathered(size_t kind, const TokenPlace& token, std::span<const int32_t> positions, const TensorView& q,
                         const TensorView& o);
  /// Returns the indexer's logits of every row of the kind's pool that the token sees, computed by `operations`.
  Result<std::vector<float>> indexer_logits(Operations& operations, size_t kind, const TokenPlace& token,
                                            const IndexerQueries& query);
  /// Returns these rows of a request from a kind's pool (the window's: tokens), f32 [rows, d_qk], read by `operations`.
  Result<std::vector<float>> rows(Operations& operations, size_t pool, std::span<const int32_t> pages,
                                  std::span<const int32_t> rows);
  /// Returns these keys of a request's indexer over a kind's pool, [keys, 128]; `operations` say where they are read.
  Result<std::vector<float>> keys(const Operations& operations, size_t pool, std::span<const int32_t> pages,
                                  std::span<const int32_t> keys);

  const LayerOptions& options() const { return options_; }
  const std::vector<PooledKind>& kinds() const { return kinds_; }
  int32_t rows_per_page(size_t kind) const { return options_.page_size / kinds_[kind].ratio; }

 private:
  Status gather(size_t kind, const TokenRange& row_range, const TensorView& out);
  void select_window(std::span<const TokenRange> ranges);
  void select_all(const PooledKind& kind, int32_t page_rows, std::span<const TokenRange> ranges);
  Choice choice(size_t kind) const;

  LayerOptions options_;
  Operations& operations_;
  std::vector<float> attn_sink_;
  std::vector<PooledKind> kinds_;
  std::vector<CachePool> pools_;       // by kind; empty where another kind's is read
  std::vector<IndexerPool> indexers_;  // by kind; empty where nothing is chosen, or another kind's is read
  Angles angles_;
  Prologue prologue_;
  Epilogue epilogue_;
  std::vector<std::optional<Compressor>> row_compressors_, key_compressors_;  // by kind
  Chooser chooser_;
  // These are what select() chose.
  size_t kind_ = kWindow;
  int32_t window_width_ = 0, extra_width_ = 0;
  std::vector<int32_t> window_, window_length_, extra_, extra_length_;
  QueryBatch batch_;  // of the current call; its memory is reused
};

}  // namespace mla::cli::replay

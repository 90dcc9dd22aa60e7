// SPDX-License-Identifier: Apache-2.0
// Computes one attention layer over a paged cache with the library: what an engine would do between two projections.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/mla.h"
#include "mla/replay/cache_pool.h"
#include "mla/replay/chooser.h"
#include "mla/replay/compressor.h"
#include "mla/replay/generator.h"
#include "mla/replay/operations.h"
#include "mla/replay/projector.h"
#include "mla/replay/prologue.h"
#include "mla/replay/recorder.h"
#include "mla/replay/state_table.h"

namespace mla::cli::replay {

struct LayerOptions {
  ModelConfig model;
  CacheFormat cache = CacheFormat::kBF16;
  CacheFormat pool_cache = CacheFormat::kBF16;  ///< of the pools beside that of the window (DeepSeek V4 and V4.1)
  int32_t page_size = 64;                       ///< tokens of a page of one rank's cache
  int32_t num_pages = 0;
  int32_t chunk = 4096;             ///< most prompt tokens of one call, and most keys that are up-projected at once
  DType dtype = DType::kBF16;       ///< of the activations
  int32_t world = 1;                ///< ranks that share every request's tokens, each with a cache of its own
  int32_t max_batch = 64;           ///< requests that run at once
  int32_t drafts = 0;               ///< computed beside each answer token
  int32_t max_positions = 0;        ///< of the longest request
  int32_t topk = 0;                 ///< tokens that sparse decode takes; 0 = dense
  int32_t candidate_blocks = 2048;  ///< that the first indexer over a pool of V4.1 picks for the later ones
  bool shared_prefix = false;       ///< decode reads the rows that neighbours share once

  /// Returns how many tokens one page number stands for: page_size on every rank.
  int32_t page_tokens() const { return page_size * world; }
  /// Returns how many answer tokens a step has at most, drafts included.
  int64_t decode_rows() const { return int64_t{max_batch} * (drafts + 1); }
  /// Returns what a compressor has to hold. Only one rank compresses.
  CompressorRoom compressor_room() const {
    return {.dtype = dtype,
            .page_size = page_size,
            .num_pages = num_pages,
            .seats = max_batch,
            .drafts = drafts,
            .tokens = chunk + decode_rows()};
  }
};

/// Returns how many tokens share a key of the model's indexer.
int32_t index_pooled(const ModelConfig& model);

/// Computes one attention layer. Errors are the library's. A recorder that is null records nothing.
class Layer {
 public:
  Layer(const LayerOptions& options, const Generator& generator, Operations& operations, Projector& projector,
        const std::atomic<bool>& stop);
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  const LayerOptions& options() const { return options_; }

  /// Returns the bytes of the caches of all ranks.
  static int64_t cache_bytes(const LayerOptions& options);
  /// Returns how wide the lists of slots of sparse decode are.
  int32_t list_width() const { return choice_.token_list_width > 0 ? choice_.token_list_width : options_.topk; }
  /// Returns the compressor of the indexer's keys; null if a key is one token's.
  Compressor* key_compressor() { return key_compressor_ ? &*key_compressor_ : nullptr; }

  /// Writes the rows of new tokens, whose slots are page * page_tokens + place in the page, and their queries. Each
  /// rank gets its own tokens.
  Status append(const NewTokens& tokens, const NewQueries& queries, Phase phase, Recorder* recorder);
  /// Writes the indexer's keys of sparse decode, of the same tokens: `ranges` name them. Those that stand for several
  /// tokens are compressed from what was generated.
  Status append_keys(const void* latents, std::span<const int64_t> slots, std::span<const TokenRange> ranges,
                     Recorder* recorder);

  /// Computes chunked prefill of new tokens, T in all: q and o (f32) are [T, heads.count, d] views of the heads
  /// `heads`, lse [T, heads.count] is scratch. One causal call takes the new tokens of all requests; unmasked calls of
  /// at most `chunk` keys take the tokens before them, and are merged into o. Stops between calls once `stop` is set;
  /// was_cut_short() then returns true.
  Status prefill(const TensorView& q, std::span<const TokenRange> fresh, Heads heads, const TensorView& o,
                 const TensorView& lse, Recorder* recorder);

  /// Computes absorbed decode of the ranges' tokens, which are each request's last ones, by `operations`; the views
  /// hold [T, heads, d]. With several ranks each computes over its own keys, and the states are merged.
  Status decode(Operations& operations, const TensorView& q_nope, const TensorView& q_pe,
                std::span<const TokenRange> requests, const TensorView& o, Recorder* recorder);

  /// Returns the slots of the tokens that each of the ranges' tokens attends to, [T, list_width()], with -1 behind the
  /// last. The slots are valid until the next call.
  Result<TensorView> select(const IndexerQueries& queries, std::span<const TokenRange> requests,
                            const ChoicePhases& phases, Recorder* recorder);
  /// Computes absorbed attention to the slots [T, list_width()], by `operations`.
  Status decode_slots(Operations& operations, const TensorView& q_nope, const TensorView& q_pe, const TensorView& slots,
                      const TensorView& o, Phase phase, Recorder* recorder);
  /// Returns the indexer's logits of every key that a token (the range's only one) sees, computed by `operations`.
  Result<std::vector<float>> indexer_logits(Operations& operations, const IndexerQueries& query,
                                            const TokenRange& token);
  /// Returns these rows of a request, f32 [rows, d_qk], read by `operations`.
  Result<std::vector<float>> rows(Operations& operations, std::span<const int32_t> pages,
                                  std::span<const int32_t> rows);
  /// Returns these keys of a request, [keys, 128]; `operations` say where they are read.
  Result<std::vector<float>> keys(const Operations& operations, std::span<const int32_t> pages,
                                  std::span<const int32_t> keys);

  bool was_cut_short() const { return cut_short_; }

 private:
  ContextParallel share(int32_t rank) const { return {.rank = rank, .world = options_.world, .interleave = 1}; }
  enum class Lengths : uint8_t { kGlobal, kLocal };
  PageTable page_table(std::span<const TokenRange> ranges, const ContextParallel& share, Lengths lengths);
  void set_query_ranges(std::span<const TokenRange> ranges);
  Status gather(std::span<const TokenRange> ranges, const ContextParallel& share, const TensorView& out,
                Recorder* recorder);
  Status load_keys(std::span<const TokenRange> ranges, Heads heads, Recorder* recorder);
  Status attend(const TensorView& q, std::span<const int32_t> qo_indptr, std::span<const int32_t> kv_indptr,
                Heads heads, bool causal, const TensorView& o, const TensorView& lse, Recorder* recorder);
  Status merge_context(const TensorView& q, const TokenRange& context, Heads heads, const TensorView& o,
                       const TensorView& lse, Recorder* recorder);
  Status decode_rank(Operations& operations, int32_t rank, DecodeParams params, std::span<const TokenRange> requests,
                     Recorder* recorder);
  Status decode_ranks(Operations& operations, DecodeParams params, std::span<const TokenRange> requests,
                      Recorder* recorder);

  LayerOptions options_;
  Operations& operations_;
  Projector& projector_;
  const std::atomic<bool>& stop_;
  bool cut_short_ = false;
  std::vector<CachePool> caches_;  // one per rank
  IndexerPool indexer_;
  Angles angles_, no_angles_;
  Prologue prologue_;
  std::optional<Compressor> key_compressor_;
  Chooser chooser_;
  Choice choice_;
  QueryBatch batch_;
  bench::Buffer latents_, keys_, values_, partial_o_, partial_lse_;
  // These are of the current call; their memory is reused.
  std::vector<int32_t> table_indptr_, table_, lengths_, starts_, out_indptr_, qo_indptr_;
  std::vector<int64_t> rank_slots_;
  std::vector<float> rank_o_, rank_lse_;
};

/// Returns the pages, each once, that the slots of a contiguous view (i32, -1 = none) lie in.
std::vector<int32_t> pages_of(const TensorView& slots, int32_t page_size);

/// Returns the view of the channels that stand in for each row's indexer key: the last ones in front of the rotary
/// ones. (The view comes by value: GCC 12.2 at -O1 left out the making of a temporary that was bound to a reference.)
TensorView indexer_keys(TensorView rows, int64_t kv_lora_rank);

}  // namespace mla::cli::replay

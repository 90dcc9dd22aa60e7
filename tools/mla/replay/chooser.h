// SPDX-License-Identifier: Apache-2.0
// Chooses the keys that sparse attention takes: the indexer's logits, the largest of them, the slots where those lie.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/mla.h"
#include "mla/replay/operations.h"
#include "mla/replay/recorder.h"
#include "mla/replay/state_table.h"

namespace mla::cli::replay {

/// Holds queries of the sparse indexer, e4m3 [T, its heads, 128], and their weights, f32 [T, its heads].
struct IndexerQueries {
  const void* q = nullptr;
  const float* weights = nullptr;
};

/// Describes the query tokens of a call: the last tokens of requests, and the pages of these.
class QueryBatch {
 public:
  /// The ranges' tokens are queries. A page holds `page_size` tokens.
  void assign(std::span<const TokenRange> ranges, int32_t page_size);

  int64_t num_tokens() const { return std::ssize(positions_); }
  std::span<const int32_t> positions() const { return positions_; }  ///< of the queries
  int32_t longest() const { return longest_; }                       ///< tokens of the longest request
  PageTable pages() const;  ///< valid for pools too, whose pages stand for as many tokens
  TensorView qo_indptr() const { return ints(qo_indptr_); }
  std::span<const int32_t> page_list() const { return kv_indices_; }

 private:
  std::vector<int32_t> kv_indptr_, kv_indices_, kv_len_, qo_indptr_, positions_;
  int32_t longest_ = 0;
};

/// Names the phases in which the time of a choice is booked.
struct ChoicePhases {
  Phase indexer, top_k, slots;
};
inline constexpr ChoicePhases kPrefillChoice = {Phase::kPrefillIndexer, Phase::kPrefillTopK, Phase::kPrefillSlots};
inline constexpr ChoicePhases kDecodeChoice = {Phase::kDecodeIndexer, Phase::kDecodeTopK, Phase::kDecodeSlots};

/// Says what is chosen, and how.
struct Choice {
  IndexerCache keys;
  int32_t heads = 0;      ///< of the indexer
  int32_t ratio = 1;      ///< tokens that a key stands for
  int32_t topk = 0;       ///< keys
  int32_t page_size = 0;  ///< rows of a page of what is attended to
  /// Attention is to all tokens of the chosen keys, and to those of the incomplete group (GLM-5.3-Flash): lists are so
  /// wide. 0: to one row for each key.
  int32_t token_list_width = 0;
  int32_t block_size = 1;  ///< keys of a candidate block
  int32_t picks = 0;       ///< candidate blocks that are chosen, too (DeepSeek V4.1)
  bool within = false;     ///< keys are chosen within the blocks that were picked last, for the same tokens
};

class Chooser {
 public:
  explicit Chooser(Operations& operations) : operations_(operations) {}

  /// Chooses for each query of the batch.
  Status choose(const QueryBatch& batch, const Choice& choice, const IndexerQueries& queries,
                const ChoicePhases& phases, Recorder* recorder);
  /// Returns the slots of the last choice, [T, width], in a row's front and with -1 behind them.
  TensorView slots() const { return contiguous(slots_.data(), DType::kI32, {std::ssize(counts_), width_}); }
  const std::vector<int32_t>& slot_list() const { return slots_; }
  const std::vector<int32_t>& counts() const { return counts_; }  ///< [T], valid slots of each row
  int32_t width() const { return width_; }
  /// Returns the candidate blocks that were picked last for a query, with -1 behind them.
  std::span<const int32_t> candidates(int64_t query) const;

  /// Returns the logits of all keys that the queries of a batch see, by any operations, [T, num_keys].
  static Result<std::vector<float>> logits(Operations& operations, const QueryBatch& batch, const Choice& choice,
                                           const IndexerQueries& queries);

 private:
  IndexerLogitsParams indexer_params(const QueryBatch& batch, const Choice& choice, const IndexerQueries& queries);
  Status pick_blocks(const QueryBatch& batch, const Choice& choice, const TensorView& logits, Phase phase,
                     Recorder* recorder);
  Status find_slots(const QueryBatch& batch, const Choice& choice, Phase phase, Recorder* recorder);

  Operations& operations_;
  int32_t width_ = 0;
  int64_t num_candidates_ = 0;
  std::vector<float> logits_;
  std::vector<int32_t> visible_, indices_, candidates_, slots_, counts_;
};

}  // namespace mla::cli::replay

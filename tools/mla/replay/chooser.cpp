// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/chooser.h"

#include <algorithm>

namespace mla::cli::replay {
namespace {

// Returns how many keys a row of logits has: as many as the longest request, and at least one.
int64_t num_keys(const QueryBatch& batch, const Choice& choice) { return std::max(batch.longest() / choice.ratio, 1); }

IndexerLogitsParams params_of(const QueryBatch& batch, const Choice& choice, const IndexerQueries& queries) {
  IndexerLogitsParams params;
  params.q = contiguous(queries.q, DType::kE4M3, {batch.num_tokens(), choice.heads, kIndexerLayout.head_dim});
  params.weights = contiguous(queries.weights, DType::kF32, {batch.num_tokens(), choice.heads});
  params.cache = choice.keys;
  params.pages = batch.pages();
  params.qo_indptr = batch.qo_indptr();
  params.ratio = choice.ratio;
  return params;
}

}  // namespace

void QueryBatch::assign(std::span<const TokenRange> ranges, int32_t page_size) {
  kv_indptr_.assign(1, 0);
  qo_indptr_.assign(1, 0);
  kv_indices_.clear();
  kv_len_.clear();
  positions_.clear();
  longest_ = 0;
  for (const TokenRange& range : ranges) {
    const int32_t length = range.start + range.count;
    const auto pages = range.pages.first(static_cast<size_t>((length + page_size - 1) / page_size));
    kv_indices_.insert(kv_indices_.end(), pages.begin(), pages.end());
    kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
    kv_len_.push_back(length);
    qo_indptr_.push_back(qo_indptr_.back() + range.count);
    for (int32_t position = range.start; position < length; ++position) positions_.push_back(position);
    longest_ = std::max(longest_, length);
  }
}

PageTable QueryBatch::pages() const {
  return {.kv_indptr = ints(kv_indptr_), .kv_indices = ints(kv_indices_), .block_table = {}, .kv_len = ints(kv_len_)};
}

IndexerLogitsParams Chooser::indexer_params(const QueryBatch& batch, const Choice& choice,
                                            const IndexerQueries& queries) {
  IndexerLogitsParams params = params_of(batch, choice, queries);
  int64_t width = num_keys(batch, choice);
  if (choice.within) {
    width = num_candidates_ * choice.block_size;
    params.blocks = contiguous(candidates_.data(), DType::kI32, {batch.num_tokens(), num_candidates_});
    params.block_size = choice.block_size;
  }
  logits_.resize(static_cast<size_t>(batch.num_tokens() * width));
  params.logits = contiguous(logits_.data(), DType::kF32, {batch.num_tokens(), width});
  visible_.clear();
  for (int32_t position : batch.positions()) visible_.push_back((position + 1) / choice.ratio);
  return params;
}

Status Chooser::choose(const QueryBatch& batch, const Choice& choice, const IndexerQueries& queries,
                       const ChoicePhases& phases, Recorder* recorder) {
  IndexerLogitsParams indexer;
  TopKParams top_k;
  timed(recorder, Phase::kPlan, [&] {
    indexer = indexer_params(batch, choice, queries);
    indices_.resize(static_cast<size_t>(batch.num_tokens() * choice.topk));
    top_k.logits = indexer.logits;
    top_k.blocks = indexer.blocks;
    top_k.block_size = indexer.block_size;
    if (!choice.within) top_k.lengths = ints(visible_);
    top_k.indices = contiguous(indices_.data(), DType::kI32, {batch.num_tokens(), choice.topk});
  });
  if (Status status = operations_.run(indexer, phases.indexer, recorder); !status.ok()) return status;
  if (choice.picks > 0)
    if (Status status = pick_blocks(batch, choice, indexer.logits, phases.top_k, recorder); !status.ok()) return status;
  if (Status status = operations_.run(top_k, phases.top_k, recorder); !status.ok()) return status;
  return find_slots(batch, choice, phases.slots, recorder);
}

// Short requests have fewer blocks than are picked: a list is no wider than the longest one needs.
Status Chooser::pick_blocks(const QueryBatch& batch, const Choice& choice, const TensorView& logits, Phase phase,
                            Recorder* recorder) {
  const int64_t most = (num_keys(batch, choice) + choice.block_size - 1) / choice.block_size;
  num_candidates_ = std::min<int64_t>(choice.picks, most);
  candidates_.resize(static_cast<size_t>(batch.num_tokens() * num_candidates_));
  TopKParams params;
  params.logits = logits;
  params.lengths = ints(visible_);
  params.block_size = choice.block_size;
  params.indices = contiguous(candidates_.data(), DType::kI32, {batch.num_tokens(), num_candidates_});
  return operations_.run(params, phase, recorder);
}

Status Chooser::find_slots(const QueryBatch& batch, const Choice& choice, Phase phase, Recorder* recorder) {
  const bool lists_tokens = choice.token_list_width > 0;
  width_ = lists_tokens ? choice.token_list_width : choice.topk;
  slots_.resize(static_cast<size_t>(batch.num_tokens() * width_));
  counts_.resize(static_cast<size_t>(batch.num_tokens()));
  PhysicalSlotsParams params;
  params.indices = contiguous(indices_.data(), DType::kI32, {batch.num_tokens(), choice.topk});
  params.qo_indptr = batch.qo_indptr();
  params.pages = batch.pages();
  params.page_size = choice.page_size;
  params.ratio = choice.ratio;
  params.list_tokens = lists_tokens;
  params.compact = lists_tokens;  // the incomplete group's tokens stand behind room for all keys
  params.slots = slots();
  params.valid_count = ints(counts_);
  return operations_.run(params, phase, recorder);
}

std::span<const int32_t> Chooser::candidates(int64_t query) const {
  return std::span(candidates_)
      .subspan(static_cast<size_t>(query * num_candidates_), static_cast<size_t>(num_candidates_));
}

Result<std::vector<float>> Chooser::logits(Operations& operations, const QueryBatch& batch, const Choice& choice,
                                           const IndexerQueries& queries) {
  const int64_t width = num_keys(batch, choice);
  std::vector<float> logits(static_cast<size_t>(batch.num_tokens() * width));
  IndexerLogitsParams params = params_of(batch, choice, queries);
  params.logits = contiguous(logits.data(), DType::kF32, {batch.num_tokens(), width});
  if (Status status = operations.run(params, Phase::kCheck, nullptr); !status.ok()) return status;
  return logits;
}

}  // namespace mla::cli::replay

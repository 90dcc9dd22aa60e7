// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/pooled_layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace mla::cli::replay {
namespace {

CacheFormat format_of(const LayerOptions& options, size_t kind) {
  return kind == kWindow ? options.cache : options.pool_cache;
}

}  // namespace

std::vector<PooledKind> pooled_kinds(const ModelConfig& model) {
  std::vector<PooledKind> kinds = {{.name = "window"}};
  for (const mla::LayerKind& layer : model.layers) {
    const PooledKind kind = {
        .name = fmt::format("c{}", layer.compress_ratio), .ratio = layer.compress_ratio, .topk = layer.index_topk};
    if (kind.ratio > 0 && std::ranges::find(kinds, kind.name, &PooledKind::name) == kinds.end()) kinds.push_back(kind);
  }
  return kinds;
}

PooledLayer::PooledLayer(const LayerOptions& options, Operations& operations, std::vector<float> attn_sink)
    : options_(options),
      operations_(operations),
      attn_sink_(std::move(attn_sink)),
      kinds_(pooled_kinds(options.model)) {
  const ModelConfig& model = options.model;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    pools_.emplace_back(format_of(options, kind), model.d_qk(), model.kv_lora_rank, rows_per_page(kind),
                        options.num_pages, operations.gpu());
    indexers_.push_back(kinds_[kind].chooses() ? IndexerPool(rows_per_page(kind), options.num_pages, operations.gpu())
                                               : IndexerPool());
  }
}

int64_t PooledLayer::cache_bytes(const LayerOptions& options) {
  const std::vector<PooledKind> kinds = pooled_kinds(options.model);
  int64_t bytes = 0;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const int32_t rows = options.page_size / kinds[kind].ratio;
    bytes += page_bytes(format_of(options, kind), options.model.d_qk(), rows, true);
    if (kinds[kind].chooses()) bytes += indexer_page_bytes(rows);
  }
  return bytes * options.num_pages;
}

Status PooledLayer::append(const void* latents, std::span<const int64_t> slots, Recorder* recorder) {
  const int64_t count = std::ssize(slots);
  AppendParams params;
  params.kv = contiguous(latents, options_.dtype, {count, options_.model.d_qk()});
  params.slot_mapping = contiguous(slots.data(), DType::kI64, {count});
  params.cache = pools_[kWindow].cache();
  return operations_.run(params, Phase::kAppend, recorder);
}

// Gathers ranges of a pool's rows, one range behind the other. `start` and `count` of a range are in rows of the pool.
Status PooledLayer::gather(size_t kind, std::span<const TokenRange> row_ranges, const TensorView& out,
                           Recorder* recorder) {
  const int32_t page_rows = rows_per_page(kind);
  indptr_.assign(1, 0);
  out_indptr_.assign(1, 0);
  table_.clear();
  lengths_.clear();
  starts_.clear();
  for (const TokenRange& range : row_ranges) {
    const int32_t length = range.start + range.count;
    table_.insert(table_.end(), range.pages.begin(), range.pages.begin() + (length + page_rows - 1) / page_rows);
    indptr_.push_back(static_cast<int32_t>(table_.size()));
    lengths_.push_back(length);
    starts_.push_back(range.start);
    out_indptr_.push_back(out_indptr_.back() + range.count);
  }
  GatherParams params;
  params.cache = pools_[kind].cache();
  params.pages = {.kv_indptr = ints(indptr_), .kv_indices = ints(table_), .block_table = {}, .kv_len = ints(lengths_)};
  params.token_start = ints(starts_);
  params.out_indptr = ints(out_indptr_);
  params.out_kv = out;
  return operations_.run(params, Phase::kCompress, recorder);
}

Result<std::vector<float>> PooledLayer::rows(size_t kind, std::span<const int32_t> pages, int32_t start,
                                             int32_t count) {
  const int64_t width = options_.model.d_qk();
  std::vector<float> values(static_cast<size_t>(count * width));
  const TokenRange range{.pages = pages, .start = start, .count = count};
  Status status = gather(kind, std::span(&range, 1), contiguous(values.data(), DType::kF32, {count, width}), nullptr);
  if (!status.ok()) return status;
  return values;
}

Status PooledLayer::compress(std::span<const TokenRange> ranges, Recorder* recorder) {
  for (size_t kind = kWindow + 1; kind < kinds_.size(); ++kind)
    if (Status status = compress(kind, ranges, recorder); !status.ok()) return status;
  return {};
}

Status PooledLayer::compress(size_t kind, std::span<const TokenRange> ranges, Recorder* recorder) {
  const int32_t ratio = kinds_[kind].ratio, page_tokens = options_.page_size;
  const int64_t width = options_.model.d_qk();
  std::vector<TokenRange> groups;  // of tokens, whole groups
  group_slots_.clear();
  for (const TokenRange& range : ranges) {
    const int32_t first = range.start / ratio * ratio, end = (range.start + range.count) / ratio * ratio;
    if (first == end) continue;
    groups.push_back({.pages = range.pages, .start = first, .count = end - first});
    for (int32_t token = first; token < end; token += ratio)
      group_slots_.push_back(int64_t{range.pages[static_cast<size_t>(token / page_tokens)]} * rows_per_page(kind) +
                             token % page_tokens / ratio);
  }
  const int64_t count = std::ssize(group_slots_);
  if (count == 0) return {};
  group_rows_.resize(static_cast<size_t>(count * ratio * width));
  pooled_.resize(static_cast<size_t>(count * width));
  const TensorView all = contiguous(group_rows_.data(), DType::kF32, {count * ratio, width});
  if (Status status = gather(kWindow, groups, all, recorder); !status.ok()) return status;
  timed(recorder, Phase::kCompress, [&] {
    for (int64_t group = 0; group < count; ++group) {
      float* mean = pooled_.data() + group * width;
      std::fill_n(mean, width, 0.0F);
      for (int64_t token = group * ratio; token < (group + 1) * ratio; ++token)
        for (int64_t c = 0; c < width; ++c) mean[c] += group_rows_[static_cast<size_t>(token * width + c)];
      for (int64_t c = 0; c < width; ++c) mean[c] /= static_cast<float>(ratio);
    }
  });
  AppendParams append;
  append.kv = contiguous(pooled_.data(), DType::kF32, {count, width});
  append.slot_mapping = contiguous(group_slots_.data(), DType::kI64, {count});
  append.cache = pools_[kind].cache();
  Status status = operations_.run(append, Phase::kCompress, recorder);
  if (!status.ok() || !kinds_[kind].chooses()) return status;
  AppendIndexerParams indexer;
  indexer.k = indexer_keys(append.kv, options_.model.kv_lora_rank);
  indexer.slot_mapping = append.slot_mapping;
  indexer.cache = indexers_[kind].cache();
  return operations_.run(indexer, Phase::kCompress, recorder);
}

void PooledLayer::select_window(std::span<const TokenPlace> tokens) {
  window_width_ = options_.model.sliding_window;
  window_.assign(tokens.size() * static_cast<size_t>(window_width_), -1);
  window_length_.clear();
  for (size_t t = 0; t < tokens.size(); ++t) {
    const TokenPlace& token = tokens[t];
    const int32_t count = std::min(token.position + 1, window_width_), page = options_.page_size;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t position = token.position + 1 - count + i;
      window_[t * static_cast<size_t>(window_width_) + static_cast<size_t>(i)] =
          token.pages[static_cast<size_t>(position / page)] * page + position % page;
    }
    window_length_.push_back(count);
  }
}

void PooledLayer::select_all(const PooledKind& kind, int32_t page_rows, std::span<const TokenPlace> tokens) {
  extra_width_ = 1;
  for (const TokenPlace& token : tokens) extra_width_ = std::max(extra_width_, token.visible(kind));
  extra_.assign(tokens.size() * static_cast<size_t>(extra_width_), -1);
  extra_length_.clear();
  for (size_t t = 0; t < tokens.size(); ++t) {
    const int32_t count = tokens[t].visible(kind);
    for (int32_t i = 0; i < count; ++i)
      extra_[t * static_cast<size_t>(extra_width_) + static_cast<size_t>(i)] =
          tokens[t].pages[static_cast<size_t>(i / page_rows)] * page_rows + i % page_rows;
    extra_length_.push_back(count);
  }
}

// Every token is a request of its own: what it sees grows with every row, not with every token.
IndexerLogitsParams PooledLayer::indexer_params(size_t kind, std::span<const TokenPlace> tokens,
                                                const IndexerQueries& queries, std::vector<float>& logits) {
  const int32_t page_rows = rows_per_page(kind);
  indptr_.assign(1, 0);
  table_.clear();
  lengths_.clear();
  int64_t longest = 1;
  for (const TokenPlace& token : tokens) {
    const int32_t length = token.visible(kinds_[kind]);
    table_.insert(table_.end(), token.pages.begin(), token.pages.begin() + (length + page_rows - 1) / page_rows);
    indptr_.push_back(static_cast<int32_t>(table_.size()));
    lengths_.push_back(length);
    longest = std::max<int64_t>(longest, length);
  }
  const int64_t count = std::ssize(tokens);
  logits.resize(static_cast<size_t>(count * longest));
  IndexerLogitsParams params;
  const int64_t heads = indexer_heads(options_.model);
  params.q = contiguous(queries.q, DType::kE4M3, {count, heads, kIndexerLayout.head_dim});
  params.weights = contiguous(queries.weights, DType::kF32, {count, heads});
  params.cache = indexers_[kind].cache();
  params.pages = {.kv_indptr = ints(indptr_), .kv_indices = ints(table_), .block_table = {}, .kv_len = ints(lengths_)};
  params.logits = contiguous(logits.data(), DType::kF32, {count, longest});
  return params;
}

Status PooledLayer::select(size_t kind, std::span<const TokenPlace> tokens, const IndexerQueries& queries, Phase phase,
                           Recorder* recorder) {
  kind_ = kind;
  timed(recorder, Phase::kPlan, [&] { select_window(tokens); });
  if (kind == kWindow) return {};
  if (!kinds_[kind].chooses()) {
    timed(recorder, Phase::kPlan, [&] { select_all(kinds_[kind], rows_per_page(kind), tokens); });
    return {};
  }
  extra_width_ = kinds_[kind].topk;
  extra_.resize(tokens.size() * static_cast<size_t>(extra_width_));
  extra_length_.resize(tokens.size());
  IndexerTopKParams params;
  timed(recorder, Phase::kPlan, [&] { params.indexer = indexer_params(kind, tokens, queries, logits_); });
  params.pages = params.indexer.pages;
  params.page_size = rows_per_page(kind);
  params.slots = contiguous(extra_.data(), DType::kI32, {std::ssize(tokens), extra_width_});
  params.valid_count = ints(extra_length_);
  return operations_.run(params, phase, recorder);
}

std::span<const int32_t> PooledLayer::selected(int64_t token) const {
  if (kind_ == kWindow) return {};
  return std::span(extra_).subspan(static_cast<size_t>(token * extra_width_),
                                   static_cast<size_t>(extra_length_[static_cast<size_t>(token)]));
}

Status PooledLayer::attend(Operations& operations, const TensorView& q, int64_t first, int32_t first_head,
                           const TensorView& o, Phase phase, Recorder* recorder) {
  const int64_t count = q.shape[0], heads = q.shape[1];
  const auto rows_of = [&](const std::vector<int32_t>& values, int64_t width) {
    return contiguous(values.data() + first * width, DType::kI32, {count, width});
  };
  const auto sparse_pool = [&](size_t kind, const TensorView& indices,
                               const std::vector<int32_t>& lengths) -> Result<SparsePool> {
    std::vector<int32_t> pages;
    if (&operations != &operations_) pages = pages_of(indices, rows_per_page(kind));
    const auto cache = pools_[kind].cache(operations, pages);
    if (!cache.ok()) return cache.status();
    return SparsePool{
        .cache = *cache, .indices = indices, .topk_length = contiguous(lengths.data() + first, DType::kI32, {count})};
  };
  DecodeSparseParams params;
  params.q = q;
  const auto window = sparse_pool(kWindow, rows_of(window_, window_width_), window_length_);
  if (!window.ok()) return window.status();
  params.pool = *window;
  if (kind_ != kWindow) {
    const auto extra = sparse_pool(kind_, rows_of(extra_, extra_width_), extra_length_);
    if (!extra.ok()) return extra.status();
    params.extra_pool = *extra;
  }
  params.options.attn_sink = contiguous(attn_sink_.data() + first_head, DType::kF32, {heads});
  params.sm_scale = options_.model.sm_scale();
  params.o = o;
  Status status = operations.plan_and_run(params, phase, recorder);
  if (recorder == nullptr) return status;
  const auto sum = [&](const std::vector<int32_t>& lengths) {
    return std::accumulate(lengths.begin() + first, lengths.begin() + first + count, 0.0);
  };
  const double keys = sum(window_length_) + (kind_ != kWindow ? sum(extra_length_) : 0.0);
  const double flops = 2.0 * keys * static_cast<double>(heads) * (options_.model.d_qk() + options_.model.d_v());
  if (phase == Phase::kDecodeAttention)
    recorder->add_decode_flops(flops);
  else
    recorder->add_prefill_flops(flops);
  return status;
}

Status PooledLayer::attend_gathered(size_t kind, const TokenPlace& token, std::span<const int32_t> positions,
                                    const TensorView& q, const TensorView& o) {
  const int64_t width = options_.model.d_qk();
  const int32_t window = std::min(token.position + 1, options_.model.sliding_window),
                extra = token.visible(kinds_[kind]);
  const DType dtype = value_dtype(kv_layout(options_.cache).nope.element);
  const int64_t total = window + (kind == kWindow ? 0 : extra);
  std::vector<uint16_t> keys(static_cast<size_t>(total * width));
  const TensorView kv = contiguous(keys.data(), dtype, {total, width});
  const TokenRange recent{.pages = token.pages, .start = token.position + 1 - window, .count = window};
  Status status = gather(kWindow, std::span(&recent, 1), slice(kv, 0, 0, window), nullptr);
  if (!status.ok()) return status;
  std::vector<int32_t> indices(static_cast<size_t>(window));
  std::iota(indices.begin(), indices.end(), 0);
  if (kind != kWindow && extra > 0) {
    const TokenRange pooled{.pages = token.pages, .start = 0, .count = extra};
    status = gather(kind, std::span(&pooled, 1), slice(kv, 0, window, extra), nullptr);
    if (!status.ok()) return status;
    for (int32_t position : positions) indices.push_back(window + position);
  }
  PrefillSparseParams params;
  params.q = q;
  params.kv = kv;
  params.indices = contiguous(indices.data(), DType::kI32, {1, std::ssize(indices)});
  params.options.attn_sink = contiguous(attn_sink_.data(), DType::kF32, {q.shape[1]});
  params.sm_scale = options_.model.sm_scale();
  params.o = o;
  return operations_.plan_and_run(params, Phase::kCheck, nullptr);
}

Result<std::vector<float>> PooledLayer::indexer_logits(Operations& operations, size_t kind, const TokenPlace& token,
                                                       const IndexerQueries& query) {
  std::vector<float> logits;
  IndexerLogitsParams params = indexer_params(kind, std::span(&token, 1), query, logits);
  const auto cache = indexers_[kind].cache(operations, table_);
  if (!cache.ok()) return cache.status();
  params.cache = *cache;
  if (Status status = operations.run(params, Phase::kCheck, nullptr); !status.ok()) return status;
  logits.resize(static_cast<size_t>(token.visible(kinds_[kind])));
  return logits;
}

}  // namespace mla::cli::replay

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

/// Holds what makes the rows of a kind's pool, and what makes the keys of its indexer.
struct Compressors {
  std::optional<CompressorShape> rows, keys;
};

Compressors compressors_of(const ModelConfig& model, const std::vector<PooledKind>& kinds, size_t kind) {
  if (kind == kWindow || kinds[kind].pool != kind) return {};
  Compressors shapes = {.rows = pool_compressor(model, kinds[kind].ratio), .keys = std::nullopt};
  if (kinds[kind].chooses()) shapes.keys = key_compressor(model, kinds[kind].ratio);
  return shapes;
}

std::vector<CompressorShape> all_compressors(const ModelConfig& model) {
  const std::vector<PooledKind> kinds = pooled_kinds(model);
  std::vector<CompressorShape> all;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const Compressors shapes = compressors_of(model, kinds, kind);
    if (shapes.rows) all.push_back(*shapes.rows);
    if (shapes.keys) all.push_back(*shapes.keys);
  }
  return all;
}

}  // namespace

std::vector<PooledKind> pooled_kinds(const ModelConfig& model) {
  std::vector<PooledKind> kinds = {{.name = "window"}};
  for (const mla::LayerKind& layer : model.layers) {
    if (layer.compress_ratio == 0) continue;
    const bool within = layer.candidates == CandidateBlocks::kWithin && layer.index_heads > 0;
    if (!within && !layer.owns_pool) continue;
    const std::string pool = fmt::format("c{}", layer.compress_ratio);
    PooledKind kind = {.name = within ? pool + " within" : pool,
                       .pool = kinds.size(),
                       .ratio = layer.compress_ratio,
                       .topk = layer.index_topk,
                       .candidates = layer.candidates};
    if (std::ranges::find(kinds, kind.name, &PooledKind::name) != kinds.end()) continue;
    if (within) kind.pool = static_cast<size_t>(std::ranges::find(kinds, pool, &PooledKind::name) - kinds.begin());
    kinds.push_back(kind);
  }
  return kinds;
}

PooledLayer::PooledLayer(const LayerOptions& options, const Generator& generator, Operations& operations)
    : options_(options),
      operations_(operations),
      attn_sink_(generator.attn_sink()),
      kinds_(pooled_kinds(options.model)),
      angles_(generator, options.model.qk_rope_head_dim, options.max_positions, operations.gpu()),
      prologue_(options.model, options.dtype, generator, angles_),
      epilogue_(options.model, angles_),
      chooser_(operations) {
  const ModelConfig& model = options.model;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const int32_t rows = rows_per_page(kind);
    const bool owns = kinds_[kind].pool == kind;
    pools_.push_back(owns ? CachePool(format_of(options, kind), model.d_qk(), model.kv_lora_rank, rows,
                                      options.num_pages, operations.gpu())
                          : CachePool());
    indexers_.push_back(owns && kinds_[kind].chooses() ? IndexerPool(rows, options.num_pages, operations.gpu())
                                                       : IndexerPool());
    const Compressors shapes = compressors_of(model, kinds_, kind);
    const auto make = [&](const std::optional<CompressorShape>& shape) -> std::optional<Compressor> {
      if (!shape) return std::nullopt;
      return Compressor(*shape, options.compressor_room(), generator, angles_, operations);
    };
    row_compressors_.push_back(make(shapes.rows));
    key_compressors_.push_back(make(shapes.keys));
  }
}

int64_t PooledLayer::cache_bytes(const LayerOptions& options) {
  const std::vector<PooledKind> kinds = pooled_kinds(options.model);
  int64_t bytes = 0;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    if (kinds[kind].pool != kind) continue;
    const int32_t rows = options.page_size / kinds[kind].ratio;
    bytes += page_bytes(format_of(options, kind), options.model.d_qk(), rows, true);
    if (kinds[kind].chooses()) bytes += indexer_page_bytes(rows);
  }
  for (const CompressorShape& shape : all_compressors(options.model))
    bytes += Compressor::page_bytes(shape, options.drafts);
  return bytes * options.num_pages;
}

int64_t PooledLayer::compressor_bytes(const LayerOptions& options) {
  int64_t bytes = int64_t{options.max_positions} * options.model.qk_rope_head_dim * static_cast<int64_t>(sizeof(float));
  for (const CompressorShape& shape : all_compressors(options.model))
    bytes += Compressor::memory_needed(shape, options.compressor_room());
  return bytes;
}

std::vector<int32_t> PooledLayer::page_units(const LayerOptions& options) {
  std::vector<int32_t> units;
  for (const CompressorShape& shape : all_compressors(options.model))
    units.push_back(shape.overlap ? StateTable::block_size(shape, options.drafts) : shape.ratio);
  return units;
}

std::vector<Compressor*> PooledLayer::compressors() {
  std::vector<Compressor*> all;
  for (auto* list : {&row_compressors_, &key_compressors_})
    for (std::optional<Compressor>& compressor : *list)
      if (compressor) all.push_back(&*compressor);
  return all;
}

Status PooledLayer::append(size_t kind, const NewTokens& tokens, const NewQueries& queries, const PooledTokens& pooled,
                           const AppendPhases& phases, Recorder* recorder) {
  const KvCache window = pools_[kWindow].cache();
  if (!row_compressors_[kind]) return prologue_.run(operations_, tokens, queries, window, phases.prologue, recorder);
  Compressor& rows = *row_compressors_[kind];
  CompressParams params;
  params.cache = pools_[kind].cache();
  params.append = prologue_.params(tokens, queries, window);
  if (Status status = rows.run(operations_, params, pooled, phases.compress, recorder); !status.ok()) return status;
  if (!kinds_[kind].chooses()) return {};
  const IndexerCache indexer = indexers_[kind].cache();
  if (key_compressors_[kind])
    return key_compressors_[kind]->run(operations_, {.indexer = indexer}, pooled, phases.compress, recorder);
  AppendIndexerParams keys;
  keys.k = indexer_keys(rows.latents(), options_.model.kv_lora_rank);
  keys.slot_mapping = rows.slots();
  keys.cache = indexer;
  return operations_.run(keys, Phase::kAppendKeys, recorder);
}

// Gathers a range of a pool's rows. Its `start` and `count` are in rows of the pool.
Status PooledLayer::gather(size_t kind, const TokenRange& row_range, const TensorView& out) {
  const int32_t page_rows = rows_per_page(kind), length = row_range.start + row_range.count;
  const std::vector<int32_t> kv_indptr = {0, (length + page_rows - 1) / page_rows}, kv_len = {length},
                             start = {row_range.start}, out_indptr = {0, row_range.count};
  GatherParams params;
  params.cache = pools_[kind].cache();
  params.pages = {.kv_indptr = ints(kv_indptr),
                  .kv_indices = contiguous(row_range.pages.data(), DType::kI32, {std::ssize(row_range.pages)}),
                  .block_table = {},
                  .kv_len = ints(kv_len)};
  params.token_start = ints(start);
  params.out_indptr = ints(out_indptr);
  params.out_kv = out;
  return operations_.run(params, Phase::kCheck, nullptr);
}

Result<std::vector<float>> PooledLayer::rows(Operations& operations, size_t pool, std::span<const int32_t> pages,
                                             std::span<const int32_t> rows) {
  return pools_[pool].rows(operations, options_.model.d_qk(), rows_per_page(pool), pages, rows);
}

Result<std::vector<float>> PooledLayer::keys(const Operations& operations, size_t pool, std::span<const int32_t> pages,
                                             std::span<const int32_t> keys) {
  return indexers_[pool].keys(operations, pages, keys);
}

void PooledLayer::select_window(std::span<const TokenRange> ranges) {
  window_width_ = options_.model.sliding_window;
  window_.clear();
  window_length_.clear();
  const int32_t page = options_.page_size;
  for (const TokenRange& range : ranges)
    for (int32_t token = range.start; token < range.start + range.count; ++token) {
      const int32_t count = std::min(token + 1, window_width_);
      for (int32_t position = token + 1 - count; position <= token; ++position)
        window_.push_back(range.pages[static_cast<size_t>(position / page)] * page + position % page);
      window_.insert(window_.end(), static_cast<size_t>(window_width_ - count), -1);
      window_length_.push_back(count);
    }
}

void PooledLayer::select_all(const PooledKind& kind, int32_t page_rows, std::span<const TokenRange> ranges) {
  extra_width_ = 1;
  for (const TokenRange& range : ranges)
    extra_width_ = std::max(extra_width_, (range.start + range.count) / kind.ratio);
  extra_.clear();
  extra_length_.clear();
  for (const TokenRange& range : ranges)
    for (int32_t token = range.start; token < range.start + range.count; ++token) {
      const int32_t count = (token + 1) / kind.ratio;
      for (int32_t row = 0; row < count; ++row)
        extra_.push_back(range.pages[static_cast<size_t>(row / page_rows)] * page_rows + row % page_rows);
      extra_.insert(extra_.end(), static_cast<size_t>(extra_width_ - count), -1);
      extra_length_.push_back(count);
    }
}

Choice PooledLayer::choice(size_t kind) const {
  const PooledKind& chooser = kinds_[kind];
  Choice choice = {.keys = indexers_[chooser.pool].cache(),
                   .heads = indexer_heads(options_.model),
                   .ratio = chooser.ratio,
                   .topk = chooser.topk,
                   .page_size = rows_per_page(kind)};
  if (chooser.candidates == CandidateBlocks::kNone) return choice;
  choice.block_size = kCandidateBlock;
  choice.picks = chooser.candidates == CandidateBlocks::kPicks ? options_.candidate_blocks : 0;
  choice.within = chooser.candidates == CandidateBlocks::kWithin;
  return choice;
}

Status PooledLayer::select(size_t kind, std::span<const TokenRange> ranges, const IndexerQueries& queries,
                           const ChoicePhases& phases, Recorder* recorder) {
  kind_ = kind;
  timed(recorder, Phase::kPlan, [&] {
    select_window(ranges);
    if (kind != kWindow && !kinds_[kind].chooses()) select_all(kinds_[kind], rows_per_page(kind), ranges);
    if (kinds_[kind].chooses()) batch_.assign(ranges, options_.page_size);
  });
  if (!kinds_[kind].chooses()) return {};
  Status status = chooser_.choose(batch_, choice(kind), queries, phases, recorder);
  extra_width_ = chooser_.width();
  extra_ = chooser_.slot_list();
  extra_length_ = chooser_.counts();
  return status;
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
    const auto cache = pools_[kinds_[kind].pool].cache(operations, pages);
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

Status PooledLayer::finish(const TensorView& o, std::span<const int64_t> positions, Phase phase, Recorder* recorder) {
  return epilogue_.run(operations_, o, positions, phase, recorder);
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
  Status status = gather(kWindow, recent, slice(kv, 0, 0, window));
  if (!status.ok()) return status;
  std::vector<int32_t> indices(static_cast<size_t>(window));
  std::iota(indices.begin(), indices.end(), 0);
  if (kind != kWindow && extra > 0) {
    const TokenRange pooled{.pages = token.pages, .start = 0, .count = extra};
    status = gather(kinds_[kind].pool, pooled, slice(kv, 0, window, extra));
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
  const TokenRange range{.pages = token.pages, .start = token.position, .count = 1};
  QueryBatch batch;
  batch.assign(std::span(&range, 1), options_.page_size);
  Choice all = choice(kind);
  const auto keys = indexers_[kinds_[kind].pool].cache(operations, batch.page_list());
  if (!keys.ok()) return keys.status();
  all.keys = *keys;
  auto logits = Chooser::logits(operations, batch, all, query);
  if (logits.ok()) logits->resize(static_cast<size_t>(token.visible(kinds_[kind])));
  return logits;
}

}  // namespace mla::cli::replay

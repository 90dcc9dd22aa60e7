// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/layer.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace mla::cli::replay {
namespace {

// Returns the number of keys that the queries of one request see, added up.
double visible_pairs(int64_t queries, int64_t keys, bool causal) {
  const auto q = static_cast<double>(queries), k = static_cast<double>(keys);
  return causal ? q * (k - q) + q * (q + 1) / 2 : q * k;
}

}  // namespace

std::vector<int32_t> pages_of(const TensorView& slots, int32_t page_size) {
  const std::span all(static_cast<const int32_t*>(slots.data), static_cast<size_t>(slots.numel()));
  std::set<int32_t> pages;
  for (int32_t slot : all)
    if (slot >= 0) pages.insert(slot / page_size);
  return {pages.begin(), pages.end()};
}

TensorView indexer_keys(TensorView rows, int64_t kv_lora_rank) {
  constexpr int64_t kWidth = kIndexerLayout.head_dim;
  return slice(rows, 1, kv_lora_rank - kWidth, kWidth);
}

int32_t index_pooled(const ModelConfig& model) {
  int32_t pooled = 1;
  for (const mla::LayerKind& kind : model.layers) pooled = std::max(pooled, kind.index_pooled);
  return pooled;
}

Layer::Layer(const LayerOptions& options, const Generator& generator, Operations& operations, Projector& projector,
             const std::atomic<bool>& stop)
    : options_(options),
      operations_(operations),
      projector_(projector),
      stop_(stop),
      angles_(generator, options.model.qk_rope_head_dim, options.max_positions, operations.gpu()),
      prologue_(options.model, options.dtype, generator, angles_),
      chooser_(operations) {
  const ModelConfig& model = options.model;
  const auto bytes = static_cast<int64_t>(size_of(options.dtype));
  const int64_t rows = Projector::padded_rows(options.chunk), heads = model.num_attention_heads;
  const auto buffer = [](int64_t size) { return bench::Buffer(static_cast<size_t>(size), /*huge_pages=*/true); };
  for (int32_t rank = 0; rank < options.world; ++rank)
    caches_.emplace_back(options.cache, model.d_qk(), model.kv_lora_rank, options.page_size, options.num_pages,
                         operations.gpu());
  if (options.topk > 0) {
    const int32_t pooled = index_pooled(model);
    indexer_ = IndexerPool(options.page_size / pooled, options.num_pages, operations.gpu());
    choice_ = {.keys = indexer_.cache(),
               .heads = indexer_heads(model),
               .ratio = pooled,
               .topk = options.topk / pooled,
               .page_size = options.page_size};
    if (pooled > 1) {
      key_compressor_.emplace(pooled_key_compressor(pooled), options.compressor_room(), generator, no_angles_,
                              operations);
      for (const mla::LayerKind& kind : model.layers)
        choice_.token_list_width = std::max(choice_.token_list_width, kind.list_width());
    }
  }
  latents_ = buffer(rows * model.d_qk() * bytes);
  keys_ = buffer(rows * heads * model.prefill_d_qk() * bytes);
  values_ = buffer(rows * heads * model.v_head_dim * bytes);
  partial_o_ = buffer(int64_t{options.chunk} * heads * model.v_head_dim * 4);
  partial_lse_ = buffer(int64_t{options.chunk} * heads * 4);
}

int64_t Layer::cache_bytes(const LayerOptions& options) {
  const int64_t page = page_bytes(options.cache, options.model.d_qk(), options.page_size, true);
  const int64_t indexer = options.topk > 0 ? indexer_page_bytes(options.page_size / index_pooled(options.model)) : 0;
  return options.num_pages * (page * options.world + indexer);
}

Status Layer::append(const NewTokens& tokens, const NewQueries& queries, Phase phase, Recorder* recorder) {
  const int64_t page_tokens = options_.page_tokens();
  for (int32_t rank = 0; rank < options_.world; ++rank) {
    const ContextParallel own = share(rank);
    rank_slots_.clear();
    for (int64_t slot : tokens.slots) {
      const int64_t page = slot / page_tokens, place = slot % page_tokens;
      rank_slots_.push_back(owns(own, place) ? page * options_.page_size + local_length(own, place) : -1);
    }
    // The ranks share the work on queries; here the first has it all.
    Status status =
        prologue_.run(operations_, {.latents = tokens.latents, .slots = rank_slots_, .positions = tokens.positions},
                      rank == 0 ? queries : NewQueries{}, caches_[static_cast<size_t>(rank)].cache(), phase, recorder);
    if (!status.ok()) return status;
  }
  return {};
}

Status Layer::append_keys(const void* latents, std::span<const int64_t> slots, std::span<const TokenRange> ranges,
                          Recorder* recorder) {
  if (key_compressor_)
    return key_compressor_->run(operations_, {.indexer = indexer_.cache()}, {.ranges = ranges}, Phase::kCompress,
                                recorder);
  const int64_t count = std::ssize(slots);
  AppendIndexerParams params;
  params.k =
      indexer_keys(contiguous(latents, options_.dtype, {count, options_.model.d_qk()}), options_.model.kv_lora_rank);
  params.slot_mapping = contiguous(slots.data(), DType::kI64, {count});
  params.cache = indexer_.cache();
  return operations_.run(params, Phase::kAppendKeys, recorder);
}

// Makes the page tables of one rank. kv_len is the length of the whole request (kGlobal), as context-parallel calls
// expect it, or of what the rank holds of it (kLocal).
PageTable Layer::page_table(std::span<const TokenRange> ranges, const ContextParallel& own, Lengths lengths) {
  table_indptr_.assign(1, 0);
  table_.clear();
  lengths_.clear();
  for (const TokenRange& range : ranges) {
    const int32_t length = range.start + range.count;
    const auto local = static_cast<int32_t>(local_length(own, length));
    const int32_t pages = (local + options_.page_size - 1) / options_.page_size;
    table_.insert(table_.end(), range.pages.begin(), range.pages.begin() + pages);
    table_indptr_.push_back(static_cast<int32_t>(table_.size()));
    lengths_.push_back(lengths == Lengths::kGlobal ? length : local);
  }
  return {.kv_indptr = ints(table_indptr_), .kv_indices = ints(table_), .block_table = {}, .kv_len = ints(lengths_)};
}

void Layer::set_query_ranges(std::span<const TokenRange> ranges) {
  qo_indptr_.assign(1, 0);
  for (const TokenRange& range : ranges) qo_indptr_.push_back(qo_indptr_.back() + range.count);
}

// Gathers one rank's rows of the token ranges into `out`, in order.
Status Layer::gather(std::span<const TokenRange> ranges, const ContextParallel& own, const TensorView& out,
                     Recorder* recorder) {
  GatherParams params;
  timed(recorder, Phase::kPlan, [&] {
    out_indptr_.assign(1, 0);
    starts_.clear();
    for (const TokenRange& range : ranges) {
      const int64_t first = local_length(own, range.start);
      starts_.push_back(static_cast<int32_t>(first));
      out_indptr_.push_back(out_indptr_.back() +
                            static_cast<int32_t>(local_length(own, range.start + range.count) - first));
    }
    params.cache = caches_[static_cast<size_t>(own.rank)].cache();
    params.pages = page_table(ranges, own, Lengths::kLocal);
    params.token_start = ints(starts_);
    params.out_indptr = ints(out_indptr_);
    params.out_kv = out;
    params.out_kv.shape[0] = out_indptr_.back();
  });
  if (out_indptr_.back() == 0) return {};
  return operations_.run(params, Phase::kGather, recorder);
}

// Loads keys and values of the token ranges, one behind the other, into keys_ and values_. With several ranks the
// tokens of each stand between those of the others.
Status Layer::load_keys(std::span<const TokenRange> ranges, Heads heads, Recorder* recorder) {
  int64_t rows = 0;
  for (const TokenRange& range : ranges) rows += range.count;
  const TensorView all = contiguous(latents_.data(), options_.dtype, {rows, options_.model.d_qk()});
  if (options_.world == 1) {
    if (Status status = gather(ranges, {}, all, recorder); !status.ok()) return status;
  } else {
    int64_t first_row = 0;
    for (const TokenRange& range : ranges) {
      for (int32_t rank = 0; rank < options_.world; ++rank) {
        const ContextParallel own = share(rank);
        const int64_t skipped = global_position(own, local_length(own, range.start)) - range.start;
        if (skipped >= range.count) continue;
        TensorView out = slice(all, 0, first_row + skipped, range.count - skipped);
        out.stride[0] *= options_.world;
        if (Status status = gather(std::span(&range, 1), own, out, recorder); !status.ok()) return status;
      }
      first_row += range.count;
    }
  }
  timed(recorder, Phase::kUpProjection,
        [&] { projector_.keys_values(latents_.data(), rows, heads, keys_.data(), values_.data()); });
  if (recorder != nullptr)
    recorder->add_projection_flops(static_cast<double>(rows * heads.count) * projector_.keys_values_flops());
  return {};
}

Status Layer::attend(const TensorView& q, std::span<const int32_t> qo_indptr, std::span<const int32_t> kv_indptr,
                     Heads heads, bool causal, const TensorView& o, const TensorView& lse, Recorder* recorder) {
  const ModelConfig& model = options_.model;
  const int64_t keys = kv_indptr.back(), all_heads = model.num_attention_heads;
  PrefillParams params;
  params.q = q;
  params.k = slice(contiguous(keys_.data(), options_.dtype, {keys, all_heads, model.prefill_d_qk()}), 1, heads.begin,
                   heads.count);
  params.v = slice(contiguous(values_.data(), options_.dtype, {keys, all_heads, model.v_head_dim}), 1, heads.begin,
                   heads.count);
  params.qo_indptr = contiguous(qo_indptr.data(), DType::kI32, {std::ssize(qo_indptr)});
  params.kv_indptr = contiguous(kv_indptr.data(), DType::kI32, {std::ssize(kv_indptr)});
  params.causal = causal;
  params.sm_scale = model.sm_scale();
  params.o = o;
  params.lse = lse;
  Status status = operations_.plan_and_run(params, Phase::kPrefillAttention, recorder);
  if (recorder == nullptr) return status;
  double pairs = 0.0;
  for (size_t i = 0; i + 1 < qo_indptr.size(); ++i)
    pairs += visible_pairs(qo_indptr[i + 1] - qo_indptr[i], kv_indptr[i + 1] - kv_indptr[i], causal);
  recorder->add_prefill_flops(2.0 * pairs * heads.count * (model.prefill_d_qk() + model.v_head_dim));
  return status;
}

Status Layer::prefill(const TensorView& q, std::span<const TokenRange> fresh, Heads heads, const TensorView& o,
                      const TensorView& lse, Recorder* recorder) {
  std::vector<int32_t> indptr = {0};
  for (const TokenRange& range : fresh) indptr.push_back(indptr.back() + range.count);
  if (Status status = load_keys(fresh, heads, recorder); !status.ok()) return status;
  if (Status status = attend(q, indptr, indptr, heads, /*causal=*/true, o, lse, recorder); !status.ok()) return status;
  for (size_t i = 0; i < fresh.size(); ++i) {
    const int64_t first = indptr[i], count = fresh[i].count;
    for (int32_t start = 0; start < fresh[i].start; start += options_.chunk) {
      cut_short_ = stop_;
      if (cut_short_) return {};
      const TokenRange context{
          .pages = fresh[i].pages, .start = start, .count = std::min(options_.chunk, fresh[i].start - start)};
      Status status = merge_context(slice(q, 0, first, count), context, heads, slice(o, 0, first, count),
                                    slice(lse, 0, first, count), recorder);
      if (!status.ok()) return status;
    }
  }
  return {};
}

// Computes the part of the softmax over one range of earlier tokens, which all queries see, and merges it into o and
// lse.
Status Layer::merge_context(const TensorView& q, const TokenRange& context, Heads heads, const TensorView& o,
                            const TensorView& lse, Recorder* recorder) {
  if (Status status = load_keys(std::span(&context, 1), heads, recorder); !status.ok()) return status;
  const int64_t queries = q.shape[0], v_dim = options_.model.v_head_dim;
  const int32_t qo_indptr[] = {0, static_cast<int32_t>(queries)}, kv_indptr[] = {0, context.count};
  const TensorView partial_o = contiguous(partial_o_.data(), DType::kF32, {queries, heads.count, v_dim});
  const TensorView partial_lse = contiguous(partial_lse_.data(), DType::kF32, {queries, heads.count});
  Status status = attend(q, qo_indptr, kv_indptr, heads, /*causal=*/false, partial_o, partial_lse, recorder);
  if (!status.ok()) return status;
  MergeStatesParams merge;
  merge.partial_o = contiguous(partial_o_.data(), DType::kF32, {1, queries, heads.count, v_dim});
  merge.partial_lse = contiguous(partial_lse_.data(), DType::kF32, {1, queries, heads.count});
  merge.in_place = true;
  merge.o = o;
  merge.lse = lse;
  return operations_.run(merge, Phase::kMerge, recorder);
}

Status Layer::decode(Operations& operations, const TensorView& q_nope, const TensorView& q_pe,
                     std::span<const TokenRange> requests, const TensorView& o, Recorder* recorder) {
  DecodeParams params;
  params.q_nope = q_nope;
  params.q_pe = q_pe;
  params.sm_scale = options_.model.sm_scale();
  params.shared_prefix = options_.shared_prefix;
  params.o = o;
  set_query_ranges(requests);
  params.qo_indptr = ints(qo_indptr_);
  Status status = options_.world == 1 ? decode_rank(operations, 0, params, requests, recorder)
                                      : decode_ranks(operations, params, requests, recorder);
  if (recorder != nullptr) {
    double pairs = 0.0;
    for (const TokenRange& range : requests) pairs += visible_pairs(range.count, range.start + range.count, true);
    const auto heads = static_cast<double>(q_nope.shape[1]);
    recorder->add_decode_flops(2.0 * pairs * heads * (options_.model.d_qk() + options_.model.kv_lora_rank));
  }
  return status;
}

Status Layer::decode_rank(Operations& operations, int32_t rank, DecodeParams params,
                          std::span<const TokenRange> requests, Recorder* recorder) {
  timed(recorder, Phase::kPlan, [&] {
    params.context_parallel = share(rank);
    params.pages = page_table(requests, params.context_parallel, Lengths::kGlobal);
  });
  const auto cache = caches_[static_cast<size_t>(rank)].cache(operations, table_);
  if (!cache.ok()) return cache.status();
  params.cache = *cache;
  return operations.plan_and_run(params, Phase::kDecodeAttention, recorder);
}

Status Layer::decode_ranks(Operations& operations, DecodeParams params, std::span<const TokenRange> requests,
                           Recorder* recorder) {
  const int64_t world = options_.world, tokens = params.o.shape[0], heads = params.o.shape[1], d_v = params.o.shape[2];
  rank_o_.resize(static_cast<size_t>(world * tokens * heads * d_v));
  rank_lse_.resize(static_cast<size_t>(world * tokens * heads));
  MergeStatesParams merge;
  merge.partial_o = contiguous(rank_o_.data(), DType::kF32, {world, tokens, heads, d_v});
  merge.partial_lse = contiguous(rank_lse_.data(), DType::kF32, {world, tokens, heads});
  merge.o = params.o;
  for (int32_t rank = 0; rank < options_.world; ++rank) {
    params.o = contiguous(rank_o_.data() + rank * tokens * heads * d_v, DType::kF32, {tokens, heads, d_v});
    params.lse = contiguous(rank_lse_.data() + rank * tokens * heads, DType::kF32, {tokens, heads});
    if (Status status = decode_rank(operations, rank, params, requests, recorder); !status.ok()) return status;
  }
  return operations.run(merge, Phase::kDecodeMerge, recorder);
}

Result<TensorView> Layer::select(const IndexerQueries& queries, std::span<const TokenRange> requests,
                                 const ChoicePhases& phases, Recorder* recorder) {
  timed(recorder, Phase::kPlan, [&] { batch_.assign(requests, options_.page_size); });
  if (Status status = chooser_.choose(batch_, choice_, queries, phases, recorder); !status.ok()) return status;
  return chooser_.slots();
}

Status Layer::decode_slots(Operations& operations, const TensorView& q_nope, const TensorView& q_pe,
                           const TensorView& slots, const TensorView& o, Phase phase, Recorder* recorder) {
  DecodeSparseParams params;
  params.q_nope = q_nope;
  params.q_pe = q_pe;
  std::vector<int32_t> pages;
  if (&operations != &operations_) pages = pages_of(slots, options_.page_size);
  const auto cache = caches_.front().cache(operations, pages);
  if (!cache.ok()) return cache.status();
  params.pool = {.cache = *cache, .indices = slots, .topk_length = {}};
  params.sm_scale = options_.model.sm_scale();
  params.o = o;
  Status status = operations.plan_and_run(params, phase, recorder);
  if (recorder != nullptr) {
    const auto* first = static_cast<const int32_t*>(slots.data);
    const auto keys = std::count_if(first, first + slots.numel(), [](int32_t slot) { return slot >= 0; });
    const auto heads = static_cast<double>(q_nope.shape[1]);
    const double flops =
        2.0 * static_cast<double>(keys) * heads * (options_.model.d_qk() + options_.model.kv_lora_rank);
    if (phase == Phase::kDecodeAttention)
      recorder->add_decode_flops(flops);
    else
      recorder->add_prefill_flops(flops);
  }
  return status;
}

Result<std::vector<float>> Layer::indexer_logits(Operations& operations, const IndexerQueries& query,
                                                 const TokenRange& token) {
  QueryBatch batch;
  batch.assign(std::span(&token, 1), options_.page_size);
  Choice choice = choice_;
  const auto keys = indexer_.cache(operations, batch.page_list());
  if (!keys.ok()) return keys.status();
  choice.keys = *keys;
  auto logits = Chooser::logits(operations, batch, choice, query);
  if (logits.ok()) logits->resize(static_cast<size_t>((token.start + 1) / choice.ratio));
  return logits;
}

Result<std::vector<float>> Layer::rows(Operations& operations, std::span<const int32_t> pages,
                                       std::span<const int32_t> rows) {
  const auto width = static_cast<size_t>(options_.model.d_qk());
  std::vector<float> values(rows.size() * width);
  for (int32_t rank = 0; rank < options_.world; ++rank) {
    const ContextParallel own = share(rank);
    std::vector<int32_t> local;
    for (int32_t row : rows)
      if (owns(own, row)) local.push_back(static_cast<int32_t>(local_length(own, row)));
    const auto got =
        caches_[static_cast<size_t>(rank)].rows(operations, options_.model.d_qk(), options_.page_size, pages, local);
    if (!got.ok()) return got.status();
    const float* next = got->data();
    for (size_t i = 0; i < rows.size(); ++i)
      if (owns(own, rows[i])) std::copy_n(std::exchange(next, next + width), width, values.data() + i * width);
  }
  return values;
}

Result<std::vector<float>> Layer::keys(const Operations& operations, std::span<const int32_t> pages,
                                       std::span<const int32_t> keys) {
  return indexer_.keys(operations, pages, keys);
}

}  // namespace mla::cli::replay

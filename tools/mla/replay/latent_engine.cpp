// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/latent_engine.h"

#include <fmt/format.h>

#include <algorithm>

namespace mla::cli::replay {
namespace {

constexpr int64_t kTokensPerTask = 16;  // of the generator

std::byte* element(const bench::Buffer& buffer, int64_t index, size_t element_bytes) {
  return buffer.data() + index * static_cast<int64_t>(element_bytes);
}

}  // namespace

LatentEngine::LatentEngine(const EngineOptions& options, const Context& context, const Context& reference,
                           const std::atomic<bool>& stop)
    : options_(options),
      operations_(context),
      reference_(reference),
      team_(context.num_threads()),
      generator_(options.layer.model, options.seed, options.layer.dtype),
      projector_(options.layer.model, generator_.weights(), options.layer.dtype, team_),
      layer_(options.layer, generator_, operations_, projector_, stop),
      checker_(layer_, generator_, operations_, reference_, projector_),
      seats_(options.layer.max_batch) {
  const ModelConfig& model = options.layer.model;
  const size_t bytes = size_of(options.layer.dtype);
  const int64_t heads = model.num_attention_heads, chunk = options.layer.chunk;
  const int64_t batch = Projector::padded_rows(options.layer.decode_rows());
  latents_ = rows_buffer(chunk + batch, model.d_qk(), bytes);
  q_ = rows_buffer(chunk, heads * model.prefill_d_qk(), bytes);
  o_ = rows_buffer(chunk, heads * model.v_head_dim, sizeof(float));
  lse_ = rows_buffer(chunk, heads, sizeof(float));
  q_nope_ = rows_buffer(batch, heads * model.qk_nope_head_dim, bytes);
  q_pe_ = rows_buffer(batch, heads * std::max(model.qk_rope_head_dim, 1), bytes);
  absorbed_ = rows_buffer(batch, heads * model.kv_lora_rank, bytes);
  o_latent_ = rows_buffer(batch, heads * model.kv_lora_rank, bytes);
  out_ = rows_buffer(batch, heads * model.v_head_dim, sizeof(float));
  if (has_prologue(model)) decode_q_ = rows_buffer(batch, heads * model.d_qk(), bytes);
  if (!sparse()) return;
  indexer_q_ = rows_buffer(batch, index_heads() * kIndexerLayout.head_dim, 1);
  indexer_weights_ = rows_buffer(batch, index_heads(), sizeof(float));
}

int64_t LatentEngine::memory_needed(const EngineOptions& options) {
  const LayerOptions& layer = options.layer;
  const ModelConfig& model = layer.model;
  const auto bytes = static_cast<int64_t>(size_of(layer.dtype));
  const int64_t heads = model.num_attention_heads, qk = model.prefill_d_qk(), v = model.v_head_dim;
  const int64_t cache = Layer::cache_bytes(layer);
  const int64_t per_prompt_token = 2 * model.d_qk() * bytes + heads * ((2 * qk + v) * bytes + 2 * v * 4 + 8);
  // With several ranks every one's partial outputs wait to be merged; the indexer's logits are as long as a request.
  const int64_t partial = layer.world > 1 ? layer.world * heads * (model.kv_lora_rank + 1) * 4 : 0;
  const int64_t indexer =
      layer.topk > 0 ? int64_t{indexer_heads(layer.model)} * (kIndexerLayout.head_dim + 4) + int64_t{layer.topk} * 4
                     : 0;
  const int32_t pooled = index_pooled(model);
  const int64_t compressor = layer.topk > 0 && pooled > 1
                                 ? Compressor::memory_needed(pooled_key_compressor(pooled), layer.compressor_room())
                                 : 0;
  const int64_t queries = qk + 2 * model.kv_lora_rank + (has_prologue(model) ? model.d_qk() : 0);
  const int64_t per_request = model.d_qk() * bytes + heads * (queries * bytes + v * 4) + partial + indexer;
  const int64_t angles = int64_t{layer.max_positions} * model.qk_rope_head_dim * 4;
  const int64_t weights = heads * (model.qk_nope_head_dim + v) * model.kv_lora_rank * (bytes + 4);
  return cache + compressor + angles + Projector::padded_rows(layer.chunk) * per_prompt_token +
         Projector::padded_rows(options.layer.decode_rows()) * per_request + weights;
}

// Adds seeds, positions and slots of a sequence's next tokens; the caller decides where their queries go.
TokenRange LatentEngine::add_tokens(const Sequence& sequence, int32_t index, int32_t start, int32_t count,
                                    int32_t accepted) {
  const auto seeds = generator_.token_seeds(*sequence.request, sequence.request->line, start, count);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = start + i, page_tokens = options_.layer.page_tokens();
    const int64_t page = sequence.pages[static_cast<size_t>(position / page_tokens)];
    jobs_.push_back({.seed = answer_seed(seeds[static_cast<size_t>(i)], i < accepted),
                     .position = position,
                     .query = {},
                     .indexer_row = -1});
    slots_.push_back(page * page_tokens + position % page_tokens);
    positions_.push_back(position);
  }
  return {.pages = sequence.pages, .start = start, .count = count, .seat = seats_.of(index)};
}

void LatentEngine::generate(const Step& step, std::span<const Sequence> sequences) {
  jobs_.clear();
  slots_.clear();
  positions_.clear();
  prefill_.clear();
  decode_.clear();
  seats_.update(step, sequences);
  const ModelConfig& model = options_.layer.model;
  const size_t bytes = size_of(options_.layer.dtype);
  const int64_t heads = model.num_attention_heads, nope = model.qk_nope_head_dim, rope = model.qk_rope_head_dim;
  for (const PrefillPiece& piece : step.prefill) {
    const Sequence& sequence = sequences[static_cast<size_t>(piece.sequence)];
    prefill_.push_back(add_tokens(sequence, piece.sequence, piece.start, piece.count, piece.count));
  }
  const int64_t d_qk = nope + rope, prefill_rows = std::ssize(jobs_);
  for (int64_t row = 0; row < prefill_rows; ++row)
    jobs_[static_cast<size_t>(row)].query = {.q_nope = element(q_, row * heads * d_qk, bytes),
                                             .q_nope_stride_head = d_qk,
                                             .q_pe = element(q_, row * heads * d_qk + nope, bytes),
                                             .q_pe_stride_head = d_qk};
  for (const DecodePiece& piece : step.decode) {
    const Sequence& sequence = sequences[static_cast<size_t>(piece.sequence)];
    decode_.push_back(add_tokens(sequence, piece.sequence, sequence.num_computed, piece.count, piece.accepted));
  }
  place_decode_queries(prefill_rows);
  const int64_t count = std::ssize(jobs_);
  team_.run((count + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kTokensPerTask; i < std::min(count, (task + 1) * kTokensPerTask); ++i)
      generate_token(jobs_[static_cast<size_t>(i)], i);
  });
}

// Queries of prompts, whose heads are not as wide as a row of the cache, come rotated: append_rope has no such queries.
void LatentEngine::generate_token(const TokenJob& job, int64_t index) {
  const ModelConfig& model = options_.layer.model;
  std::byte* const row = element(latents_, index * model.d_qk(), size_of(options_.layer.dtype));
  if (has_prologue(model))
    generator_.projected_latent(job.seed, job.position, row);
  else
    generator_.latent(job.seed, job.position, row);
  if (has_prologue(model) && index >= first_decode_row())
    generator_.projected_query(job.seed, job.query);
  else
    generator_.query(job.seed, job.position, job.query);
  if (Compressor* const compressor = layer_.key_compressor(); compressor != nullptr)
    compressor->generate(generator_, job.seed, job.position, index);
  if (job.indexer_row < 0) return;
  const int64_t first = job.indexer_row * index_heads();
  generator_.indexer_query(job.seed, 0, static_cast<int32_t>(index_heads()),
                           element(indexer_q_, first * kIndexerLayout.head_dim, 1),
                           indexer_weights_.as<float>() + first);
}

// Appends the step's rows. The queries of decode, brought into the latent space, are made ready in the same call.
Status LatentEngine::append() {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  const int64_t heads = model.num_attention_heads, prefill = first_decode_row(), decode = std::ssize(jobs_) - prefill;
  if (decode > 0)
    recorder_.time(Phase::kDecodeProjection, [&] { projector_.absorb(q_nope_.data(), decode, absorbed_.data()); });
  const auto tokens = [&](int64_t first, int64_t count) {
    const auto begin = static_cast<size_t>(first), size = static_cast<size_t>(count);
    return NewTokens{.latents = element(latents_, first * model.d_qk(), size_of(dtype)),
                     .slots = std::span(slots_).subspan(begin, size),
                     .positions = std::span(positions_).subspan(begin, size)};
  };
  if (!has_prologue(model)) return layer_.append(tokens(0, prefill + decode), {}, Phase::kAppend, &recorder_);
  if (prefill > 0)
    if (Status status = layer_.append(tokens(0, prefill), {}, Phase::kPrefillPrologue, &recorder_); !status.ok())
      return status;
  if (decode == 0) return {};
  return layer_.append(tokens(prefill, decode),
                       {.q_nope = contiguous(absorbed_.data(), dtype, {decode, heads, model.kv_lora_rank}),
                        .q_pe = contiguous(q_pe_.data(), dtype, {decode, heads, model.qk_rope_head_dim}),
                        .out = contiguous(decode_q_.data(), dtype, {decode, heads, model.d_qk()})},
                       Phase::kDecodePrologue, &recorder_);
}

void LatentEngine::place_decode_queries(int64_t first_job) {
  const ModelConfig& model = options_.layer.model;
  const size_t bytes = size_of(options_.layer.dtype);
  const int64_t heads = model.num_attention_heads, nope = model.qk_nope_head_dim, rope = model.qk_rope_head_dim;
  for (int64_t row = 0; first_job + row < std::ssize(jobs_); ++row) {
    TokenJob& job = jobs_[static_cast<size_t>(first_job + row)];
    job.query = {.q_nope = element(q_nope_, row * heads * nope, bytes),
                 .q_nope_stride_head = nope,
                 .q_pe = element(q_pe_, row * heads * rope, bytes),
                 .q_pe_stride_head = rope};
    if (sparse()) job.indexer_row = row;
  }
}

Status LatentEngine::run_prefill() {
  if (prefill_.empty()) return {};
  const ModelConfig& model = options_.layer.model;
  const int64_t heads = model.num_attention_heads, rows = first_decode_row();
  return layer_.prefill(contiguous(q_.data(), options_.layer.dtype, {rows, heads, model.prefill_d_qk()}), prefill_,
                        {.begin = 0, .count = model.num_attention_heads},
                        contiguous(o_.data(), DType::kF32, {rows, heads, model.v_head_dim}),
                        contiguous(lse_.data(), DType::kF32, {rows, heads}), &recorder_);
}

Status LatentEngine::run_decode() {
  if (decode_.empty()) return {};
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  const int64_t heads = model.num_attention_heads, rank = model.kv_lora_rank;
  const int64_t rows = std::ssize(jobs_) - first_decode_row();
  const TensorView q = contiguous(decode_queries().data(), dtype, {rows, heads, model.d_qk()});
  const TensorView q_nope = slice(q, 2, 0, rank);
  TensorView q_pe;
  if (model.qk_rope_head_dim > 0) q_pe = slice(q, 2, rank, model.qk_rope_head_dim);
  const TensorView o = contiguous(o_latent_.data(), dtype, {rows, heads, rank});
  Status status;
  if (sparse()) {
    const auto slots =
        layer_.select({.q = indexer_q_.data(), .weights = indexer_weights_.as<float>()}, decode_, &recorder_);
    if (!slots.ok()) return slots.status();
    selected_ = *slots;
    status = layer_.decode_slots(operations_, q_nope, q_pe, selected_, o, &recorder_);
  } else {
    status = layer_.decode(operations_, q_nope, q_pe, decode_, o, &recorder_);
  }
  if (!status.ok()) return status;
  recorder_.time(Phase::kDecodeProjection, [&] { projector_.output(o_latent_.data(), rows, out_.as<float>()); });
  return {};
}

Status LatentEngine::run(const Step& step, std::span<const Sequence> sequences) {
  recorder_.time(Phase::kGenerate, [&] { generate(step, sequences); });
  if (Status status = append(); !status.ok()) return status;
  if (sparse()) {
    std::vector<TokenRange> ranges = prefill_;
    ranges.insert(ranges.end(), decode_.begin(), decode_.end());
    if (Status status = layer_.append_keys(latents_.data(), slots_, ranges, &recorder_); !status.ok()) return status;
  }
  if (Status status = run_prefill(); !status.ok()) return status;
  cut_short_ = layer_.was_cut_short();
  if (cut_short_) return {};
  if (Status status = run_decode(); !status.ok()) return status;
  return recorder_.time(Phase::kCheck, [&] { return check(step, sequences); });
}

Status LatentEngine::check(const Step& step, std::span<const Sequence> sequences) {
  if (options_.check_every == 0) return {};
  if (!step.prefill.empty() && prefill_steps_++ % options_.check_every == 0)
    if (Status status = check_prefill(step, sequences); !status.ok()) return status;
  if (!step.decode.empty() && decode_steps_++ % options_.check_every == 0) return check_decode(step, sequences);
  return {};
}

// Tokens of the step, whose first is job `first_job`, may be drafts; those before them are what they will be.
SeedOf LatentEngine::seed_of(const Sequence& sequence, const TokenRange& piece, int64_t first_job) const {
  return [this, &sequence, start = piece.start, first_job](int32_t position) {
    if (position >= start) return jobs_[static_cast<size_t>(first_job + position - start)].seed;
    return generator_.token_seeds(*sequence.request, sequence.request->line, position, 1).front();
  };
}

// Checks one token of one piece, at a different place in each check.
Status LatentEngine::check_prefill(const Step& step, std::span<const Sequence> sequences) {
  const ModelConfig& model = options_.layer.model;
  const int64_t n = checks().num_checks;
  const auto which = static_cast<size_t>(n % std::ssize(step.prefill));
  const TokenRange& piece = prefill_[which];
  const auto offset = static_cast<int32_t>((n * 7919 + piece.count - 1) % piece.count);
  int64_t row = offset;
  for (size_t i = 0; i < which; ++i) row += prefill_[i].count;
  const QueryRow& query = jobs_[static_cast<size_t>(row)].query;
  const Sequence& sequence = sequences[static_cast<size_t>(step.prefill[which].sequence)];
  return checker_.check_prefill({.what = fmt::format("line {}, token {}", sequence.request->line, piece.start + offset),
                                 .token = {.pages = piece.pages, .start = piece.start + offset, .count = 1},
                                 .q_nope = query.q_nope,
                                 .q_nope_stride_head = query.q_nope_stride_head,
                                 .q_pe = query.q_pe,
                                 .q_pe_stride_head = query.q_pe_stride_head,
                                 .out = o_.as<float>() + row * model.num_attention_heads * model.v_head_dim});
}

Status LatentEngine::check_decode(const Step& step, std::span<const Sequence> sequences) {
  const ModelConfig& model = options_.layer.model;
  const int64_t n = checks().num_checks;
  const auto which = static_cast<size_t>(n % std::ssize(decode_));
  const TokenRange& piece = decode_[which];
  const auto offset = static_cast<int32_t>((n + piece.count - 1) % piece.count);  // a lone draft is the last one
  int64_t row = offset;
  for (size_t i = 0; i < which; ++i) row += decode_[i].count;
  const TokenJob& job = jobs_[static_cast<size_t>(first_decode_row() + row)];
  const Sequence& sequence = sequences[static_cast<size_t>(step.decode[which].sequence)];
  const int64_t latent_row = row * model.num_attention_heads * model.kv_lora_rank, d_qk = model.d_qk();
  const size_t bytes = size_of(options_.layer.dtype);
  const std::byte* const q = element(decode_queries(), row * model.num_attention_heads * d_qk, bytes);
  Checker::Sample sample{.what = fmt::format("line {}, token {}", sequence.request->line, piece.start + offset),
                         .token = {.pages = piece.pages, .start = piece.start + offset, .count = 1},
                         .q_nope = job.query.q_nope,
                         .q_nope_stride_head = job.query.q_nope_stride_head,
                         .q_pe = q + model.kv_lora_rank * static_cast<int64_t>(bytes),
                         .q_pe_stride_head = d_qk,
                         .out = out_.as<float>() + row * model.num_attention_heads * model.v_head_dim,
                         .seed = job.seed,
                         .seed_of = seed_of(sequence, piece, first_decode_row() + row - offset)};
  if (sparse()) {
    sample.indexer = {.q = element(indexer_q_, row * index_heads() * kIndexerLayout.head_dim, 1),
                      .weights = indexer_weights_.as<float>() + row * index_heads()};
    sample.slots = static_cast<const int32_t*>(selected_.data) + row * layer_.list_width();
  }
  return checker_.check_decode(
      sample, {.absorbed = element(absorbed_, latent_row, bytes), .q = q, .o = element(o_latent_, latent_row, bytes)});
}

}  // namespace mla::cli::replay

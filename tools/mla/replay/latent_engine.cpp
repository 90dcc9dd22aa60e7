// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/latent_engine.h"

#include <fmt/format.h>

#include <algorithm>

namespace mla::cli::replay {
namespace {

constexpr int64_t kTokensPerTask = 16;  // of the generator
// Sparse attention of prompts takes this many tokens a call, since each has queries of all heads in the latent space.
constexpr int64_t kSparseSlice = 128;

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
      seats_(options.layer.max_batch),
      stop_(stop) {
  const ModelConfig& model = options.layer.model;
  const size_t bytes = size_of(options.layer.dtype);
  const int64_t heads = model.num_attention_heads, chunk = options.layer.chunk;
  const int64_t batch = absorbed_rows(options.layer);
  latents_ = rows_buffer(chunk + options.layer.decode_rows(), model.d_qk(), bytes);
  q_ = rows_buffer(chunk, heads * model.prefill_d_qk(), bytes);
  o_ = rows_buffer(chunk, heads * model.v_head_dim, sizeof(float));
  lse_ = rows_buffer(chunk, heads, sizeof(float));
  q_nope_ = rows_buffer(batch, heads * model.qk_nope_head_dim, bytes);
  q_pe_ = rows_buffer(batch, heads * std::max(model.qk_rope_head_dim, 1), bytes);
  absorbed_ = rows_buffer(batch, heads * model.kv_lora_rank, bytes);
  o_latent_ = rows_buffer(batch, heads * model.kv_lora_rank, bytes);
  out_ = rows_buffer(batch, heads * model.v_head_dim, sizeof(float));
  if (turns(model)) ready_q_ = rows_buffer(batch, heads * model.d_qk(), bytes);
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
  const int64_t queries = qk + 2 * model.kv_lora_rank + (turns(model) ? model.d_qk() : 0);
  const int64_t per_request = model.d_qk() * bytes + heads * (queries * bytes + v * 4) + partial + indexer;
  const int64_t angles = int64_t{layer.max_positions} * model.qk_rope_head_dim * 4;
  const int64_t weights = heads * (model.qk_nope_head_dim + v) * model.kv_lora_rank * (bytes + 4);
  return cache + compressor + angles + Projector::padded_rows(layer.chunk) * per_prompt_token +
         absorbed_rows(layer) * per_request + weights;
}

int64_t LatentEngine::absorbed_rows(const LayerOptions& options) {
  return Projector::padded_rows(std::max(options.decode_rows(), options.topk > 0 ? kSparseSlice : 0));
}

QueryRow LatentEngine::dense_query(int64_t row) const {
  const ModelConfig& model = options_.layer.model;
  const size_t bytes = size_of(options_.layer.dtype);
  const int64_t nope = model.qk_nope_head_dim, width = model.prefill_d_qk();
  const int64_t first = row * model.num_attention_heads * width;
  return {.q_nope = element(q_, first, bytes),
          .q_nope_stride_head = width,
          .q_pe = element(q_, first + nope, bytes),
          .q_pe_stride_head = width};
}

QueryRow LatentEngine::absorbed_query(int64_t row) const {
  const ModelConfig& model = options_.layer.model;
  const size_t bytes = size_of(options_.layer.dtype);
  const int64_t nope = model.qk_nope_head_dim, rope = model.qk_rope_head_dim;
  const int64_t first = row * model.num_attention_heads;
  return {.q_nope = element(q_nope_, first * nope, bytes),
          .q_nope_stride_head = nope,
          .q_pe = element(q_pe_, first * rope, bytes),
          .q_pe_stride_head = rope};
}

IndexerQueries LatentEngine::indexer_queries(int64_t row) const {
  const int64_t first = row * index_heads();
  return {.q = element(indexer_q_, first * kIndexerLayout.head_dim, 1),
          .weights = indexer_weights_.as<float>() + first};
}

// Adds seeds, positions and slots of a sequence's next tokens, the first `dense` of which attend to every key.
void LatentEngine::add_piece(const Sequence& sequence, int32_t index, int32_t start, int32_t count, int32_t dense,
                             int32_t accepted) {
  const auto seeds = generator_.token_seeds(*sequence.request, sequence.request->line, start, count);
  int64_t dense_row = 0;
  for (const TokenRange& range : dense_) dense_row += range.count;
  pieces_.push_back({.range = {.pages = sequence.pages, .start = start, .count = count, .seat = seats_.of(index)},
                     .sequence = &sequence,
                     .first_job = std::ssize(jobs_),
                     .dense = dense});
  if (dense > 0) dense_.push_back({.pages = sequence.pages, .start = start, .count = dense});
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = start + i, page_tokens = options_.layer.page_tokens();
    const int64_t page = sequence.pages[static_cast<size_t>(position / page_tokens)];
    jobs_.push_back({.seed = answer_seed(seeds[static_cast<size_t>(i)], i < accepted),
                     .position = position,
                     .piece = pieces_.size() - 1,
                     .dense_row = i < dense ? dense_row + i : -1});
    slots_.push_back(page * page_tokens + position % page_tokens);
    positions_.push_back(position);
  }
}

// The tokens of a prompt that see no more keys than sparse attention would choose attend to all of them.
void LatentEngine::plan_step(const Step& step, std::span<const Sequence> sequences) {
  jobs_.clear();
  slots_.clear();
  positions_.clear();
  pieces_.clear();
  dense_.clear();
  seats_.update(step, sequences);
  for (const PrefillPiece& piece : step.prefill) {
    const int32_t dense = sparse() ? std::clamp(options_.layer.topk - piece.start, 0, piece.count) : piece.count;
    add_piece(sequences[static_cast<size_t>(piece.sequence)], piece.sequence, piece.start, piece.count, dense,
              piece.count);
  }
  num_prefill_pieces_ = pieces_.size();
  num_prefill_ = std::ssize(jobs_);
  for (const DecodePiece& piece : step.decode) {
    const Sequence& sequence = sequences[static_cast<size_t>(piece.sequence)];
    add_piece(sequence, piece.sequence, sequence.num_computed, piece.count, 0, piece.accepted);
  }
}

// Makes the rows of all tokens, and the queries of dense prefill. These, whose heads are not as wide as a row of the
// cache, come rotated: append_rope has no such queries.
void LatentEngine::generate_tokens() {
  const ModelConfig& model = options_.layer.model;
  const size_t bytes = size_of(options_.layer.dtype);
  const int64_t count = std::ssize(jobs_);
  Compressor* const compressor = layer_.key_compressor();
  team_.run((count + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kTokensPerTask; i < std::min(count, (task + 1) * kTokensPerTask); ++i) {
      const TokenJob& job = jobs_[static_cast<size_t>(i)];
      std::byte* const row = element(latents_, i * model.d_qk(), bytes);
      generator_.projected_latent(job.seed, job.position, row);
      if (job.dense_row >= 0) generator_.query(job.seed, job.position, dense_query(job.dense_row));
      if (compressor != nullptr) compressor->generate(generator_, job.seed, job.position, i);
    }
  });
}

// Makes the queries of absorbed attention of a slice of the tokens.
void LatentEngine::generate_queries(int64_t first, int64_t count) {
  const bool projected = turns(options_.layer.model);
  const auto heads = static_cast<int32_t>(index_heads());
  team_.run((count + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kTokensPerTask; i < std::min(count, (task + 1) * kTokensPerTask); ++i) {
      const TokenJob& job = jobs_[static_cast<size_t>(first + i)];
      if (projected)
        generator_.projected_query(job.seed, absorbed_query(i));
      else
        generator_.query(job.seed, job.position, absorbed_query(i));
      if (sparse())
        generator_.indexer_query(job.seed, 0, heads, element(indexer_q_, i * heads * kIndexerLayout.head_dim, 1),
                                 indexer_weights_.as<float>() + i * heads);
    }
  });
}

NewTokens LatentEngine::tokens(int64_t first, int64_t count) const {
  const auto begin = static_cast<size_t>(first), size = static_cast<size_t>(count);
  return {.latents = element(latents_, first * options_.layer.model.d_qk(), size_of(options_.layer.dtype)),
          .slots = std::span(slots_).subspan(begin, size),
          .positions = std::span(positions_).subspan(begin, size)};
}

// Returns what a slice of the step's tokens has of each piece.
std::vector<TokenRange> LatentEngine::ranges_of(int64_t first, int64_t count) const {
  std::vector<TokenRange> ranges;
  for (const Piece& piece : pieces_) {
    const int64_t begin = std::max(first, piece.first_job),
                  end = std::min(first + count, piece.first_job + piece.range.count);
    if (begin >= end) continue;
    ranges.push_back(piece.range);
    ranges.back().start += static_cast<int32_t>(begin - piece.first_job);
    ranges.back().count = static_cast<int32_t>(end - begin);
  }
  return ranges;
}

// Appends the rows of dense prefill. Others follow with their queries.
Status LatentEngine::append() {
  for (int64_t first = 0; first < num_prefill_;) {
    const auto is_dense = [&](int64_t job) { return jobs_[static_cast<size_t>(job)].dense_row >= 0; };
    int64_t end = first + 1;
    while (end < num_prefill_ && is_dense(end) == is_dense(first)) ++end;
    if (is_dense(first)) {
      Status status = layer_.append(tokens(first, end - first), {}, Phase::kPrefillPrologue, &recorder_);
      if (!status.ok()) return status;
    }
    first = end;
  }
  return {};
}

Status LatentEngine::attend_dense() {
  if (dense_.empty()) return {};
  const ModelConfig& model = options_.layer.model;
  const int64_t heads = model.num_attention_heads;
  int64_t rows = 0;
  for (const TokenRange& range : dense_) rows += range.count;
  Status status = layer_.prefill(contiguous(q_.data(), options_.layer.dtype, {rows, heads, model.prefill_d_qk()}),
                                 dense_, {.begin = 0, .count = model.num_attention_heads},
                                 contiguous(o_.data(), DType::kF32, {rows, heads, model.v_head_dim}),
                                 contiguous(lse_.data(), DType::kF32, {rows, heads}), &recorder_);
  cut_short_ = layer_.was_cut_short();
  return status;
}

Status LatentEngine::attend_absorbed(int64_t first, int64_t count, const AbsorbedPhases& phases,
                                     const std::optional<int64_t>& sample) {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  const int64_t heads = model.num_attention_heads, rank = model.kv_lora_rank, rope = model.qk_rope_head_dim;
  recorder_.time(Phase::kGenerate, [&] { generate_queries(first, count); });
  recorder_.time(phases.projection, [&] { projector_.absorb(q_nope_.data(), count, absorbed_.data()); });
  const TensorView q = contiguous(ready_queries().data(), dtype, {count, heads, model.d_qk()});
  const TensorView o = contiguous(o_latent_.data(), dtype, {count, heads, rank});
  NewQueries queries;
  if (turns(model))
    queries = {.q_nope = contiguous(absorbed_.data(), dtype, {count, heads, rank}),
               .q_pe = contiguous(q_pe_.data(), dtype, {count, heads, rope}),
               .out = q};
  Status status = layer_.append(tokens(first, count), queries, phases.prologue, &recorder_);
  if (!status.ok()) return status;
  const TensorView q_nope = slice(q, 2, 0, rank), q_pe = rope > 0 ? slice(q, 2, rank, rope) : TensorView{};
  const std::vector<TokenRange> ranges = ranges_of(first, count);
  if (sparse()) {
    const auto slots = layer_.select(indexer_queries(0), ranges, phases.choice, &recorder_);
    if (!slots.ok()) return slots.status();
    selected_ = *slots;
    status = layer_.decode_slots(operations_, q_nope, q_pe, selected_, o, phases.attention, &recorder_);
  } else {
    status = layer_.decode(operations_, q_nope, q_pe, ranges, o, &recorder_);
  }
  if (!status.ok()) return status;
  recorder_.time(phases.projection, [&] { projector_.output(o_latent_.data(), count, out_.as<float>()); });
  if (!sample || *sample < first || *sample >= first + count) return {};
  return recorder_.time(Phase::kCheck, [&] { return check_absorbed(*sample, first); });
}

Status LatentEngine::run_prefill() {
  const std::span prompts(pieces_.data(), num_prefill_pieces_);
  const std::optional<int64_t> sample = pick(prompts, prefill_steps_);
  if (Status status = attend_dense(); !status.ok() || cut_short_) return status;
  if (sample && jobs_[static_cast<size_t>(*sample)].dense_row >= 0) {
    Status status = recorder_.time(Phase::kCheck, [&] { return check_dense(*sample); });
    if (!status.ok()) return status;
  }
  for (const Piece& piece : prompts) {
    const int64_t end = piece.first_job + piece.range.count;
    for (int64_t first = piece.first_job + piece.dense; first < end; first += kSparseSlice) {
      cut_short_ = stop_;
      if (cut_short_) return {};
      Status status = attend_absorbed(first, std::min(kSparseSlice, end - first), kOfPrompts, sample);
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status LatentEngine::run_decode() {
  const int64_t count = std::ssize(jobs_) - num_prefill_;
  if (count == 0) return {};
  const std::span answers = std::span<const Piece>(pieces_).subspan(num_prefill_pieces_);
  return attend_absorbed(num_prefill_, count, kOfAnswers, pick(answers, decode_steps_));
}

Status LatentEngine::run(const Step& step, std::span<const Sequence> sequences) {
  recorder_.time(Phase::kGenerate, [&] {
    plan_step(step, sequences);
    generate_tokens();
  });
  if (Status status = append(); !status.ok()) return status;
  if (sparse()) {
    Status status = layer_.append_keys(latents_.data(), slots_, ranges_of(0, std::ssize(jobs_)), &recorder_);
    if (!status.ok()) return status;
  }
  if (Status status = run_prefill(); !status.ok() || cut_short_) return status;
  return run_decode();
}

// Picks another piece and another place in it for each check. Returns the token's job.
std::optional<int64_t> LatentEngine::pick(std::span<const Piece> pieces, int64_t& steps) const {
  if (options_.check_every == 0 || pieces.empty() || steps++ % options_.check_every != 0) return std::nullopt;
  const int64_t n = checks().num_checks;
  const Piece& piece = pieces[static_cast<size_t>(n % std::ssize(pieces))];
  return piece.first_job + (n * 7919 + piece.range.count - 1) % piece.range.count;
}

// Tokens of the step may be drafts; those before them are what they will be.
SeedOf LatentEngine::seed_of(const Piece& piece) const {
  return [this, &piece](int32_t position) {
    if (position >= piece.range.start)
      return jobs_[static_cast<size_t>(piece.first_job + position - piece.range.start)].seed;
    return generator_.token_seeds(*piece.sequence->request, piece.sequence->request->line, position, 1).front();
  };
}

std::string LatentEngine::describe(int64_t job) const {
  const TokenJob& token = jobs_[static_cast<size_t>(job)];
  return fmt::format("line {}, token {}", pieces_[token.piece].sequence->request->line, token.position);
}

Status LatentEngine::check_dense(int64_t job) {
  const ModelConfig& model = options_.layer.model;
  const TokenJob& token = jobs_[static_cast<size_t>(job)];
  const QueryRow query = dense_query(token.dense_row);
  return checker_.check_prefill(
      {.what = describe(job),
       .token = {.pages = pieces_[token.piece].range.pages, .start = token.position, .count = 1},
       .q_nope = query.q_nope,
       .q_nope_stride_head = query.q_nope_stride_head,
       .q_pe = query.q_pe,
       .q_pe_stride_head = query.q_pe_stride_head,
       .out = o_.as<float>() + token.dense_row * model.num_attention_heads * model.v_head_dim});
}

// `first` is the first token of the slice whose queries and outputs are there.
Status LatentEngine::check_absorbed(int64_t job, int64_t first) {
  const ModelConfig& model = options_.layer.model;
  const size_t bytes = size_of(options_.layer.dtype);
  const TokenJob& token = jobs_[static_cast<size_t>(job)];
  const Piece& piece = pieces_[token.piece];
  const int64_t row = job - first, heads = model.num_attention_heads, rank = model.kv_lora_rank, d_qk = model.d_qk();
  const QueryRow query = absorbed_query(row);
  const std::byte* const q = element(ready_queries(), row * heads * d_qk, bytes);
  Checker::Sample sample{.what = describe(job),
                         .token = {.pages = piece.range.pages, .start = token.position, .count = 1},
                         .q_nope = query.q_nope,
                         .q_nope_stride_head = query.q_nope_stride_head,
                         .q_pe = q + rank * static_cast<int64_t>(bytes),
                         .q_pe_stride_head = d_qk,
                         .out = out_.as<float>() + row * heads * model.v_head_dim,
                         .seed = token.seed,
                         .seed_of = seed_of(piece)};
  if (sparse()) {
    sample.indexer = indexer_queries(row);
    sample.slots = static_cast<const int32_t*>(selected_.data) + row * layer_.list_width();
  }
  return checker_.check_decode(sample, {.absorbed = element(absorbed_, row * heads * rank, bytes),
                                        .q = q,
                                        .o = element(o_latent_, row * heads * rank, bytes)});
}

}  // namespace mla::cli::replay

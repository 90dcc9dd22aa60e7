// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/pooled_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "mla/replay/checker.h"

namespace mla::cli::replay {
namespace {

// A call has at most this many query tokens: the queries, and the indexer's logits, take as many times a token's
// memory.
constexpr int64_t kSliceTokens = 128;
constexpr int64_t kPooledTokensPerTask = 8;  // of the generator
int64_t slice_bytes(const ModelConfig& model, int64_t element_bytes) {
  const int64_t heads = model.num_attention_heads, kinds = std::ssize(pooled_kinds(model));
  const int64_t queries = (turns(model) ? 2 : 1) * int64_t{model.d_qk()};
  return kSliceTokens * (heads * (queries + model.d_v()) * element_bytes +
                         kinds * int64_t{indexer_heads(model)} * (kIndexerLayout.head_dim + 4));
}

std::vector<float> widened(const std::byte* values, DType dtype, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    out[static_cast<size_t>(i)] = dtype == DType::kF32 ? reinterpret_cast<const float*>(values)[i]
                                                       : bf16_to_f32(reinterpret_cast<const uint16_t*>(values)[i]);
  return out;
}

}  // namespace

PooledEngine::PooledEngine(const EngineOptions& options, const Context& context, const Context& reference,
                           const std::atomic<bool>& stop)
    : options_(options),
      operations_(context),
      reference_(reference),
      stop_(stop),
      team_(context.num_threads()),
      generator_(options.layer.model, options.seed, options.layer.dtype),
      layer_(options.layer, generator_, operations_),
      oracle_(options.layer.model, generator_, options.layer.dtype),
      seats_(options.layer.max_batch) {
  const ModelConfig& model = options.layer.model;
  const size_t bytes = size_of(options.layer.dtype);
  const int64_t heads = model.num_attention_heads;
  latents_ = rows_buffer(options.layer.chunk + options.layer.decode_rows(), model.d_qk(), bytes);
  q_ = rows_buffer(kSliceTokens, heads * model.d_qk(), bytes);
  if (turns(model)) projected_q_ = rows_buffer(kSliceTokens, heads * model.d_qk(), bytes);
  o_ = rows_buffer(kSliceTokens, heads * model.d_v(), bytes);
  const int64_t indexers = std::ssize(layer_.kinds()) * indexer_heads(model);
  indexer_q_ = rows_buffer(kSliceTokens, indexers * kIndexerLayout.head_dim, 1);
  indexer_weights_ = rows_buffer(kSliceTokens, indexers, sizeof(float));
}

int64_t PooledEngine::memory_needed(const EngineOptions& options) {
  const ModelConfig& model = options.layer.model;
  const auto bytes = static_cast<int64_t>(size_of(options.layer.dtype));
  const int64_t rows = options.layer.chunk + options.layer.decode_rows();
  return PooledLayer::cache_bytes(options.layer) + PooledLayer::compressor_bytes(options.layer) +
         rows * model.d_qk() * bytes + slice_bytes(model, bytes) + Epilogue::memory_needed(model, kSliceTokens);
}

void PooledEngine::add_tokens(const Sequence& sequence, int32_t index, int32_t start, int32_t count, int32_t accepted) {
  const auto seeds = generator_.token_seeds(*sequence.request, sequence.request->line, start, count);
  const int32_t page_size = options_.layer.page_size;
  ranges_.push_back({.pages = sequence.pages, .start = start, .count = count, .seat = seats_.of(index)});
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = start + i;
    tokens_.push_back({.seed = answer_seed(seeds[static_cast<size_t>(i)], i < accepted),
                       .request = sequence.request,
                       .range = ranges_.size() - 1,
                       .place = {.pages = sequence.pages, .position = position}});
    slots_.push_back(int64_t{sequence.pages[static_cast<size_t>(position / page_size)]} * page_size +
                     position % page_size);
    positions_.push_back(position);
  }
}

void PooledEngine::plan_step(const Step& step, std::span<const Sequence> sequences) {
  tokens_.clear();
  slots_.clear();
  positions_.clear();
  ranges_.clear();
  seats_.update(step, sequences);
  for (const PrefillPiece& piece : step.prefill)
    add_tokens(sequences[static_cast<size_t>(piece.sequence)], piece.sequence, piece.start, piece.count, piece.count);
  num_prefill_ = std::ssize(tokens_);
  for (const DecodePiece& piece : step.decode) {
    const Sequence& sequence = sequences[static_cast<size_t>(piece.sequence)];
    add_tokens(sequence, piece.sequence, sequence.num_computed, piece.count, piece.accepted);
  }
}

// Returns what a slice of the step's tokens has of each range.
std::vector<TokenRange> PooledEngine::ranges_of(int64_t first, int64_t count) const {
  std::vector<TokenRange> ranges;
  size_t last = 0;
  for (int64_t i = first; i < first + count; ++i) {
    const Token& token = tokens_[static_cast<size_t>(i)];
    if (ranges.empty() || token.range != last) {
      ranges.push_back(ranges_[token.range]);
      ranges.back().start = token.place.position;
      ranges.back().count = 0;
      last = token.range;
    }
    ++ranges.back().count;
  }
  return ranges;
}

// Tokens of the step may be drafts; those before them are what they will be.
SeedOf PooledEngine::seed_of(int64_t token) const {
  return [this, token](int32_t position) {
    const Token& last = tokens_[static_cast<size_t>(token)];
    if (position >= ranges_[last.range].start)
      return tokens_[static_cast<size_t>(token - (last.place.position - position))].seed;
    return generator_.token_seeds(*last.request, last.request->line, position, 1).front();
  };
}

// Returns where the buffers of the indexers' queries have those of a kind's layer for a token of the slice, in heads.
int64_t PooledEngine::indexer_row(size_t kind, int64_t row) const {
  return (static_cast<int64_t>(kind) * kSliceTokens + row) * indexer_heads(options_.layer.model);
}

IndexerQueries PooledEngine::indexer_queries(size_t kind, int64_t row) const {
  const int64_t first = indexer_row(kind, row);
  return {.q = indexer_q_.data() + first * kIndexerLayout.head_dim, .weights = indexer_weights_.as<float>() + first};
}

void PooledEngine::generate_latents() {
  const int64_t count = std::ssize(tokens_), width = options_.layer.model.d_qk();
  const auto bytes = static_cast<int64_t>(size_of(options_.layer.dtype));
  const std::vector<Compressor*> compressors = layer_.compressors();
  team_.run((count + kPooledTokensPerTask - 1) / kPooledTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kPooledTokensPerTask; i < std::min(count, (task + 1) * kPooledTokensPerTask); ++i) {
      const Token& token = tokens_[static_cast<size_t>(i)];
      std::byte* const row = latents_.data() + i * width * bytes;
      generator_.projected_latent(token.seed, token.place.position, row);
      for (Compressor* compressor : compressors) compressor->generate(generator_, token.seed, token.place.position, i);
    }
  });
}

void PooledEngine::generate_queries(int64_t first, int64_t count) {
  const ModelConfig& model = options_.layer.model;
  const auto bytes = static_cast<int64_t>(size_of(options_.layer.dtype));
  const int64_t width = model.d_qk(), row_bytes = model.num_attention_heads * width * bytes;
  const int32_t index_heads = indexer_heads(model);
  const bool projected = turns(model);
  team_.run((count + kPooledTokensPerTask - 1) / kPooledTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kPooledTokensPerTask; i < std::min(count, (task + 1) * kPooledTokensPerTask); ++i) {
      const Token& token = tokens_[static_cast<size_t>(first + i)];
      std::byte* const row = (projected ? projected_q_ : q_).data() + i * row_bytes;
      const QueryRow query = {.q_nope = row,
                              .q_nope_stride_head = width,
                              .q_pe = row + model.kv_lora_rank * bytes,
                              .q_pe_stride_head = width};
      if (projected)
        generator_.projected_query(token.seed, query);
      else
        generator_.query(token.seed, token.place.position, query);
      for (size_t kind = 0; kind < layer_.kinds().size(); ++kind) {
        if (!layer_.kinds()[kind].chooses()) continue;
        const int64_t at = indexer_row(kind, i);
        generator_.indexer_query(token.seed, kind, index_heads, indexer_q_.data() + at * kIndexerLayout.head_dim,
                                 indexer_weights_.as<float>() + at);
      }
    }
  });
}

Status PooledEngine::run(const Step& step, std::span<const Sequence> sequences) {
  plan_step(step, sequences);
  recorder_.time(Phase::kGenerate, [&] { generate_latents(); });
  const int64_t num_decode = std::ssize(tokens_) - num_prefill_;
  if (Status status = attend(0, num_prefill_, Phase::kPrefillAttention, prefill_steps_); !status.ok() || cut_short_)
    return status;
  return attend(num_prefill_, num_decode, Phase::kDecodeAttention, decode_steps_);
}

// Picks another token and another kind of layer for each check.
std::optional<PooledEngine::Sample> PooledEngine::pick(int64_t first, int64_t count, int64_t& steps) {
  if (options_.check_every == 0 || count == 0 || steps++ % options_.check_every != 0) return std::nullopt;
  const int64_t n = log_.num_checks;
  return Sample{.token = first + (n * 7919 + count - 1) % count,
                .kind = static_cast<size_t>(n) % layer_.kinds().size()};
}

Status PooledEngine::attend(int64_t first, int64_t count, Phase phase, int64_t& steps) {
  const std::optional<Sample> sample = pick(first, count, steps);
  for (int64_t start = first; start < first + count; start += kSliceTokens) {
    cut_short_ = phase == Phase::kPrefillAttention && stop_;
    if (cut_short_) return {};
    if (Status status = attend_slice(start, std::min(kSliceTokens, first + count - start), phase, sample); !status.ok())
      return status;
  }
  return {};
}

// Appends what a slice's tokens have in a layer of the kind, and makes its queries ready for attention.
Status PooledEngine::append_slice(size_t kind, int64_t first, std::span<const TokenRange> ranges, int64_t count,
                                  const AppendPhases& phases) {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  const int64_t heads = model.num_attention_heads;
  NewQueries queries;
  if (turns(model)) {
    const TensorView q = contiguous(projected_q_.data(), dtype, {count, heads, model.d_qk()});
    queries = {.q_nope = slice(q, 2, 0, model.kv_lora_rank),
               .q_pe = slice(q, 2, model.kv_lora_rank, model.qk_rope_head_dim),
               .out = contiguous(q_.data(), dtype, {count, heads, model.d_qk()})};
  }
  const auto row_bytes = model.d_qk() * static_cast<int64_t>(size_of(dtype));
  return layer_.append(kind,
                       {.latents = latents_.data() + first * row_bytes,
                        .slots = std::span(slots_).subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                        .positions = positions_of_slice(first, count)},
                       queries, {.ranges = ranges, .first = first}, phases, &recorder_);
}

Status PooledEngine::attend_slice(int64_t first, int64_t count, Phase phase, const std::optional<Sample>& sample) {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  recorder_.time(Phase::kGenerate, [&] { generate_queries(first, count); });
  const std::vector<TokenRange> ranges = ranges_of(first, count);
  const TensorView q = contiguous(q_.data(), dtype, {count, model.num_attention_heads, model.d_qk()});
  const TensorView o = contiguous(o_.data(), dtype, {count, model.num_attention_heads, model.d_v()});
  for (size_t kind = 0; kind < layer_.kinds().size(); ++kind) {
    // In the model every layer has rows and queries of its own. Here they are the same, and written again for each.
    const bool prefill = phase == Phase::kPrefillAttention;
    Status status = append_slice(kind, first, ranges, count, prefill ? kPrefillAppend : kDecodeAppend);
    if (!status.ok()) return status;
    const ChoicePhases& choice = prefill ? kPrefillChoice : kDecodeChoice;
    status = layer_.select(kind, ranges, indexer_queries(kind, 0), choice, &recorder_);
    if (!status.ok()) return status;
    if (status = layer_.attend(operations_, q, 0, 0, o, phase, &recorder_); !status.ok()) return status;
    const Phase finish = prefill ? Phase::kPrefillFinish : Phase::kDecodeFinish;
    if (status = layer_.finish(o, positions_of_slice(first, count), finish, &recorder_); !status.ok()) return status;
    if (!sample || sample->kind != kind || sample->token < first || sample->token >= first + count) continue;
    status = recorder_.time(Phase::kCheck, [&] { return check(*sample, first); });
    if (!status.ok()) return status;
  }
  return {};
}

// Compares rows of a pool, and its indexer's keys, with what the activations of all tokens come to.
Status PooledEngine::check_rows_of(size_t pool, const Sample& sample, const std::string& what) {
  const LayerOptions& options = options_.layer;
  const TokenPlace& place = tokens_[static_cast<size_t>(sample.token)].place;
  const PooledKind& kind = layer_.kinds()[pool];
  const SeedOf seeds = seed_of(sample.token);
  const CompressorShape shape = pool_compressor(options.model, kind.ratio);
  const auto salt = static_cast<uint64_t>(log_.num_checks);
  const auto compare = [&](const char* name, std::span<const int32_t> rows, const Result<std::vector<float>>& got,
                           RowFormat format, const std::function<std::vector<double>(int32_t)>& expected) {
    return check_rows(fmt::format("{}, {} {}", what, kind.name, name), rows, got, format, expected, log_);
  };
  if (pool == kWindow) {
    const int32_t first = std::max(place.position + 1 - options.model.sliding_window, 0);
    std::vector<int32_t> rows(static_cast<size_t>(place.position + 1 - first));
    std::iota(rows.begin(), rows.end(), first);
    return compare("row", rows, layer_.rows(reference_, pool, place.pages, rows),
                   RowFormat(options.model, options.cache, reference_),
                   [&](int32_t row) { return oracle_.latent(seeds, row); });
  }
  const std::vector<int32_t> rows = rows_to_check(place.visible(kind), shape.span(), salt);
  Status status = compare("row", rows, layer_.rows(reference_, pool, place.pages, rows),
                          RowFormat(options.model, options.pool_cache, reference_),
                          [&](int32_t row) { return oracle_.row(shape, seeds, row); });
  if (!status.ok() || !kind.chooses()) return status;
  const std::optional<CompressorShape> of_keys = key_compressor(options.model, kind.ratio);
  return compare(
      "key", rows, layer_.keys(reference_, pool, place.pages, rows), RowFormat(reference_), [&](int32_t row) {
        return of_keys ? oracle_.row(*of_keys, seeds, row) : oracle_.key_of(oracle_.pooled(shape, seeds, row));
      });
}

Status PooledEngine::check_cached(const Sample& sample, const std::string& what) {
  if (Status status = check_rows_of(kWindow, sample, what); !status.ok() || sample.kind == kWindow) return status;
  return check_rows_of(layer_.kinds()[sample.kind].pool, sample, what);
}

void PooledEngine::check_query(const Sample& sample, int64_t row, const std::string& what) {
  const ModelConfig& model = options_.layer.model;
  const Token& token = tokens_[static_cast<size_t>(sample.token)];
  const int64_t values = int64_t{model.num_attention_heads} * model.d_qk();
  const auto got = widened(q_.data() + row * values * static_cast<int64_t>(size_of(options_.layer.dtype)),
                           options_.layer.dtype, values);
  check_queries(what, got, oracle_.query(token.seed, token.place.position), model.num_attention_heads, log_);
}

void PooledEngine::check_output(const Sample& sample, int64_t row, std::span<const float> o, const std::string& what) {
  const ModelConfig& model = options_.layer.model;
  const int32_t position = tokens_[static_cast<size_t>(sample.token)].place.position;
  double worst = -1.0;
  int64_t where = 0;
  for (int64_t head = 0; head < model.num_attention_heads; ++head) {
    const auto output = o.subspan(static_cast<size_t>(head * model.d_v()), static_cast<size_t>(model.d_v()));
    const double error = layer_.epilogue().error(row, head, oracle_.turned_back(output, position));
    if (error <= worst) continue;
    worst = error;
    where = head;
  }
  log_.note_outputs(model.num_attention_heads, worst, kOutputTolerance,
                    fmt::format("{}, finished output of head {}", what, where));
}

// Finds out which of the compressed rows the token got, and checks that they are those that it should have got.
Status PooledEngine::check_selection(const Sample& sample, int64_t row, const std::string& what,
                                     std::vector<int32_t>& positions) {
  if (sample.kind == kWindow) return {};
  const PooledKind& kind = layer_.kinds()[sample.kind];
  const TokenPlace& place = tokens_[static_cast<size_t>(sample.token)].place;
  positions = positions_of(layer_.selected(row), place.pages, layer_.rows_per_page(sample.kind));
  std::string wrong;
  if (kind.chooses()) {
    if (Status status = judge_choice(sample, row, positions, wrong); !status.ok()) return status;
  } else if (std::ssize(positions) != place.visible(kind)) {
    wrong = fmt::format("expected all {} compressed keys, got {}", place.visible(kind), positions.size());
  }
  if (!wrong.empty()) log_.fail(fmt::format("{}: {}", what, wrong));
  return {};
}

Status PooledEngine::judge_choice(const Sample& sample, int64_t row, std::span<const int32_t> positions,
                                  std::string& wrong) {
  const PooledKind& kind = layer_.kinds()[sample.kind];
  const TokenPlace& place = tokens_[static_cast<size_t>(sample.token)].place;
  const auto logits = layer_.indexer_logits(reference_, sample.kind, place, indexer_queries(sample.kind, row));
  if (!logits.ok()) return logits.status();
  std::optional<KeyBlocks> within;
  if (kind.candidates == CandidateBlocks::kWithin)
    within = KeyBlocks{.blocks = layer_.candidates(row), .block_size = kCandidateBlock};
  wrong = judge_selection(*logits, positions, kind.topk, within);
  if (!wrong.empty() || kind.candidates == CandidateBlocks::kNone) return {};
  // The blocks have to be those that the owner of the pool picks for this very token.
  const auto of_owner = layer_.indexer_logits(reference_, kind.pool, place, indexer_queries(kind.pool, row));
  if (!of_owner.ok()) return of_owner.status();
  wrong = judge_blocks(*of_owner, {.blocks = layer_.candidates(row), .block_size = kCandidateBlock},
                       options_.layer.candidate_blocks);
  return {};
}

Status PooledEngine::check(const Sample& sample, int64_t first) {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  const int64_t heads = model.num_attention_heads, d_qk = model.d_qk(), d_v = model.d_v(), row = sample.token - first;
  const Token& token = tokens_[static_cast<size_t>(sample.token)];
  const std::string what = fmt::format("line {}, token {}, layer {}", token.request->line, token.place.position,
                                       layer_.kinds()[sample.kind].name);
  const int64_t head = log_.num_checks++ % heads;
  const TensorView q = contiguous(q_.data() + row * heads * d_qk * bytes, dtype, {1, heads, d_qk});
  const std::vector<float> got = widened(o_.data() + row * heads * d_v * bytes, dtype, heads * d_v);

  // The oracle is slow, so one head must do.
  std::vector<float> expected(static_cast<size_t>(heads * d_v));
  Status status = layer_.attend(reference_, slice(q, 1, head, 1), row, static_cast<int32_t>(head),
                                contiguous(expected.data(), DType::kF32, {1, 1, d_v}), Phase::kCheck, nullptr);
  if (!status.ok()) return status;
  log_.note(relative_error(got.data() + head * d_v, expected.data(), d_v), log_.worst_reference,
            fmt::format("{}, head {}", what, head), "the reference");

  check_output(sample, row, got, what);
  if (turns(model)) check_query(sample, row, what);
  if (status = check_cached(sample, what); !status.ok()) return status;
  std::vector<int32_t> positions;
  if (status = check_selection(sample, row, what, positions); !status.ok()) return status;
  if (log_.failed()) return {};  // positions that are none cannot be gathered
  status = layer_.attend_gathered(sample.kind, token.place, positions, q,
                                  contiguous(expected.data(), DType::kF32, {1, heads, d_v}));
  if (!status.ok()) return status;
  for (int64_t h = 0; h < heads; ++h)
    log_.note(relative_error(got.data() + h * d_v, expected.data() + h * d_v, d_v), log_.worst_other_way,
              fmt::format("{}, head {}", what, h), "prefill_sparse over gathered keys");
  return {};
}

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/pooled_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "mla/replay/checker.h"

namespace mla::cli::replay {
namespace {

// A call has at most this many query tokens: the queries, and the indexer's logits, take as many times a token's
// memory.
constexpr int64_t kSliceTokens = 128;
constexpr int64_t kPooledTokensPerTask = 8;  // of the generator
// A pooled row may have this relative error against the mean of what it is made of: e4m3 keeps three bits behind the
// first, e2m1 one.
double pooled_tolerance(CacheFormat format) { return kv_layout(format).nope.element == DType::kE2M1 ? 0x1p-2 : 0x1p-4; }

int64_t slice_bytes(const ModelConfig& model, int64_t element_bytes) {
  const int64_t heads = model.num_attention_heads;
  return kSliceTokens * (heads * (model.d_qk() + model.d_v()) * element_bytes +
                         int64_t{indexer_heads(model)} * (kIndexerLayout.head_dim + 4));
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
      layer_(options.layer, operations_, generator_.attn_sink()) {
  const ModelConfig& model = options.layer.model;
  const size_t bytes = size_of(options.layer.dtype);
  const int64_t heads = model.num_attention_heads;
  latents_ = rows_buffer(options.layer.chunk + options.decode_rows(), model.d_qk(), bytes);
  q_ = rows_buffer(kSliceTokens, heads * model.d_qk(), bytes);
  o_ = rows_buffer(kSliceTokens, heads * model.d_v(), bytes);
  indexer_q_ = rows_buffer(kSliceTokens, int64_t{indexer_heads(model)} * kIndexerLayout.head_dim, 1);
  indexer_weights_ = rows_buffer(kSliceTokens, indexer_heads(model), sizeof(float));
}

int64_t PooledEngine::memory_needed(const EngineOptions& options) {
  const ModelConfig& model = options.layer.model;
  const auto bytes = static_cast<int64_t>(size_of(options.layer.dtype));
  const int64_t rows = options.layer.chunk + options.decode_rows();
  // Counts the latents, and the groups that a step finishes, in f32.
  const int64_t per_row = model.d_qk() * (bytes + 2 * static_cast<int64_t>(sizeof(float)));
  return PooledLayer::cache_bytes(options.layer) + rows * per_row + slice_bytes(model, bytes);
}

void PooledEngine::add_tokens(const Sequence& sequence, int32_t start, int32_t count, int32_t accepted) {
  const auto seeds = generator_.token_seeds(*sequence.request, sequence.request->line, start, count);
  const int32_t page_size = options_.layer.page_size;
  ranges_.push_back({.pages = sequence.pages, .start = start, .count = count});
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = start + i;
    tokens_.push_back({.seed = answer_seed(seeds[static_cast<size_t>(i)], i < accepted),
                       .line = sequence.request->line,
                       .place = {.pages = sequence.pages, .position = position}});
    slots_.push_back(int64_t{sequence.pages[static_cast<size_t>(position / page_size)]} * page_size +
                     position % page_size);
  }
}

void PooledEngine::plan_step(const Step& step, std::span<const Sequence> sequences) {
  tokens_.clear();
  slots_.clear();
  ranges_.clear();
  for (const PrefillPiece& piece : step.prefill)
    add_tokens(sequences[static_cast<size_t>(piece.sequence)], piece.start, piece.count, piece.count);
  num_prefill_ = std::ssize(tokens_);
  for (const DecodePiece& piece : step.decode) {
    const Sequence& sequence = sequences[static_cast<size_t>(piece.sequence)];
    add_tokens(sequence, sequence.num_computed, piece.count, piece.accepted);
  }
}

void PooledEngine::generate_latents() {
  const int64_t count = std::ssize(tokens_), width = options_.layer.model.d_qk();
  const auto bytes = static_cast<int64_t>(size_of(options_.layer.dtype));
  team_.run((count + kPooledTokensPerTask - 1) / kPooledTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kPooledTokensPerTask; i < std::min(count, (task + 1) * kPooledTokensPerTask); ++i) {
      const Token& token = tokens_[static_cast<size_t>(i)];
      generator_.latent(token.seed, token.place.position, latents_.data() + i * width * bytes);
    }
  });
}

void PooledEngine::generate_queries(int64_t first, int64_t count) {
  const ModelConfig& model = options_.layer.model;
  const auto bytes = static_cast<int64_t>(size_of(options_.layer.dtype));
  const int64_t width = model.d_qk(), row_bytes = model.num_attention_heads * width * bytes;
  const int32_t index_heads = indexer_heads(model);
  team_.run((count + kPooledTokensPerTask - 1) / kPooledTokensPerTask, [&](int64_t task, int32_t) {
    for (int64_t i = task * kPooledTokensPerTask; i < std::min(count, (task + 1) * kPooledTokensPerTask); ++i) {
      const Token& token = tokens_[static_cast<size_t>(first + i)];
      std::byte* row = q_.data() + i * row_bytes;
      generator_.query(token.seed, token.place.position,
                       {.q_nope = row,
                        .q_nope_stride_head = width,
                        .q_pe = row + model.kv_lora_rank * bytes,
                        .q_pe_stride_head = width});
      generator_.indexer_query(token.seed, 0, index_heads,
                               indexer_q_.data() + i * index_heads * kIndexerLayout.head_dim,
                               indexer_weights_.as<float>() + i * index_heads);
    }
  });
}

Status PooledEngine::run(const Step& step, std::span<const Sequence> sequences) {
  plan_step(step, sequences);
  recorder_.time(Phase::kGenerate, [&] { generate_latents(); });
  if (Status status = layer_.append(latents_.data(), slots_, &recorder_); !status.ok()) return status;
  if (Status status = layer_.compress(ranges_, &recorder_); !status.ok()) return status;
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

Status PooledEngine::attend_slice(int64_t first, int64_t count, Phase phase, const std::optional<Sample>& sample) {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  recorder_.time(Phase::kGenerate, [&] { generate_queries(first, count); });
  std::vector<TokenPlace> places;
  for (int64_t i = first; i < first + count; ++i) places.push_back(tokens_[static_cast<size_t>(i)].place);
  const TensorView q = contiguous(q_.data(), dtype, {count, model.num_attention_heads, model.d_qk()});
  const TensorView o = contiguous(o_.data(), dtype, {count, model.num_attention_heads, model.d_v()});
  for (size_t kind = 0; kind < layer_.kinds().size(); ++kind) {
    const IndexerQueries queries{.q = indexer_q_.data(), .weights = indexer_weights_.as<float>()};
    const Phase selection = phase == Phase::kPrefillAttention ? Phase::kPrefillIndexer : Phase::kDecodeIndexer;
    if (Status status = layer_.select(kind, places, queries, selection, &recorder_); !status.ok()) return status;
    if (Status status = layer_.attend(operations_, q, 0, 0, o, phase, &recorder_); !status.ok()) return status;
    if (!sample || sample->kind != kind || sample->token < first || sample->token >= first + count) continue;
    Status status = recorder_.time(Phase::kCheck, [&] { return check(*sample, first); });
    if (!status.ok()) return status;
  }
  return {};
}

// Checks the last of the compressed rows that the token sees.
Status PooledEngine::check_pooled_row(const Sample& sample, const std::string& what) {
  const TokenPlace& place = tokens_[static_cast<size_t>(sample.token)].place;
  const PooledKind& kind = layer_.kinds()[sample.kind];
  const int32_t ratio = kind.ratio, last = place.visible(kind) - 1;
  const int64_t width = options_.layer.model.d_qk();
  if (sample.kind == kWindow || last < 0) return {};
  const auto group = layer_.rows(kWindow, place.pages, last * ratio, ratio);
  if (!group.ok()) return group.status();
  const auto pooled = layer_.rows(sample.kind, place.pages, last, 1);
  if (!pooled.ok()) return pooled.status();
  std::vector<float> mean(static_cast<size_t>(width), 0.0F);
  for (size_t i = 0; i < group->size(); ++i)
    mean[i % static_cast<size_t>(width)] += (*group)[i] / static_cast<float>(ratio);
  const double error = relative_error(pooled->data(), mean.data(), width);
  const double tolerance = pooled_tolerance(options_.layer.pool_cache);
  if (error > tolerance)
    log_.fail(fmt::format("{}: expected row {} of the pool within {:.4f} of the mean of its {} tokens, got {:.4g}",
                          what, last, tolerance, ratio, error));
  return {};
}

// Finds out which of the compressed rows the token got, and checks that they are those that it should have got.
Status PooledEngine::check_selection(const Sample& sample, int64_t row, const std::string& what,
                                     std::vector<int32_t>& positions) {
  if (sample.kind == kWindow) return {};
  const PooledKind& kind = layer_.kinds()[sample.kind];
  const TokenPlace& place = tokens_[static_cast<size_t>(sample.token)].place;
  positions = positions_of(layer_.selected(row), place.pages, layer_.rows_per_page(sample.kind));
  std::string wrong;
  if (!kind.chooses()) {
    if (std::ssize(positions) != place.visible(kind))
      wrong = fmt::format("expected all {} compressed keys, got {}", place.visible(kind), positions.size());
  } else {
    const int32_t index_heads = indexer_heads(options_.layer.model);
    const IndexerQueries query{.q = indexer_q_.data() + row * index_heads * kIndexerLayout.head_dim,
                               .weights = indexer_weights_.as<float>() + row * index_heads};
    const auto logits = layer_.indexer_logits(reference_, sample.kind, place, query);
    if (!logits.ok()) return logits.status();
    wrong = judge_selection(*logits, positions, kind.topk);
  }
  if (!wrong.empty()) log_.fail(fmt::format("{}: {}", what, wrong));
  return {};
}

Status PooledEngine::check(const Sample& sample, int64_t first) {
  const ModelConfig& model = options_.layer.model;
  const DType dtype = options_.layer.dtype;
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  const int64_t heads = model.num_attention_heads, d_qk = model.d_qk(), d_v = model.d_v(), row = sample.token - first;
  const Token& token = tokens_[static_cast<size_t>(sample.token)];
  const std::string what =
      fmt::format("line {}, token {}, layer {}", token.line, token.place.position, layer_.kinds()[sample.kind].name);
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

  std::vector<int32_t> positions;
  if (status = check_selection(sample, row, what, positions); !status.ok()) return status;
  if (log_.failed()) return {};  // positions that are none cannot be gathered
  status = layer_.attend_gathered(sample.kind, token.place, positions, q,
                                  contiguous(expected.data(), DType::kF32, {1, heads, d_v}));
  if (!status.ok()) return status;
  for (int64_t h = 0; h < heads; ++h)
    log_.note(relative_error(got.data() + h * d_v, expected.data() + h * d_v, d_v), log_.worst_other_way,
              fmt::format("{}, head {}", what, h), "prefill_sparse over gathered keys");
  return check_pooled_row(sample, what);
}

}  // namespace mla::cli::replay

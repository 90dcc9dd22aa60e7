// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/generator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "mla/kv_layout.h"
#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

constexpr int32_t kMaxSinkChannels = 32;  // the first ones
constexpr int32_t kOutlierEvery = 64;     // one outlier channel in as many
constexpr float kOutlierGain = 5.0F;
constexpr float kSinkGain = 0.05F;       // the sink channels of ordinary tokens, and all others of token 0
constexpr float kSinkSpread = 5.0F;      // of the sink channels, times their gain: equal ones would round all one way
constexpr float kSinkScore = 9.0F;       // of token 0, scaled: a fifth to a half of the weight at usual lengths
constexpr float kNormSpread = 0.1F;      // of the norms' weights, around 1
constexpr float kProjectedGain = 3.0F;   // of what a norm brings to root mean square 1, so that a norm left out shows
constexpr float kSinkValueGain = 0.03F;  // the sink's value is nearly nothing, as in trained models

// Says what a random stream is for, so that no two streams of a token coincide.
enum Stream : uint64_t {
  kLatent = 1,
  kQuery = 2,
  kWeightK = 3,
  kWeightV = 4,
  kAnswer = 5,
  kPrompt = 6,
  kIndexer = 7,
  kAttnSink = 8,
  kCompressorKv = 9,
  kCompressorScore = 10,
  kNormWeight = 11,
  kPositionBias = 12
};

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a ^ (b + 0x9E3779B97F4A7C15U + (a << 6) + (a >> 2));
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

// Writes nearly normal numbers of variance 1, each the sum of four random bytes. Those are a hash of the index, so that
// the loop vectorizes.
void fill_normal(uint64_t seed, float* to, int64_t count) {
  const auto low = static_cast<uint32_t>(seed);
  const auto high = static_cast<uint32_t>(seed >> 32);
  constexpr float kScale = 1.0F / 147.8F;  // sqrt(4 * (256^2 - 1) / 12)
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = (static_cast<uint32_t>(i) * 0x9E3779B9U + low) ^ high;
    x = (x ^ (x >> 16)) * 0x7FEB352DU;
    x = (x ^ (x >> 15)) * 0x846CA68BU;
    x ^= x >> 16;
    const uint32_t pairs = (x & 0x00FF00FFU) + ((x >> 8) & 0x00FF00FFU);
    const auto sum = static_cast<int32_t>((pairs & 0xFFFFU) + (pairs >> 16));
    to[i] = static_cast<float>(sum - 510) * kScale;
  }
}

float sum_of_squares(const float* values, int64_t count) {
  float sum = 0.0F;
  for (int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
  return sum;
}

// Returns a buffer that is reused from call to call: the generator competes with the kernels for time.
float* scratch(size_t count) {
  thread_local std::vector<float> buffer;
  if (buffer.size() < count) buffer.resize(count);
  return buffer.data();
}

}  // namespace

Generator::Generator(const ModelConfig& model, uint64_t seed, DType dtype)
    : model_(model), seed_(mix(seed, 0)), dtype_(dtype) {
  const int64_t heads = model.num_attention_heads, rank = model.kv_lora_rank, nope = model.qk_nope_head_dim;
  channel_gain_.assign(static_cast<size_t>(rank), 1.0F);
  for (int64_t c = kOutlierEvery - 1; c < rank; c += kOutlierEvery)
    channel_gain_[static_cast<size_t>(c)] = kOutlierGain;
  sink_channels_ = std::min<int32_t>(kMaxSinkChannels, model.kv_lora_rank / 2);
  std::fill_n(channel_gain_.begin(), sink_channels_, kSinkGain);

  if (!model.value_is_row) {
    // Variance 1 / kv_lora_rank keeps k_nope at the latents' root mean square of 1.
    w_uk_.resize(static_cast<size_t>(heads * nope * rank));
    fill_normal(mix(seed_, kWeightK), w_uk_.data(), heads * nope * rank);
    for (float& w : w_uk_) w /= std::sqrt(static_cast<float>(rank));
  }
  make_sink_query();
  for (int32_t i = 0; i < model.qk_rope_head_dim / 2; ++i)
    frequency_.push_back(std::pow(model.rope_theta, -2.0 * i / model.qk_rope_head_dim));
}

// Token 0's key without noise is a row sum of W_UK over the sink channels, or those channels themselves without
// projections; the query looks along it.
void Generator::make_sink_query() {
  const int64_t heads = model_.num_attention_heads, rank = model_.kv_lora_rank, nope = model_.qk_nope_head_dim;
  const float sink_value = std::sqrt(static_cast<float>(rank) / static_cast<float>(sink_channels_));
  sink_query_.resize(static_cast<size_t>(heads * nope));
  for (int64_t h = 0; h < heads; ++h) {
    float* direction = sink_query_.data() + h * nope;
    for (int64_t d = 0; d < nope; ++d) {
      const auto row = w_uk_.begin() + (w_uk_.empty() ? 0 : (h * nope + d) * rank);
      const float along =
          w_uk_.empty() ? (d < sink_channels_ ? 1.0F : 0.0F) : std::accumulate(row, row + sink_channels_, 0.0F);
      direction[d] = sink_value * along;
    }
    const float gain = kSinkScore / (sum_of_squares(direction, nope) * model_.sm_scale());
    for (int64_t d = 0; d < nope; ++d) direction[d] *= gain;
  }
}

Weights Generator::weights() const {
  if (w_uk_.empty()) return {};
  const int64_t heads = model_.num_attention_heads, rank = model_.kv_lora_rank, v = model_.v_head_dim;
  std::vector<float> w_uv(static_cast<size_t>(heads * v * rank));
  fill_normal(mix(seed_, kWeightV), w_uv.data(), heads * v * rank);
  for (float& w : w_uv) w /= std::sqrt(static_cast<float>(rank));
  for (int64_t row = 0; row < heads * v; ++row)
    for (int64_t c = 0; c < sink_channels_; ++c) w_uv[static_cast<size_t>(row * rank + c)] *= kSinkValueGain;

  Weights weights{.w_uk = std::vector<std::byte>(w_uk_.size() * size_of(dtype_)),
                  .w_uv = std::vector<std::byte>(w_uv.size() * size_of(dtype_))};
  store(w_uk_.data(), std::ssize(w_uk_), weights.w_uk.data());
  store(w_uv.data(), std::ssize(w_uv), weights.w_uv.data());
  return weights;
}

std::vector<uint64_t> Generator::token_seeds(const Request& request, int64_t index, int32_t start,
                                             int32_t count) const {
  std::vector<uint64_t> seeds;
  seeds.reserve(static_cast<size_t>(count));
  uint64_t chain = mix(seed_, kPrompt);
  int32_t chained = 0;  // blocks in `chain`
  const uint64_t answer = mix(mix(seed_, kAnswer), static_cast<uint64_t>(index));
  for (int32_t position = start; position < start + count; ++position) {
    if (position >= request.input_length) {
      seeds.push_back(mix(answer, static_cast<uint64_t>(position)));
      continue;
    }
    while (chained <= position / kBlockTokens)
      chain = mix(chain, static_cast<uint64_t>(request.hash_ids[static_cast<size_t>(chained++)]));
    seeds.push_back(mix(chain, static_cast<uint64_t>(position % kBlockTokens)));
  }
  return seeds;
}

void Generator::store(const float* values, int64_t count, void* to) const {
  if (dtype_ == DType::kF32) {
    std::memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* out = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = f32_to_bf16(values[i]);
}

// DeepSeek's pairing: channels 2i and 2i + 1 turn together.
void Generator::rotate(float* channels, int32_t heads, int32_t position) const {
  const int32_t dim = model_.qk_rope_head_dim;
  for (int32_t i = 0; i < dim / 2; ++i) {
    const auto c = static_cast<float>(std::cos(angle(position, i)));
    const auto s = static_cast<float>(std::sin(angle(position, i)));
    for (int32_t h = 0; h < heads; ++h) {
      float* pair = channels + int64_t{h} * dim + 2 * i;
      const float x = pair[0], y = pair[1];
      pair[0] = x * c - y * s;
      pair[1] = x * s + y * c;
    }
  }
}

// Gives normal numbers in the channels of a row their sizes: outliers, and at position 0 the sink.
void Generator::shape_row(float* values, int32_t position) const {
  const int32_t rank = model_.kv_lora_rank;
  for (int32_t c = 0; c < rank; ++c) values[c] *= channel_gain_[static_cast<size_t>(c)];
  if (position != 0) return;
  for (int32_t c = 0; c < rank; ++c)
    values[c] = c < sink_channels_ ? 1.0F + values[c] * kSinkSpread : values[c] * kSinkGain;
}

void Generator::latent(uint64_t token_seed, int32_t position, void* row) const {
  const int32_t rank = model_.kv_lora_rank, rope = model_.qk_rope_head_dim;
  float* values = scratch(static_cast<size_t>(rank + rope));
  fill_normal(mix(token_seed, kLatent), values, rank + rope);
  shape_row(values, position);
  const float inverse_rms = std::sqrt(static_cast<float>(rank) / sum_of_squares(values, rank));
  for (int32_t c = 0; c < rank; ++c) values[c] *= inverse_rms;
  rotate(values + rank, 1, position);
  store(values, rank + rope, row);
}

void Generator::projected_latent(uint64_t token_seed, int32_t position, void* row) const {
  const int32_t rank = model_.kv_lora_rank, rope = model_.qk_rope_head_dim;
  float* values = scratch(static_cast<size_t>(rank + rope));
  fill_normal(mix(token_seed, kLatent), values, rank + rope);
  shape_row(values, position);
  if (model_.value_is_row && position == 0)
    for (int32_t c = rank; c < rank + rope; ++c) values[c] *= kSinkGain;
  for (int32_t c = 0; c < (model_.value_is_row ? rank + rope : rank); ++c) values[c] *= kProjectedGain;
  store(values, rank + rope, row);
}

// Returns the heads' q_nope, and behind them their q_pe, not rotated.
float* Generator::plain_query(uint64_t token_seed) const {
  const int64_t heads = model_.num_attention_heads, nope = model_.qk_nope_head_dim, rope = model_.qk_rope_head_dim;
  float* q = scratch(static_cast<size_t>(heads * (nope + rope)));
  fill_normal(mix(token_seed, kQuery), q, heads * (nope + rope));
  for (int64_t i = 0; i < heads * nope; ++i) q[i] += sink_query_[static_cast<size_t>(i)];
  return q;
}

void Generator::query(uint64_t token_seed, int32_t position, const QueryRow& row) const {
  float* q = plain_query(token_seed);
  rotate(q + int64_t{model_.num_attention_heads} * model_.qk_nope_head_dim, model_.num_attention_heads, position);
  store_query(q, row);
}

void Generator::projected_query(uint64_t token_seed, const QueryRow& row) const {
  const int64_t count = int64_t{model_.num_attention_heads} * (model_.qk_nope_head_dim + model_.qk_rope_head_dim);
  float* q = plain_query(token_seed);
  for (int64_t i = 0; model_.value_is_row && i < count; ++i) q[i] *= kProjectedGain;
  store_query(q, row);
}

void Generator::store_query(const float* q, const QueryRow& row) const {
  const int64_t heads = model_.num_attention_heads, nope = model_.qk_nope_head_dim, rope = model_.qk_rope_head_dim;
  const float *q_nope = q, *q_pe = q + heads * nope;
  const auto bytes = static_cast<int64_t>(size_of(dtype_));
  for (int64_t h = 0; h < heads; ++h) {
    store(q_nope + h * nope, nope, static_cast<std::byte*>(row.q_nope) + h * row.q_nope_stride_head * bytes);
    if (rope > 0) store(q_pe + h * rope, rope, static_cast<std::byte*>(row.q_pe) + h * row.q_pe_stride_head * bytes);
  }
}

void Generator::indexer_query(uint64_t token_seed, uint64_t indexer, int32_t heads, void* q, float* weights) const {
  const int64_t count = int64_t{heads} * kIndexerLayout.head_dim;
  float* values = scratch(static_cast<size_t>(count + heads));
  fill_normal(mix(mix(token_seed, kIndexer), indexer), values, count + heads);
  auto* codes = static_cast<uint8_t*>(q);
  for (int64_t i = 0; i < count; ++i) codes[i] = f32_to_e4m3(values[i]);
  std::copy_n(values + count, heads, weights);
}

void Generator::projections(uint64_t token_seed, int32_t position, const CompressorShape& shape, void* kv,
                            void* score) const {
  const int32_t width = shape.width();
  float* values = scratch(static_cast<size_t>(width));
  fill_normal(mix(mix(token_seed, kCompressorKv), shape.id), values, width);
  for (int32_t first = 0; shape.row_like && first < width; first += shape.d_latent) shape_row(values + first, position);
  store(values, width, kv);
  if (score == nullptr) return;
  fill_normal(mix(mix(token_seed, kCompressorScore), shape.id), values, width);
  store(values, width, score);
}

std::vector<float> Generator::norm_weight(const CompressorShape& shape) const {
  return shape.norm ? norm_weights(shape.id, shape.d_latent) : std::vector<float>();
}

std::vector<float> Generator::latent_norm_weight() const {
  return norm_weights(0, model_.value_is_row ? model_.d_qk() : model_.kv_lora_rank);
}

std::vector<float> Generator::norm_weights(uint64_t id, int32_t count) const {
  std::vector<float> weight(static_cast<size_t>(count));
  fill_normal(mix(mix(seed_, kNormWeight), id), weight.data(), count);
  for (float& w : weight) w = 1.0F + kNormSpread * w;
  return weight;
}

std::vector<float> Generator::position_bias(const CompressorShape& shape) const {
  if (!shape.has_bias()) return {};
  std::vector<float> bias(static_cast<size_t>(shape.ratio) * static_cast<size_t>(shape.width()));
  fill_normal(mix(mix(seed_, kPositionBias), shape.id), bias.data(), std::ssize(bias));
  return bias;
}

std::vector<float> Generator::attn_sink() const {
  std::vector<float> sink(static_cast<size_t>(model_.num_attention_heads));
  fill_normal(mix(seed_, kAttnSink), sink.data(), std::ssize(sink));
  return sink;
}

}  // namespace mla::cli::replay

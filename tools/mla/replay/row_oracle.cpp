// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/row_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

constexpr int32_t kTokensChecked = 2048;  // of one pool in one check
constexpr int32_t kVariants = 3;          // rows that RowFormat stores of one
constexpr double kNormEps = 1e-6;         // of CompressParams and AppendRopeParams, by default

// Brings values to root mean square 1, and multiplies each by its weight, if there are weights.
void normalize(double* values, int64_t count, std::span<const float> weight) {
  double squares = 0.0;
  for (int64_t c = 0; c < count; ++c) squares += values[c] * values[c];
  const double root = std::sqrt(squares / static_cast<double>(count) + kNormEps);
  for (int64_t c = 0; c < count; ++c)
    values[c] *= (weight.empty() ? 1.0 : static_cast<double>(weight[static_cast<size_t>(c)])) / root;
}

}  // namespace

std::vector<double> RowOracle::widened(const std::byte* values, int64_t count) const {
  std::vector<double> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    out[static_cast<size_t>(i)] =
        static_cast<double>(dtype_ == DType::kF32 ? reinterpret_cast<const float*>(values)[i]
                                                  : bf16_to_f32(reinterpret_cast<const uint16_t*>(values)[i]));
  return out;
}

std::vector<double> RowOracle::projected(const SeedOf& seed_of, int32_t position) const {
  std::vector<std::byte> row(static_cast<size_t>(model_.d_qk()) * size_of(dtype_));
  generator_.projected_latent(seed_of(position), position, row.data());
  return widened(row.data(), model_.d_qk());
}

// DeepSeek's pairing: channels 2i and 2i + 1 turn together.
void RowOracle::turn(double* channels, int32_t count, double positions) const {
  for (int32_t pair = 0; pair < count / 2; ++pair) {
    const double angle = positions * generator_.angle(1, pair);
    const double x = channels[2 * pair], y = channels[2 * pair + 1];
    channels[2 * pair] = x * std::cos(angle) - y * std::sin(angle);
    channels[2 * pair + 1] = x * std::sin(angle) + y * std::cos(angle);
  }
}

std::vector<double> RowOracle::latent(const SeedOf& seed_of, int32_t position) const {
  std::vector<double> row = projected(seed_of, position);
  const std::vector<float> weight = generator_.latent_norm_weight();
  normalize(row.data(), std::ssize(weight), weight);
  turn(row.data() + model_.kv_lora_rank, model_.qk_rope_head_dim, position);
  return row;
}

std::vector<double> RowOracle::query(uint64_t token_seed, int32_t position) const {
  const int32_t heads = model_.num_attention_heads, nope = model_.qk_nope_head_dim, rope = model_.qk_rope_head_dim;
  const int32_t width = model_.value_is_row ? nope + rope : rope;
  const auto bytes = static_cast<int64_t>(size_of(dtype_));
  std::vector<std::byte> values(static_cast<size_t>(heads * (nope + rope) * bytes));
  generator_.projected_query(token_seed, {.q_nope = values.data(),
                                          .q_nope_stride_head = nope + rope,
                                          .q_pe = values.data() + nope * bytes,
                                          .q_pe_stride_head = nope + rope});
  std::vector<double> query;
  for (int64_t head = 0; head < heads; ++head) {
    std::vector<double> one = widened(values.data() + head * (nope + rope) * bytes, nope + rope);
    if (model_.value_is_row) normalize(one.data(), width, {});
    turn(one.data() + nope, rope, position);
    query.insert(query.end(), one.end() - width, one.end());
  }
  return query;
}

std::vector<double> RowOracle::turned_back(std::span<const float> output, int32_t position) const {
  std::vector<double> turned(output.begin(), output.end());
  turn(turned.data() + turned.size() - model_.qk_rope_head_dim, model_.qk_rope_head_dim,
       -static_cast<double>(position));
  return turned;
}

std::vector<double> RowOracle::pooled(const CompressorShape& shape, const SeedOf& seed_of, int32_t group) const {
  const int32_t width = shape.width(), last = (group + 1) * shape.ratio - 1;
  const std::vector<float> bias = generator_.position_bias(shape), norm = generator_.norm_weight(shape);
  const auto channels = static_cast<size_t>(shape.d_latent);
  std::vector<double> numerator(channels), denominator(channels);
  std::vector<std::byte> kv(static_cast<size_t>(width) * size_of(dtype_)), score(kv.size());
  for (int32_t position = std::max(last - shape.span() + 1, 0); position <= last; ++position) {
    generator_.projections(seed_of(position), position, shape, kv.data(), shape.has_score() ? score.data() : nullptr);
    const std::vector<double> values = widened(kv.data(), width), scores = widened(score.data(), width);
    // With overlap, tokens of the group before add their first half of channels, the group's own their second.
    const size_t half = shape.overlap && position > last - shape.ratio ? channels : 0;
    for (size_t c = 0; c < channels; ++c) {
      double weight = 1.0;
      if (shape.has_score()) {
        const size_t at = static_cast<size_t>(position % shape.ratio) * static_cast<size_t>(width) + half + c;
        // Scores are a few units, so that nothing has to be taken off before the exponential.
        weight = std::exp(scores[half + c] + (bias.empty() ? 0.0 : static_cast<double>(bias[at])));
      }
      numerator[c] += weight * values[half + c];
      denominator[c] += weight;
    }
  }
  for (size_t c = 0; c < channels; ++c) numerator[c] /= denominator[c];
  if (!norm.empty()) normalize(numerator.data(), std::ssize(numerator), norm);
  for (size_t c = 0; c < channels; ++c) {
    const auto value = static_cast<float>(numerator[c]);
    numerator[c] = static_cast<double>(dtype_ == DType::kF32 ? value : bf16_to_f32(f32_to_bf16(value)));
  }
  return numerator;
}

std::vector<double> RowOracle::row(const CompressorShape& shape, const SeedOf& seed_of, int32_t group) const {
  std::vector<double> latent = pooled(shape, seed_of, group);
  turn(latent.data() + shape.d_latent - shape.d_rotary, shape.d_rotary, group * shape.ratio);
  return latent;
}

std::vector<double> RowOracle::key_of(const std::vector<double>& latent) const {
  const auto end = latent.begin() + model_.kv_lora_rank;
  return {end - kIndexerLayout.head_dim, end};
}

std::vector<int32_t> rows_to_check(int32_t count, int32_t tokens_per_row, uint64_t salt) {
  const int32_t most = std::max(kTokensChecked / tokens_per_row, 1);
  std::set<int32_t> rows;
  if (count <= most) {
    for (int32_t row = 0; row < count; ++row) rows.insert(row);
  } else {
    rows.insert(0);
    for (int32_t row = count - (most + 1) / 2; row < count; ++row) rows.insert(row);
    while (std::ssize(rows) < most) {
      salt = salt * 0x5851F42D4C957F2DU + 0x14057B7EF767814FU;
      rows.insert(static_cast<int32_t>((salt >> 33) % static_cast<uint64_t>(count)));
    }
  }
  return {rows.begin(), rows.end()};
}

RowFormat::RowFormat(const ModelConfig& model, CacheFormat format, Operations& reference)
    : reference_(reference), rows_(format, model.d_qk(), model.kv_lora_rank, kVariants, 1, nullptr) {}

RowFormat::RowFormat(Operations& reference) : reference_(reference), keys_(kVariants, 1, nullptr), is_keys_(true) {}

// Returns what the cache holds of `rows`, [kVariants, width].
Result<std::vector<float>> RowFormat::stored(const std::vector<float>& rows) {
  const int64_t width = std::ssize(rows) / kVariants;
  const std::vector<int64_t> slots = {0, 1, 2};
  const std::vector<int32_t> page = {0}, all = {0, 1, 2};
  const TensorView values = contiguous(rows.data(), DType::kF32, {kVariants, width});
  const TensorView slot_mapping = contiguous(slots.data(), DType::kI64, {kVariants});
  if (is_keys_) {
    AppendIndexerParams params;
    params.k = values;
    params.slot_mapping = slot_mapping;
    params.cache = keys_.cache();
    if (Status status = reference_.run(params, Phase::kCheck, nullptr); !status.ok()) return status;
    return keys_.keys(reference_, page, all);
  }
  AppendParams params;
  params.kv = values;
  params.slot_mapping = slot_mapping;
  params.cache = rows_.cache();
  if (Status status = reference_.run(params, Phase::kCheck, nullptr); !status.ok()) return status;
  return rows_.rows(reference_, width, kVariants, page, all);
}

Result<double> RowFormat::error(const float* got, const std::vector<double>& truth) {
  std::vector<float> rows;
  for (double factor : {1.0, 1.0 - 0x1p-8, 1.0 + 0x1p-8})
    for (double x : truth) rows.push_back(static_cast<float>(x * factor));
  const auto may_be = stored(rows);
  if (!may_be.ok()) return may_be.status();
  double excess = 0.0, norm = 0.0;
  for (size_t c = 0; c < truth.size(); ++c) {
    double allowed = 0.0;
    for (size_t i = c; i < may_be->size(); i += truth.size())
      allowed = std::max(allowed, std::abs(static_cast<double>((*may_be)[i]) - truth[c]));
    const double beyond = std::abs(static_cast<double>(got[c]) - truth[c]) - allowed;
    if (!(beyond <= 0.0)) excess += beyond * beyond;
    norm += truth[c] * truth[c];
  }
  return std::isfinite(excess) ? std::sqrt(excess / norm) : std::numeric_limits<double>::infinity();
}

void check_queries(const std::string& what, std::span<const float> got, std::span<const double> expected, int64_t heads,
                   CheckLog& log) {
  const size_t width = expected.size() / static_cast<size_t>(heads);
  double worst = -1.0;
  size_t where = 0;
  for (size_t first = 0, head = 0; first < expected.size(); first += width, ++head) {
    double difference = 0.0, norm = 0.0;
    for (size_t c = first; c < first + width; ++c) {
      const double off = static_cast<double>(got[c]) - expected[c];
      difference += off * off;
      norm += expected[c] * expected[c];
    }
    const double error = difference == 0.0 ? 0.0 : std::sqrt(difference / norm);
    if (error <= worst) continue;  // NaN is the worst
    worst = error;
    where = head;
    if (std::isnan(error)) break;
  }
  log.note_queries(heads, worst, kQueryTolerance, fmt::format("{}, query of head {}", what, where));
}

Status check_rows(const std::string& what, std::span<const int32_t> rows, const Result<std::vector<float>>& got,
                  RowFormat& format, const std::function<std::vector<double>(int32_t row)>& expected, CheckLog& log) {
  if (!got.ok()) return got.status();
  const float* values = got->data();
  for (int32_t row : rows) {
    const std::vector<double> truth = expected(row);
    const auto error = format.error(values, truth);
    if (!error.ok()) return error.status();
    log.note_row(*error, kRowTolerance, fmt::format("{} {}", what, row));
    values += truth.size();
  }
  return {};
}

}  // namespace mla::cli::replay

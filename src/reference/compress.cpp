// SPDX-License-Identifier: Apache-2.0
// compress pools the tokens of a group into one latent,
//   latent[c] = norm(sum_p softmax_p(score[p][c] + position_bias[p mod ratio][c]) * kv[p][c])
// and appends it. DeepSeek V4's compressors are described in its report, section 2.3, eqs. 9 to 23, and written out in
// transformers (models/deepseek_v4, DeepseekV4CSACompressor and DeepseekV4HCACompressor); V4.1's in vLLM
// (models/deepseek_v41/compressor.py); GLM-5.3's pooled indexer keys in SGLang (IndexerKPool).
#include <algorithm>
#include <cmath>

#include "reference/cache_rows.h"
#include "reference/reference.h"
#include "reference/rotated.h"

namespace mla::reference {
namespace {

/// Finds what a token of a request adds to the latents of its own group, and with overlap of the next one.
struct Tokens {
  const core::CompressArgs& args;
  int32_t request;
  int64_t first;  // position of the first new token

  int64_t token(int64_t position) const { return args.queries.begin(request) + position - first; }
  bool is_new(int64_t position) const { return position >= first; }
  /// Returns whether anything is known of the token: it is new, or it has a state.
  bool known(int64_t position) const {
    return position >= 0 && (is_new(position) || args.state_of(request, position) != nullptr);
  }
  float kv(int64_t position, int32_t c) const {
    if (!is_new(position)) return args.state_of(request, position)[c];
    return load(args.kv, args.dtype, token(position) * args.kv_stride_token + c);
  }
  float score(int64_t position, int32_t c) const {
    if (!is_new(position)) return args.state_of(request, position)[args.width() + c];
    const float score = load(args.score, args.dtype, token(position) * args.score_stride_token + c);
    if (args.position_bias == nullptr) return score;
    return score + args.position_bias[position % args.ratio * args.position_bias_stride_position + c];
  }
};

/// Returns channel `c` of the latent of the group that ends at `last`, not yet normalized.
double pooled(const Tokens& tokens, int64_t last, int32_t c) {
  const core::CompressArgs& args = tokens.args;
  if (args.ratio == 1) return static_cast<double>(tokens.kv(last, c));
  const auto for_tokens = [&](const auto& f) {
    for (int64_t position = last - args.span() + 1; position <= last; ++position) {
      const bool second_half = args.overlap && position > last - args.ratio;
      if (tokens.known(position)) f(position, second_half ? args.d_latent + c : c);
    }
  };
  double max = -INFINITY, sum = 0, weighted = 0;
  for_tokens([&](int64_t position, int32_t channel) {
    max = std::max(max, static_cast<double>(tokens.score(position, channel)));
  });
  for_tokens([&](int64_t position, int32_t channel) {
    const double weight = std::exp(static_cast<double>(tokens.score(position, channel)) - max);
    sum += weight;
    weighted += weight * static_cast<double>(tokens.kv(position, channel));
  });
  return weighted / sum;
}

/// Writes the latent of the group that ends at `last`.
void make(const Tokens& tokens, int64_t last) {
  const core::CompressArgs& args = tokens.args;
  const int64_t first = tokens.token(last) * args.latent_stride_token;
  double squares = 0;
  for (int32_t c = 0; args.norm_weight != nullptr && c < args.d_latent; ++c)
    squares += pooled(tokens, last, c) * pooled(tokens, last, c);
  const double root = std::sqrt(squares / args.d_latent + static_cast<double>(args.norm_eps));
  for (int32_t c = 0; c < args.d_latent; ++c) {
    double value = pooled(tokens, last, c);
    if (args.norm_weight != nullptr)
      value *= static_cast<double>(load(args.norm_weight, args.norm_weight_dtype, c)) / root;
    store_row(&value, args.latent_dtype, first + c, 1, args.latent);
  }
}

/// Appends the latent of the group that ends at `last`, as it stands in `latent`.
void append(const core::CompressArgs& args, int64_t token, int64_t last) {
  if (args.to == core::CompressArgs::To::kLatents || args.slot_mapping[token] < 0) return;
  const int64_t slot = args.slot_mapping[token], first = token * args.latent_stride_token;
  const Channels latent = {args.latent, args.latent_dtype, first};
  const int32_t num_plain = args.d_latent - args.d_rotary;
  const Channels tail = {args.latent, args.latent_dtype, first + num_plain};
  const Rotated<Channels> rotated = {
      .pe = tail,
      .dim = args.d_rotary,
      .cos_sin = args.cos_sin + (last - args.ratio + 1) * (args.d_rotary > 0 ? args.cos_sin_stride_position : 0),
      .interleaved = args.interleaved};
  if (args.to == core::CompressArgs::To::kIndexer) {
    const auto source = [&](int32_t c) { return c < num_plain ? latent(c) : rotated.rounded(c - num_plain); };
    return write_indexer_key(args.indexer, slot, source, args.power_of_two_scales);
  }
  const CacheRow row = CacheRow::at_slot(args.cache, slot);
  if (args.d_rotary > 0) return write_rotated_row(row, latent, rotated);
  write_ckv(row, latent);
  write_kpe(row, Channels{args.latent, args.latent_dtype, first + args.cache.d_ckv});
}

/// Keeps the newest tokens of a request, as many as its state has room for.
void keep(const core::CompressArgs& args, const Tokens& tokens, int64_t end) {
  if (args.state == nullptr) return;
  for (int64_t position = std::max({tokens.first, end - args.capacity(), int64_t{0}}); position < end; ++position) {
    float* const to = args.state_of(tokens.request, position);
    if (to == nullptr) continue;
    for (int32_t c = 0; c < args.width(); ++c) {
      to[c] = tokens.kv(position, c);
      to[args.width() + c] = tokens.score(position, c);
    }
  }
}

}  // namespace

void compress(const core::CompressArgs& args) {
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const Tokens tokens = {args, request, args.first_position(request)};
    const int64_t end = tokens.first + args.queries.len(request);
    for (int64_t last = std::max<int64_t>(tokens.first, 0); last < end; ++last) {
      if ((last + 1) % args.ratio != 0) continue;
      make(tokens, last);
      append(args, tokens.token(last), last);
    }
    keep(args, tokens, end);
  }
  if (args.appends()) append_rope(args.append);
}

}  // namespace mla::reference

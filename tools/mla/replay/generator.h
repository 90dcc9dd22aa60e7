// SPDX-License-Identifier: Apache-2.0
// Generates seeded stand-ins for what the rest of the model would compute: latents, queries and the two up-projections.
// A token is a function of the seed, of the prompt up to its block and of its position, so that equal prefixes are
// equal.
#pragma once

#include <cstdint>
#include <vector>

#include "mla/model.h"
#include "mla/replay/compressor_shape.h"
#include "mla/replay/trace.h"
#include "mla/types.h"

namespace mla::cli::replay {

/// Holds W_UK [H, qk_nope_head_dim, kv_lora_rank] and W_UV [H, v_head_dim, kv_lora_rank], in the activations' dtype;
/// empty for a model without projections (value_is_row).
struct Weights {
  std::vector<std::byte> w_uk, w_uv;
};

/// Says where the query of one token is written; heads are `*_stride_head` elements apart.
struct QueryRow {
  void* q_nope = nullptr;  ///< [H, qk_nope_head_dim]
  int64_t q_nope_stride_head = 0;
  void* q_pe = nullptr;  ///< [H, qk_rope_head_dim], unused if that is 0
  int64_t q_pe_stride_head = 0;
};

class Generator {
 public:
  /// `dtype`, bf16 or f32, is that of the weights, latents and queries.
  Generator(const ModelConfig& model, uint64_t seed, DType dtype);

  Weights weights() const;

  /// Returns the seeds of the tokens `start` ... `start + count - 1` of a request. Answer tokens depend on the
  /// request's `index`.
  std::vector<uint64_t> token_seeds(const Request& request, int64_t index, int32_t start, int32_t count) const;

  /// Writes the latent row [ckv | kpe] of one token. ckv has root mean square 1, a few outlier channels, and at
  /// position 0 nearly all of its energy in a few channels, at which every query looks: the attention sink. kpe is
  /// rotated by position.
  void latent(uint64_t token_seed, int32_t position, void* row) const;
  /// Writes the query of one token, q_pe rotated by position. Without projections q_nope is compared with ckv as it is.
  void query(uint64_t token_seed, int32_t position, const QueryRow& row) const;
  /// Writes what the projections give of a token before its row is normalized and both are rotated. Normalized are the
  /// channels of latent_norm_weight(), and without projections the heads of the query: these channels are larger here.
  void projected_latent(uint64_t token_seed, int32_t position, void* row) const;
  void projected_query(uint64_t token_seed, const QueryRow& row) const;
  /// Returns the weights of the norm of latent rows: of the whole row, if it is its own value, else of ckv.
  std::vector<float> latent_norm_weight() const;

  /// Writes the query of one token for the sparse indexer number `indexer`, e4m3 [heads, kIndexerLayout.head_dim], and
  /// its weights [heads] f32.
  void indexer_query(uint64_t token_seed, uint64_t indexer, int32_t heads, void* q, float* weights) const;

  /// Writes what a compressor gets of one token, both [width]: the projection `kv`, and `score` unless that is null.
  void projections(uint64_t token_seed, int32_t position, const CompressorShape& shape, void* kv, void* score) const;
  /// Returns a compressor's norm_weight [d_latent], empty without a norm.
  std::vector<float> norm_weight(const CompressorShape& shape) const;
  /// Returns a compressor's position_bias [ratio, width], empty if it has none.
  std::vector<float> position_bias(const CompressorShape& shape) const;
  /// Returns the angle of a pair of rotary channels, in radians.
  double angle(int32_t position, int32_t pair) const { return position * frequency_[static_cast<size_t>(pair)]; }
  /// Returns stand-ins for the learned sink logits, one per head.
  std::vector<float> attn_sink() const;

 private:
  void make_sink_query();
  float* plain_query(uint64_t token_seed) const;
  void store_query(const float* q, const QueryRow& row) const;
  std::vector<float> norm_weights(uint64_t id, int32_t count) const;
  void shape_row(float* values, int32_t position) const;
  void rotate(float* channels, int32_t heads, int32_t position) const;
  void store(const float* values, int64_t count, void* to) const;

  ModelConfig model_;
  uint64_t seed_;
  DType dtype_;
  int32_t sink_channels_ = 0;        // the first channels, which token 0 owns
  std::vector<float> channel_gain_;  // [kv_lora_rank]
  std::vector<float> w_uk_;          // [H, qk_nope_head_dim, kv_lora_rank], empty without projections
  std::vector<float> sink_query_;    // [H, qk_nope_head_dim], added to every query
  std::vector<double> frequency_;    // [qk_rope_head_dim / 2], radians per position
};

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// Describes how tokens are compressed to rows of a pool, or to keys of an indexer.
#pragma once

#include <cstdint>
#include <optional>

#include "mla/model.h"

namespace mla::cli::replay {

/// Holds what compress has to know of a model's layer.
struct CompressorShape {
  uint64_t id = 0;        ///< tells compressors of a model apart: their activations and weights differ
  int32_t ratio = 1;      ///< tokens of a group
  bool overlap = false;   ///< whether a latent is pooled from the group before as well (DeepSeek V4's ratio of 4)
  int32_t d_latent = 0;   ///< channels of a latent
  int32_t d_rotary = 0;   ///< those that turn, the last ones
  bool norm = true;       ///< whether a latent is normalized
  bool row_like = false;  ///< whether its channels are those of a row: with outliers, and a sink at position 0

  int32_t width() const { return overlap ? 2 * d_latent : d_latent; }  ///< channels of a token
  int32_t span() const { return overlap ? 2 * ratio : ratio; }         ///< tokens that a latent is pooled from
  bool has_score() const { return ratio > 1; }
  bool has_bias() const { return ratio > 2; }  ///< DeepSeek V4.1's scores, of ratio 2, have none
};

/// Returns the compressor of a pool with one row for `ratio` tokens (DeepSeek V4 and V4.1).
inline CompressorShape pool_compressor(const ModelConfig& model, int32_t ratio) {
  return {.id = static_cast<uint64_t>(ratio),
          .ratio = ratio,
          .overlap = ratio == 4,
          .d_latent = model.d_qk(),
          .d_rotary = model.qk_rope_head_dim,
          .row_like = true};
}

/// Returns the compressor of the keys of an indexer that chooses rows of that pool; nothing where keys are made of the
/// pool's latents (V4.1).
inline std::optional<CompressorShape> key_compressor(const ModelConfig& model, int32_t ratio) {
  if (ratio <= 2) return std::nullopt;
  return CompressorShape{.id = 1000 + static_cast<uint64_t>(ratio),
                         .ratio = ratio,
                         .overlap = ratio == 4,
                         .d_latent = kIndexerLayout.head_dim,
                         .d_rotary = model.qk_rope_head_dim};
}

/// Returns the compressor of keys that stand for `pooled` tokens of a latent cache (GLM-5.3-Flash). They are normalized
/// before they are pooled.
inline CompressorShape pooled_key_compressor(int32_t pooled) {
  return {.id = 2000, .ratio = pooled, .d_latent = kIndexerLayout.head_dim, .norm = false};
}

}  // namespace mla::cli::replay

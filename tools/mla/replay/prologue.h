// SPDX-License-Identifier: Apache-2.0
// Runs what stands between the projections and attention: norms and rotation of queries and keys, and the append.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/mla.h"
#include "mla/replay/compressor.h"
#include "mla/replay/generator.h"
#include "mla/replay/operations.h"
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

/// Holds what the projections give of new tokens: latent rows [T, d_qk], and where they go.
struct NewTokens {
  const void* latents = nullptr;
  std::span<const int64_t> slots = {};      ///< [T]; negative: written nowhere
  std::span<const int64_t> positions = {};  ///< [T]
};

/// Holds their queries, q_nope [T, H, kv_lora_rank] and q_pe [T, H, qk_rope_head_dim], and where attention finds them,
/// out [T, H, d_qk]. Not given: only keys are written.
struct NewQueries {
  TensorView q_nope = {}, q_pe = {}, out = {};
};

/// Returns whether queries and keys have rotary channels. Queries without them are attended with as they come.
inline bool turns(const ModelConfig& model) { return model.qk_rope_head_dim > 0; }

class Prologue {
 public:
  /// `dtype` is that of the latents; `angles` must outlive the prologue.
  Prologue(const ModelConfig& model, DType dtype, const Generator& generator, const Angles& angles);

  /// Writes the tokens' rows into the cache, and their queries.
  Status run(Operations& operations, const NewTokens& tokens, const NewQueries& queries, const KvCache& cache,
             Phase phase, Recorder* recorder) const;
  /// Returns what append_rope is given for that.
  AppendRopeParams params(const NewTokens& tokens, const NewQueries& queries, const KvCache& cache) const;

 private:
  TensorView rows(const NewTokens& tokens) const;
  static TensorView slots(const NewTokens& tokens);

  ModelConfig model_;
  DType dtype_;
  std::vector<float> norm_weight_;
  const Angles& angles_;
};

}  // namespace mla::cli::replay

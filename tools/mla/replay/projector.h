// SPDX-License-Identifier: Apache-2.0
// The projections on both sides of attention, by oneDNN: latents to keys and values, queries into the latent space,
// decode's output out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mla/model.h"
#include "mla/replay/generator.h"
#include "mla/replay/team.h"
#include "mla/types.h"

namespace mla::cli::replay {

/// A range of heads.
struct Heads {
  int32_t begin = 0;
  int32_t count = 0;
};

/// Every buffer must have room for padded_rows(rows) rows: whole blocks are computed, the last one past its end.
class Projector {
 public:
  /// bf16 where oneDNN can multiply it on this machine, else f32.
  static DType activation_dtype();
  static int64_t padded_rows(int64_t rows);

  /// `dtype` is activation_dtype(). The team must outlive the projector; oneDNN's exceptions pass through.
  Projector(const ModelConfig& model, Weights weights, DType dtype, Team& team);
  ~Projector();

  /// latents [rows, kv_lora_rank + qk_rope_head_dim] -> k [rows, H, qk_nope_head_dim + qk_rope_head_dim] and
  /// v [rows, H, v_head_dim]; only `heads` are written.
  void keys_values(const void* latents, int64_t rows, Heads heads, void* k, void* v);
  /// q_nope [rows, H, qk_nope_head_dim] -> absorbed [rows, H, kv_lora_rank].
  void absorb(const void* q_nope, int64_t rows, void* absorbed);
  /// o [rows, H, kv_lora_rank] -> out [rows, H, v_head_dim] f32.
  void output(const void* o, int64_t rows, float* out);

  /// Floating-point operations of keys_values for one token and one head.
  double keys_values_flops() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// Computes the projections on both sides of attention, with oneDNN: latents to keys and values, queries into the latent
// space, decode's output out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mla/model.h"
#include "mla/replay/generator.h"
#include "mla/replay/team.h"
#include "mla/types.h"

namespace mla::cli::replay {

/// Names the heads `begin` ... `begin + count - 1`.
struct Heads {
  int32_t begin = 0;
  int32_t count = 0;
};

/// Computes the projections. Every buffer must have room for padded_rows(rows) rows: whole blocks of rows are computed,
/// so the last one may go beyond `rows`.
class Projector {
 public:
  /// Returns bf16 if oneDNN can multiply it on this machine, else f32.
  static DType activation_dtype();
  static int64_t padded_rows(int64_t rows);

  /// `dtype` is activation_dtype(). The team must outlive the projector; oneDNN's exceptions pass through.
  Projector(const ModelConfig& model, Weights weights, DType dtype, Team& team);
  ~Projector();

  /// Computes k [rows, H, qk_nope_head_dim + qk_rope_head_dim] and v [rows, H, v_head_dim] from latents [rows,
  /// kv_lora_rank + qk_rope_head_dim]; only `heads` are written.
  void keys_values(const void* latents, int64_t rows, Heads heads, void* k, void* v);
  /// Computes absorbed [rows, H, kv_lora_rank] from q_nope [rows, H, qk_nope_head_dim].
  void absorb(const void* q_nope, int64_t rows, void* absorbed);
  /// Computes out [rows, H, v_head_dim] f32 from o [rows, H, kv_lora_rank].
  void output(const void* o, int64_t rows, float* out);

  /// Returns the floating-point operations of keys_values for one token and one head.
  double keys_values_flops() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla::cli::replay

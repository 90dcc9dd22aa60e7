// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/prologue.h"

namespace mla::cli::replay {

Prologue::Prologue(const ModelConfig& model, DType dtype, const Generator& generator, const Angles& angles)
    : model_(model), dtype_(dtype), norm_weight_(generator.latent_norm_weight()), angles_(angles) {}

Status Prologue::run(Operations& operations, const NewTokens& tokens, const NewQueries& queries, const KvCache& cache,
                     Phase phase, Recorder* recorder) const {
  const int64_t count = std::ssize(tokens.slots), rank = model_.kv_lora_rank, rotary = model_.qk_rope_head_dim;
  const TensorView rows = contiguous(tokens.latents, dtype_, {count, rank + rotary});
  const TensorView slots = contiguous(tokens.slots.data(), DType::kI64, {count});
  if (!has_prologue(model_)) {
    AppendParams params;
    params.kv = rows;
    params.slot_mapping = slots;
    params.cache = cache;
    return operations.run(params, Phase::kAppend, recorder);
  }
  AppendRopeParams params;
  params.q_nope = queries.q_nope;
  params.q_pe = queries.q_pe;
  params.q_out = queries.out;
  params.ckv = slice(rows, 1, 0, rank);
  params.kpe = slice(rows, 1, rank, rotary);
  params.cos_sin = angles_.cos_sin();
  params.positions = contiguous(tokens.positions.data(), DType::kI64, {count});
  params.slot_mapping = slots;
  params.q_norm = model_.value_is_row && queries.q_nope.given();
  params.norm_weight = contiguous(norm_weight_.data(), DType::kF32, {std::ssize(norm_weight_)});
  params.cache = cache;
  return operations.run(params, phase, recorder);
}

}  // namespace mla::cli::replay

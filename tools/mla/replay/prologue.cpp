// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/prologue.h"

namespace mla::cli::replay {

Prologue::Prologue(const ModelConfig& model, DType dtype, const Generator& generator, const Angles& angles)
    : model_(model), dtype_(dtype), norm_weight_(generator.latent_norm_weight()), angles_(angles) {}

TensorView Prologue::rows(const NewTokens& tokens) const {
  return contiguous(tokens.latents, dtype_, {std::ssize(tokens.slots), model_.kv_lora_rank + model_.qk_rope_head_dim});
}

TensorView Prologue::slots(const NewTokens& tokens) {
  return contiguous(tokens.slots.data(), DType::kI64, {std::ssize(tokens.slots)});
}

AppendRopeParams Prologue::params(const NewTokens& tokens, const NewQueries& queries, const KvCache& cache) const {
  AppendRopeParams params;
  params.q_nope = queries.q_nope;
  params.q_pe = queries.q_pe;
  params.q_out = queries.out;
  params.ckv = slice(rows(tokens), 1, 0, model_.kv_lora_rank);
  if (turns(model_)) {
    params.kpe = slice(rows(tokens), 1, model_.kv_lora_rank, model_.qk_rope_head_dim);
    params.cos_sin = angles_.cos_sin();
    params.positions = contiguous(tokens.positions.data(), DType::kI64, {std::ssize(tokens.slots)});
  }
  params.slot_mapping = slots(tokens);
  params.q_norm = model_.value_is_row && queries.q_nope.given();
  params.norm_weight = contiguous(norm_weight_.data(), DType::kF32, {std::ssize(norm_weight_)});
  params.cache = cache;
  return params;
}

Status Prologue::run(Operations& operations, const NewTokens& tokens, const NewQueries& queries, const KvCache& cache,
                     Phase phase, Recorder* recorder) const {
  return operations.run(params(tokens, queries, cache), phase, recorder);
}

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// This header gives the attention shapes of published models, by preset name or from a Hugging Face config.json.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "mla/status.h"

namespace mla {

struct ModelConfig {
  std::string name;
  int32_t num_attention_heads = 0;
  int32_t num_hidden_layers = 0;
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  int32_t index_topk = 0;      ///< keys that a query selects; 0 = dense attention
  int32_t sliding_window = 0;  ///< tokens that every query sees beside the compressed ones (DeepSeek V4); 0 = no window
  /// Is set for DeepSeek V4: rows are cached as they are attended to, without a projection; kv_lora_rank is their
  /// non-rotary part, and the value is the whole row.
  bool value_is_row = false;
  double rope_theta = 10000.0;

  int32_t d_qk() const { return kv_lora_rank + qk_rope_head_dim; }              ///< width of absorbed queries
  int32_t d_v() const { return value_is_row ? d_qk() : kv_lora_rank; }          ///< width of absorbed outputs
  int32_t prefill_d_qk() const { return qk_nope_head_dim + qk_rope_head_dim; }  ///< width of prefill queries
  float sm_scale() const;  ///< 1/sqrt(qk_nope_head_dim + qk_rope_head_dim)
};

/// Returns all presets.
std::span<const ModelConfig> model_presets();

/// Returns a preset by its name ("deepseek-v3", in upper or lower case), or reads the config.json at a path. The error
/// names what is missing.
Result<ModelConfig> load_model(std::string_view name_or_path);

/// Reads the text of a config.json. `source` names it in errors.
Result<ModelConfig> parse_model_config(std::string_view json, std::string_view source);

}  // namespace mla

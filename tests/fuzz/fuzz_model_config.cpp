// SPDX-License-Identifier: Apache-2.0
// Fuzzes the parsing of config.json: any text gives a usable model or a message that begins with the source.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "mla/model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const mla::Result<mla::ModelConfig> model = mla::parse_model_config(text, "fuzz");
  if (!model.ok()) {
    if (!model.status().message().starts_with("fuzz: ")) std::abort();
    return 0;
  }
  const bool usable = model->num_attention_heads > 0 && model->num_hidden_layers > 0 && model->kv_lora_rank > 0 &&
                      model->qk_nope_head_dim > 0 && model->qk_rope_head_dim >= 0 && model->v_head_dim > 0 &&
                      model->index_topk >= 0 && model->rope_theta > 0.0 && model->sm_scale() > 0.0F &&
                      model->d_qk() >= model->kv_lora_rank;
  if (!usable || model->layers.empty() || model->caches.empty()) std::abort();
  int64_t attending = 0;
  for (const mla::LayerKind& layer : model->layers) {
    if (layer.count < 1 || layer.d_qk() < 1 || layer.d_v() < 1 || layer.prefill_d_qk() < 1 ||
        layer.list_width() < layer.index_topk || (layer.index_heads > 0) != (layer.index_head_dim > 0))
      std::abort();
    if (layer.draft_block == 0) attending += layer.count;
  }
  if (attending > model->num_hidden_layers) std::abort();
  return 0;
}

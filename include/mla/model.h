// SPDX-License-Identifier: Apache-2.0
// This header gives the attention shapes of published models, by preset name or from a Hugging Face config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/kv_layout.h"
#include "mla/status.h"

namespace mla {

/// Holds the heads and widths of a layer's attention.
struct AttentionShape {
  int32_t num_attention_heads = 0;
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;
  /// Counts the channels beside the latent ones. Models without rotation may have them: Kimi K3's config.json says
  /// mla_use_nope and 64, its 64 shared channels stay as they are, and its rows are 576 wide as DeepSeek's.
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  /// Is set for DeepSeek V4: rows are cached as they are attended to, without a projection; kv_lora_rank is their
  /// non-rotary part, and the value is the whole row.
  bool value_is_row = false;

  int32_t d_qk() const { return kv_lora_rank + qk_rope_head_dim; }              ///< width of absorbed queries
  int32_t d_v() const { return value_is_row ? d_qk() : kv_lora_rank; }          ///< width of absorbed outputs
  int32_t prefill_d_qk() const { return qk_nope_head_dim + qk_rope_head_dim; }  ///< width of prefill queries
  float sm_scale() const;  ///< 1/sqrt(qk_nope_head_dim + qk_rope_head_dim)

  friend bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

/// Says what a layer's indexer does with the blocks of keys that DeepSeek V4.1 chooses first.
enum class CandidateBlocks : uint8_t {
  kNone,   ///< it chooses among all keys
  kPicks,  ///< it picks the blocks, too
  kWithin  ///< it chooses within the blocks that another layer picked
};

/// Describes layers of a model that attend alike.
struct LayerKind : AttentionShape {
  std::string name = {};       ///< "sliding window", "compressed by 4", ...
  int32_t count = 0;           ///< layers of the model that are of this kind
  int32_t sliding_window = 0;  ///< newest tokens that a query sees, itself among them; 0 = all
  /// Counts the tokens that make a row of the second pool, which a query sees beside its window (DeepSeek V4). 0: there
  /// is no second pool.
  int32_t compress_ratio = 0;
  bool owns_pool = false;      ///< it writes the second pool; otherwise it reads that of another layer (V4.1)
  int32_t index_topk = 0;      ///< keys that are chosen for a query, of the second pool if there is one; 0 = all
  int32_t index_heads = 0;     ///< heads of its indexer; 0: another layer's indexer chose, or nothing is chosen
  int32_t index_head_dim = 0;  ///< channels of its indexer's keys; 0 without one
  int32_t index_pooled = 1;    ///< tokens that share a key of the indexer and are chosen together (GLM-5.3-Flash)
  CandidateBlocks candidates = CandidateBlocks::kNone;
  bool attn_sink = false;
  int32_t draft_block = 0;  ///< of layers that draft: tokens of a block, all of which see each other; 0 = causal

  /// Returns the width of the lists of chosen keys. Where keys are chosen by pools, the tokens of the incomplete pool
  /// are in the list as well, and it is as wide as engines make it: 2176 of index_topk 2048 in pools of 4.
  int32_t list_width() const;

  friend bool operator==(const LayerKind&, const LayerKind&) = default;
};

/// Names the formats of the caches that a model's layers attend to.
struct CachePair {
  CacheFormat cache = CacheFormat::kBF16;
  CacheFormat extra_cache = CacheFormat::kBF16;  ///< of the second pool, where there is one
  friend bool operator==(const CachePair&, const CachePair&) = default;
};

/// Holds the shape of a model's attention; of a model with several (dots3) that of the layers that see all tokens.
struct ModelConfig : AttentionShape {
  std::string name = {};
  int32_t num_hidden_layers = 0;  ///< with those of linear attention, which have no such cache (Kimi K3)
  int32_t index_topk = 0;         ///< keys that a query selects; 0 = dense attention
  int32_t index_n_heads = 0;      ///< heads of the indexers; 0 if there are none
  int32_t sliding_window = 0;  ///< tokens that every query sees beside the compressed ones (DeepSeek V4); 0 = no window
  double rope_theta = 10000.0;
  /// Lists the layers that attend over a cache of latent rows, kind by kind, in the order in which kinds first appear.
  /// Layers of multi-token prediction, which attend as other layers do, are not listed.
  std::vector<LayerKind> layers = {};
  std::vector<CachePair> caches = {};  ///< in which engines serve the model, the usual one first

  /// Returns what the model is served with where its first pool has that format, or else two pools of it.
  CachePair caches_of(CacheFormat cache) const;

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

/// Returns all presets.
std::span<const ModelConfig> model_presets();

/// Returns a preset by its name ("deepseek-v3", in upper or lower case), or reads the config.json at a path. The error
/// names what is missing.
Result<ModelConfig> load_model(std::string_view name_or_path);

/// Reads the text of a config.json. `source` names it in errors.
Result<ModelConfig> parse_model_config(std::string_view json, std::string_view source);

}  // namespace mla

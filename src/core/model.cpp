// SPDX-License-Identifier: Apache-2.0
#include "mla/model.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "core/format.h"

namespace mla {
namespace {

/// Holds a preset: what of the published config.json parse_model_config() reads, so that a preset and its file are one.
struct Preset {
  const char* name;
  const char* config;
  LayerKind draft = {};  ///< layers of a checkpoint of its own that drafts for the model; count 0: there is none
};

/// Returns the layers of Inferact/Kimi-K3-DSpark: dense MLA in a bf16 cache, blocks of 7 (vLLM's pull request 54005,
/// TokenSpeed's 905, TensorRT-LLM's 19040).
LayerKind kimi_k3_draft() {
  LayerKind draft;
  draft.num_attention_heads = 64;
  draft.kv_lora_rank = 512;
  draft.qk_nope_head_dim = 128;
  draft.qk_rope_head_dim = 64;
  draft.v_head_dim = 128;
  draft.name = "draft of 7";
  draft.count = 5;
  draft.draft_block = 7;
  return draft;
}

/// Returns the presets' sources: the values of the config.json with which each model was published, as public copies of
/// it and transformers' defaults have them (November 2026). A long list may be said by a shorter field that says the
/// same.
std::span<const Preset> sources() {
  static const Preset all[] = {
      {"deepseek-v2-lite",
       R"({"num_attention_heads": 16, "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})"},
      {"deepseek-v2",
       R"({"num_attention_heads": 128, "num_hidden_layers": 60, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})"},
      {"deepseek-v3",
       R"({"num_attention_heads": 128, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})"},
      {"deepseek-r1",
       R"({"num_attention_heads": 128, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})"},
      {"deepseek-v3.2",
       R"({"num_attention_heads": 128, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
         "rope_theta": 10000})"},
      // The V4 models' last compress ratio is that of the layer of multi-token prediction.
      {"deepseek-v4-flash",
       R"({"num_attention_heads": 64, "num_hidden_layers": 43, "head_dim": 512, "qk_rope_head_dim": 64,
         "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000,
         "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
          128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0]})"},
      {"deepseek-v4-pro",
       R"({"num_attention_heads": 128, "num_hidden_layers": 61, "head_dim": 512, "qk_rope_head_dim": 64,
         "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 1024, "rope_theta": 10000,
         "compress_ratios": [128, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
          128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
          128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0]})"},
      {"deepseek-v4.1-flash",
       R"({"num_attention_heads": 64, "num_hidden_layers": 40, "head_dim": 512, "qk_rope_head_dim": 64,
         "sliding_window": 128, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000,
         "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1,
          1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
         "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
         "candidate_source_layer_id": 20,
         "num_nextn_predict_layers": 3, "dspark_block_size": 5})"},
      {"kimi-k2",
       R"({"num_attention_heads": 64, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 50000})"},
      {"kimi-k2.5",
       R"({"num_attention_heads": 64, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 50000})"},
      // Layers are counted from 1; those that are not listed are linear attention.
      {"kimi-k3",
       R"({"num_attention_heads": 96, "num_hidden_layers": 93, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true,
         "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68,
         72, 76, 80, 84, 88, 92, 93]}})",
       kimi_k3_draft()},
      {"glm-5",
       R"({"num_attention_heads": 64, "num_hidden_layers": 78, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
         "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
         "rope_theta": 1000000})"},
      // Of GLM-5.2 and GLM-5.3, which has the same base, every fourth layer has an indexer.
      {"glm-5.2",
       R"({"num_attention_heads": 64, "num_hidden_layers": 78, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
         "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
         "index_topk_freq": 4, "index_skip_topk_offset": 3, "rope_theta": 8000000})"},
      {"glm-5.3",
       R"({"num_attention_heads": 64, "num_hidden_layers": 78, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
         "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
         "index_topk_freq": 4, "index_skip_topk_offset": 3, "rope_theta": 8000000})"},
      {"glm-5.3-flash",
       R"({"num_attention_heads": 64, "num_hidden_layers": 45, "kv_lora_rank": 512, "qk_nope_head_dim": 256,
         "qk_rope_head_dim": 0, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
         "index_kpool": 4,
         "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44]}})"},
      // The heads, ranks, layers and indexer stand in the README of the weights. The file itself could not be read:
      // head dims, rotary base and the layers with an indexer are as in transformers and a port to MLX (IndexShare,
      // every fourth).
      {"hy4-preview",
       R"({"model_type": "hy_v4", "num_attention_heads": 64, "num_hidden_layers": 78, "kv_lora_rank": 512,
         "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128,
         "index_topk": 2048, "rope_theta": 10000000, "index_topk_freq": 4})"},
      // dots3-note-prev. Its layer of multi-token prediction, which is dense, is not listed.
      {"dots3-note",
       R"({"num_attention_heads": 128, "num_hidden_layers": 46, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
         "rope_theta": 80000000, "swa_num_attention_heads": 64, "swa_kv_lora_rank": 1024, "swa_qk_nope_head_dim": 192,
         "swa_qk_rope_head_dim": 64, "swa_v_head_dim": 128, "sliding_window_size": 513,
         "layer_types": [
           "full_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
           "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]})"},
      {"mistral-small-4",
       R"({"num_attention_heads": 32, "num_hidden_layers": 36, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})"},
      // As in transformers; the models of the family with an indexer of their own (LSA) have no preset.
      {"longcat-flash",
       R"({"num_attention_heads": 64, "num_layers": 28, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000000})"},
  };
  return all;
}

/// Reads the text of a file, or returns the operating system's reason why it cannot be read.
std::optional<std::string> read_file(const std::string& path, std::string& text) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (file.is_open()) text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  if (file.is_open() && !file.bad()) return std::nullopt;
  return std::system_category().message(errno != 0 ? errno : EIO);
}

bool equal_but_for_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

}  // namespace

float AttentionShape::sm_scale() const { return 1.0F / std::sqrt(static_cast<float>(prefill_d_qk())); }

int32_t LayerKind::list_width() const {
  if (index_pooled == 1) return index_topk;
  constexpr int32_t kMultiple = 128;
  return (index_topk + index_pooled - 1 + kMultiple - 1) / kMultiple * kMultiple;
}

CachePair ModelConfig::caches_of(CacheFormat cache) const {
  const auto served =
      std::find_if(caches.begin(), caches.end(), [&](const CachePair& pair) { return pair.cache == cache; });
  return served != caches.end() ? *served : CachePair{cache, cache};
}

std::span<const ModelConfig> model_presets() {
  static const std::vector<ModelConfig> presets = [] {
    std::vector<ModelConfig> all;
    for (const Preset& source : sources()) {
      ModelConfig preset = parse_model_config(source.config, source.name).value();
      preset.name = source.name;
      if (source.draft.count > 0) preset.layers.push_back(source.draft);
      all.push_back(std::move(preset));
    }
    return all;
  }();
  return presets;
}

Result<ModelConfig> load_model(std::string_view name_or_path) try {
  std::string known;
  for (const ModelConfig& preset : model_presets()) {
    if (equal_but_for_case(preset.name, name_or_path)) return preset;
    known += (known.empty() ? "" : ", ") + preset.name;
  }
  const std::filesystem::path path(name_or_path);
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    return Status(StatusCode::kInvalidArgument, core::format("model: {} is a directory; did you mean {}?", name_or_path,
                                                             (path / "config.json").string()));
  std::string text;
  if (const auto reason = read_file(path.string(), text))
    return Status(StatusCode::kInvalidArgument,
                  core::format("model: expected a preset ({}) or the path of a config.json, got \"{}\" ({})", known,
                               name_or_path, *reason));
  return parse_model_config(text, name_or_path);
} catch (const std::exception&) {
  return Status(StatusCode::kInternal, "out of memory");
}

}  // namespace mla

// SPDX-License-Identifier: Apache-2.0
// Tests which layers a model has, in presets and in the fields of a config.json.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "mla/model.h"

namespace mla {
namespace {

using testing::ElementsAre;

/// Says what distinguishes a kind: "2 sliding window: window 128".
std::string told(const LayerKind& layer) {
  std::string text = std::to_string(layer.count) + " " + layer.name + ":";
  const auto add = [&](const char* what, int32_t value) {
    if (value != 0) text += " " + std::string(what) + " " + std::to_string(value);
  };
  add("window", layer.sliding_window);
  add("ratio", layer.compress_ratio);
  add("topk", layer.index_topk);
  add("indexer", layer.index_heads);
  if (layer.owns_pool) text += " owns";
  if (layer.candidates == CandidateBlocks::kPicks) text += " picks";
  if (layer.candidates == CandidateBlocks::kWithin) text += " within";
  add("draft", layer.draft_block);
  return text;
}

std::vector<std::string> told(const std::vector<LayerKind>& layers) {
  std::vector<std::string> all;
  for (const LayerKind& layer : layers) all.push_back(told(layer));
  return all;
}

const ModelConfig& preset(std::string_view name) {
  for (const ModelConfig& model : model_presets())
    if (model.name == name) return model;
  ADD_FAILURE() << "no preset " << name;
  static const ModelConfig none;
  return none;
}

/// Returns an absorbed shape with its heads and the head dims of its prefill: "64 x 576/512, 192/128".
std::string shape(const AttentionShape& of) {
  return std::to_string(of.num_attention_heads) + " x " + std::to_string(of.d_qk()) + "/" + std::to_string(of.d_v()) +
         ", " + std::to_string(of.prefill_d_qk()) + "/" + std::to_string(of.v_head_dim);
}

TEST(ModelLayers, OfModelsWhoseLayersAreAllAlike) {
  EXPECT_THAT(told(preset("deepseek-v2-lite").layers), ElementsAre("27 dense:"));
  EXPECT_THAT(told(preset("deepseek-v3").layers), ElementsAre("61 dense:"));
  EXPECT_THAT(told(preset("deepseek-v3.2").layers), ElementsAre("61 sparse: topk 2048 indexer 64"));
  EXPECT_THAT(told(preset("glm-5").layers), ElementsAre("78 sparse: topk 2048 indexer 32"));
  EXPECT_THAT(told(preset("longcat-flash").layers), ElementsAre("56 dense:"));
  EXPECT_EQ(shape(preset("mistral-small-4").layers.at(0)), "32 x 320/256, 128/128");
  EXPECT_EQ(shape(preset("glm-5").layers.at(0)), "64 x 576/512, 256/256");
}

TEST(ModelLayers, OfDeepSeekV4) {
  const ModelConfig &flash = preset("deepseek-v4-flash"), &pro = preset("deepseek-v4-pro");
  EXPECT_THAT(told(flash.layers),
              ElementsAre("2 sliding window: window 128", "21 ratio 4: window 128 ratio 4 topk 512 indexer 64 owns",
                          "20 ratio 128: window 128 ratio 128 owns"));
  EXPECT_THAT(told(pro.layers), ElementsAre("31 ratio 128: window 128 ratio 128 owns",
                                            "30 ratio 4: window 128 ratio 4 topk 1024 indexer 64 owns"));
  EXPECT_EQ(shape(flash), "64 x 512/512, 512/512");
  EXPECT_EQ(shape(pro), "128 x 512/512, 512/512");
  EXPECT_EQ(flash.caches_of(CacheFormat::kFP8DsV4).extra_cache, CacheFormat::kFP8DsV4);
  for (const LayerKind& layer : flash.layers) EXPECT_TRUE(layer.attn_sink);
}

TEST(ModelLayers, OfDeepSeekV41) {
  const ModelConfig& model = preset("deepseek-v4.1-flash");
  EXPECT_THAT(told(model.layers), ElementsAre("2 sliding window: window 128",
                                              "3 ratio 2, source: window 128 ratio 2 topk 512 indexer 32 owns",
                                              "15 ratio 2, reader: window 128 ratio 2 topk 512",
                                              "1 ratio 1, source: window 128 ratio 1 topk 512 indexer 32 owns picks",
                                              "15 ratio 1, reader: window 128 ratio 1 topk 512",
                                              "4 ratio 1, indexer: window 128 ratio 1 topk 512 indexer 32 within",
                                              "3 draft of 5: window 128 draft 5"));
  EXPECT_EQ(model.caches.front(), (CachePair{CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41}));
  EXPECT_EQ(model.caches_of(CacheFormat::kFP8DsV41), model.caches.front());
  EXPECT_EQ(model.caches_of(CacheFormat::kBF16), (CachePair{CacheFormat::kBF16, CacheFormat::kBF16}));
}

TEST(ModelLayers, OfModelsThatShareIndices) {
  for (const char* name : {"glm-5.2", "glm-5.3", "hy4-preview"}) {
    const ModelConfig& model = preset(name);
    EXPECT_THAT(told(model.layers), ElementsAre("21 sparse: topk 2048 indexer 32", "57 sparse, reader: topk 2048"))
        << name;
    EXPECT_EQ(shape(model), "64 x 576/512, 256/256") << name;
    for (const LayerKind& layer : model.layers) EXPECT_EQ(layer.attn_sink, std::string(name) == "hy4-preview");
  }
}

TEST(ModelLayers, OfModelsWithLinearAttention) {
  const ModelConfig &glm = preset("glm-5.3-flash"), &kimi = preset("kimi-k3");
  EXPECT_THAT(told(glm.layers), ElementsAre("11 sparse: topk 2048 indexer 32"));
  EXPECT_EQ(shape(glm.layers.at(0)), "64 x 512/512, 256/256");
  EXPECT_EQ(glm.layers.at(0).index_pooled, 4);
  EXPECT_EQ(glm.layers.at(0).list_width(), 2176);
  EXPECT_EQ(glm.caches.back().cache, CacheFormat::kFP8Nope);
  EXPECT_THAT(told(kimi.layers), ElementsAre("24 dense:", "5 draft of 7: draft 7"));
  // Rows of Kimi K3 keep the 64 channels that it does not rotate: 24 layers of 1,152 bytes are the 27,648 bytes a token
  // of TensorRT-LLM's pull request 19040.
  EXPECT_EQ(shape(kimi.layers.at(0)), "96 x 576/512, 192/128");
  EXPECT_EQ(shape(kimi.layers.at(1)), "64 x 576/512, 192/128");
}

TEST(ModelLayers, OfDots3HaveTwoShapes) {
  const ModelConfig& model = preset("dots3-note");
  EXPECT_THAT(told(model.layers), ElementsAre("13 sparse: topk 2048 indexer 64", "33 sliding window: window 513"));
  EXPECT_EQ(shape(model), "128 x 576/512, 192/128");
  EXPECT_EQ(shape(model.layers.at(1)), "64 x 1088/1024, 256/128");
  EXPECT_EQ(model.caches.size(), 1U);  // no packed format holds both rows
}

TEST(ModelLayers, AddUpInEveryPreset) {
  for (const ModelConfig& model : model_presets()) {
    int32_t count = 0;
    for (const LayerKind& layer : model.layers) {
      EXPECT_GT(layer.count, 0) << model.name;
      EXPECT_FALSE(layer.name.empty()) << model.name;
      if (layer.draft_block == 0) count += layer.count;
    }
    const bool linear = model.name == "kimi-k3" || model.name == "glm-5.3-flash";
    EXPECT_EQ(count < model.num_hidden_layers, linear) << model.name;
    EXPECT_FALSE(model.caches.empty()) << model.name;
  }
}

/// Returns the fields of a small model with a latent cache, and `more`.
std::string latent(const std::string& more) {
  return R"({"num_attention_heads": 8, "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
             "qk_rope_head_dim": 64, "v_head_dim": 128)" +
         (more.empty() ? "" : ", " + more) + "}";
}

/// Returns the fields of a small V4, and `more`, such as its ratios.
std::string compressed(const std::string& more) {
  return R"({"num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 512, "qk_rope_head_dim": 64,
             "sliding_window": 128, "index_topk": 64, "index_n_heads": 16, )" +
         more + "}";
}

std::vector<std::string> layers_of(const std::string& json) {
  const Result<ModelConfig> model = parse_model_config(json, "c");
  EXPECT_TRUE(model.ok()) << model.status().message();
  return model.ok() ? told(model->layers) : std::vector<std::string>();
}

TEST(ModelLayers, WaysToSayWhichLayersHaveAnIndexer) {
  const auto expected = ElementsAre("2 sparse: topk 64 indexer 16", "2 sparse, reader: topk 64");
  const std::string indexer = R"("index_topk": 64, "index_n_heads": 16, )";
  EXPECT_THAT(layers_of(latent(indexer + R"("indexer_types": ["full", "full", "shared", "shared", "full"])")),
              expected);
  EXPECT_THAT(layers_of(latent(indexer + R"("index_topk_pattern": "FFSS")")), expected);
  EXPECT_THAT(layers_of(latent(indexer + R"("index_topk_freq": 4)")), expected);
  EXPECT_THAT(layers_of(latent(indexer + R"("index_topk_freq": 3, "index_skip_topk_offset": 1)")),
              ElementsAre("2 sparse: topk 64 indexer 16", "2 sparse, reader: topk 64"));
  EXPECT_THAT(layers_of(latent(R"("index_topk": 64, "indexer_types": null)")),
              ElementsAre("4 sparse: topk 64 indexer 64"));
}

TEST(ModelLayers, WaysToSayWhichLayersAttend) {
  EXPECT_THAT(layers_of(latent(R"("layer_types": ["linear_attention", "full_attention", "linear_attention",
                                                  "deepseek_sparse_attention"])")),
              ElementsAre("2 dense:"));
  EXPECT_THAT(layers_of(latent(R"("linear_attn_config": {"full_attn_layers": [4]})")), ElementsAre("1 dense:"));
  EXPECT_THAT(layers_of(latent(R"("sliding_window": 100, "layer_types": ["sliding_attention", "full_attention",
                                  "full_attention", "full_attention"])")),
              ElementsAre("1 sliding window: window 100", "3 dense:"));
  EXPECT_THAT(layers_of(latent(R"("sliding_window": 4096)")), ElementsAre("4 dense:"));  // as files that do not use it
}

TEST(ModelLayers, ReadInTheTextConfigOfAV41) {
  const std::string text = compressed(R"("compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1, 2],
      "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2)");
  EXPECT_THAT(
      layers_of(R"({"model_type": "deepseek_v41", "text_config": )" + text + "}"),
      ElementsAre("1 sliding window: window 128", "1 ratio 2, source: window 128 ratio 2 topk 64 indexer 16 owns",
                  "1 ratio 1, source: window 128 ratio 1 topk 64 indexer 16 owns picks",
                  "1 ratio 1, indexer: window 128 ratio 1 topk 64 indexer 16 within"));
}

TEST(ModelLayers, RefuseWhatIsUnusableByTheField) {
  const std::string v41 = R"(, "index_source_layer_ids": [1], "candidate_source_layer_id": 2)";
  const struct {
    std::string text, message;
  } cases[] = {
      {compressed(R"("compress_ratios": [0, 4])"), "compress_ratios: expected an entry for each of 4 layers, got 2"},
      {compressed(R"("compress_ratios": 4)"), "compress_ratios: expected a list of integers, got 4"},
      {compressed(R"("compress_ratios": [0, 4, "4", 4])"),
       "compress_ratios: expected integers from 0 to 1048576, got \"4\""},
      {compressed(R"("compress_ratios": [0, 4, 8, 4])"), "compress_ratios: expected 0, 4 or 128, got 8 for layer 2"},
      {compressed(R"("compress_ratios": [0, 2, 4, 1], "kv_source_layer_ids": [1])" + v41),
       "compress_ratios: expected 0, 1 or 2, got 4 for layer 2"},
      {compressed(R"("compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1])" + v41),
       "kv_source_layer_ids: expected a layer with compress ratio 1 up to layer 2, got none"},
      {compressed(R"("compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1, 2])" + v41),
       "index_source_layer_ids: expected a layer with compress ratio 1 up to layer 2, got none"},
      {compressed(R"("compress_ratios": [0, 2, 2, 2], "kv_source_layer_ids": [1, 4])" + v41),
       "kv_source_layer_ids: expected layers from 0 to 3, got 4"},
      {R"({"num_attention_heads": 8, "num_hidden_layers": 1, "head_dim": 512, "compress_ratios": [0]})",
       "qk_rope_head_dim: expected an integer, got none"},
      {R"({"num_attention_heads": 8, "num_hidden_layers": 1, "head_dim": 64, "qk_rope_head_dim": 64,
           "compress_ratios": [0]})",
       "head_dim: expected more than qk_rope_head_dim, 64, got 64"},
      {R"({"num_attention_heads": 8, "num_hidden_layers": 1, "head_dim": 512, "qk_rope_head_dim": 64,
           "compress_ratios": [0]})",
       "sliding_window: expected an integer, got none"},
      {latent(R"("layer_types": ["full_attention"])"), "layer_types: expected an entry for each of 4 layers, got 1"},
      {latent(R"("layer_types": ["full_attention", "mamba", "full_attention", "full_attention"])"),
       "layer_types: expected linear_attention, sliding_attention, full_attention, deepseek_sparse_attention, "
       "sparse_attention, indexed_attention, got \"mamba\" for layer 1"},
      {latent(R"("layer_types": ["linear_attention", "linear_attention", "linear_attention", "linear_attention"])"),
       "layer_types: expected a layer that attends, got none"},
      {latent(R"("layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"])"),
       "sliding_window: expected an integer, got none"},
      {latent(R"("layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"],
                 "swa_kv_lora_rank": 1024, "sliding_window": 9)"),
       "swa_num_attention_heads: expected an integer, got none"},
      {latent(R"("linear_attn_config": {"full_attn_layers": [0]})"),
       "full_attn_layers: expected layers from 1 to 4, got 0"},
      {latent(R"("index_topk": 64, "indexer_types": ["shared", "full", "full", "full"])"),
       "indexer_types: expected full before shared, got shared for layer 0"},
      {latent(R"("index_topk": 64, "indexer_types": ["full", "half", "full", "full"])"),
       "indexer_types: expected shared, full, got \"half\" for layer 1"},
      {latent(R"("index_topk": 64, "index_topk_pattern": "FXSS")"), "index_topk_pattern: expected text of F and S"},
      {latent(R"("index_topk": 64, "index_topk_pattern": [true])"), "index_topk_pattern: expected text of F and S"},
      {latent(R"("index_topk": 64, "index_topk_pattern": "FS")"),
       "index_topk_pattern: expected an entry for each of 4 layers, got 2"},
      {latent(R"("index_topk": 64, "index_kpool": 0)"), "index_kpool: expected an integer from 1 to 1048576, got 0"},
      {latent(R"("index_topk": 64, "index_n_heads": 0)"),
       "index_n_heads: expected an integer from 1 to 1048576, got 0"},
  };
  for (const auto& bad : cases) {
    const Result<ModelConfig> model = parse_model_config(bad.text, "c");
    ASSERT_FALSE(model.ok()) << bad.text;
    EXPECT_EQ(model.status().message(), "c: " + bad.message) << bad.text;
    EXPECT_EQ(model.status().code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace mla

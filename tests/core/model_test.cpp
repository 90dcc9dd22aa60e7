// SPDX-License-Identifier: Apache-2.0
#include "mla/model.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

namespace mla {
namespace {

constexpr const char* kValid = R"({"model_type": "deepseek_v3", "num_attention_heads": 128, "num_hidden_layers": 61,
  "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})";

/// Returns kValid with one piece of text replaced.
std::string with(const std::string& what, const std::string& by) {
  std::string text = kValid;
  const size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
}

TEST(ModelConfig, ReadsAConfig) {
  const Result<ModelConfig> model = parse_model_config(kValid, "config.json");
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->name, "deepseek_v3");
  EXPECT_EQ(model->num_attention_heads, 128);
  EXPECT_EQ(model->num_hidden_layers, 61);
  EXPECT_EQ(model->d_qk(), 576);
  EXPECT_EQ(model->prefill_d_qk(), 192);
  EXPECT_EQ(model->v_head_dim, 128);
  EXPECT_EQ(model->index_topk, 0);
  EXPECT_FLOAT_EQ(model->sm_scale(), 1.0F / std::sqrt(192.0F));
}

TEST(ModelConfig, LooksIntoTextConfigAndRopeParameters) {
  const std::string nested = R"({"model_type": "kimi_k25", "text_config": )" +
                             with("\"rope_theta\": 10000", R"("rope_parameters": {"rope_theta": 5e4})") + "}";
  const Result<ModelConfig> model = parse_model_config(nested, "config.json");
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->name, "deepseek_v3");
  EXPECT_EQ(model->rope_theta, 5e4);
}

TEST(ModelConfig, TakesNoRotaryPartAndASparseOne) {
  const Result<ModelConfig> nope = parse_model_config(with("\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 0"), "c");
  ASSERT_TRUE(nope.ok());
  EXPECT_EQ(nope->d_qk(), 512);
  const Result<ModelConfig> sparse =
      parse_model_config(with("\"rope_theta\": 10000", "\"index_topk\": 2048, \"rope_theta\": null"), "c");
  ASSERT_TRUE(sparse.ok()) << sparse.status().message();
  EXPECT_EQ(sparse->index_topk, 2048);
  EXPECT_EQ(sparse->rope_theta, 10000.0);
}

TEST(ModelConfig, RefusesWhatIsNotOne) {
  const struct {
    std::string text, message;
  } cases[] = {
      {"", "c: not JSON (at byte 1)"},
      {"{\"kv_lora_rank\": 512,, }", "c: not JSON (at byte 22)"},
      {"{\"kv_lora_rank\": 512} x", "c: not JSON (at byte 23)"},
      {"{\"rope_theta\": 1e999}", "c: not JSON (a number is out of range)"},
      {"\xFF\xFE", "c: not JSON (at byte 1)"},
      {"[1, 2]", "c: expected a JSON object, got array"},
      {"null", "c: expected a JSON object, got null"},
      {"{}", "c: not an MLA model (no kv_lora_rank)"},
      {"{\"kv_lora_rank\": null}", "c: not an MLA model (no kv_lora_rank)"},
      {"{\"num_attention_heads\": 32, \"text_config\": {\"head_dim\": 128}}", "c: not an MLA model (no kv_lora_rank)"},
      {with("\"num_attention_heads\": 128, ", ""), "c: num_attention_heads: expected an integer, got none"},
      {with("\"v_head_dim\": 128", "\"v_head_dim\": null"), "c: v_head_dim: expected an integer, got none"},
      {with("\"num_hidden_layers\": 61", "\"num_hidden_layers\": \"61\""),
       "c: num_hidden_layers: expected an integer from 1 to 1048576, got \"61\""},
      {with("\"num_hidden_layers\": 61", "\"num_hidden_layers\": 61.5"),
       "c: num_hidden_layers: expected an integer from 1 to 1048576, got 61.5"},
      {with("\"num_hidden_layers\": 61", "\"num_hidden_layers\": [61]"),
       "c: num_hidden_layers: expected an integer from 1 to 1048576, got array"},
      {with("512", "0"), "c: kv_lora_rank: expected an integer from 1 to 1048576, got 0"},
      {with("512", "-512"), "c: kv_lora_rank: expected an integer from 1 to 1048576, got -512"},
      {with("512", "18446744073709551615"),
       "c: kv_lora_rank: expected an integer from 1 to 1048576, got 18446744073709551615"},
      {with("\"rope_theta\": 10000", "\"rope_theta\": -1"), "c: rope_theta: expected a number above 0, got -1"},
      {with("\"rope_theta\": 10000", "\"rope_theta\": \"big\""),
       "c: rope_theta: expected a number above 0, got \"big\""},
      {with("\"rope_theta\": 10000", "\"index_topk\": 0"),
       "c: index_topk: expected an integer from 1 to 1048576, got 0"},
  };
  for (const auto& bad : cases) {
    const Result<ModelConfig> model = parse_model_config(bad.text, "c");
    EXPECT_FALSE(model.ok()) << bad.text;
    EXPECT_EQ(model.status().message(), bad.message) << bad.text;
    EXPECT_EQ(model.status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(ModelConfig, DeepNestingIsNoStackOverflow) {
  const std::string deep = "{\"kv_lora_rank\": " + std::string(200000, '[') + std::string(200000, ']') + "}";
  EXPECT_EQ(parse_model_config(deep, "c").status().message(),
            "c: kv_lora_rank: expected an integer from 1 to 1048576, got array");
}

TEST(LoadModel, KnowsEveryPreset) {
  std::set<std::string> names;
  for (const ModelConfig& preset : model_presets()) {
    names.insert(preset.name);
    const Result<ModelConfig> model = load_model(preset.name);
    ASSERT_TRUE(model.ok()) << preset.name;
    EXPECT_EQ(*model, preset);
  }
  EXPECT_THAT(names, testing::IsSupersetOf({"deepseek-v2-lite", "deepseek-v3", "deepseek-r1", "deepseek-v3.2",
                                            "deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash", "kimi-k2",
                                            "kimi-k2.5", "kimi-k3", "glm-5", "glm-5.2", "glm-5.3", "glm-5.3-flash",
                                            "hy4-preview", "dots3-note", "mistral-small-4", "longcat-flash"}));
  EXPECT_EQ(names.size(), model_presets().size());
  EXPECT_EQ(load_model("deepseek-v2-lite")->num_hidden_layers, 27);
  EXPECT_EQ(load_model("deepseek-v3.2")->index_topk, 2048);
  EXPECT_EQ(load_model("glm-5")->prefill_d_qk(), 256);
  EXPECT_EQ(load_model("deepseek-v4-flash")->sliding_window, 128);
  EXPECT_FLOAT_EQ(load_model("deepseek-v4-flash")->sm_scale(), 1.0F / std::sqrt(512.0F));
}

TEST(LoadModel, ReadsAFileAndNamesItInErrors) {
  const std::string path = testing::TempDir() + "mla_model_test_config.json";
  std::ofstream(path) << kValid;
  EXPECT_EQ(load_model(path)->num_attention_heads, 128);
  std::ofstream(path) << "{";
  EXPECT_EQ(load_model(path).status().message(), path + ": not JSON (at byte 2)");
  std::remove(path.c_str());
}

TEST(LoadModel, RefusesWhatIsNeitherPresetNorFile) {
  for (const std::string& wrong : {std::string("deepseek-v9"), std::string(), testing::TempDir() + "none.json"}) {
    const Status status = load_model(wrong).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), testing::StartsWith("model: expected a preset (deepseek-v2-lite, "));
    EXPECT_THAT(status.message(),
                testing::EndsWith("or the path of a config.json, got \"" + wrong + "\" (No such file or directory)"));
  }
}

TEST(LoadModel, PointsFromADirectoryToItsConfig) {
  const std::string path = testing::TempDir() + "mla_model_test_directory";
  std::filesystem::create_directory(path);
  const Status status = load_model(path).status();
  std::filesystem::remove(path);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "model: " + path + " is a directory; did you mean " + path + "/config.json?");
}

TEST(LoadModel, TakesPresetsInAnyCase) {
  EXPECT_EQ(load_model("DeepSeek-V3")->name, "deepseek-v3");
  EXPECT_EQ(load_model("KIMI-K2.5")->name, "kimi-k2.5");
  EXPECT_FALSE(load_model("deepseek-v").ok());
}

}  // namespace
}  // namespace mla

// SPDX-License-Identifier: Apache-2.0
// Tests `libmla explain --model` without an operation: what it prints of a whole model, its JSON and its refusals.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "mla/model.h"
#include "run_mla.h"

namespace mla::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

TEST(CliExplainModel, SaysOfEveryKindOfLayerWhatRuns) {
  const Ran ran = run_mla("explain --model deepseek-v3 --cache fp8_ds_mla --backend reference");
  EXPECT_EQ(ran.status, 0) << ran.err;
  for (const char* part : {"deepseek-v3: cache fp8_ds_mla, device cpu", "61 dense", "append", "gather", "prefill",
                           "128 heads, head dims 192/128", "merge_states", "decode", "128 heads, head dims 576/512",
                           "also served with bf16, fp8"})
    EXPECT_THAT(ran.out, HasSubstr(part));
  EXPECT_THAT(ran.out, Not(HasSubstr("missing")));
  EXPECT_THAT(ran.out, Not(HasSubstr("linear attention")));
}

TEST(CliExplainModel, SaysWhatDeepSeekV41Does) {
  const Ran ran = run_mla("explain --model DeepSeek-V4.1-Flash --device sm89");
  EXPECT_EQ(ran.status, 0) << ran.err;
  for (const char* part :
       {"cache fp8_dsv41 + fp4_dsv41, device sm89", "2 sliding window", "3 ratio 2, source", "15 ratio 2, reader",
        "1 ratio 1, source", "4 ratio 1, indexer", "3 draft of 5", "caches fp8_dsv41 and fp4_dsv41", "window 128, sink",
        "32 heads; keys of the candidate blocks", "f32 logits; candidate blocks",
        "d_v 512; rotary channels turned back"})
    EXPECT_THAT(ran.out, HasSubstr(part));
  EXPECT_THAT(ran.out, Not(HasSubstr("missing")));
}

/// Returns a folder with the config.json of a DeepSeek-V3.2 whose indexer's keys have 64 channels.
std::string folder_of_narrow_keys() {
  const std::string folder = testing::TempDir() + "narrow-keys";
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/config.json")
      << R"({"model_type": "deepseek_v32", "num_hidden_layers": 3, "num_attention_heads": 128, "kv_lora_rank": 512,
             "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_topk": 2048,
             "index_n_heads": 64, "index_head_dim": 64})";
  return folder;
}

TEST(CliExplainModel, SaysWhatIsMissingAndFails) {
  const Ran ran = run_mla("explain --model " + folder_of_narrow_keys() + " --device sm89");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.out, HasSubstr("\nmissing: indexer_logits: keys of the indexer have 128 channels, not 64\n"));
  EXPECT_THAT(ran.err, HasSubstr("on sm89: missing: indexer_logits: keys of the indexer have 128 channels, not 64"));
}

TEST(CliExplainModel, JsonHasTheContractsKeys) {
  const json document = json_of("explain --model kimi-k3 --tp 16 --device sm90 --json");
  EXPECT_EQ(document["model"], "kimi-k3");
  EXPECT_TRUE(document["error"].is_null());
  EXPECT_EQ(document["device"], "sm90");
  EXPECT_EQ(document["code"]["arch"], "sm90");
  EXPECT_EQ(document["tp"], 16);
  EXPECT_EQ(document["caches"], json::parse(R"({"cache": "bf16", "extra_cache": null})"));
  EXPECT_EQ(document["served"].size(), 2U);
  EXPECT_EQ(document["num_hidden_layers"], 93);
  EXPECT_TRUE(document["missing"].empty());
  ASSERT_EQ(document["layers"].size(), 2U);
  const json& dense = document["layers"][0];
  EXPECT_EQ(dense["name"], "dense");
  EXPECT_EQ(dense["count"], 24);
  EXPECT_EQ(dense["heads"], 6);
  for (const char* key :
       {"d_qk", "d_v", "sliding_window", "compress_ratio", "index_topk", "index_heads", "list_width", "draft_block"})
    EXPECT_TRUE(dense[key].is_number_integer()) << key;
  EXPECT_EQ(dense["attn_sink"], false);
  const json& decode = dense["steps"].back();
  EXPECT_EQ(decode["operation"], "decode");
  EXPECT_TRUE(decode["backend"].is_string());
  EXPECT_TRUE(decode["reason"].is_null());
  EXPECT_EQ(decode["problem"]["heads"], 6);
  EXPECT_EQ(decode["problem"]["cache"], "bf16");
  EXPECT_TRUE(decode["problem"]["extra_cache"].is_null());
  EXPECT_EQ(document["layers"][1]["steps"].back()["problem"]["q_len"], 7);
}

TEST(CliExplainModel, JsonSaysWhatIsMissing) {
  const json document = json_of("explain --model " + folder_of_narrow_keys() + " --json", 2);
  ASSERT_EQ(document["missing"].size(), 1U);
  EXPECT_THAT(document["error"].get<std::string>(), HasSubstr(document["missing"][0].get<std::string>()));
  const json& step = document["layers"][0]["steps"][1];
  EXPECT_EQ(step["operation"], "indexer_logits");
  EXPECT_TRUE(step["backend"].is_null());
  EXPECT_EQ(step["reason"], "keys of the indexer have 128 channels, not 64");
  EXPECT_FALSE(step.contains("problem"));
}

TEST(CliExplainModel, EveryPresetAndFormatIsATable) {
  for (const ModelConfig& model : model_presets())
    for (const char* arguments : {"", " --cache bf16 --device sm120"}) {
      const Ran ran = run_mla("explain --model " + model.name + arguments);
      EXPECT_EQ(ran.status, ran.err.empty() ? 0 : 2) << model.name << arguments;
      EXPECT_THAT(ran.out, HasSubstr(model.layers.at(0).name)) << model.name << arguments;
      EXPECT_EQ(ran.out.find("missing") == std::string::npos, ran.status == 0) << model.name << arguments;
    }
}

TEST(CliExplainModel, ReadsAConfig) {
  const std::string folder = testing::TempDir() + "mla_explained_model";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json")
      << R"({"num_attention_heads": 24, "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
             "qk_rope_head_dim": 0, "v_head_dim": 128, "index_topk": 64, "index_topk_freq": 4})";
  const Ran ran = run_mla("explain --model " + folder + " --cache fp8_nope");
  EXPECT_EQ(ran.status, 0) << ran.err;
  for (const char* part : {"2 sparse ", "2 sparse, reader", "24 heads, head dims 512/512", "lists of 64"})
    EXPECT_THAT(ran.out, HasSubstr(part));
}

TEST(CliExplainModel, RefusesWhatDescribesOneProblem) {
  const std::string model = "explain --model kimi-k3 ";
  for (const char* option : {"--heads 16", "--head-dims 576/512", "--q-len 2", "--q-dtype f16", "--compute fp8",
                             "--batch 4", "--keys 4k", "--estimate"}) {
    const std::string text = option;
    expect_refusal(model + text, {text.substr(0, text.find(' ')), "--op"});
  }
  expect_refusal(model + "--tp 5", {"--tp: expected a divisor of 96, the heads of kimi-k3 (dense), got 5"});
  expect_refusal(model + "--tp 96", {"--tp: expected a divisor of 64, the heads of kimi-k3 (draft of 7), got 96"});
  expect_refusal(model + "--tp 0", {"--tp", "at least 1"});
  expect_refusal(model + "--cache int4", {"--cache", "fp8_dsv41", "int4"});
  expect_refusal(model + "--device tpu", {"--device", "tpu"});
  expect_refusal(model + "--backend cpu_avx3", {"cpu_avx3"});
  expect_refusal("explain --tp 2", {"--tp", "--model"});
  expect_refusal("explain --op decode --model kimi-k3 --tp 2", {"--tp", "without --op"});
  expect_refusal("explain --model deepseek-v9", {"deepseek-v9", "deepseek-v4.1-flash", "longcat-flash"});
}

TEST(CliExplainModel, OfOneOperationTakesTheModelsHeadsAndCache) {
  EXPECT_THAT(run_mla("explain --op indexer_logits --model glm-5").out, HasSubstr("queries e4m3, 32 heads"));
  EXPECT_THAT(run_mla("explain --op decode_sparse --model deepseek-v4.1-flash").out,
              HasSubstr("cache fp8_dsv41, queries bf16, 64 heads, head dims 512/512"));
  EXPECT_THAT(run_mla("explain --op decode --model mistral-small-4").out,
              HasSubstr("cache bf16, queries bf16, 32 heads, head dims 320/256"));
}

}  // namespace
}  // namespace mla::cli

// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <algorithm>
#include <array>

#include "mla/backend.h"
#include "tools/mla/run_mla.h"

namespace mla::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

const char* const kFast = " --heads 4 --min-time 0.01 --max-runs 20";

void expect_result(const json& result) {
  for (const char* key : {"op", "backend", "device", "cache"}) EXPECT_TRUE(result[key].is_string()) << key;
  for (const char* key : {"batch", "q_len", "kv_len", "heads", "page_size", "topk", "threads"})
    EXPECT_TRUE(result[key].is_number_integer()) << key;
  for (const char* key : {"median_us", "p10_us", "p90_us", "gflops", "gbps", "ceiling_share"})
    EXPECT_TRUE(result[key].is_number()) << key;
  EXPECT_EQ(result["noisy"], result["ceiling_share"].get<double>() > 1.02);
  EXPECT_TRUE(result.contains("error"));
  EXPECT_EQ(result["topk"], 0);
  EXPECT_GT(result["median_us"].get<double>(), 0.0);
  EXPECT_LE(result["p10_us"].get<double>(), result["p90_us"].get<double>());
  EXPECT_GT(result["ceiling_share"].get<double>(), 0.0);
}

TEST(CliBench, JsonHasTheContractsKeys) {
  const json bench = json_of(std::string("bench --kv-len 64,100 --threads 1 --json") + kFast);
  EXPECT_TRUE(bench["version"].is_string());
  EXPECT_TRUE(bench["machine"]["cpu"].is_string());
  for (const char* key : {"bf16_gflops", "f32_gflops", "dram_gbps", "l3_gbps"})
    EXPECT_GT(bench["ceilings"][key].get<double>(), 0.0) << key;
  for (const char* key : {"others_share", "steal_share"}) {
    EXPECT_GE(bench["load"][key], 0.0) << key;
    EXPECT_LE(bench["load"][key], 1.0) << key;
  }
  EXPECT_EQ(bench["load"]["busy"], bench["load"]["others_share"] > 0.05 || bench["load"]["steal_share"] > 0.01);
  ASSERT_EQ(bench["results"].size(), 2U);
  for (const json& result : bench["results"]) {
    expect_result(result);
    EXPECT_TRUE(result["error"].is_null());
    EXPECT_EQ(result["threads"], 1);
  }
  EXPECT_EQ(bench["results"][1]["kv_len"], 100);
}

/// Returns the processors that this process may use, as a list.
std::vector<std::string> own_processors() {
  std::vector<std::string> processors;
  for (const int32_t processor : usable_processors()) processors.push_back(std::to_string(processor));
  return processors;
}

TEST(CliBench, RunsOnTheProcessorsThatAreListed) {
  const std::string last = own_processors().back();
  const json bench = json_of(std::string("bench --kv-len 64 --json --processors ") + last + kFast);
  EXPECT_EQ(bench["machine"]["threads"], 1);
  EXPECT_EQ(bench["results"][0]["threads"], 1);
  expect_refusal("bench --processors " + last + " --threads 2", {"--processors: expected 2 processors"});
  expect_refusal("bench --processors 1023", {"--processors: expected processors that this process may use, got 1023"});
}

TEST(CliBench, RefcheckFillsTheError) {
  const json bench = json_of(std::string("bench --op decode,prefill,append,gather,merge_states --kv-len 70 --refcheck "
                                         "--json") +
                             kFast);
  ASSERT_EQ(bench["results"].size(), 5U);
  for (const json& result : bench["results"]) {
    expect_result(result);
    EXPECT_TRUE(result["error"].is_number()) << result["op"];
  }
}

TEST(CliBench, TakesBatchSpecificationsAndTraces) {
  const json spec = json_of(std::string("bench --batch-spec 2q1s64_q4s100 --json") + kFast);
  EXPECT_EQ(spec["results"][0]["batch"], 3);
  EXPECT_EQ(spec["results"][0]["kv_total"], 228);
  EXPECT_EQ(spec["results"][0]["q_len"], 4);
  const json trace =
      json_of("bench --trace " MLA_SOURCE_DIR "/data/mooncake_conversation_sample.jsonl --batch 5 --clip 128 --json" +
              std::string(kFast));
  ASSERT_EQ(trace["results"].size(), 2U);
  EXPECT_EQ(trace["results"][0]["kv_total"], trace["results"][1]["kv_total"]);
  EXPECT_TRUE(trace["results"][1]["ratio"].is_number());
}

TEST(CliBench, RatioIsOfRates) {
  const json bench = json_of(std::string("bench --backend reference,cpu --compare backend --kv-len 64 --json") + kFast);
  const json& results = bench["results"];
  ASSERT_EQ(results.size(), 2U);
  EXPECT_NEAR(results[1]["ratio"].get<double>(),
              results[1]["gflops"].get<double>() / results[0]["gflops"].get<double>(), 1e-9);
}

TEST(CliBench, NoKeysNoShare) {
  const json bench = json_of(std::string("bench --kv-len 0 --json") + kFast);
  EXPECT_EQ(bench["results"][0]["gflops"], 0.0);
  EXPECT_TRUE(bench["results"][0]["ceiling_share"].is_null());
  EXPECT_EQ(bench["results"][0]["noisy"], false);
}

TEST(CliBench, ListsCasesAsATable) {
  const Ran ran = run_mla("bench --list --op decode,append --kv-len 100");
  EXPECT_EQ(ran.status, 0) << ran.err;
  for (const char* part : {"kv_len", "memory", "append", "100", "2 cases"}) EXPECT_THAT(ran.out, HasSubstr(part));
}

TEST(CliBench, OptionsHaveTheNamesOfPythonsArguments) {
  const json cases = json_of(
      "bench --list --json --num-heads 16 --attn-sink true --window-left 20 --logits-soft-cap 30 --alibi-slopes true "
      "--num-threads 1 --d-qk 320 --d-v 256");
  EXPECT_EQ(cases["cases"][0]["heads"], 16);
  EXPECT_EQ(cases["cases"][0]["d_qk"], 320);
  EXPECT_EQ(cases, json_of("bench --list --json --heads 16 --sink true --window 20 --soft-cap 30 --alibi true "
                           "--threads 1 --head-dims 320/256"));
  EXPECT_EQ(json_of("bench --list --json --num-heads 8,16 --compare num-heads"),
            json_of("bench --list --json --heads 8,16 --compare heads"));
  expect_refusal("run --logits-soft-cap 0", {"--logits-soft-cap: ", "above 0"});
}

TEST(CliBench, ListsCasesAsJson) {
  const json listed = json_of("bench --list --json --op decode,append --kv-len 100,200 --threads 3 --compare kv-len");
  EXPECT_TRUE(listed["version"].is_string());
  ASSERT_EQ(listed["cases"].size(), 4U);
  const char* ops[] = {"decode", "decode", "append", "append"};
  for (size_t i = 0; i < 4; ++i) {
    const json& one = listed["cases"][i];
    EXPECT_EQ(one["op"], ops[i]);
    EXPECT_EQ(one["backend"], "auto");
    EXPECT_EQ(one["kv_len"], i % 2 == 0 ? 100 : 200);
    EXPECT_EQ(one["threads"], 3);
    EXPECT_EQ(one["group"], i / 2);
    EXPECT_GT(one["memory_bytes"].get<int64_t>(), 100 * 576 * 2);
    EXPECT_FALSE(one.contains("median_us"));
  }
  // Every key of a case is one of a result, but for the two of the list.
  json result = json_of(std::string("bench --kv-len 64 --json") + kFast)["results"][0];
  for (const auto& item : listed["cases"][0].items())
    EXPECT_TRUE(result.contains(item.key()) || item.key() == "group" || item.key() == "memory_bytes") << item.key();
}

TEST(CliBench, FinishesOutputs) {
  const std::string sparse = "bench --op decode_sparse --topk 64 --pool-tokens 256 --json" + std::string(kFast);
  const json plain = json_of(sparse)["results"][0];
  EXPECT_TRUE(plain["out_dtype"].is_null());
  const json finished = json_of(sparse + " --finish true --out-dtype bf16,e4m3 --gate head --refcheck");
  ASSERT_EQ(finished["results"].size(), 2U);
  EXPECT_EQ(finished["results"][0]["out_dtype"], "bf16");
  EXPECT_EQ(finished["results"][1]["out_dtype"], "e4m3");
  for (const json& result : finished["results"]) {
    EXPECT_EQ(result["gate"], "head");
    EXPECT_TRUE(result["error"].is_number());
  }
}

TEST(CliBench, LogitsOfEveryType) {
  for (const char* op : {"top_k", "indexer_logits", "indexer_top_k"}) {
    const json all = json_of(std::string("bench --kv-len 300 --logits-dtype f32,bf16,f16 --refcheck --json --op ") +
                             op + std::string(kFast));
    ASSERT_EQ(all["results"].size(), 3U);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(all["results"][i]["logits_dtype"], (std::array{"f32", "bf16", "f16"}[i]));
  }
}

TEST(CliBench, CtrlCKeepsWhatIsDone) {
  const std::string path = testing::TempDir() + "mla_bench_stopped.json";
  std::remove(path.c_str());
  // 200 cases of half a second each. --foreground: without it the program gets the signal twice, and a second one
  // kills.
  const int status = std::system(("env -u MLA_BACKEND timeout --foreground -s INT 5 " MLA_BINARY
                                  " bench --kv-len 1:200 --heads 1 --min-time 0.5 --json=" +
                                  path + " >/dev/null 2>&1; exit $?")
                                     .c_str());
  EXPECT_NE(WEXITSTATUS(status), 0);
  const json bench = json::parse(read_text(path));
  EXPECT_EQ(bench["interrupted"], true);
  EXPECT_LT(bench["results"].size(), 200U);
}

TEST(CliBench, TableAndCsv) {
  const std::string path = testing::TempDir() + "mla_bench.csv";
  const Ran ran = run_mla("bench --kv-len 64 --page-size 64,1 --compare page-size --csv " + path + kFast);
  EXPECT_EQ(ran.status, 0) << ran.err;
  for (const char* part : {"ceilings", "GFLOP/s", "share", "ratio", "decode"}) EXPECT_THAT(ran.out, HasSubstr(part));
  const std::string csv = read_text(path);
  EXPECT_THAT(csv, testing::StartsWith("op,backend,device,cache,batch,q_len,kv_len,heads,page_size,topk,threads,"));
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3);
}

TEST(CliBench, RunsCaseFilesAndJudgesTargets) {
  const std::string path = testing::TempDir() + "mla_bench_cases.yaml";
  std::ofstream(path) << "defaults: {heads: 4, kv_len: 64}\n"
                         "cases:\n"
                         "  - {label: easy, target: {share: 0.000001}}\n"
                         "  - {label: impossible, target: {max_us: 0.000001}}\n";
  const std::string arguments = "bench " + path + " --min-time 0.01 --max-runs 20 --json";
  const json bench = json_of(arguments);
  EXPECT_EQ(bench["results"][0]["met"], true);
  EXPECT_EQ(bench["results"][0]["label"], "easy");
  EXPECT_EQ(bench["results"][1]["met"], false);
  EXPECT_EQ(json_of(arguments + " --strict", 1)["results"].size(), 2U);
}

TEST(CliBench, BadInputIsOneLineAndStatusTwo) {
  const std::string path = testing::TempDir() + "mla_bench_bad.yaml";
  std::ofstream(path) << "cases:\n  - op: decode\n    heads: [4\n";
  const std::string trace = testing::TempDir() + "mla_bench_bad.jsonl";
  std::ofstream(trace) << "{\"input_length\": 1}\nnot json\n";
  const std::pair<std::string, std::string> cases[] = {
      {path, "mla_bench_bad.yaml:"},
      {"/no/such/cases.yaml", "/no/such/cases.yaml"},
      {"--kv-len 8:4", "--kv-len"},
      {"--batch-spec 8x1", "--batch-spec"},
      {"--backend cpu_avx3", "cpu_avx2"},
      {"--trace " + trace + " --batch 2", ":2:"},
      {"--batch 1024 --kv-len 100m", "memory"},
      {"--min-time 0", "--min-time"},
      {"--compare page-size", "page_size"},
      {"--op decode_sparse --gate head", "without finish"},
      {"--op decode_sparse --out-dtype e4m3", "without finish"},
      {"--csv /no/such/folder/x.csv --kv-len 16 --heads 1 --min-time 0.01", "/no/such/folder/x.csv"},
  };
  for (const auto& [arguments, part] : cases) {
    const Ran ran = run_mla("bench " + arguments);
    EXPECT_EQ(ran.status, 2) << arguments;
    EXPECT_THAT(ran.err, testing::StartsWith("libmla: ")) << arguments;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(part)) << arguments;
  }
}

}  // namespace
}  // namespace mla::cli

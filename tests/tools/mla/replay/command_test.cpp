// SPDX-License-Identifier: Apache-2.0
// Tests the replay as users run it: the program, its exit status, its JSON.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mla/backend.h"

namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Outcome {
  int status = -1;  // exit status, or -signal
  std::string out, err;
};

std::string read_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class ReplayCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("mla_replay_{}", getpid());
    std::filesystem::create_directories(folder_);
    write("config.json",
          R"({"num_attention_heads": 4, "num_hidden_layers": 1, "kv_lora_rank": 256, "qk_nope_head_dim": 128,
              "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000})");
    // Requests 1 and 2 have two blocks of 512 tokens in common; request 3 has a prefix of its own.
    write("trace.jsonl",
          "{\"timestamp\": 0, \"input_length\": 1300, \"output_length\": 6, \"hash_ids\": [1, 2, 3]}\n"
          "{\"timestamp\": 1, \"input_length\": 1100, \"output_length\": 4, \"hash_ids\": [1, 2, 4]}\n"
          "{\"timestamp\": 90000, \"input_length\": 40, \"output_length\": 1, \"hash_ids\": [5]}\n");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }

  pid_t start(const std::vector<std::string>& arguments) const {
    std::vector<std::string> words = {MLA_PROGRAM, "replay"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const pid_t pid = fork();
    if (pid != 0) return pid;
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const int out = open(path("out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int err = open(path("err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  Outcome finish(pid_t pid) const {
    int status = 0;
    waitpid(pid, &status, 0);
    return {.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
            .out = read_file(path("out")),
            .err = read_file(path("err"))};
  }
  Outcome run(const std::vector<std::string>& arguments) const {
    Outcome outcome = finish(start(arguments));
    if (outcome.status < 0)
      ADD_FAILURE() << fmt::format("signal {} ended mla replay {}\n{}", -outcome.status, fmt::join(arguments, " "),
                                   outcome.err);
    return outcome;
  }
  // Returns the operations of a report, in order.
  static std::vector<std::string> operations(const json& report) {
    std::vector<std::string> names;
    for (const json& one : report["operations"]) names.push_back(one["operation"]);
    return names;
  }
  // Runs the small trace through the small model; what the test says goes before the defaults.
  Outcome run_small(const std::vector<std::string>& arguments) const {
    std::vector<std::string> all = {path("trace.jsonl"), "--json", "--chunk", "600", "--check-every", "1"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const std::pair<std::string, std::string> defaults[] = {
        {"--threads", "2"}, {"--pool-tokens", "8k"}, {"--model", path("config.json")}};
    for (const auto& [option, value] : defaults)
      if (std::find(all.begin(), all.end(), option) == all.end()) all.insert(all.end(), {option, value});
    return run(all);
  }

  std::filesystem::path folder_;
};

TEST_F(ReplayCommand, ReportsWhatTheContractPromises) {
  const Outcome outcome = run_small({"--timeline", path("timeline.json")});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["requests"], 3);
  EXPECT_EQ(report["total_requests"], 3);
  EXPECT_EQ(report["interrupted"], false);
  EXPECT_EQ(report["prefix_hit_tokens"], 1024);
  EXPECT_EQ(report["prefill_tokens"], 1300 + 1100 + 40 - 1024);
  EXPECT_EQ(report["decode_tokens"], 6 + 4 + 1);
  EXPECT_NEAR(report["prefix_hit_share"].get<double>(), 1024.0 / 2440.0, 1e-12);
  EXPECT_GT(report["checks"], 5);
  EXPECT_GT(report["worst_error"], 0.0);
  EXPECT_LT(report["worst_error"], report["tolerance"]);
  EXPECT_THAT(report["failures"], ::testing::IsEmpty());
  for (const char* key : {"ttft_ms", "tpot_ms"})
    for (const char* share : {"p50", "p90", "p99"}) EXPECT_GT(report[key][share], 0.0) << key << " " << share;
  // The third request arrives when the others are long done; its wait is not their 90 seconds.
  EXPECT_LT(report["ttft_ms"]["p99"], 60000.0);
  EXPECT_GT(report["gflops"], 0.0);
  EXPECT_GT(report["ceiling_share"], 0.0);
  EXPECT_LT(report["serving_seconds"], report["wall_seconds"]);
  for (const char* phase : {"prefill_append_rope", "decode_append_rope", "gather", "up_projection", "prefill_attention",
                            "merge", "decode_projection", "decode_attention"})
    EXPECT_GT(report["phase_seconds"][phase], 0.0) << phase;
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("time to first token"), HasSubstr("worst relative error")));

  const json timeline = json::parse(read_file(path("timeline.json")));
  int64_t steps = 0, requests = 0;
  std::vector<double> first_token, per_token;  // milliseconds
  double arrival = 0;
  for (const json& event : timeline["traceEvents"]) {
    steps += event["name"] == "step" ? 1 : 0;
    if (event["name"] == "wait") arrival = event["ts"];
    if (event["name"] == "prefill")
      first_token.push_back((event["ts"].get<double>() + event["dur"].get<double>() - arrival) / 1e3);
    if (event["name"] != "decode") continue;
    ++requests;
    const int32_t tokens = event["args"]["output_tokens"];
    if (tokens > 1) per_token.push_back(event["dur"].get<double>() / 1e3 / (tokens - 1));
  }
  EXPECT_EQ(steps, report["steps"]);
  EXPECT_EQ(requests, 3);
  ASSERT_EQ(first_token.size(), 3U);
  ASSERT_EQ(per_token.size(), 2U);
  std::sort(first_token.begin(), first_token.end());
  EXPECT_NEAR(report["ttft_ms"]["p50"], first_token[1], 1e-3);
  EXPECT_NEAR(report["ttft_ms"]["p90"], first_token[1] + 0.8 * (first_token[2] - first_token[1]), 1e-3);
  EXPECT_NEAR(report["tpot_ms"]["p50"], (per_token[0] + per_token[1]) / 2, 1e-3);
}

TEST_F(ReplayCommand, RatesAreWorkOverTime) {
  const Outcome outcome = run_small({});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  const auto number = [&](const char* key) { return report[key].get<double>(); };
  const auto seconds = [&](const char* phase) { return report["phase_seconds"][phase].get<double>(); };
  const double prefill = seconds("prefill_attention"), decode = seconds("decode_attention");
  // Queries times the keys they see, by request: all of 1300, 76 behind 1024 shared tokens, all of 40.
  const double prefill_gflop = (1300 * 1301 + 76 * (1025 + 1100) + 40 * 41) / 2.0 * 4 * 2e-9 * (192 + 128);
  const double decode_gflop = (5 * 1303 + 3 * 1102) * 4 * 2e-9 * (320 + 256);
  EXPECT_NEAR(number("prefill_gflops") * prefill, prefill_gflop, 1e-9 * prefill_gflop);
  EXPECT_NEAR(number("decode_gflops") * decode, decode_gflop, 1e-9 * decode_gflop);
  EXPECT_NEAR(number("gflops") * (prefill + decode), prefill_gflop + decode_gflop, 1e-9 * prefill_gflop);
  const double at_ceilings = prefill_gflop / report["ceilings"]["prefill_gflops"].get<double>() +
                             decode_gflop / report["ceilings"]["decode_gflops"].get<double>();
  EXPECT_NEAR(number("ceiling_share"), at_ceilings / (prefill + decode), 1e-9);
  EXPECT_NEAR(number("prefill_tokens_per_s") * (prefill + seconds("prefill_append_rope") + seconds("gather") +
                                                seconds("up_projection") + seconds("merge")),
              number("prefill_tokens"), 1e-6);
  EXPECT_NEAR(number("decode_tokens_per_s") * (decode + seconds("decode_append_rope") + seconds("decode_projection")),
              5 + 3, 1e-6);
  // The time of every operation is that of its phases, and together they are all of serving.
  EXPECT_THAT(operations(report), ::testing::ElementsAre("append_rope", "gather", "up_projection", "projections",
                                                         "prefill", "decode", "merge_states", "plan"));
  double sum = 0.0, shares = 0.0;
  for (const json& one : report["operations"]) {
    sum += one["ms"].get<double>();
    shares += one["share"].get<double>();
    if (one["operation"] == "append_rope") {
      EXPECT_GE(one["calls"], report["steps"]);  // one for the step's prompts, one for its answers
    }
    if (one["operation"] == "decode") {
      EXPECT_NEAR(one["ms"], decode * 1e3, 1e-9);
    }
    EXPECT_EQ(one["calls"].is_null(), one["operation"] == "plan");
  }
  EXPECT_NEAR(sum, number("serving_seconds") * 1e3, 1e-6);
  EXPECT_NEAR(shares, 1.0, 1e-9);
}

TEST_F(ReplayCommand, ChecksEveryPieceOfAStep) {
  std::string trace;
  for (int i = 0; i < 30; ++i)
    trace += fmt::format("{{\"timestamp\": 0, \"input_length\": 130, \"output_length\": 2, \"hash_ids\": [{}]}}\n", i);
  write("trace.jsonl", trace);
  const Outcome outcome = run_small({});  // four or five requests a step, another one checked in each
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_GT(json::parse(outcome.out)["checks"], 6);
}

TEST_F(ReplayCommand, EveryCacheAndBackendAgreesWithItself) {
  for (const char* cache : {"bf16", "f16", "fp8"})
    for (const char* backend : {"auto", "reference"}) {
      const Outcome outcome = run_small({"--cache", cache, "--backend", backend, "--requests", "2"});
      ASSERT_EQ(outcome.status, 0) << cache << " " << backend << "\n" << outcome.err;
      const json report = json::parse(outcome.out);
      EXPECT_LT(report["worst_error"], report["tolerance"]) << cache << " " << backend;
      EXPECT_EQ(report["requests"], 2);
    }
}

// Formats, ranks, drafts and sparsity, alone and together: every sampled token agrees with the two other ways.
TEST_F(ReplayCommand, EveryWayOfDecodingAgreesWithItself) {
  write("sparse.json",
        R"({"num_attention_heads": 4, "num_hidden_layers": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "index_topk": 200})");
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--cache", "fp8_ds_mla"},
        {"--dcp", "2"},
        {"--shared-prefix", "--mtp", "1"},
        {"--dcp", "4", "--page-size", "16", "--cache", "fp8_ds_mla", "--mtp", "2"},
        {"--mtp", "3", "--cache", "fp8"},
        {"--sparse"},
        {"--sparse", "--cache", "fp8_ds_mla", "--mtp", "1"}}) {
    std::vector<std::string> arguments = {"--model", path("sparse.json")};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome outcome = run_small(arguments);
    const std::string what = fmt::format("{}", fmt::join(options, " "));
    ASSERT_EQ(outcome.status, 0) << what << "\n" << outcome.err;
    const json report = json::parse(outcome.out);
    EXPECT_EQ(report["requests"], 3) << what;
    EXPECT_EQ(report["decode_tokens"], 11) << what;
    EXPECT_EQ(report["prefix_hit_tokens"], 1024) << what;
    EXPECT_GT(report["worst_error_reference"], 0.0) << what;
    EXPECT_LT(report["worst_error"], report["tolerance"]) << what;
    const bool sparse = options[0] == "--sparse";
    EXPECT_EQ(report["sparse"], sparse) << what;
    for (const char* phase : {"decode_indexer", "prefill_indexer", "prefill_sparse_attention", "prefill_projection"})
      EXPECT_EQ(report["phase_seconds"][phase].get<double>() > 0.0, sparse) << what << " " << phase;
    EXPECT_EQ(report["phase_seconds"]["decode_merge"].get<double>() > 0.0, report["dcp"] > 1) << what;
    EXPECT_EQ(report["draft_tokens"].get<int64_t>() > 0, report["mtp"] > 0) << what;
    EXPECT_GT(report["checked_queries"], 0) << what;
    EXPECT_LT(report["worst_query_share"], 1.0) << what;
    EXPECT_GT(report["checked_rows"], 0) << what;
    EXPECT_LT(report["worst_row_share"], 1.0) << what;
    EXPECT_LE(report["accepted_drafts"], report["draft_tokens"]) << what;
  }
}

// The first 200 tokens of a prompt see as many keys as would be chosen, and are up-projected; the others choose.
TEST_F(ReplayCommand, PromptsChooseKeysWhereTheySeeMore) {
  write("sparse.json",
        R"({"num_attention_heads": 4, "num_hidden_layers": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "index_topk": 200})");
  write("pooled.json",
        R"({"num_attention_heads": 4, "num_hidden_layers": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 0, "v_head_dim": 128, "rope_theta": 10000, "index_topk": 200, "index_kpool": 4})");
  for (const char* model : {"sparse.json", "pooled.json"}) {
    const Outcome outcome = run_small({"--model", path(model), "--sparse", "--requests", "1"});
    ASSERT_EQ(outcome.status, 0) << model << "\n" << outcome.err;
    const json report = json::parse(outcome.out);
    const auto seconds = [&](const char* phase) { return report["phase_seconds"][phase].get<double>(); };
    const bool pooled = report["checked_queries"] == 0;  // without rotary channels there is nothing to check of them
    EXPECT_EQ(pooled, std::string(model) == "pooled.json");
    EXPECT_EQ(operations(report),
              (std::vector<std::string>{"append_rope", pooled ? "compress" : "append_indexer", "gather",
                                        "up_projection", "projections", "indexer_logits", "top_k", "physical_slots",
                                        "prefill", "decode_sparse", "plan"}));
    // 3 steps have prompts and 5 have answers; the 600, 600 and 100 tokens of the former are divided into slices of
    // 128.
    EXPECT_EQ(report["checks"], 3 + 5);
    for (const json& one : report["operations"]) {
      if (one["operation"] == "prefill") {
        EXPECT_EQ(one["calls"], 1);
      }
      if (one["operation"] == "decode_sparse") {
        EXPECT_EQ(one["calls"], 4 + 5 + 1 + 5);
      }
    }
    double keys = 1100 * 200;  // and where keys stand for groups, the tokens of those that are not complete
    for (int token = 200; pooled && token < 1300; ++token) keys += (token + 1) % 4;
    const int width = pooled ? 512 : 576, head = pooled ? 128 : 192;
    const double gflop = 4 * 2e-9 * (200 * 201 / 2.0 * (head + 128) + keys * (width + 512));
    EXPECT_NEAR(
        report["prefill_gflops"].get<double>() * (seconds("prefill_attention") + seconds("prefill_sparse_attention")),
        gflop, 1e-9 * gflop);
    EXPECT_LT(report["worst_error"], report["tolerance"]);
  }
}

// Prompts and answers cross the ends of groups of every size; one prompt begins with another one's block.
TEST_F(ReplayCommand, ModelsThatCompressServeEveryKindOfLayer) {
  write("short.jsonl",
        "{\"timestamp\": 0, \"input_length\": 630, \"output_length\": 24, \"hash_ids\": [1, 2]}\n"
        "{\"timestamp\": 1, \"input_length\": 600, \"output_length\": 50, \"hash_ids\": [1, 3]}\n"
        "{\"timestamp\": 2, \"input_length\": 2, \"output_length\": 9, \"hash_ids\": [5]}\n");
  const std::string v4 = "deepseek-v4-flash", v41 = "deepseek-v4.1-flash", glm = "glm-5.3-flash";
  const struct {
    std::vector<std::string> options;
    const char *cache, *pool_cache, *kinds;
  } runs[] = {
      {{"--model", v4}, "fp8_dsv4", "fp8_dsv4", "3 sparse layers (window, c4, c128)"},
      {{"--model", v4, "--cache", "bf16", "--mtp", "2"}, "bf16", "bf16", "(window, c4, c128)"},
      {{"--model", v4, "--cache", "fp8", "--page-size", "128", "--chunk", "77"}, "fp8", "fp8", "(window, c4, c128)"},
      {{"--model", v4, "--pool-cache", "mxfp4_dsv4"}, "fp8_dsv4", "mxfp4_dsv4", "(window, c4, c128)"},
      {{"--model", v41, "--mtp", "3"}, "fp8_dsv41", "fp4_dsv41", "4 sparse layers (window, c2, c1, c1 within)"},
      {{"--model", v41, "--pool-cache", "fp8_dsv41", "--page-size", "64", "--candidate-blocks", "30"},
       "fp8_dsv41",
       "fp8_dsv41",
       "(window, c2, c1, c1 within)"},
      {{"--model", glm, "--cache", "fp8_nope", "--chunk", "131"}, "fp8_nope", nullptr, "decode over 2048 tokens"},
      {{"--model", glm, "--mtp", "3"}, "bf16", nullptr, "decode over 2048 tokens"},
  };
  for (const auto& [options, cache, pool_cache, kinds] : runs) {
    std::vector<std::string> arguments = {
        path("short.jsonl"), "--sparse", "--json", "--check-every", "3", "--threads", "2", "--pool-tokens", "4k"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    if (std::ranges::find(arguments, "--chunk") == arguments.end())
      arguments.insert(arguments.end(), {"--chunk", "130"});
    const Outcome outcome = run(arguments);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const json report = json::parse(outcome.out);
    EXPECT_EQ(report["cache"], cache);
    EXPECT_EQ(report["pool_cache"], pool_cache != nullptr ? json(pool_cache) : json(nullptr));
    EXPECT_EQ(report["requests"], 3);
    EXPECT_EQ(report["prefix_hit_tokens"], 512);
    EXPECT_EQ(report["decode_tokens"], 83);
    EXPECT_GE(report["checks"], 6);
    EXPECT_GT(report["checked_rows"], 1000);
    EXPECT_LT(report["worst_row_share"], 1.0);
    if (pool_cache != nullptr) {
      EXPECT_EQ(report["checked_queries"], report["checks"].get<int64_t>() * 64);
      EXPECT_LT(report["worst_query_share"], 1.0);
      EXPECT_EQ(report["checked_outputs"], report["checked_queries"]);
      EXPECT_LT(report["worst_output_share"], 1.0);
      EXPECT_THAT(outcome.err, AllOf(HasSubstr(" queries of heads against float64"),
                                     HasSubstr(" finished outputs of heads against float64")));
    } else {
      EXPECT_TRUE(report["worst_query_share"].is_null()) << "GLM-5.3-Flash turns nothing";
      EXPECT_TRUE(report["worst_output_share"].is_null());
    }
    EXPECT_GT(report["worst_error_prefill_decode"], 0.0);
    EXPECT_LT(report["worst_error"], report["tolerance"]);
    for (const char* phase : {"prefill_attention", "decode_indexer", "decode_top_k", "decode_slots"})
      EXPECT_GT(report["phase_seconds"][phase], 0.0) << phase;
    EXPECT_EQ(report["phase_seconds"]["compress"].get<double>() > 0.0, pool_cache == nullptr);
    for (const char* phase : {"prefill_compress", "decode_compress"})
      EXPECT_EQ(report["phase_seconds"][phase].get<double>() > 0.0, pool_cache != nullptr) << phase;
    for (const char* phase : {"prefill_indexer", "prefill_top_k", "prefill_slots"})
      EXPECT_EQ(report["phase_seconds"][phase].get<double>() > 0.0, pool_cache != nullptr) << phase;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(kinds), HasSubstr("cached rows and keys against float64")));
    std::vector<std::string> steps = {"append_rope", "compress"};
    if (options[1] == v41) steps.emplace_back("append_indexer");  // of its pools' latents
    if (pool_cache == nullptr) steps.insert(steps.end(), {"gather", "up_projection", "projections"});
    steps.insert(steps.end(), {"indexer_logits", "top_k", "physical_slots"});
    if (pool_cache == nullptr) steps.emplace_back("prefill");
    steps.emplace_back("decode_sparse");
    if (pool_cache != nullptr) steps.emplace_back("finish_output");
    if (pool_cache == nullptr) steps.emplace_back("merge_states");
    steps.emplace_back("plan");
    EXPECT_EQ(operations(report), steps);
    for (const std::string& operation : steps) EXPECT_THAT(outcome.err, HasSubstr("\n" + operation + " "));
  }
}

TEST_F(ReplayCommand, CountsDoNotDependOnThreadsPagesOrTime) {
  json first;
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--seed", "7"}, {"--threads", "1"}, {"--page-size", "1"}, {"--page-size", "512"}}) {
    const Outcome outcome = run_small(arguments);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const json report = json::parse(outcome.out);
    if (first.is_null()) first = report;
    for (const char* key : {"requests", "prefill_tokens", "decode_tokens", "prefix_hit_tokens"})
      EXPECT_EQ(report[key], first[key]) << key << " with " << arguments[0] << " " << arguments[1];
    EXPECT_LT(report["worst_error"], report["tolerance"]);
  }
}

TEST_F(ReplayCommand, PagesThatDoNotDivideBlocksShareNothing) {
  const Outcome outcome = run_small({"--page-size", "48", "--as-fast-as-possible"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(json::parse(outcome.out)["prefix_hit_share"], 0.0);
  EXPECT_THAT(outcome.err, HasSubstr("no prefix is shared"));
}

TEST_F(ReplayCommand, ASmallPoolDelaysButLosesNobody) {
  // Room for one of the two long requests at a time.
  const Outcome outcome = run_small({"--pool-tokens", "1344", "--as-fast-as-possible"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["requests"], 3);
  EXPECT_EQ(report["decode_tokens"], 11);
}

TEST_F(ReplayCommand, ATimeBudgetLeavesOutWhatWouldTakeTooLong) {
  // Structure only: how much is left out depends on the machine, but no CPU does this prompt's 90 TFLOP in 5 s,
  // and the first step is always computed, and checked.
  std::string long_ids = "1";
  for (int block = 1; block < 512; ++block) long_ids += fmt::format(", {}", 5000 + block);
  std::string trace = read_file(path("trace.jsonl"));
  trace.insert(trace.find('\n') + 1, fmt::format("{{\"timestamp\": 0, \"input_length\": 262144, \"output_length\": 7, "
                                                 "\"hash_ids\": [{}]}}\n",
                                                 long_ids));
  write("long.jsonl", trace);
  const Outcome outcome = run({path("long.jsonl"), "--model", path("config.json"), "--threads", "2", "--pool-tokens",
                               "300k", "--chunk", "256", "--check-every", "1", "--time-budget", "5", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["time_budget"], 5.0);
  EXPECT_EQ(report["interrupted"], false);
  EXPECT_EQ(report["total_requests"], 4);
  const json& left_out = report["left_out"];
  EXPECT_EQ(report["requests"].get<size_t>() + left_out.size(), 4U);
  const auto longest = std::find_if(left_out.begin(), left_out.end(), [](const json& one) { return one["line"] == 2; });
  ASSERT_NE(longest, left_out.end());
  EXPECT_EQ((*longest)["input_length"], 262144);
  EXPECT_EQ((*longest)["output_length"], 7);
  EXPECT_LT((*longest)["computed_tokens"], 262144);
  EXPECT_GT(report["checks"], 0);
  EXPECT_THAT(report["failures"], ::testing::IsEmpty());
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("left out, for a time budget of 5 s: "), HasSubstr("line 2 (262144 + 7")));
}

TEST_F(ReplayCommand, WithoutATimeBudgetNothingIsLeftOut) {
  const Outcome outcome = run_small({});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["time_budget"], nullptr);
  EXPECT_THAT(report["left_out"], ::testing::IsEmpty());
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("left out")));
}

/// Returns the processors of every thread of a process.
std::vector<std::vector<int32_t>> processors_of_threads(pid_t pid) {
  std::vector<std::vector<int32_t>> all;
  std::error_code ended;
  for (const auto& task : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid), ended)) {
    cpu_set_t set;
    if (sched_getaffinity(std::stoi(task.path().filename()), sizeof set, &set) != 0) continue;
    std::vector<int32_t>& processors = all.emplace_back();
    for (int32_t i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(static_cast<size_t>(i), &set)) processors.push_back(i);
  }
  return all;
}

TEST_F(ReplayCommand, RunsOnTheProcessorsThatAreListed) {
  const std::vector<int32_t> usable = mla::usable_processors();
  if (usable.size() < 2) GTEST_SKIP() << "one processor";
  const int32_t first = usable[0], second = usable[1];
  const auto process = start({MLA_SAMPLE_TRACE, "--processors", fmt::format("{},{}", second, first)});
  std::vector<std::vector<int32_t>> found;
  for (int i = 0; i < 600 && found.size() < 2; ++i) {  // one thread and the worker of the context
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    found = processors_of_threads(process);
    std::erase_if(found, [&](const auto& one) {
      return one != std::vector{first} && one != std::vector{first, second};
    });
    if (std::ranges::count(found, std::vector{first}) == 0) found.clear();
  }
  EXPECT_THAT(found, ::testing::Contains(std::vector{first}));          // the second worker's
  EXPECT_THAT(found, ::testing::Contains(std::vector{first, second}));  // the first worker's, which is the main thread
  ASSERT_EQ(kill(process, SIGKILL), 0);
  EXPECT_EQ(finish(process).status, -SIGKILL);
}

TEST_F(ReplayCommand, BadInputIsOneClearError) {
  const auto expect_error = [&](const std::vector<std::string>& arguments, const std::string& text) {
    const Outcome outcome = run(arguments);
    EXPECT_NE(outcome.status, 0) << text;
    EXPECT_GT(outcome.status, 0) << "ended by a signal: " << text;
    EXPECT_NE(outcome.status, 130) << text;
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(outcome.out, "");
  };
  write("bad.jsonl",
        "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [1]}\n{\"timestamp\": 0}\n");
  write("narrow.json",
        R"({"num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 208, "qk_rope_head_dim": 64,
            "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000,
            "compress_ratios": [0, 4]})");
  write("dense.json", R"({"num_attention_heads": 4, "hidden_size": 64})");
  const std::string trace = path("trace.jsonl"), config = path("config.json");
  expect_error({path("missing.jsonl")}, "missing.jsonl: cannot open");
  expect_error({path("bad.jsonl")}, "bad.jsonl:2: input_length: expected");
  expect_error({trace, "--model", path("dense.json")}, "dense.json");
  expect_error({trace, "--model", "no-such-model"}, "no-such-model");
  expect_error({trace, "--model", config, "--pool-tokens", "1024"}, "request of line 1");
  expect_error({trace, "--model", config, "--cache", "fp8_ds_mla"}, "--cache: fp8_ds_mla holds rows of 512 + 64");
  expect_error({trace, "--cache", "fp8_dsv4"}, "--cache: fp8_dsv4 holds rows of 448 + 64");
  expect_error({trace, "--sparse"}, "--sparse: expected a model with index_topk");
  expect_error({trace, "--model", "deepseek-v3.2", "--sparse", "--dcp", "2"}, "--dcp: sparse attention runs on one");
  expect_error({trace, "--model", "deepseek-v4-flash"}, "expected --sparse");
  expect_error({trace, "--model", "deepseek-v4.1-flash", "--sparse", "--page-size", "63"},
               "--page-size: expected a multiple of 2");
  expect_error({trace, "--model", "deepseek-v4.1-flash", "--sparse", "--pool-cache", "fp8_ds_mla"},
               "--pool-cache: fp8_ds_mla holds rows of 512 + 64");
  expect_error({trace, "--model", "deepseek-v4.1-flash", "--sparse", "--cache", "fp8_ds_mla"},
               "--cache: fp8_ds_mla holds rows of 512 + 64 channels, those of deepseek-v4.1-flash have 448 + 64");
  expect_error({trace, "--pool-cache", "bf16"}, "--pool-cache: expected a model with pools");
  expect_error({trace, "--model", "glm-5.3-flash", "--sparse", "--page-size", "2"},
               "--page-size: expected a multiple of 4, the tokens of a key of glm-5.3-flash's indexer, got 2");
  expect_error({trace, "--model", "deepseek-v4.1-flash", "--sparse", "--candidate-blocks", "0"}, "--candidate-blocks");
  expect_error({trace, "--model", "deepseek-v4-flash", "--sparse", "--page-size", "64"},
               "--page-size: expected a mult");
  expect_error({trace, "--model", path("narrow.json"), "--sparse", "--cache", "bf16", "--pool-cache", "bf16"},
               "--model: expected heads of a multiple of 32 channels, which are quantized for the projection, got 208");
  expect_error({trace, "--mtp", "-1"}, "--mtp");
  expect_error({trace, "--shared-prefix", "--dcp", "2"},
               "--shared-prefix: expected dense attention of one rank, not --dcp");
  expect_error({trace, "--dcp", "0"}, "--dcp: expected");
  expect_error({trace, "--cache", "float"}, "--cache");
  expect_error({trace, "--layers", "2"}, "--layers");
  expect_error({trace, "--chunk", "0"}, "--chunk");
  expect_error({trace, "--requests", "-1"}, "--requests");
  expect_error({trace, "--backend", "no-such-backend"}, "no-such-backend");
  expect_error({trace, "--model", config, "--timeline", "/nonexistent/t.json"}, "--timeline: cannot open");
  expect_error({trace, "--model", config, "--chunk", "1m", "--max-batch", "64k", "--pool-tokens", "1024m"}, "memory");
  expect_error({trace, "--json=/nonexistent/x.json"}, "--json: cannot open");
  expect_error({trace, "--time-budget", "0"}, "--time-budget: expected seconds above 0, got 0");
  expect_error({trace, "--pool-gb", "0"}, "--pool-gb: expected GB above 0, got 0");
  expect_error({trace, "--layers", "2"}, "one attention layer");
  expect_error({trace, "--processors", "0-"}, "--processors: expected an integer");
  expect_error({trace, "--processors", "1023"},
               "--processors: expected processors that this process may use, got 1023");
  expect_error({trace, "--processors", std::to_string(mla::usable_processors().front()), "--threads", "2"},
               "--processors: expected 2 processors, one for each thread, got 1");
  expect_error({}, "trace");
}

TEST_F(ReplayCommand, CtrlCReportsWhatWasDone) {
  // These kernels of oneDNN keep data where a signal handler on their thread would write (mla/interrupt.h).
  setenv("ONEDNN_MAX_CPU_ISA", "AVX2", 1);
  const pid_t pid = start({MLA_SAMPLE_TRACE, "--threads", "2", "--chunk", "512", "--check-every", "0",
                           "--json=" + path("report.json"), "--timeline", path("timeline.json")});
  // The first steps are done when the timeline's first block is on disk; the whole trace takes far longer.
  std::error_code missing;
  for (int i = 0; i < 1200; ++i) {
    const auto size = std::filesystem::file_size(path("timeline.json"), missing);
    if (!missing && size > 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const auto asked = std::chrono::steady_clock::now();
  ASSERT_EQ(kill(pid, SIGINT), 0);
  const Outcome outcome = finish(pid);
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(30));
  EXPECT_EQ(outcome.status, 130) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("INTERRUPTED"));
  const json report = json::parse(read_file(path("report.json")));
  EXPECT_EQ(report["interrupted"], true);
  EXPECT_LT(report["requests"], 300);
  EXPECT_EQ(report["total_requests"], 300);
  EXPECT_TRUE(report["worst_error"].is_null());
  EXPECT_TRUE(json::accept(read_file(path("timeline.json"))));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// Tests the command line's contract: exit statuses, streams, keys and types of the JSON, one-line errors.
#include <gmock/gmock.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "mla/types.h"
#include "tools/mla/run_mla.h"

namespace mla::cli {
namespace {

using nlohmann::json;
using testing::ContainsRegex;
using testing::HasSubstr;

TEST(Cli, HelpOfEveryCommandShowsExamples) {
  EXPECT_EQ(run_mla("--help").status, 0);
  for (const char* command : {"info", "explain", "run", "check", "bench", "replay", "quant-report"}) {
    const Ran ran = run_mla(std::string(command) + " --help");
    EXPECT_EQ(ran.status, 0) << command;
    EXPECT_THAT(ran.out, HasSubstr("Examples:")) << command;
    EXPECT_THAT(ran.out, HasSubstr("--json")) << command;
    EXPECT_EQ(run_mla("help " + std::string(command)).out, ran.out) << command;
  }
  EXPECT_EQ(run_mla("help").out, run_mla("--help").out);
  EXPECT_THAT(run_mla("help").out, HasSubstr("Usage: libmla "));
}

TEST(Cli, VersionIsTheLibrarys) {
  const std::string version = json_of("info --json")["version"];
  for (const char* flag : {"--version", "-V"}) {
    const Ran ran = run_mla(flag);
    EXPECT_EQ(ran.status, 0) << flag;
    EXPECT_EQ(ran.out, version + "\n") << flag;
  }
}

TEST(Cli, IsCalledByBothItsNames) {
  const std::filesystem::path program = MLA_BINARY;
  EXPECT_TRUE(std::filesystem::equivalent(program, program.parent_path() / "libmla"));
}

TEST(Cli, WhatWasMisspeltIsGuessed) {
  expect_refusal("explian --op decode", {"unknown command 'explian'", "did you mean 'explain'?"});
  expect_refusal("help explian", {"unknown command 'explian'", "did you mean 'explain'?"});
  expect_refusal("generat", {"unknown command 'generat'", "did you mean 'generate'?"});
  expect_refusal("plot a.json", {"'plot' is a command of the Python package: pip install libmla"});
  expect_refusal("--versoin", {"unknown option '--versoin'", "did you mean '--version'?"});
  expect_refusal("explain --haeds 5", {"explain: unknown option '--haeds'; did you mean '--heads'?"});
  expect_refusal("bench --kv-lens=4k", {"bench: unknown option '--kv-lens=4k'; did you mean '--kv-len'?"});
  expect_refusal("info --frobnicate", {"info: unknown option '--frobnicate'; libmla info --help lists those"});
  expect_refusal("info now", {"info: unexpected argument 'now'"});
}

TEST(Cli, NoCommandPrintsHelpAndFails) {
  const Ran ran = run_mla("");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.out, "");
  EXPECT_THAT(ran.err, HasSubstr("Usage: libmla"));
}

TEST(Cli, BadArgumentsAreOneLineAndStatusTwo) {
  expect_refusal("frobnicate", {"unknown command 'frobnicate'", "info", "bench"});
  expect_refusal("info --frobnicate", {"--frobnicate"});
  expect_refusal("explain --op", {"--op"});
  expect_refusal("explain --op dekode", {"--op", "decode", "gather", "dekode"});
  expect_refusal("explain --cache int4", {"--cache", "bf16", "int4"});
  expect_refusal("explain --q-dtype i32", {"--q-dtype", "bf16, f16, f32, e4m3", "i32"});
  expect_refusal("explain --topk 5", {"--topk"});
  expect_refusal("explain --op top_k --cache fp8", {"--cache", "top_k"});
  expect_refusal("explain --op top_k --indexer-format mxfp4", {"--indexer-format", "top_k"});
  expect_refusal("check --indexer-format fp4", {"--indexer-format", "one of fp8, mxfp4", "fp4"});
  expect_refusal("explain --model no-such-model", {"no-such-model", "deepseek-v3"});
  expect_refusal("explain --model /no/such/config.json", {"/no/such/config.json"});
  expect_refusal("explain --backend cpu_avx3", {"cpu_avx3", "cpu_avx2", "reference"});
  expect_refusal("explain --heads none", {"--heads", "none"});
  expect_refusal("explain --head-dims 576", {"--head-dims", "576/512"});
  expect_refusal("explain --device tpu", {"--device", "tpu"});
  expect_refusal("explain --q-len 0", {"--q-len", "at least 1"});
  expect_refusal("explain --op prefill --q-len 2", {"--q-len", "prefill"});
  expect_refusal("explain --op decode --listed-keys 2", {"--listed-keys", "decode has no lists"});
  expect_refusal("explain --op prefill --num-requests 2", {"--num-requests", "prefill is judged alike"});
  expect_refusal("explain --op prefill_sparse --compute fp8", {"--compute", "prefill_sparse"});
  expect_refusal("explain --compute fp4", {"--compute", "default, fp8, exact", "fp4"});
  expect_refusal("check --op frob", {"--op", "frob"});
  expect_refusal("check --seed -1", {"--seed"});
  expect_refusal("check --backend frob", {"frob"});
  expect_refusal("check --cache int4 --op decode", {"--cache", "int4"});
  expect_refusal("check --cases -1", {"--cases", "at least 0"});
  expect_refusal("run --heads 16,32", {"--heads", "one value", "16,32", "libmla bench"});
  expect_refusal("run --trace x.jsonl", {"--trace"});
  expect_refusal("run --min-time 0", {"--min-time: expected seconds above 0, got 0"});
  expect_refusal("run --min-time nan", {"--min-time: expected seconds above 0, got nan"});
  expect_refusal("run --seed -1", {"--seed", "at least 0"});
  expect_refusal("run --states 3", {"--states", "decode"});
  expect_refusal("run --op prefill --cache f16", {"--cache", "prefill", "--q-dtype"});
  expect_refusal("explain --op merge_states --cache bf16", {"--cache", "merge_states", "--q-dtype"});
  expect_refusal("explain --model /no/such/folder/x.json", {"--model: cannot open", "No such file"});
  expect_refusal("explain --model no-such-model", {"--model: expected a preset"});
  expect_refusal("--frobnicate info", {"'--frobnicate'"});
  expect_refusal("info --json out.json", {"out.json", "--json=out.json"});
  expect_refusal("run --cache fp8_ds_mla --head-dims 512/512 --kv-len 64", {"fp8_ds_mla", "576", "512"});
  expect_refusal("run --cache fp8_dsv4 --head-dims 576/512 --kv-len 64", {"fp8_dsv4", "512", "576"});
  expect_refusal("run --op prefill_sparse --cache fp8 --kv-len 64", {"prefill_sparse", "bf16 or f16", "fp8"});
  expect_refusal("run --op append --q-dtype e4m3", {"--q-dtype", "e4m3"});
  expect_refusal("run --topk 7", {"--topk", "decode"});
  expect_refusal("run --op decode_sparse --kv-len 7", {"--kv-len", "pool_tokens"});
  expect_refusal("run --op decode_sparse --window 7", {"--window", "decode_sparse"});
  expect_refusal("run --op prefill --dcp 2", {"--dcp", "prefill"});
  expect_refusal("run --cache bf16 --scales per-slot", {"--scales", "fp8", "bf16"});
  expect_refusal("run --scales pow3", {"--scales", "pow2, f32, per-slot", "pow3"});
  expect_refusal("run --tree oak", {"--tree", "none, mask, parents", "oak"});
  expect_refusal("run --op prefill_sparse --compute fp8", {"--compute", "prefill_sparse"});
  expect_refusal("run --op prefill --compute fp8 --kv-len 64",
                 {"compute fp8 is for a prefill of e4m3 tensors, not of bf16"});
  expect_refusal("run --compute fp8 --kv-len 64", {"compute fp8 is for quantized caches, not for bf16"});
  expect_refusal("run --soft-cap 0", {"--soft-cap", "above 0"});
  expect_refusal("quant-report --queries 9 --kv-len 8", {"--queries", "at most --kv-len = 8", "9"});
  expect_refusal("quant-report --heads 0", {"--heads", "at least 1"});
  expect_refusal("quant-report --backend cpu_avx3", {"--backend", "cpu_avx3"});
  expect_refusal("info --json=/no/such/folder/out.json", {"/no/such/folder/out.json"});
}

TEST(Cli, StreamsThatCannotBeWrittenAreNoCrashAndNoSuccess) {
  const std::string path = testing::TempDir() + "mla_closed.json";
  EXPECT_EQ(status_of("info --json=" + path, ">/dev/null 2>&-"), 0);
  EXPECT_TRUE(json::accept(read_text(path)));
  for (const char* redirection : {"2>&-", "2>/dev/full"}) {
    EXPECT_EQ(status_of("explain --op dekode", redirection), 2) << redirection;
    EXPECT_EQ(status_of("info --json", std::string(">/dev/null ") + redirection), 0) << redirection;
  }
  for (const char* redirection : {">&- 2>/dev/null", ">/dev/full 2>/dev/null"})
    for (const char* command : {"info", "info --json", "--help"})
      EXPECT_EQ(status_of(command, redirection), 2) << command << " " << redirection;
}

TEST(Cli, ARefusedCommandLeavesNoFile) {
  const std::string path = testing::TempDir() + "mla_refused.json";
  std::remove(path.c_str());
  expect_refusal("bench --kv-len 8:4 --json=" + path, {"--kv-len"});
  expect_refusal("run --batch 1024 --kv-len 100m --json=" + path, {"memory"});
  EXPECT_FALSE(std::ifstream(path).good());
}

TEST(CliInfo, SaysThatMlaBackendForcesWhatIsNotThere) {
  const Ran ran = run_mla("info --json", "MLA_BACKEND=foo");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("libmla: "));
  EXPECT_THAT(json::parse(ran.out)["error"].get<std::string>(), HasSubstr("foo"));
  EXPECT_TRUE(json_of("info --json")["error"].is_null());
}

// The tool loads OpenMP, with oneDNN.
TEST(CliInfo, CountsTheProcessorsOfTheProcessThoughOpenMPBindsThreads) {
  const auto threads = [](const std::string& environment) {
    const Ran ran = run_mla("info --json", environment);
    return json::parse(ran.out, nullptr, false).value("threads", -1);
  };
  const int all = threads("");
  for (const char* bind : {"true", "close", "spread"}) EXPECT_EQ(threads(std::string("OMP_PROC_BIND=") + bind), all);
  cpu_set_t before, first;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&first);
  for (size_t i = 0; CPU_COUNT(&first) == 0; ++i)
    if (CPU_ISSET(i, &before)) CPU_SET(i, &first);
  ASSERT_EQ(sched_setaffinity(0, sizeof first, &first), 0);  // processes that this thread starts inherit it
  EXPECT_EQ(threads(""), 1);
  EXPECT_EQ(threads("OMP_PROC_BIND=true"), 1);
  EXPECT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(CliExplain, DescribesOnlyWhatTheOperationHas) {
  EXPECT_THAT(run_mla("explain --op prefill").out, testing::Not(HasSubstr("cache")));
  EXPECT_THAT(run_mla("explain --op append").out, testing::Not(HasSubstr("heads,")));
  EXPECT_THAT(run_mla("explain --backend reference").out, testing::Not(HasSubstr("note:")));
  EXPECT_THAT(run_mla("explain --head-dims 37/5").out, HasSubstr("only the float64 reference"));
  EXPECT_THAT(run_mla("explain --heads 8 --q-len 3").out, HasSubstr("queries bf16, 3 per request, 8 heads"));
  const std::string few = "explain --op decode_sparse --cache fp8_ds_mla --heads 64 --device sm90 --listed-keys ";
  EXPECT_THAT(run_mla(few + "2560").out, HasSubstr("selected: cuda_portable"));
  EXPECT_THAT(run_mla(few + "2561").out, HasSubstr("selected: cuda_sm90"));
  EXPECT_THAT(run_mla("explain --op indexer_logits --q-dtype f16 --indexer-format mxfp4 --device sm90").out,
              testing::AllOf(HasSubstr("queries f16, 64 heads, keys mxfp4"),
                             HasSubstr("takes e4m3 and bf16 queries with mxfp4 keys, not f16"),
                             HasSubstr("selected: cuda_portable")));
  EXPECT_THAT(run_mla("explain --op indexer_top_k --indexer-format mxfp4 --device sm90").out,
              HasSubstr("selected: cuda_sm90"));
  EXPECT_THAT(run_mla("explain --op append_indexer").out, testing::Not(HasSubstr("keys")));
  EXPECT_THAT(run_mla("explain --op indexer_logits --heads 121 --logits-dtype bf16 --device sm90").out,
              testing::AllOf(HasSubstr("121 heads, logits bf16"),
                             HasSubstr("takes at most 120 heads where logits are bf16, not 121")));
  EXPECT_THAT(run_mla("explain --op top_k --logits-dtype f16").out, HasSubstr("any number of f16 logits"));
  expect_refusal("explain --op decode --logits-dtype f16", {"--logits-dtype", "decode has no logits"});
  expect_refusal("explain --op top_k --logits-dtype e4m3", {"--logits-dtype", "one of bf16, f16, f32"});
  EXPECT_THAT(run_mla("explain --cache fp8 --compute fp8").out, HasSubstr("head dims 576/512, compute fp8"));
  EXPECT_THAT(run_mla("explain --compute fp8").out, HasSubstr("compute fp8 is for quantized caches, not for bf16"));
  EXPECT_THAT(run_mla("explain --op prefill --q-dtype e4m3 --compute fp8").out,
              HasSubstr("q, k and v e4m3, 128 heads, head dims 192/128, compute fp8"));
}

TEST(CliExplain, OptionsHaveTheNamesOfPythonsArguments) {
  const std::string expected = run_mla("explain --heads 16 --head-dims 320/256 --cache f16").out;
  EXPECT_THAT(expected, HasSubstr("16 heads, head dims 320/256"));
  EXPECT_EQ(run_mla("explain --num-heads 16 --d-qk 320 --d-v 256 --cache f16").out, expected);
  EXPECT_THAT(run_mla("explain --help").out,
              testing::AllOf(HasSubstr("--num-heads"), testing::Not(HasSubstr("--heads"))));
  // Messages name what was written.
  expect_refusal("explain --num-heads none", {"libmla: --num-heads: ", "none"});
  expect_refusal("explain --heads none", {"libmla: --heads: ", "none"});
  expect_refusal("explain --heads 4 --num-heads 4", {"--heads: --num-heads was given too"});
  expect_refusal("explain --d-v 256 --head-dims 320/256", {"--d-v: --head-dims was given too"});
  expect_refusal("explain --model kimi-k3 --d-qk 64",
                 {"--d-qk: describes one operation of the model; expected --op too"});
  for (const auto& [command, name] : {std::pair("check", "threads"), {"bench", "threads"}, {"quant-report", "heads"}})
    for (const std::string& option : {std::string("--") + name, std::string("--num-") + name})
      expect_refusal(std::string(command) + " " + option + " none", {"libmla: " + option + ": "});
}

TEST(CliExplain, TakesTheFolderOfAConfig) {
  const std::string folder = testing::TempDir() + "mla_model_folder";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json")
      << R"({"num_attention_heads": 24, "num_hidden_layers": 1, "kv_lora_rank": 256, "qk_nope_head_dim": 128,
             "qk_rope_head_dim": 64, "v_head_dim": 128})";
  EXPECT_THAT(run_mla("explain --model " + folder).out, HasSubstr("24 heads, head dims 320/256"));
}

TEST(CliInfo, TextNamesThePartsOfTheMachine) {
  const Ran ran = run_mla("info");
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  for (const char* part :
       {"libmla", "\ncommit   ", "\nbuild    ", "cpu", "threads", "gpu", "avx2", "portable", "reference", "usable"})
    EXPECT_THAT(ran.out, HasSubstr(part));
}

TEST(CliInfo, JsonHasTheContractsKeys) {
  const json info = json_of("info --json");
  EXPECT_TRUE(info["version"].is_string());
  // The tests may have been built of an archive.
  EXPECT_TRUE(info["commit"].is_null() || info["commit"].get<std::string>().size() >= 12) << info["commit"];
  for (const char* key : {"compiler", "type", "options"}) EXPECT_TRUE(info["build"][key].is_string()) << key;
  EXPECT_THAT(info["build"]["options"].get<std::string>(), HasSubstr("MLA_CUDA="));
  EXPECT_TRUE(info["driver"].is_null() || info["driver"].is_string());
  EXPECT_TRUE(info["cpu"].is_string());
  ASSERT_TRUE(info["devices"].is_array());
  EXPECT_EQ(info["devices"][0]["type"], "cpu");
  ASSERT_TRUE(info["backends"].is_array());
  bool reference = false;
  for (const json& backend : info["backends"]) {
    EXPECT_TRUE(backend["name"].is_string());
    EXPECT_TRUE(backend["usable"].is_boolean());
    EXPECT_TRUE(backend["reason"].is_string());
    reference = reference || (backend["name"] == "reference" && backend["usable"] == true);
  }
  EXPECT_TRUE(reference);
}

TEST(CliInfo, JsonGoesToTheFileAndTextStaysOnStandardOutput) {
  const std::string path = testing::TempDir() + "mla_info.json";
  const Ran ran = run_mla("info --json=" + path);
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  EXPECT_THAT(ran.out, testing::AllOf(testing::StartsWith("libmla "), HasSubstr("\n> cpu_")));
  EXPECT_TRUE(json::parse(read_text(path)).contains("backends"));
  for (const char* to_stdout : {"info --json", "info --json=-"}) {
    const Ran both = run_mla(to_stdout);
    EXPECT_TRUE(json::accept(both.out)) << to_stdout;
    EXPECT_THAT(both.err, HasSubstr("libmla")) << to_stdout;
  }
}

TEST(CliInfo, MarkdownIsOneTablePerOperation) {
  const Ran ran = run_mla("info --markdown");
  EXPECT_EQ(ran.status, 0);
  for (Op op : kAllOps) EXPECT_THAT(ran.out, HasSubstr("**" + std::string(name(op)) + "**"));
  EXPECT_THAT(ran.out, testing::Not(HasSubstr("No backend")));
  EXPECT_THAT(ran.out, HasSubstr("`reference`"));
  EXPECT_THAT(ran.out, HasSubstr("`fp8_ds_mla`"));
  expect_refusal("info --markdown --json", {"--json"});
  expect_refusal("info --estimates --json", {"--json"});
  expect_refusal("info --estimates --markdown", {"--markdown"});
}

TEST(CliExplain, JsonListsEveryRowAndTheChoice) {
  const json explained = json_of("explain --op decode --model deepseek-v3 --cache bf16 --json");
  EXPECT_EQ(explained["indexer_format"], "fp8");
  EXPECT_EQ(explained["logits_dtype"], "f32");
  ASSERT_TRUE(explained["selected"].is_string());
  const std::string selected = explained["selected"];
  bool first_usable = true;
  for (const json& row : explained["rows"]) {
    EXPECT_TRUE(row["backend"].is_string());
    EXPECT_TRUE(row["reason"].is_string());
    ASSERT_TRUE(row["usable"].is_boolean());
    if (row["usable"] == true && first_usable) {
      EXPECT_EQ(row["backend"], selected);
      first_usable = false;
    }
  }
  EXPECT_FALSE(first_usable);
}

TEST(CliExplain, ForcesByFlagAndByEnvironment) {
  EXPECT_EQ(json_of("explain --backend reference --json")["selected"], "reference");
  const Ran ran = run_mla("explain --json", "MLA_BACKEND=reference");
  EXPECT_EQ(json::parse(ran.out)["selected"], "reference");
}

TEST(CliExplain, ForcedBackendThatCannotRunFailsWithTheReason) {
  const Ran ran = run_mla("explain --head-dims 37/5 --backend cpu --json");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, HasSubstr("libmla: "));
  EXPECT_THAT(ran.err, HasSubstr("cannot run this"));
  const json explained = json::parse(ran.out);
  EXPECT_TRUE(explained["selected"].is_null());
  EXPECT_THAT(explained["error"].get<std::string>(), HasSubstr("cpu_avx2: d_v must be"));
}

// The table has the reasons.
TEST(CliExplain, AFailureIsShort) {
  const Ran forced = run_mla("explain --head-dims 37/5 --backend cpu");
  EXPECT_EQ(forced.err, "libmla: decode: backend: \"cpu\" cannot run this (the table says why); reference can\n");
  EXPECT_THAT(forced.out, HasSubstr("d_v must be a multiple of 32 up to 1024, not 5\n"));
  EXPECT_EQ(run_mla("explain --compute fp8").err, "libmla: decode: no backend can run this (the table says why)\n");
  const Ran model = run_mla("explain --model deepseek-v3 --backend cuda_sm90");
  EXPECT_EQ(model.status, 2);
  EXPECT_EQ(model.err,
            "libmla: deepseek-v3 on cpu: missing: append_rope, gather, prefill, merge_states, decode (above is why)\n");
  EXPECT_THAT(model.out, HasSubstr("missing: append_rope: backend: \"cuda_sm90\" cannot run this: "));
}

TEST(CliExplain, EveryOperationHasARow) {
  for (Op op : kAllOps)
    EXPECT_TRUE(json_of("explain --json --op " + std::string(name(op)))["selected"].is_string()) << name(op);
  EXPECT_THAT(run_mla("explain --op decode_sparse --model deepseek-v4-flash").out,
              HasSubstr("cache fp8_dsv4, queries bf16, 64 heads, head dims 512/512"));
}

TEST(CliRun, EveryOperationIsCorrect) {
  for (Op op : kAllOps) {
    const std::string length = op == Op::kDecodeSparse ? "--pool-tokens 70" : "--kv-len 70";
    const json ran =
        json_of("run --heads 4 --batch 2 --min-time 0.01 --json " + length + " --op " + std::string(name(op)));
    EXPECT_EQ(ran["op"], name(op));
    EXPECT_TRUE(ran["error"].is_number()) << name(op);
    EXPECT_EQ(ran["error_text"], "") << name(op);
    EXPECT_GT(ran["median_us"].get<double>(), 0.0) << name(op);
  }
  EXPECT_THAT(run_mla("run --heads 4 --kv-len 70 --min-time 0.01").out, HasSubstr("GFLOP/s"));
}

TEST(CliRun, ForcedBackendThatCannotRunFailsWithTheReason) {
  const Ran ran = run_mla("run --head-dims 37/5 --backend cpu --kv-len 70");
  EXPECT_EQ(ran.status, 2);
  EXPECT_THAT(ran.err, testing::StartsWith("libmla: decode: backend: \"cpu\" cannot run this: "));
}

TEST(CliRun, EveryFormatAndOptionIsCorrect) {
  constexpr const char* kTwoPools =
      "--op decode_sparse --cache fp8_dsv4 --topk 20 --page-size 16 --extra-topk 9 --extra-page-size 4 --sink true "
      "--pool-tokens 100";
  for (const char* options :
       {"--cache fp8", "--cache fp8 --scales per-slot --q-dtype e4m3", "--cache fp8_ds_mla --scales f32 --sink true",
        "--cache fp8_dsv4 --window 20 --soft-cap 30", "--q-len 4 --tree mask --alibi true", "--q-len 4 --tree parents",
        "--q-len 3 --dcp 3", "--op decode_sparse --cache fp8_ds_mla --topk 20 --pool-tokens 100", kTwoPools,
        "--op copy_pages --cache fp8_dsv4 --page-size 32 --to-page-size 8",
        "--op copy_pages --cache bf16 --to-cache fp8_ds_mla", "--op append_rope --cache fp8_ds_mla",
        "--cache fp8_ds_mla --compute fp8", "--op prefill --q-dtype e4m3",
        "--op prefill --q-dtype e4m3 --compute fp8"}) {
    const std::string length = std::string_view(options).find("sparse") == std::string_view::npos ? " --kv-len 70" : "";
    const json ran = json_of("run --heads 4 --min-time 0.01 --json " + std::string(options) + length);
    EXPECT_EQ(ran["error_text"], "") << options;
  }
  const json sparse = json_of(
      "run --op decode_sparse --heads 4 --cache fp8_dsv41 --topk 20 --extra-topk 9 --extra-cache fp4_dsv41 --min-time "
      "0.01 --pool-tokens 100 --json");
  EXPECT_EQ(sparse["topk"], 29);
  EXPECT_EQ(sparse["extra_topk"], 9);
  EXPECT_EQ(sparse["extra_cache"], "fp4_dsv41");
  EXPECT_EQ(sparse["kv_len"], 100);
  EXPECT_EQ(sparse["d_qk"], 512);
  const json top_k = json_of("run --op top_k --kv-len 1000 --topk 20 --min-time 0.01 --json");
  EXPECT_GT(top_k["ratio"].get<double>(), 0.0);
}

// What `error` is measured from has the same rounded operands, what `method_error` is measured from has not.
TEST(CliRun, BothErrorsOfFP8MultipliesAreReported) {
  for (const char* operands : {"--cache fp8_ds_mla", "--op prefill --q-dtype e4m3"}) {
    const std::string problem = "run --heads 4 --kv-len 70 --min-time 0.01 " + std::string(operands);
    EXPECT_TRUE(json_of(problem + " --json")["method_error"].is_null());
    const Ran both = run_mla(problem + " --compute fp8 --json");
    const json ran = json::parse(both.out);
    EXPECT_EQ(ran["error_text"], "");
    EXPECT_GT(ran["method_error"].get<double>(), 2 * ran["error"].get<double>());
    EXPECT_LT(ran["method_error"].get<double>(), 0.2);
    EXPECT_THAT(both.err, ContainsRegex("\nmethod   [0-9].*e-0[1-3] from the unrounded products\n"));
  }
}

TEST(CliQuantReport, OrdersTheFormatsByWhatTheyKeep) {
  const json report = json_of("quant-report --heads 4 --kv-len 600 --json");
  EXPECT_TRUE(report["version"].is_string());
  EXPECT_EQ(report["heads"], 4);
  EXPECT_EQ(report["kv_len"], 600);
  std::map<std::string, json> by_name;
  for (const json& format : report["formats"]) {
    for (const char* key : {"cache", "scales", "backend"}) EXPECT_TRUE(format[key].is_string()) << key;
    for (const char* key : {"bytes_per_token", "d_qk", "d_v"}) EXPECT_TRUE(format[key].is_number_integer()) << key;
    EXPECT_LE(format["output_error_rms"], format["output_error_worst"]);
    EXPECT_LE(format["lse_error_rms"], format["lse_error_worst"]);
    const std::string name = format["cache"].get<std::string>() + " " + format["scales"].get<std::string>();
    if (name == "bf16 -") {
      EXPECT_EQ(format["output_error_worst"], 0.0);
      EXPECT_EQ(format["bytes_per_token"], 2 * format["d_qk"].get<int64_t>());
    }
    by_name[name] = format;
  }
  const std::map<std::string, int64_t> bytes = {{"f16 -", 1152},
                                                {"fp8 one, f32", 576},
                                                {"fp8 4 per token, f32", 592},
                                                {"fp8_ds_mla 4 per token, powers of two", 656},
                                                {"fp8_ds_mla 4 per token, f32", 656},
                                                {"fp8_dsv4 7 per token, powers of two", 584},
                                                {"fp8_dsv41 16 per token, powers of two", 528},
                                                {"fp4_dsv41 32 per token, e4m3", 288},
                                                {"fp8_nope 4 per token, f32", 528},
                                                {"nvfp4_ds_mla 32 per token, e4m3", 432},
                                                {"nvfp4_ds_mla_416 32 per token, e4m3, outer", 416},
                                                {"nvfp4_ds_mla_368 32 per token, e4m3, outer", 368},
                                                {"nvfp4_dsv4 28 per token, e4m3", 384},
                                                {"mxfp4_dsv4 14 per token, powers of two", 368}};
  for (const auto& [name, count] : bytes) {
    ASSERT_TRUE(by_name.contains(name)) << name;
    EXPECT_EQ(by_name[name]["bytes_per_token"], count) << name;
  }
  // Three bits of mantissa round by at most 1/16; the softmax adds up its own share of that.
  for (const auto& [name, count] : bytes) {
    if (name == "f16 -") {
      EXPECT_LT(by_name[name]["output_error_worst"], 1e-5) << "f16 holds bf16 rows of this size exactly";
      continue;
    }
    EXPECT_GT(by_name[name]["output_error_rms"], 1e-3) << name;
    EXPECT_LT(by_name[name]["output_error_rms"], name.find("fp4") != std::string::npos ? 0.4 : 0.1) << name;
    EXPECT_GT(by_name[name]["lse_error_rms"], 1e-5) << name;
  }
  EXPECT_THAT(run_mla("quant-report --heads 1 --kv-len 1 --queries 1").out, HasSubstr("bytes/token"));
}

}  // namespace
}  // namespace mla::cli

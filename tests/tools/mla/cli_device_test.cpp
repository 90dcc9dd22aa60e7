// SPDX-License-Identifier: Apache-2.0
// Tests --device of every command: GPUs that are not there, emulated ones, and what MLA_EMULATE does.
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "kit/device.h"
#include "mla/backend.h"
#include "tools/mla/run_mla.h"

namespace mla::cli {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

bool has_row(const json& rows, const std::string& name) {
  return std::any_of(rows.begin(), rows.end(), [&](const json& row) { return row["backend"] == name; });
}

/// Computes on "emulated:sm90", or on the first architecture that this build emulates.
class CliEmulated : public testing::Test {
 protected:
  void SetUp() override {
    const std::vector<int32_t>& archs = machine_info().emulated_archs;
    if (archs.empty()) GTEST_SKIP() << "this build emulates no GPU";
    const bool hopper = std::find(archs.begin(), archs.end(), 90) != archs.end();
    arch_ = "sm" + std::to_string(hopper ? 90 : archs.front());
    device_ = "emulated:" + arch_;
  }
  std::string arch_, device_;
};

TEST(CliDevice, MistakesAreOneLineAndStatusTwo) {
  for (const char* command : {"run", "check", "bench --list", "explain"})
    expect_refusal(std::string(command) + " --device tpu", {"--device", "tpu", "cuda:0"});
  for (const char* command : {"run", "check", "bench --list"})
    expect_refusal(std::string(command) + " --device sm90", {"--device", "emulated:sm90"});
  expect_refusal("check --device emulated:sm77", {"--device", "sm77"});
  expect_refusal("run --kv-len 64 --device emulated:sm77", {"sm77"});
  expect_refusal("check --device cuda:99", {"cuda:99"});
  expect_refusal("explain", {"MLA_EMULATE", "tpu"}, "MLA_EMULATE=tpu");
}

TEST(CliDevice, ExplainAnswersForAGpuThatIsNotThere) {
  for (const char* arch : {"sm80", "sm103", "sm110", "sm120", "sm121"}) {
    const json document = json_of(std::string("explain --json --device ") + arch);
    EXPECT_EQ(document["device"], arch);
    EXPECT_TRUE(has_row(document["rows"], "cuda_portable"));
    for (const json& row : document["rows"])
      EXPECT_TRUE(kit::is_gpu_backend(row["backend"].get<std::string>()) || row["usable"] == false) << row;
    // Whatever this build has, the answer is there, and what it lacks is said.
    EXPECT_TRUE(kit::is_gpu_backend(document["selected"].get<std::string>())) << document["selected"];
    const json& code = document["code"];
    EXPECT_EQ(code["by_driver"], false);
    const std::string text = run_mla(std::string("explain --device ") + arch).out;
    EXPECT_EQ(text.find("not in this build") == std::string::npos, code["built"].get<bool>()) << text;
    EXPECT_EQ(text.find("note: ") == std::string::npos, code["built"].get<bool>()) << text;
    EXPECT_EQ(document["note"].is_null(), code["built"].get<bool>()) << document["note"];
  }
  EXPECT_EQ(run_mla("explain --device sm75").status, 2);
  EXPECT_TRUE(json_of("explain --json --device cpu")["code"].is_null());
}

TEST(CliDevice, ExplainSaysWhoseCodeAGpuRuns) {
  const std::vector<int32_t>& archs = machine_info().gpu_archs;
  for (const auto& [arch, family] : {std::pair{103, 100}, std::pair{121, 120}}) {
    if (std::find(archs.begin(), archs.end(), arch) != archs.end()) continue;  // this build has its own
    const std::string text = run_mla("explain --device sm" + std::to_string(arch)).out;
    EXPECT_THAT(text, HasSubstr("(code: the family of sm" + std::to_string(family)));
    EXPECT_THAT(text, HasSubstr("compiled for the family of sm" + std::to_string(family)));
  }
}

TEST(CliDevice, ExplainEstimatesTimesOfAnArchitecture) {
  for (const char* arch : {"sm80", "sm86", "sm89", "sm90", "sm120"}) {
    const std::string command = std::string("explain --device ") + arch + " --estimate --heads 16 --batch 8 --keys 2k";
    const json estimate = json_of(command + " --json")["estimate"];
    EXPECT_EQ(estimate["batch"], 8);
    EXPECT_EQ(estimate["keys"], 2048);
    EXPECT_TRUE(estimate["unknown"].is_null());
    EXPECT_GT(estimate["error"], 0.0);
    ASSERT_FALSE(estimate["gpus"].empty()) << arch;
    const std::string text = run_mla(command).out;
    EXPECT_THAT(text, HasSubstr("estimate, not measured, for 8 requests of 2048 keys each"));
    for (const json& gpu : estimate["gpus"]) {
      EXPECT_THAT(text, HasSubstr(gpu["gpu"].get<std::string>() + ": estimate "));
      EXPECT_GT(gpu["estimate_us"], gpu["ceiling_us"]);
      EXPECT_EQ(gpu["bytes_per_key"], 1152);
      EXPECT_EQ(gpu["block_rows"], 16);
    }
  }
  EXPECT_FALSE(json_of("explain --device sm120 --json").contains("estimate"));
}

TEST(CliDevice, ExplainSaysWhereNothingCanBeEstimated) {
  for (const auto& [arguments, reason] :
       {std::pair{"--device sm121", "no GPU of sm121"}, std::pair{"--device sm120 --op prefill", "not prefill"},
        std::pair{"--device sm120 --head-dims 320/256", "head dims 320/256"},
        std::pair{"--device sm90 --heads 16 --backend cuda_portable --q-dtype f32", "queries of f32"}}) {
    const std::string command = std::string("explain --estimate ") + arguments;
    EXPECT_THAT(run_mla(command).out, AllOf(HasSubstr("no estimate: "), HasSubstr(reason)));
    const json estimate = json_of(command + " --json")["estimate"];
    EXPECT_THAT(estimate["unknown"].get<std::string>(), HasSubstr(reason));
    EXPECT_TRUE(estimate["gpus"].empty());
  }
  // Nobody has timed cuda_fp8.
  EXPECT_THAT(run_mla("explain --estimate --device sm120 --cache fp8_ds_mla --compute fp8").out,
              HasSubstr("no time of cuda_fp8 was ever measured"));
}

TEST(CliDevice, ExplainRefusesEstimatesOfDevices) {
  for (const char* device : {"", "--device cpu", "--device emulated:sm120"})
    expect_refusal(std::string("explain --estimate ") + device, {"--estimate", "sm120"});
  expect_refusal("explain --device sm120 --batch 4", {"--batch", "--estimate"});
  expect_refusal("explain --device sm120 --keys 4k", {"--keys", "--estimate"});
  expect_refusal("explain --device sm120 --estimate --batch 0", {"--batch", "at least 1"});
  expect_refusal("explain --device sm120 --estimate --keys x", {"--keys", "integer"});
}

TEST(CliDevice, InfoSaysWhatTheBuildHasForGpus) {
  const json cuda = json_of("info --json")["cuda"];
  for (const char* key : {"driver", "error", "archs", "codes", "emulated_archs", "times"})
    EXPECT_TRUE(cuda.contains(key)) << key;
  for (const char* arch : {"sm103", "sm110", "sm121"}) EXPECT_TRUE(cuda["codes"].contains(arch)) << arch;
  EXPECT_EQ(cuda["emulated_archs"].size(), machine_info().emulated_archs.size());
  EXPECT_EQ(cuda["times"]["sm90"], "measured");
  EXPECT_EQ(cuda["times"]["sm120"], "estimated");
  EXPECT_EQ(cuda["times"]["sm100"], "emulated only");
  EXPECT_EQ(cuda["times"]["sm103"], "emulated only");
  EXPECT_EQ(cuda["times"]["sm110"], "compiled only");
  const std::string text = run_mla("info").out;
  EXPECT_THAT(text, HasSubstr("emulates"));
  EXPECT_THAT(text, ContainsRegex("\nH100, H200 +sm90 .* measured on hardware\n"));
  EXPECT_THAT(text, ContainsRegex("\nRTX PRO 6000, RTX 50 +sm120 .* emulated only, times estimated\n"));
  EXPECT_THAT(text, ContainsRegex("\nB200 +sm100 .* emulated only\n"));
  EXPECT_THAT(text, ContainsRegex("\nJetson Thor +sm110 .* compiled only\n"));
}

TEST(CliDevice, MarkdownJudgesRowsOfGpusForEmulatedOnes) {
  const Ran ran = run_mla("info --markdown");
  EXPECT_EQ(ran.status, 0);
  EXPECT_THAT(ran.out, HasSubstr("`cuda_portable`"));
  const bool refused = ran.out.find("`cuda_portable` is idle on this machine") != std::string::npos;
  EXPECT_EQ(refused, machine_info().emulated_archs.empty());
  // It takes nothing that does not ask for it.
  const std::vector<int32_t>& archs = machine_info().emulated_archs;
  const bool wgmma = std::find(archs.begin(), archs.end(), 90) != archs.end();
  const bool mma = std::any_of(archs.begin(), archs.end(), [](int32_t arch) { return arch == 89 || arch / 10 == 12; });
  EXPECT_EQ(ran.out.find("e4m3 bf16 f16 f32, compute fp8") != std::string::npos, wgmma || mma);
  EXPECT_EQ(ran.out.find("`cuda_sm90_fp8` is idle on this machine") != std::string::npos, !wgmma);
  EXPECT_EQ(ran.out.find("`cuda_fp8` is idle on this machine") != std::string::npos, !mma);
}

TEST_F(CliEmulated, RunsOneOperation) {
  const json document = json_of("run --kv-len 70 --heads 4 --device " + device_ + " --json");
  EXPECT_EQ(document["device"], device_);
  EXPECT_TRUE(kit::is_gpu_backend(document["backend"].get<std::string>())) << document["backend"];
  EXPECT_EQ(document["error_text"], "");
  EXPECT_TRUE(document["ceiling_share"].is_null());
  const Ran text = run_mla("run --kv-len 70 --heads 4 --device " + device_);
  EXPECT_THAT(text.out, HasSubstr("emulator"));
}

TEST_F(CliEmulated, TheEnvironmentDoesWhatTheOptionDoes) {
  const Ran ran = run_mla("run --kv-len 40 --heads 2 --json", "MLA_EMULATE=" + arch_);
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(json::parse(ran.out)["device"], device_);
}

TEST_F(CliEmulated, Checks) {
  const json document = json_of("check --op append --cases 2 --json --device " + device_);
  EXPECT_EQ(document["device"], device_);
  EXPECT_EQ(document["failed"], 0);
  EXPECT_GT(document["backends"].size(), 0U);
  for (const json& row : document["backends"]) EXPECT_TRUE(kit::is_gpu_backend(row["backend"].get<std::string>()));
}

TEST_F(CliEmulated, AllRowsOfAttentionAreExplainedRunAndChecked) {
  if (arch_ != "sm90") GTEST_SKIP() << "this build does not emulate sm90";
  const std::string device = " --json --device " + device_;
  const json few = json_of("explain --heads 8 --q-len 2" + device),
             many = json_of("explain --heads 8 --q-len 3" + device);
  EXPECT_EQ(few["selected"], "cuda_bulk");
  EXPECT_EQ(few["q_len"], 2);
  EXPECT_EQ(few["heads"], 8);
  EXPECT_EQ(many["selected"], "cuda_sm90");
  EXPECT_EQ(json_of("run --kv-len 40 --heads 8 --q-len 2" + device)["backend"], "cuda_bulk");
  EXPECT_EQ(json_of("run --kv-len 40 --heads 11 --q-len 3" + device)["backend"], "cuda_sm90");
  EXPECT_EQ(json_of("run --kv-len 40 --heads 11 --q-len 3 --backend cuda_portable" + device)["backend"],
            "cuda_portable");
  // 17 to 32 heads go where they do by the number of requests.
  const json a_few = json_of("explain --heads 32 --num-requests 32" + device);
  EXPECT_EQ(a_few["selected"], "cuda_bulk");
  EXPECT_EQ(a_few["num_requests"], 32);
  EXPECT_EQ(json_of("explain --heads 32 --num-requests 33" + device)["selected"], "cuda_sm90");
  EXPECT_EQ(json_of("run --kv-len 40 --heads 24 --batch 32" + device)["backend"], "cuda_bulk");
  EXPECT_EQ(json_of("run --kv-len 40 --heads 24 --batch 33" + device)["backend"], "cuda_sm90");
  for (const char* row : {"cuda_sm90", "cuda_bulk", "cuda_portable"}) {
    const json checked = json_of("check --cache bf16 --cases 2 --backend " + std::string(row) + device);
    EXPECT_EQ(checked["failed"], 0);
    EXPECT_GT(checked["cases"], 0);
    for (const json& each : checked["backends"]) EXPECT_EQ(each["backend"], row);
  }
}

TEST_F(CliEmulated, BenchComparesItWithTheCpu) {
  const json document =
      json_of("bench --kv-len 40 --heads 2 --min-time 0.01 --compare device --json --device cpu," + device_);
  ASSERT_EQ(document["results"].size(), 2U);
  EXPECT_EQ(document["results"][0]["device"], "cpu");
  EXPECT_EQ(document["results"][1]["device"], device_);
  EXPECT_EQ(document["results"][1]["copies"], 1);
  EXPECT_TRUE(document["results"][1]["plan_us"].is_null());
  EXPECT_EQ(document["ceilings"]["gpus"], json::array());
  EXPECT_TRUE(document["ceilings"]["bf16_gflops"].is_number());
}

TEST_F(CliEmulated, BenchWithoutTheCpuMeasuresNoneOfItsCeilings) {
  const json document = json_of("bench --kv-len 40 --heads 2 --json --device " + device_);
  EXPECT_TRUE(document["ceilings"]["bf16_gflops"].is_null());
  EXPECT_TRUE(document["results"][0]["ceiling_share"].is_null());
}

// Caches lie in the emulated GPU's memory, as in a real one's: what is not copied there or back is missed.
TEST_F(CliEmulated, Replays) {
  const std::string path = testing::TempDir() + "mla_device_trace.jsonl";
  std::ofstream(path) << R"({"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]})"
                      << "\n"
                      << R"({"timestamp": 1, "input_length": 130, "output_length": 2, "hash_ids": [2]})"
                      << "\n";
  for (const char* options :
       {"", "--cache fp8 --dcp 2", "--model deepseek-v3.2 --sparse --cache fp8_ds_mla --mtp 1",
        "--model deepseek-v4-flash --sparse --mtp 1", "--model deepseek-v4.1-flash --sparse --candidate-blocks 5",
        "--model glm-5.3-flash --sparse --cache fp8_nope"}) {
    const json document = json_of("replay " + path + " --chunk 100 --pool-tokens 1k --check-every 1 --json --device " +
                                  device_ + " " + options);
    EXPECT_EQ(document["device"], device_) << options;
    EXPECT_EQ(document["requests"], 2) << options;
    EXPECT_GE(document["checks"], 4) << options;
    EXPECT_EQ(document["failures"], json::array()) << options;
    EXPECT_GT(document["worst_error_reference"], 0.0) << options;
    EXPECT_GT(document["phase_seconds"]["transfer"], 0.0) << options;
    EXPECT_TRUE(kit::is_gpu_backend(document["backends"]["decode"].get<std::string>())) << options;
    EXPECT_TRUE(document["ceiling_share"].is_null()) << options;
  }
}

}  // namespace
}  // namespace mla::cli

// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "mla/bench/cases.h"
#include "tools/mla/expect_usage_error.h"

namespace mla::bench {
namespace {

using cli::expect_usage_error;

class CaseFile : public testing::Test {
 protected:
  std::vector<CaseGroup> load(const std::string& text, const Settings& flags = {}) {
    std::ofstream(path_) << text;
    return load_case_file(path_, flags);
  }
  void TearDown() override { std::filesystem::remove(path_); }
  void expect_error(const std::string& text, const std::vector<std::string>& parts) {
    expect_usage_error([&] { load(text); }, parts);
  }

  // Tests run beside each other, each in a process of its own.
  const std::string name_ = "mla_cases_" + std::to_string(getpid()) + ".yaml", path_ = testing::TempDir() + name_;
};

TEST_F(CaseFile, DefaultsCasesAndFlags) {
  const std::string text =
      "defaults: {heads: 16, threads: 1}\n"
      "cases:\n"
      "  - label: a\n    kv_len: [1k, 2k]\n    target: {share: 0.9}\n"
      "  - {label: b, heads: 32, page_size: [64, 1], compare: page_size, target: {ratio: 0.95, max_us: 30}}\n";
  const auto groups = load(text);
  ASSERT_EQ(groups.size(), 3U);
  EXPECT_EQ(groups[0].cases[0].label, "a");
  EXPECT_EQ(groups[0].cases[0].heads, 16);
  EXPECT_EQ(groups[0].cases[0].threads, 1);
  EXPECT_EQ(groups[1].cases[0].total_kv(), 2048);
  EXPECT_EQ(groups[0].target.min_share, 0.9);
  EXPECT_EQ(groups[2].cases.size(), 2U);
  EXPECT_EQ(groups[2].cases[0].heads, 32);
  EXPECT_EQ(groups[2].target.min_ratio, 0.95);
  EXPECT_EQ(groups[2].target.max_us, 30);
  const Settings flags = {{"heads", Setting{.text = "8", .where = "--heads"}}};
  for (const CaseGroup& group : load(text, flags)) EXPECT_EQ(group.cases[0].heads, 8);
}

TEST_F(CaseFile, KeysHaveTheNamesOfPythonsArgumentsToo) {
  const auto groups = load("cases:\n  - {num_heads: [8, 16], attn_sink: true, window_left: 9, compare: num_heads}\n");
  ASSERT_EQ(groups.size(), 1U);
  ASSERT_EQ(groups[0].cases.size(), 2U);
  EXPECT_EQ(groups[0].cases[1].heads, 16);
  EXPECT_TRUE(groups[0].cases[0].sink);
  EXPECT_EQ(groups[0].cases[0].window, 9);
  const Settings flags = {{"heads", Setting{.text = "4", .where = "--num-heads"}}};
  EXPECT_EQ(load("defaults: {heads: 16}\ncases:\n  - {num_heads: 8}\n")[0].cases[0].heads, 8);
  EXPECT_EQ(load("cases:\n  - {num_heads: 8}\n", flags)[0].cases[0].heads, 4);
  expect_error("cases:\n  - heads: 8\n    num_heads: 8\n", {":3:", "num_heads: was given before", ":2: heads"});
}

TEST_F(CaseFile, NamesTheLineOfEveryMistake) {
  expect_error("cases:\n  - heads: [1, 2\n", {name_ + ":"});
  expect_error("cases:\n  - heads: 16\n    haeds: 16\n", {":3:", "haeds: unknown key; did you mean 'heads'?"});
  expect_error("cases:\n  - op: decode\n    heads: many\n", {":3:", "heads", "many"});
  expect_error("cases:\n  - op: dekode\n", {":2:", "op", "decode"});
  expect_error("cases:\n  - target: {shear: 1}\n", {":2:", "shear", "share"});
  expect_error("cases:\n  - target: {share: much}\n", {":2:", "share", "number"});
  expect_error("cases:\n  - target: {ratio: 0.9}\n", {":2:", "ratio", "compare"});
  expect_error("cases:\n  - target: fast\n", {":2:", "target", "map"});
  expect_error("cases:\n  - kv_len: {a: 1}\n", {":2:", "kv_len"});
  expect_error("cases:\n  - just text\n", {":2:", "map"});
  expect_error("cases: []\n", {"cases", "list"});
  expect_error("things: []\n", {":1:", "things", "unknown key"});
  expect_error("- 1\n", {"map"});
  expect_error("", {"map"});
  expect_error("\x01\x02", {name_});
}

TEST_F(CaseFile, RefusesWhatIsNoFile) {
  expect_usage_error([] { load_case_file("/no/such/cases.yaml", {}); }, {"/no/such/cases.yaml"});
  expect_usage_error([] { load_case_file(testing::TempDir(), {}); }, {"directory"});
}

TEST(ShippedCases, AllLoad) {
  for (const char* file : {"decode", "prefill", "cache", "sparse", "formats", "targets", "gpu_targets"}) {
    const std::string path = std::string(MLA_SOURCE_DIR "/bench/") + file + ".yaml";
    EXPECT_FALSE(load_case_file(path, {}).empty()) << path;
  }
}

TEST(ShippedCases, EveryTargetCaseHasATarget) {
  size_t ratios = 0;
  for (const CaseGroup& group : load_case_file(MLA_SOURCE_DIR "/bench/targets.yaml", {})) {
    EXPECT_TRUE(group.target.given()) << group.cases[0].label;
    ratios += group.target.min_ratio.has_value() ? 1U : 0U;
    for (const Case& one : group.cases) EXPECT_EQ(one.threads, 2) << one.label;
  }
  EXPECT_EQ(ratios, 4U);  // page size with 16 and with 128 heads, ragged lengths, top-k
}

TEST(ShippedCases, GpuTargetsAreForAGpu) {
  size_t targets = 0;
  for (const CaseGroup& group : load_case_file(MLA_SOURCE_DIR "/bench/gpu_targets.yaml", {})) {
    targets += group.target.given() ? 1U : 0U;
    for (const Case& one : group.cases) EXPECT_EQ(one.device, "cuda:0") << one.label;
  }
  EXPECT_EQ(targets, 10U);
}

}  // namespace
}  // namespace mla::bench

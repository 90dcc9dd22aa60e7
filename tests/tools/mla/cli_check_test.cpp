// SPDX-License-Identifier: Apache-2.0
// Tests `libmla check`: what it counts, what it shows while it works, and what Ctrl-C leaves.
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>

#include "kit/device.h"
#include "tools/mla/run_mla.h"

namespace mla::cli {
namespace {

using nlohmann::json;
using testing::ContainsRegex;

TEST(CliCheck, JsonCountsTheCases) {
  const json checked = json_of("check --quick --op merge_states --seed 3 --json");
  EXPECT_GT(checked["cases"].get<int64_t>(), 0);
  EXPECT_EQ(checked["failed"], 0);
  EXPECT_EQ(checked["total_cases"], checked["cases"]);
  EXPECT_EQ(checked["interrupted"], false);
  EXPECT_TRUE(checked["failures"].is_array());
  EXPECT_EQ(checked["seed"], 3);
  EXPECT_GT(checked["seconds"], 0.0);
  int64_t cases = 0, of_one_row = 0;
  for (const json& row : checked["backends"]) {
    EXPECT_EQ(row["op"], "merge_states");
    EXPECT_EQ(row["failed"], 0);
    cases += row["cases"].get<int64_t>();
    if (row["backend"] == "reference") of_one_row = row["cases"].get<int64_t>();
  }
  EXPECT_EQ(checked["cases"], cases);
  ASSERT_TRUE(checked["skipped"].is_array());
  for (const json& entry : checked["skipped"]) {
    EXPECT_TRUE(entry["backend"].is_string());
    EXPECT_TRUE(entry["reason"].is_string());
    cases += entry["count"].get<int64_t>();
  }
  int64_t rows = 0;  // for the host's memory: what is for GPUs is not even counted as skipped
  const json explained = json_of("explain --op merge_states --json");
  for (const json& row : explained["rows"]) rows += kit::is_gpu_backend(row["backend"].get<std::string>()) ? 0 : 1;
  EXPECT_EQ(cases, rows * of_one_row);
  EXPECT_EQ(run_mla("check --quick --op merge_states", "MLA_BACKEND=foo").status, 0);
}

// Only a person at a terminal wants to see how far it is.
TEST(CliCheck, ShowsProgressOnATerminalOnly) {
  const std::string terminal = testing::TempDir() + "mla_check_terminal";
  const std::string check = " check --quick --op top_k";
  EXPECT_EQ(std::system(("script -qec '" MLA_BINARY + check + "' /dev/null >" + terminal).c_str()), 0);
  EXPECT_THAT(read_text(terminal), ContainsRegex("checking \\[#*\\.*\\] [0-9]+/[0-9]+ "));
  EXPECT_EQ(run_mla(check).err, "");
}

TEST(CliCheck, CtrlCReportsWhatWasChecked) {
  const std::string base = testing::TempDir() + "mla_check_stopped";
  // Interrupted once it waits for that: it blocks SIGINT then.
  const int status =
      std::system(("unset MLA_BACKEND MLA_EMULATE; " MLA_BINARY " check --op top_k --cases 20000 --json=" + base +
                   ".json >" + base + ".out 2>" + base +
                   ".err & until grep -q '^SigBlk:.*2$' /proc/$!/status; do sleep 0.02; done; "
                   "sleep 0.2; kill -INT $!; wait $!")
                      .c_str());
  EXPECT_EQ(WEXITSTATUS(status), 130);
  const json checked = json::parse(read_text(base + ".json"));
  EXPECT_EQ(checked["interrupted"], true);
  EXPECT_LT(checked["cases"], checked["total_cases"]);
  const std::string cases = std::to_string(checked["cases"].get<int64_t>());
  EXPECT_THAT(read_text(base + ".out"), ContainsRegex("\n" + cases + " cases?, 0 failed, in "));
  EXPECT_THAT(read_text(base + ".err"), testing::StartsWith("INTERRUPTED: " + cases + " of "));
}

}  // namespace
}  // namespace mla::cli

// SPDX-License-Identifier: Apache-2.0
// Runs the built `mla` as a user would.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace mla::cli {

struct Ran {
  int status = -1;
  std::string out, err;
};

inline std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Runs `mla`. `arguments` are shell words; `environment` is put in front, such as "MLA_BACKEND=reference".
inline Ran run_mla(const std::string& arguments, const std::string& environment = "") {
  const std::string base = testing::TempDir() + "mla_cli_" + std::to_string(getpid());
  const std::string command = "env -u MLA_BACKEND -u MLA_EMULATE " + environment + " " MLA_BINARY " " + arguments +
                              " >" + base + ".out 2>" + base + ".err";
  const int status = std::system(command.c_str());
  Ran ran{.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .out = read_text(base + ".out"),
          .err = read_text(base + ".err")};
  // A shell reports a signal as 128 + its number.
  if (ran.status < 0 || ran.status >= 128)
    ADD_FAILURE() << environment << " mla " << arguments << ": ended by a signal, status " << ran.status << "\n"
                  << ran.err;
  std::remove((base + ".out").c_str());
  std::remove((base + ".err").c_str());
  return ran;
}

/// Returns the exit status with the streams as `redirections` say, such as "2>&-"; -1 if a signal ended it.
inline int status_of(const std::string& arguments, const std::string& redirections) {
  const std::string command = "env -u MLA_BACKEND -u MLA_EMULATE " MLA_BINARY " " + arguments + " " + redirections;
  // A shell reports a signal as 128 + its number.
  const int status = std::system(command.c_str());
  return WIFEXITED(status) && WEXITSTATUS(status) < 128 ? WEXITSTATUS(status) : -1;
}

/// Returns the standard output of a command that ends with `expected_status`, as JSON.
inline nlohmann::json json_of(const std::string& arguments, int expected_status = 0) {
  const Ran ran = run_mla(arguments);
  EXPECT_EQ(ran.status, expected_status) << arguments << "\n" << ran.err;
  nlohmann::json document = nlohmann::json::parse(ran.out, nullptr, false);
  EXPECT_FALSE(document.is_discarded()) << arguments << "\n" << ran.out;
  return document;
}

/// Expects status 2, nothing on standard output, and one line "libmla: ..." that holds all `parts`.
inline void expect_refusal(const std::string& arguments, const std::vector<std::string>& parts,
                           const std::string& environment = "") {
  const Ran ran = run_mla(arguments, environment);
  EXPECT_EQ(ran.status, 2) << arguments;
  EXPECT_EQ(ran.out, "") << arguments;
  EXPECT_THAT(ran.err, testing::StartsWith("libmla: ")) << arguments;
  EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << arguments << "\n" << ran.err;
  for (const std::string& part : parts) EXPECT_THAT(ran.err, testing::HasSubstr(part)) << arguments;
}

}  // namespace mla::cli

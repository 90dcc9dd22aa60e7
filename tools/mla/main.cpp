// SPDX-License-Identifier: Apache-2.0
// The `mla` command line: parses, runs the chosen command, and turns every error into one line and an exit status.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "mla/backend.h"
#include "mla/command.h"

namespace {

constexpr int kUnusableInput = 2;

int fail(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "mla: {}\n", message);
  return kUnusableInput;
}

int run(int argc, char** argv) {
  CLI::App app("Paged MLA attention: what this machine can do, whether it is right, and how fast it is.", "mla");
  app.set_version_flag("--version", std::string(mla::version()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Examples:\n  mla info\n  mla check --quick\n  mla bench --op decode --heads 16,128 --kv-len 4k\n"
      "\nExit status: 0 success, 1 the work failed, 2 unusable input.");

  std::vector<std::pair<CLI::App*, mla::cli::Action>> commands;
  for (auto* add : {mla::cli::add_info, mla::cli::add_explain, mla::cli::add_run,
#ifdef MLA_HAVE_REPLAY
                    mla::cli::add_replay,
#endif
                    mla::cli::add_check, mla::cli::add_bench}) {
    mla::cli::Action action = add(app);
    commands.emplace_back(app.get_subcommands({}).back(), std::move(action));
  }
  if (argc <= 1) {
    fmt::print(stderr, "{}", app.help());
    return kUnusableInput;
  }
  // CLI11 only says that some command is missing.
  const std::string first = argv[1];
  const bool known = std::any_of(commands.begin(), commands.end(),
                                 [&](const auto& entry) { return entry.first->get_name() == first; });
  if (!known && !first.starts_with("-")) {
    std::vector<std::string> names;
    for (const auto& entry : commands) names.push_back(entry.first->get_name());
    return fail(fmt::format("unknown command '{}'; expected one of {}", first, fmt::join(names, ", ")));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail(error.what());
  }
  for (const auto& [command, action] : commands)
    if (command->parsed()) return action();
  return fail("no command was given");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

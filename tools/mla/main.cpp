// SPDX-License-Identifier: Apache-2.0
// The `mla` command line: parses, runs the chosen command, and turns every error into one line and an exit status.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/backend.h"
#include "mla/command.h"
#include "mla/text.h"

namespace {

using mla::cli::print_to;

constexpr int kUnusableInput = 2;

// --json takes its file only as --json=FILE; the word behind it is read as another argument.
std::string json_hint(int argc, char** argv, const std::string& message) {
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string_view next = argv[i + 1];
    if (argv[i] == std::string_view("--json") && !next.starts_with("-") && message.find(next) != std::string::npos)
      return fmt::format(" (to write JSON to that file, write --json={})", next);
  }
  return {};
}

int fail(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  print_to(stderr, "mla: {}\n", message);
  return kUnusableInput;
}

int run(int argc, char** argv) {
  CLI::App app("Paged MLA attention: what this machine can do, whether it is right, and how fast it is.", "mla");
  app.set_version_flag("--version", std::string(mla::version()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Examples:\n  mla info\n  mla check --quick\n  mla bench --op decode --heads 16,128 --kv-len 4k\n"
      "\nExit status: 0 success, 1 the work failed, 2 unusable input or output, 130 interrupted.");

  std::vector<std::pair<CLI::App*, mla::cli::Action>> commands;
  for (auto* add : {mla::cli::add_info, mla::cli::add_explain, mla::cli::add_run,
#ifdef MLA_HAVE_REPLAY
                    mla::cli::add_replay, mla::cli::add_quant_report,
#endif
                    mla::cli::add_check, mla::cli::add_bench}) {
    mla::cli::Action action = add(app);
    commands.emplace_back(app.get_subcommands({}).back(), std::move(action));
  }
  if (argc <= 1) {
    print_to(stderr, "{}", app.help());
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
  if (!known && first != "--help" && first != "-h" && first != "--version")
    return fail(
        fmt::format("unknown option '{}' in front of the command; expected --help, --version or a command", first));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail(error.what() + json_hint(argc, argv, error.what()));
  }
  try {
    for (const auto& [command, action] : commands)
      if (command->parsed()) return action();
  } catch (const mla::cli::UsageError& error) {
    return fail(error.what() + json_hint(argc, argv, error.what()));
  }
  return fail("no command was given");
}

// A file that the program opens must not get the number of a closed standard stream: messages would end up in it.
// Opened the wrong way round, so that writing fails as it would have.
void occupy_closed_streams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) == -1 && errno == EBADF && open("/dev/null", O_RDONLY) != stream) return;
}

}  // namespace

int main(int argc, char** argv) {
  occupy_closed_streams();
  int status = kUnusableInput;
  try {
    status = run(argc, argv);
  } catch (const std::bad_alloc&) {
    status = fail("out of memory");
  } catch (const std::exception& error) {
    status = fail(error.what());
  }
  // Text that did not arrive is no success.
  if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && status == 0)
    status = fail("cannot write to standard output");
  return status;
}

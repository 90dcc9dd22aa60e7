// SPDX-License-Identifier: Apache-2.0
// The command line `libmla`: parses, runs the chosen command, and turns every error into one line and an exit status.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iterator>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "mla/backend.h"
#include "mla/command.h"
#include "mla/suggest.h"
#include "mla/text.h"

namespace {

using mla::cli::did_you_mean;
using mla::cli::print_to;

constexpr int kUnusableInput = 2;

// What the Python package adds, which takes these before it starts this program.
constexpr const char* kPythonCommands[] = {"plot", "report", "generate", "eval"};

// --json takes its file only as --json=FILE; the word behind it is read as another argument.
std::string json_hint(const std::vector<std::string>& given, const std::string& message) {
  for (size_t i = 0; i + 1 < given.size(); ++i) {
    const std::string& next = given[i + 1];
    if (given[i] == "--json" && !next.starts_with("-") && message.find(next) != std::string::npos)
      return fmt::format(" (to write JSON to that file, write --json={})", next);
  }
  return {};
}

int fail(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  print_to(stderr, "libmla: {}\n", message);
  return kUnusableInput;
}

int unknown_command(const CLI::App& app, const std::string& word) {
  if (std::find(std::begin(kPythonCommands), std::end(kPythonCommands), word) != std::end(kPythonCommands))
    return fail(fmt::format("'{}' is a command of the Python package: pip install libmla, and run libmla {} there",
                            word, word));
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  const std::string expected = fmt::format("{}", fmt::join(names, ", "));
  names.insert(names.end(), std::begin(kPythonCommands), std::end(kPythonCommands));
  names.emplace_back("help");
  return fail(fmt::format("unknown command '{}'; expected one of {}{}", word, expected, did_you_mean(word, names)));
}

// CLI11 only lists, backwards, what it could not use. What begins with a dash is the cause; others may be its values.
std::string extras_text(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    const std::vector<std::string> extras = command->remaining();
    const auto option =
        std::find_if(extras.begin(), extras.end(), [](const auto& one) { return one.starts_with("-"); });
    if (option == extras.end())
      return fmt::format("{}: unexpected argument '{}'", command->get_name(), fmt::join(extras, "', '"));
    std::vector<std::string> known;
    for (const CLI::Option* one : command->get_options())
      for (const std::string& name : one->get_lnames()) known.push_back("--" + name);
    std::string hint = did_you_mean(option->substr(0, option->find('=')), known);
    if (hint.empty()) hint = fmt::format("; libmla {} --help lists those that there are", command->get_name());
    return fmt::format("{}: unknown option '{}'{}", command->get_name(), *option, hint);
  }
  return "unexpected arguments";
}

// `help` is `--help`, `help COMMAND` is `COMMAND --help`.
void turn_help_around(std::vector<std::string>& given) {
  if (given.empty() || given.front() != "help") return;
  given.erase(given.begin());
  given.resize(std::min<size_t>(given.size(), 1));
  given.emplace_back("--help");
}

int run(std::vector<std::string> given) {
  CLI::App app("Paged MLA attention: what this machine can do, whether it is right, and how fast it is.", "libmla");
  app.set_version_flag("-V,--version", std::string(mla::version()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Examples:\n  libmla info\n  libmla check --quick\n  libmla bench --op decode --num-heads 16,128 --kv-len 4k\n"
      "\nlibmla help COMMAND shows the options of a command, and examples.\n"
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
  if (given.empty()) {
    print_to(stderr, "{}", app.help());
    return kUnusableInput;
  }
  turn_help_around(given);
  // CLI11 only says that some command is missing.
  const std::string& first = given.front();
  const bool known = std::any_of(commands.begin(), commands.end(),
                                 [&](const auto& entry) { return entry.first->get_name() == first; });
  if (!known && !first.starts_with("-")) return unknown_command(app, first);
  const std::vector<std::string> alone = {"--help", "-h", "--version", "-V"};
  if (!known && std::find(alone.begin(), alone.end(), first) == alone.end())
    return fail(fmt::format("unknown option '{}' in front of the command; expected --help, --version or a command{}",
                            first, did_you_mean(first, alone)));
  try {
    app.parse(std::vector<std::string>(given.rbegin(), given.rend()));
  } catch (const CLI::ExtrasError&) {
    const std::string text = extras_text(app);
    return fail(text + json_hint(given, text));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail(error.what() + json_hint(given, error.what()));
  }
  try {
    for (const auto& [command, action] : commands)
      if (command->parsed()) return action();
  } catch (const mla::cli::UsageError& error) {
    return fail(error.what() + json_hint(given, error.what()));
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
    status = run({argv + 1, argv + std::max(argc, 1)});
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

// SPDX-License-Identifier: Apache-2.0
// Holds what every command prints through: text, tables, a progress line, and the JSON contract of docs/json.md.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/text.h"  // IWYU pragma: export

namespace mla::cli {

/// Keeps the keys in the order in which they were written.
using Json = nlohmann::ordered_json;

/// Says where a command's text and JSON go: with --json the JSON goes to standard output and all text to standard
/// error; with --json=FILE the JSON goes there, and text stays on standard output.
class Output {
 public:
  /// Adds `--json[=FILE]` to a command. The object must outlive the parsing and the action.
  void add_option(CLI::App& command);

  bool json() const { return !json_target_.empty(); }
  /// Throws UsageError if --json=FILE cannot be written: commands ask before they work or print.
  void check_target() const;
  /// Returns standard output, or standard error where the JSON goes to standard output.
  std::FILE* text() const { return to_stdout() ? stderr : stdout; }

  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) const {
    print_to(text(), format, std::forward<Args>(args)...);
  }

  /// Writes the document, indented, with a final newline; writes nothing without --json. Numbers that JSON lacks (NaN,
  /// infinity) become null. Throws UsageError if the file cannot be written.
  void write_json(const Json& document) const;

 private:
  bool to_stdout() const { return json_target_ == "true" || json_target_ == "-"; }

  std::string json_target_;
};

/// Throws UsageError if `path` cannot be written; leaves no file that was not there. "-" passes.
void check_writable(std::string_view option, const std::string& path);

/// Prints a table in aligned columns: the first `left_columns` columns are aligned to the left, numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header, size_t left_columns = 1)
      : header_(std::move(header)), left_columns_(left_columns) {}
  /// Adds a row; one with fewer cells than the header is filled with empty ones.
  void add_row(std::vector<std::string> cells);
  void print(std::FILE* file) const;
  /// Prints the same as comma-separated values; cells are quoted where they must be.
  void print_csv(std::FILE* file) const;
  /// Prints the same as a Markdown table.
  void print_markdown(std::FILE* file) const;

 private:
  std::vector<std::string> header_;
  size_t left_columns_;
  std::vector<std::vector<std::string>> rows_;
};

bool is_terminal(std::FILE* file);

/// Shows one line on standard error, rewritten in place at most ten times a second; is silent if that is no terminal.
class Progress {
 public:
  explicit Progress(std::string_view label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows progress_line() and `note` behind it.
  void update(int64_t done, int64_t total, std::string_view note = {});
  /// Removes the line, so that other text can be printed.
  void clear();

 private:
  std::string label_;
  bool enabled_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point start_, next_;
};

}  // namespace mla::cli

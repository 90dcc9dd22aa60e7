// SPDX-License-Identifier: Apache-2.0
#include "mla/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mla::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Columns a UTF-8 text takes on a terminal, near enough: continuation bytes take none.
size_t display_width(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

std::string padded(std::string_view text, size_t width, bool left) {
  const size_t used = display_width(text);
  const std::string fill(width > used ? width - used : 0, ' ');
  return left ? std::string(text) + fill : fill + std::string(text);
}

std::string csv_cell(const std::string& cell) {
  if (cell.find_first_of(",\"\n") == std::string::npos) return cell;
  std::string quoted = "\"";
  for (char c : cell) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace

void Output::add_option(CLI::App& command) {
  // A flag takes a value only in the form --json=FILE, so `--json` never swallows the argument behind it.
  command
      .add_flag("--json", json_target_, "Write JSON to FILE, or to standard output, and text to standard error then")
      ->option_text("[=FILE]");
}

void Output::check_target() const {
  if (json() && !to_stdout()) check_writable("--json", json_target_);
}

void Output::write_json(const Json& document) const {
  if (!json()) return;
  const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  std::FILE* file = to_stdout() ? stdout : std::fopen(json_target_.c_str(), "w");
  if (file == nullptr) throw UsageError("--json: cannot open '{}': {}", json_target_, std::strerror(errno));
  bool ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  ok = std::fflush(file) == 0 && ok;
  const int error = errno;
  if (!to_stdout()) std::fclose(file);
  if (!ok)
    throw UsageError("--json: cannot write '{}': {}", to_stdout() ? "standard output" : json_target_,
                     std::strerror(error));
}

void check_writable(std::string_view option, const std::string& path) {
  if (path == "-") return;
  const int created = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (created >= 0) {
    close(created);
    unlink(path.c_str());
    return;
  }
  int error = errno;
  if (error == EEXIST) {
    struct stat info = {};
    error = 0;
    if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
      error = EISDIR;
    else if (access(path.c_str(), W_OK) != 0)
      error = errno;
  }
  if (error != 0) throw UsageError("{}: cannot open '{}': {}", option, path, std::strerror(error));
}

void Table::add_row(std::vector<std::string> cells) {
  cells.resize(header_.size());
  rows_.push_back(std::move(cells));
}

void Table::print(std::FILE* file) const {
  std::vector<size_t> width;
  for (size_t column = 0; column < header_.size(); ++column) {
    width.push_back(display_width(header_[column]));
    for (const auto& row : rows_) width[column] = std::max(width[column], display_width(row[column]));
  }
  const auto print_row = [&](const std::vector<std::string>& row) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column)
      line += (column > 0 ? "  " : "") + padded(row[column], width[column], column < left_columns_);
    line.erase(line.find_last_not_of(' ') + 1);
    print_to(file, "{}\n", line);
  };
  print_row(header_);
  size_t total = 2 * (header_.empty() ? 0 : header_.size() - 1);
  for (size_t w : width) total += w;
  print_to(file, "{}\n", std::string(total, '-'));
  for (const auto& row : rows_) print_row(row);
}

void Table::print_csv(std::FILE* file) const {
  const auto print_row = [&](const std::vector<std::string>& row) {
    for (size_t column = 0; column < row.size(); ++column)
      print_to(file, "{}{}", column > 0 ? "," : "", csv_cell(row[column]));
    print_to(file, "\n");
  };
  print_row(header_);
  for (const auto& row : rows_) print_row(row);
}

void Table::print_markdown(std::FILE* file) const {
  print_to(file, "| {} |\n|", fmt::join(header_, " | "));
  for (size_t column = 0; column < header_.size(); ++column)
    print_to(file, "{}|", column < left_columns_ ? "---" : "---:");
  print_to(file, "\n");
  for (const auto& row : rows_) print_to(file, "| {} |\n", fmt::join(row, " | "));
}

bool is_terminal(std::FILE* file) { return isatty(fileno(file)) == 1; }

Progress::Progress(std::string_view label)
    : label_(label), enabled_(is_terminal(stderr)), start_(Clock::now()), next_(start_) {}

Progress::~Progress() { clear(); }

void Progress::update(int64_t done, int64_t total, std::string_view note) {
  const auto now = Clock::now();
  if (!enabled_ || (now < next_ && done < total)) return;
  next_ = now + std::chrono::milliseconds(100);
  shown_ = true;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  print_to(stderr, "\r\x1b[K{}", progress_line(label_, done, total, elapsed));
  if (!note.empty()) print_to(stderr, "  {}", note);
  std::fflush(stderr);
}

void Progress::clear() {
  if (!shown_) return;
  print_to(stderr, "\r\x1b[K");
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace mla::cli

// SPDX-License-Identifier: Apache-2.0
// Makes the error and number texts of the command line. They are apart from output.h, whose headers are slow to
// compile.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace mla::cli {

/// Reports unusable input. `main` prints "libmla: <message>" on one line of standard error and exits with 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  template <class... Args>
  explicit UsageError(fmt::format_string<Args...> format, Args&&... args) requires(sizeof...(Args) > 0)
      : std::runtime_error(fmt::format(format, std::forward<Args>(args)...)) {}
};

/// Writes to a stream that may be closed or full: a message that cannot be shown must not end the work. The stream
/// keeps its error mark; whoever needs the text to arrive looks at that.
void write_text(std::FILE* file, std::string_view text);

template <class... Args>
void print_to(std::FILE* file, fmt::format_string<Args...> format, Args&&... args) {
  write_text(file, fmt::format(format, std::forward<Args>(args)...));
}

/// Returns "1 case", "2 cases".
std::string counted(int64_t count, std::string_view singular);

/// Returns "1.5 GiB", "640 B".
std::string human_bytes(double bytes);
/// Returns "31.2 us", "4.50 ms", "1.25 s", "3 min 07 s".
std::string human_seconds(double seconds);
/// Returns one line that shows how far some work is: a bar, how many parts are done, the time it took and, after a
/// second, about how long the rest will take if it is like what is done.
std::string progress_line(std::string_view label, int64_t done, int64_t total, double seconds);
/// Returns "950", "12.3 k", "4.56 M".
std::string human_count(double count);
/// Returns "93.1 %".
std::string human_percent(double share);

}  // namespace mla::cli

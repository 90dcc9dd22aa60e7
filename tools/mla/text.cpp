// SPDX-License-Identifier: Apache-2.0
#include "mla/text.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace mla::cli {

void write_text(std::FILE* file, std::string_view text) { std::fwrite(text.data(), 1, text.size(), file); }

std::string counted(int64_t count, std::string_view singular) {
  return fmt::format("{} {}{}", count, singular, count == 1 ? "" : "s");
}

std::string human_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 1024.0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1.0) return fmt::format("{:.2f} ms", seconds * 1e3);
  if (seconds < 60.0) return fmt::format("{:.2f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  return fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

std::string progress_line(std::string_view label, int64_t done, int64_t total, double seconds) {
  constexpr int kBarWidth = 30;
  const double share = total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0) : 0.0;
  const auto filled = static_cast<size_t>(share * kBarWidth);
  std::string line = fmt::format("{} [{}{}] {}/{}  {}", label, std::string(filled, '#'),
                                 std::string(kBarWidth - filled, '.'), done, total, human_seconds(seconds));
  if (seconds >= 1.0 && share > 0.0 && share < 1.0) {
    const double left = seconds * (1.0 - share) / share;
    line += fmt::format(", about {} left", left < 59.5 ? fmt::format("{:.0f} s", left) : human_seconds(left));
  }
  return line;
}

std::string human_count(double count) {
  constexpr const char* kUnits[] = {"", " k", " M", " G", " T"};
  size_t unit = 0;
  while (std::abs(count) >= 1000.0 && unit + 1 < std::size(kUnits)) {
    count /= 1000.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:g}", count);
  return fmt::format("{:.{}f}{}", count, std::abs(count) >= 100 ? 0 : std::abs(count) >= 10 ? 1 : 2, kUnits[unit]);
}

std::string human_percent(double share) { return fmt::format("{:.1f} %", share * 100.0); }

}  // namespace mla::cli

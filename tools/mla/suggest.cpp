// SPDX-License-Identifier: Apache-2.0
#include "mla/suggest.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace mla::cli {

size_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the table of distances between the beginnings of a and of b: two before the current one's, for swaps.
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const std::string* nearest = nullptr;
  size_t least = word.size() / 3 + 1;
  for (const std::string& one : known) {
    const size_t distance = edit_distance(word, one);
    if (distance >= least) continue;
    least = distance;
    nearest = &one;
  }
  return nearest == nullptr ? std::string() : fmt::format("; did you mean '{}'?", *nearest);
}

}  // namespace mla::cli

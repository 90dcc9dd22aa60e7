// SPDX-License-Identifier: Apache-2.0
// Works on texts that enclose the names of fields in backticks.
#pragma once

#include <string>
#include <string_view>

namespace mla::core {

/// Returns `text` with every name and its backticks replaced by f(name).
template <class F>
std::string replace_marked(std::string_view text, F&& f) {
  std::string result;
  while (true) {
    const size_t begin = text.find('`');
    const size_t end = begin == std::string_view::npos ? begin : text.find('`', begin + 1);
    if (end == std::string_view::npos) return result.append(text);
    result.append(text.substr(0, begin)).append(f(text.substr(begin + 1, end - begin - 1)));
    text.remove_prefix(end + 1);
  }
}

}  // namespace mla::core

// SPDX-License-Identifier: Apache-2.0
#include "core/format.h"

#include <fmt/format.h>

#include <algorithm>

namespace mla::core {

std::string format_args(fmt::string_view text, fmt::format_args args) { return fmt::vformat(text, args); }

size_t format_args_to(std::span<char> to, fmt::string_view text, fmt::format_args args) {
  return std::min(fmt::vformat_to_n(to.data(), to.size(), text, args).size, to.size());
}

}  // namespace mla::core

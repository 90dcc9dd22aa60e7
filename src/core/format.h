// SPDX-License-Identifier: Apache-2.0
// Formats text. fmt comes as headers only, and each file that uses it directly takes seconds longer to compile; so its
// code is compiled once, in format.cpp.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace mla::core {

std::string format_args(fmt::string_view text, fmt::format_args args);
/// Formats into `to`, and returns the number of characters written. What does not fit is cut. Allocates nothing.
size_t format_args_to(std::span<char> to, fmt::string_view text, fmt::format_args args);

/// Does what fmt::format does.
template <class... Args>
std::string format(fmt::format_string<Args...> text, Args&&... args) {
  return format_args(text, fmt::make_format_args(args...));
}

}  // namespace mla::core

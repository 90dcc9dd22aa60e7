// SPDX-License-Identifier: Apache-2.0
// Text from numbers and names. What fmt does for that is compiled once, in format.cpp: it comes as headers only, and
// takes every file that calls it seconds.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace mla::core {

std::string format_args(fmt::string_view text, fmt::format_args args);
/// Characters written to `to`; what does not fit is cut. Allocates nothing.
size_t format_args_to(std::span<char> to, fmt::string_view text, fmt::format_args args);

/// fmt::format
template <class... Args>
std::string format(fmt::format_string<Args...> text, Args&&... args) {
  return format_args(text, fmt::make_format_args(args...));
}

}  // namespace mla::core

// SPDX-License-Identifier: Apache-2.0
// The option --processors: where the threads of a command run.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mla::cli {

inline constexpr const char* kProcessorsHelp =
    "Processors of the threads, such as 0-15,32: each thread of the library on one, the others on any";

/// Parses "0-3,8": numbers and ranges, in the order in which they stand. Throws UsageError if one is named twice.
std::vector<int32_t> parse_processors(std::string_view option, std::string_view text);

/// Lets the calling thread, and those that it starts, run on the processors of an option only, and returns these; does
/// nothing if `text` is empty. Throws UsageError if the process may not use one.
std::vector<int32_t> use_processors(std::string_view option, std::string_view text);

/// Returns ContextOptions::affinity of a context of `threads` threads: the first ones of `processors`. Throws
/// UsageError if these are fewer; none are needed if there is none.
std::vector<int32_t> affinity_of(std::string_view option, const std::vector<int32_t>& processors, int32_t threads);

}  // namespace mla::cli

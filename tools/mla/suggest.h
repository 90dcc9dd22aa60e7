// SPDX-License-Identifier: Apache-2.0
// Finds what somebody may have meant by a misspelt command or option.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mla::cli {

/// Returns how many letters must be put in, left out, replaced or swapped with their neighbour to make one word of the
/// other.
size_t edit_distance(std::string_view a, std::string_view b);

/// Returns "; did you mean 'explain'?" with the nearest of the known words, or nothing where none is near: more than a
/// third of the word would have to change.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& known);

}  // namespace mla::cli

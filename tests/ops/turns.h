// SPDX-License-Identifier: Apache-2.0
// Keeps suites short: formats whose codecs are made of parts that other formats have are not in each of their problems.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "mla/kv_layout.h"

namespace mla {

inline constexpr CacheFormat kInTurn[] = {
    CacheFormat::kFP8DsV41,      CacheFormat::kFP4DsV41,      CacheFormat::kFP8Nope,   CacheFormat::kNvFP4DsMla,
    CacheFormat::kNvFP4DsMla416, CacheFormat::kNvFP4DsMla368, CacheFormat::kNvFP4DsV4, CacheFormat::kMxFP4DsV4};

inline bool is_in_turn(CacheFormat format) { return std::ranges::find(kInTurn, format) != std::end(kInTurn); }

/// Returns whether a format is in problem number `turn` of a loop: one of kInTurn is, and every other format.
inline bool has_turn(CacheFormat format, uint64_t turn) {
  const auto* const found = std::find(std::begin(kInTurn), std::end(kInTurn), format);
  if (found == std::end(kInTurn)) return true;
  // A plain remainder would fall on the same values of an inner loop of two or four again and again.
  return (turn + turn / std::size(kInTurn)) % std::size(kInTurn) == static_cast<uint64_t>(found - kInTurn);
}

/// Returns how many of `count` random problems a format gets.
inline int turns_of(CacheFormat format, int count) {
  return is_in_turn(format) ? std::max(count / static_cast<int>(std::size(kInTurn)), 1) : count;
}

}  // namespace mla

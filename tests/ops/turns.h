// SPDX-License-Identifier: Apache-2.0
// Keeps suites short: formats whose codecs are made of parts that other formats have are not in each of their problems.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "mla/kv_layout.h"

namespace mla {

inline constexpr CacheFormat kInTurn[] = {CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41, CacheFormat::kFP8Nope};

/// Returns whether a format is in problem number `turn` of a loop: one of kInTurn is, and every other format.
inline bool has_turn(CacheFormat format, uint64_t turn) {
  const auto* const found = std::find(std::begin(kInTurn), std::end(kInTurn), format);
  if (found == std::end(kInTurn)) return true;
  // A plain remainder would fall on the same value of an inner loop of three again and again.
  return (turn + turn / std::size(kInTurn)) % std::size(kInTurn) == static_cast<uint64_t>(found - kInTurn);
}

/// Returns how many of `count` random problems a format gets.
inline int turns_of(CacheFormat format, int count) {
  const bool in_turn = std::find(std::begin(kInTurn), std::end(kInTurn), format) != std::end(kInTurn);
  return in_turn ? count / static_cast<int>(std::size(kInTurn)) : count;
}

}  // namespace mla

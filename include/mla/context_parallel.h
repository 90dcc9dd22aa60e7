// SPDX-License-Identifier: Apache-2.0
// Decode context parallelism (DCP) deals the tokens of a request out to ranks in runs of `interleave`, as vLLM's decode
// context parallel does. Token i is on rank (i / interleave) % world.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mla {

/// Describes one rank's share of a request. The default is the whole request.
struct ContextParallel {
  int32_t rank = 0;
  int32_t world = 1;
  int32_t interleave = 1;

  friend bool operator==(const ContextParallel&, const ContextParallel&) = default;
};

/// Returns how many of the first `length` tokens of a request are on the rank. Since a rank keeps their order, this is
/// also how many of its local tokens a query at global position length - 1 sees.
constexpr int64_t local_length(const ContextParallel& share, int64_t length) {
  const int64_t run = share.interleave;
  const int64_t rounds = length / (run * share.world);
  const int64_t rest = length - rounds * run * share.world - run * share.rank;
  return rounds * run + std::clamp<int64_t>(rest, 0, run);
}

/// Returns the global position of the rank's local token.
constexpr int64_t global_position(const ContextParallel& share, int64_t local) {
  const int64_t run = share.interleave;
  return (local / run * share.world + share.rank) * run + local % run;
}

/// Returns whether token `position` of a request is on the rank.
constexpr bool owns(const ContextParallel& share, int64_t position) {
  return position / share.interleave % share.world == share.rank;
}

}  // namespace mla

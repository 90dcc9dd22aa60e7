// SPDX-License-Identifier: Apache-2.0
// Decode context parallelism (DCP): the tokens of a request are dealt out to ranks in runs of `interleave`. Token i
// lives on rank (i / interleave) % world. As vLLM's decode context parallel does.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mla {

/// One rank's share. The default is the whole request.
struct ContextParallel {
  int32_t rank = 0;
  int32_t world = 1;
  int32_t interleave = 1;

  friend bool operator==(const ContextParallel&, const ContextParallel&) = default;
};

/// Tokens among the first `length` of a request that live on the rank. Since a rank keeps their order, this is also how
/// many of its local tokens a query at global position length - 1 sees.
constexpr int64_t local_length(const ContextParallel& share, int64_t length) {
  const int64_t run = share.interleave;
  const int64_t rounds = length / (run * share.world);
  const int64_t rest = length - rounds * run * share.world - run * share.rank;
  return rounds * run + std::clamp<int64_t>(rest, 0, run);
}

/// Global position of the rank's local token.
constexpr int64_t global_position(const ContextParallel& share, int64_t local) {
  const int64_t run = share.interleave;
  return (local / run * share.world + share.rank) * run + local % run;
}

/// Whether token `position` of a request lives on the rank.
constexpr bool owns(const ContextParallel& share, int64_t position) {
  return position / share.interleave % share.world == share.rank;
}

}  // namespace mla

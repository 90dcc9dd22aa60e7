// SPDX-License-Identifier: Apache-2.0
// These functions find on the device which request a query token belongs to, and how many of its keys the token sees.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns how many of holds(0), holds(1) ... holds(count - 1) are true, where all behind the first false one are
/// false. All lanes of a warp call with the same arguments. Each lane evaluates one value per round, so that 1,024
/// values take two rounds.
template <class Predicate>
MLA_DEVICE int32_t count_leading(int32_t count, const Predicate& holds) {
  int32_t begin = 0, end = count;
  while (begin < end) {
    const int32_t step = (end - begin + kWarpSize - 1) / kWarpSize;
    const int32_t last = std::min((ptx::lane() + 1) * step, end - begin + 1) - 1;  // the last value of the lane's share
    const int32_t num_true = std::popcount(ptx::ballot(last < end - begin && holds(begin + last)));
    begin += num_true * step;
    end = std::min(end, begin + step - 1);
  }
  return begin;
}

/// Describes the requests of a batch, by lengths on the device.
struct QueryBatch {
  core::QueryRanges queries = {};
  const int32_t* kv_len = nullptr;  // [batch_size]
  int32_t batch_size = 0;
  bool causal = true;
  int32_t ratio = 1;  // tokens that a key stands for

  /// Returns the token's request; batch_size if no request has the token, as in the padding of a captured batch. All
  /// lanes of a warp call this.
  MLA_DEVICE int32_t request_of(int64_t token) const {
    if (queries.indptr == nullptr) return static_cast<int32_t>(token / queries.uniform_len);
    return count_leading(batch_size, [&](int32_t request) { return queries.indptr[request + 1] <= token; });
  }

  /// Returns how many keys of the request the token sees: keys [0, visible).
  MLA_DEVICE int32_t visible(int32_t request, int64_t token) const {
    const int32_t end = queries.begin(request) + queries.len(request);
    const int32_t later = causal ? end - 1 - static_cast<int32_t>(token) : 0;  // tokens that it does not see
    return std::max(kv_len[request] - later, 0) / ratio;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

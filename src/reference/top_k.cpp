// SPDX-License-Identifier: Apache-2.0
#include "reference/top_k.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "reference/reference.h"
#include "reference/scalar.h"

namespace mla::reference {
namespace {

/// Returns an integer that orders as the operation orders logits: NaN is lowest, then -inf ... +inf; both zeros are
/// equal.
uint32_t rank(float logit) {
  if (std::isnan(logit)) return 0;
  if (logit == 0) logit = 0;
  const uint32_t bits = std::bit_cast<uint32_t>(logit);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

/// Writes the indices of the k largest of rank_of(0) ... rank_of(n - 1) in ascending order, and -1 behind them.
template <class RankOf>
void select(const RankOf& rank_of, int64_t n, int32_t k, int32_t* indices) {
  const auto count = [&](uint32_t at_least) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += rank_of(i) >= at_least ? 1 : 0;
    return sum;
  };
  // The loop finds the rank of the k-th largest logit bit by bit: it is the greatest rank that at least k logits reach.
  uint32_t least = 0;
  for (uint32_t bit = 0x80000000U; bit != 0; bit >>= 1)
    if (count(least | bit) >= k) least |= bit;
  int64_t ties = k - count(least + 1);
  int32_t* out = indices;
  for (int64_t i = 0; i < n && out < indices + k; ++i) {
    const uint32_t r = rank_of(i);
    if (r < least || (r == least && ties-- <= 0)) continue;
    *out++ = static_cast<int32_t>(i);
  }
  std::fill(out, indices + k, -1);
}

/// Chooses blocks by their largest logits, whose ranks logit_rank(0) ... logit_rank(n - 1) returns. The one with the
/// last logit is always among them.
template <class RankOf>
void select_blocks(const RankOf& logit_rank, int64_t n, int32_t size, int32_t k, int32_t* indices) {
  constexpr uint32_t kAboveAll = 0xFFFFFFFEU;
  const int64_t num_blocks = (n + size - 1) / size;
  const auto rank_of = [&](int64_t block) {
    if (block == num_blocks - 1) return kAboveAll;
    uint32_t largest = 0;
    for (int64_t i = block * size; i < (block + 1) * size; ++i) largest = std::max(largest, logit_rank(i));
    return largest;
  };
  select(rank_of, num_blocks, k, indices);
}

/// Chooses keys of listed blocks by logits above -inf.
template <class RankOf>
void select_listed(const core::KeyBlocks& blocks, int64_t token, const RankOf& logit_rank, int64_t n, int32_t k,
                   int32_t* indices) {
  select(logit_rank, n, k, indices);
  int32_t* out = indices;
  for (const int32_t* at = indices; at < indices + k && *at >= 0; ++at)
    if (logit_rank(*at) > rank(-std::numeric_limits<float>::infinity()))
      *out++ = static_cast<int32_t>(blocks.key(token, *at));
  std::fill(out, indices + k, -1);
}

}  // namespace

void select_top_k(const core::TopKArgs& args, int64_t token, int64_t begin, int64_t end) {
  const auto logit_rank = [&](int64_t i) {
    return rank(load(args.logits, args.logits_dtype, token * args.logits_stride_token + i));
  };
  int32_t* indices = args.indices + token * args.indices_stride_token;
  if (args.blocks.given())
    select_listed(args.blocks, token, logit_rank, std::min<int64_t>(end, args.blocks.num_keys()), args.k, indices);
  else if (args.block_size > 1)
    select_blocks(logit_rank, end, args.block_size, args.k, indices);
  else
    select([&](int64_t i) { return logit_rank(begin + i); }, end - begin, args.k, indices);
  for (int32_t* index = indices; index < indices + args.k && *index >= 0; ++index)
    *index += static_cast<int32_t>(begin);
}

void top_k(const core::TopKArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    int64_t begin = 0, end = args.num_logits;
    if (args.lengths != nullptr) end = std::clamp<int64_t>(args.lengths[token], 0, end);
    if (args.starts != nullptr) begin = std::clamp<int64_t>(args.starts[token], 0, end);
    select_top_k(args, token, begin, end);
  }
}

}  // namespace mla::reference

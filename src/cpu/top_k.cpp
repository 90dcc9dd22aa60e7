// SPDX-License-Identifier: Apache-2.0
// top_k finds the k largest logits of every row by radix selection: passes over the row count the ranks that are still
// in question by their next digit, until the rank of the k-th largest is known. A last pass writes the indices in
// order.
#include <algorithm>
#include <cstring>

#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

/// Holds the rank of the k-th largest logit, and how many logits of that rank to take.
struct Threshold {
  uint32_t rank = 0;
  int64_t ties = 0;
};

Threshold find_threshold(const RowKernels& kernels, const float* logits, int64_t n, int64_t k) {
  // Digits of 11 bits; the last digit shares its highest bit with the one before.
  constexpr int32_t kShifts[] = {21, 10, 0};
  RankRange range;
  for (int32_t shift : kShifts) {
    uint32_t counts[kMaxDigits] = {};
    kernels.count_ranks(logits, n, range, shift, counts);
    uint32_t digit = kMaxDigits - 1;
    for (; counts[digit] < k; --digit) k -= counts[digit];
    const uint32_t below = (uint32_t{kMaxDigits} << shift) - 1U;  // the bits of this digit and of the lower ones
    range.first = (range.first & ~below) | (digit << shift);
    range.last = range.first | ((1U << shift) - 1U);
    // All ranks of this digit are taken, so that lower digits do not matter.
    if (counts[digit] == k && range.first > 0) return {range.first - 1, 0};
  }
  return {range.first, k};
}

}  // namespace

void select_top_k(const RowKernels& kernels, const float* logits, int64_t n, int32_t k, int32_t* indices) {
  int64_t taken = 0;
  if (n <= k) {
    for (; taken < n; ++taken) indices[taken] = static_cast<int32_t>(taken);
  } else {
    const Threshold threshold = find_threshold(kernels, logits, n, k);
    taken = kernels.select_ranks(logits, n, threshold.rank, threshold.ties, k, indices);
  }
  std::fill(indices + taken, indices + k, -1);
}

void run_top_k(const KernelSet& set, const core::TopKArgs& args, core::ThreadPool& pool) {
  const int64_t bytes = args.num_tokens * args.num_logits * static_cast<int64_t>(sizeof(float));
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t n =
          args.lengths != nullptr ? std::clamp<int64_t>(args.lengths[token], 0, args.num_logits) : args.num_logits;
      select_top_k(*set.rows, args.logits + token * args.logits_stride_token, n, args.k,
                   args.indices + token * args.indices_stride_token);
    }
  });
}

}  // namespace mla::cpu

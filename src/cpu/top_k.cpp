// SPDX-License-Identifier: Apache-2.0
// top_k finds the k largest logits of every row by radix selection: passes over the row count the ranks that are still
// in question by their next digit, until the rank of the k-th largest is known. A last pass writes the indices in
// order. Where blocks of logits are chosen, every pass computes the largest logit of each block anew.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

/// Holds what is chosen from: logits, or the largest ones of blocks of logits, all but the last block.
struct Row {
  const RowKernels& kernels;
  const void* logits;
  DType dtype;
  int64_t num_values;
  int32_t block_size;

  /// Calls f(values, n, first) for values [first, first + n) of the row, a piece at a time.
  template <class F>
  void for_each_piece(const F& f) const {
    if (block_size == 1 && dtype == DType::kF32) return f(static_cast<const float*>(logits), num_values, int64_t{0});
    float values[kPiece];
    for (int64_t first = 0; first < num_values; first += kPiece) {
      const int64_t n = std::min(kPiece, num_values - first);
      if (block_size == 1)
        kernels.load_logits(at(logits, first, dtype), dtype, n, values);
      else
        for (int64_t i = 0; i < n; ++i) values[i] = largest_of((first + i) * block_size);
      f(values, n, first);
    }
  }

 private:
  static constexpr int64_t kPiece = 1024;

  /// Returns the largest logit of the block whose first logit is `begin`.
  float largest_of(int64_t begin) const {
    float largest = std::numeric_limits<float>::quiet_NaN(), converted[kPiece];
    for (int64_t first = 0; first < block_size; first += kPiece) {
      const int64_t n = std::min<int64_t>(kPiece, block_size - first);
      const void* const from = at(logits, begin + first, dtype);
      if (dtype != DType::kF32) kernels.load_logits(from, dtype, n, converted);
      const float* const some = dtype == DType::kF32 ? static_cast<const float*>(from) : converted;
      for (int64_t i = 0; i < n; ++i)
        if (some[i] > largest || std::isnan(largest)) largest = some[i];
    }
    return largest;
  }
};

/// Holds the rank of the k-th largest value, and how many values of that rank to take.
struct Threshold {
  uint32_t rank = 0;
  int64_t ties = 0;
};

Threshold find_threshold(const Row& row, int64_t k) {
  // Digits of 11 bits; the last digit shares its highest bit with the one before.
  constexpr int32_t kShifts[] = {21, 10, 0};
  RankRange range;
  for (int32_t shift : kShifts) {
    uint32_t counts[kMaxDigits] = {};
    row.for_each_piece(
        [&](const float* values, int64_t n, int64_t) { row.kernels.count_ranks(values, n, range, shift, counts); });
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

/// Writes the indices of the k largest of more than k values.
void select(const Row& row, int64_t k, int32_t* indices) {
  Threshold threshold = find_threshold(row, k);
  int64_t taken = 0;
  row.for_each_piece([&](const float* values, int64_t n, int64_t first) {
    const int64_t some =
        row.kernels.select_ranks(values, n, threshold.rank, threshold.ties, k - taken, indices + taken);
    for (int64_t i = taken; i < taken + some; ++i) indices[i] += static_cast<int32_t>(first);
    taken += some;
    if (threshold.ties == 0 || n == row.num_values) return;
    uint32_t counts[kMaxDigits] = {};
    row.kernels.count_ranks(values, n, {threshold.rank, threshold.rank}, 0, counts);
    threshold.ties -= std::min<int64_t>(threshold.ties, counts[threshold.rank % kMaxDigits]);
  });
}

/// Turns indices of listed logits into keys, and drops those of hidden ones. Returns how many are left.
int64_t keep_listed(const core::KeyBlocks& blocks, int64_t token, const Row& row, int64_t taken, int32_t* indices) {
  int64_t kept = 0;
  for (int64_t i = 0; i < taken; ++i) {
    float logit;
    row.kernels.load_logits(at(row.logits, indices[i], row.dtype), row.dtype, 1, &logit);
    if (logit > -std::numeric_limits<float>::infinity())
      indices[kept++] = static_cast<int32_t>(blocks.key(token, indices[i]));
  }
  return kept;
}

}  // namespace

void select_top_k(const RowKernels& kernels, const core::TopKArgs& args, int64_t token, int64_t begin, int64_t end) {
  const void* const logits = at(args.logits, token * args.logits_stride_token + begin, args.logits_dtype);
  int32_t* indices = args.indices + token * args.indices_stride_token;
  if (args.blocks.given()) end = std::min<int64_t>(end, args.blocks.num_keys());
  const int64_t size = args.block_size, count = (std::max(end - begin, int64_t{0}) + size - 1) / size;  // of blocks
  int64_t taken = std::min<int64_t>(count, args.k);
  Row row = {kernels, logits, args.logits_dtype, count, args.block_size};
  if (count <= args.k) {
    for (int64_t i = 0; i < count; ++i) indices[i] = static_cast<int32_t>(i);
  } else if (size == 1) {
    select(row, args.k, indices);
  } else {
    row.num_values = count - 1;
    if (args.k > 1) select(row, args.k - 1, indices);
    indices[args.k - 1] = static_cast<int32_t>(count - 1);
  }
  if (args.blocks.given()) taken = keep_listed(args.blocks, token, row, taken, indices);
  for (int64_t i = 0; i < taken; ++i) indices[i] += static_cast<int32_t>(begin);
  std::fill(indices + taken, indices + args.k, -1);
}

void run_top_k(const KernelSet& set, const core::TopKArgs& args, core::ThreadPool& pool) {
  const int64_t bytes = args.num_tokens * args.num_logits * static_cast<int64_t>(size_of(args.logits_dtype));
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      int64_t first = 0, last = args.num_logits;
      if (args.lengths != nullptr) last = std::clamp<int64_t>(args.lengths[token], 0, last);
      if (args.starts != nullptr) first = std::clamp<int64_t>(args.starts[token], 0, last);
      select_top_k(*set.rows, args, token, first, last);
    }
  });
}

}  // namespace mla::cpu

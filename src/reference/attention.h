// SPDX-License-Identifier: Apache-2.0
// The attention formula itself, for a block of query rows that share keys and values:
//   s[r][j] = sm_scale * q[r] . k[j]      for j < visible[r]
//   lse[r]  = log(sum_j exp(s[r][j]))
//   o[r]    = sum_j exp(s[r][j] - lse[r]) v[j]
// Causal masks are bottom-right aligned, so the keys a row sees are always a prefix.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "mla/types.h"

namespace mla::reference {

/// Rows computed together: each key is converted once per block, and the scores of a block fit in memory.
inline constexpr int64_t kRowsPerBlock = 64;

struct RowBlock {
  int32_t d_qk = 0, d_v = 0;
  double sm_scale = 0;
  LseBase lse_base = LseBase::kE;
  std::vector<double> q;         // [rows, d_qk]
  std::vector<int64_t> visible;  // [rows], keys 0 .. visible - 1 are seen; <= 0: none
  std::vector<double> o;         // [rows, d_v]
  std::vector<double> lse;       // [rows]
};

/// Keys that query `query` of `q_len` sees.
inline int64_t visible_keys(bool causal, int64_t query, int64_t q_len, int64_t kv_len) {
  return causal ? std::max<int64_t>(kv_len - q_len + query + 1, 0) : kv_len;
}

/// a . b. Eight partial sums, because one is a chain of dependent additions that no compiler may reorder.
inline double dot(const double* a, const double* b, int32_t n) {
  double partial[8] = {};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int32_t lane = 0; lane < 8; ++lane) partial[lane] += a[i + lane] * b[i + lane];
  double sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (double p : partial) sum += p;
  return sum;
}

/// y += weight * x
inline void add_scaled(double weight, const double* __restrict x, int32_t n, double* __restrict y) {
  for (int32_t i = 0; i < n; ++i) y[i] += weight * x[i];
}

/// Turns scores[0 .. n) into weights and returns their lse, natural. Without a weight all are 0 and lse is -inf.
inline double softmax(double* scores, int64_t n) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < n; ++j) max = std::max(max, scores[j]);
  if (!std::isfinite(max)) max = 0;  // no key, or none that weighs anything: exp(-inf) is 0 as it should be
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += scores[j] = std::exp(scores[j] - max);
  if (sum == 0) return -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < n; ++j) scores[j] /= sum;
  return max + std::log(sum);
}

/// Fills block.o and block.lse. `load_key(j, out)` writes the d_qk, `load_value(j, out)` the d_v elements of key j;
/// neither is called for keys that no row of the block sees.
template <class LoadKey, class LoadValue>
void attend(RowBlock& block, const LoadKey& load_key, const LoadValue& load_value) {
  const size_t rows = block.visible.size();
  const auto d_qk = static_cast<size_t>(block.d_qk), d_v = static_cast<size_t>(block.d_v);
  const int64_t num_keys = std::max<int64_t>(0, *std::max_element(block.visible.begin(), block.visible.end()));
  const auto score_stride = static_cast<size_t>(num_keys);
  std::vector<double> scores(rows * score_stride);  // [rows, num_keys]
  std::vector<double> row(std::max(d_qk, d_v));

  for (int64_t j = 0; j < num_keys; ++j) {
    load_key(j, row.data());
    for (size_t r = 0; r < rows; ++r)
      if (j < block.visible[r])
        scores[r * score_stride + static_cast<size_t>(j)] =
            block.sm_scale * dot(&block.q[r * d_qk], row.data(), block.d_qk);
  }

  block.lse.resize(rows);
  for (size_t r = 0; r < rows; ++r) {
    block.lse[r] = softmax(scores.data() + r * score_stride, block.visible[r]);
    if (block.lse_base == LseBase::kTwo) block.lse[r] *= std::numbers::log2e;
  }

  block.o.assign(rows * d_v, 0.0);
  for (int64_t j = 0; j < num_keys; ++j) {
    load_value(j, row.data());
    for (size_t r = 0; r < rows; ++r)
      if (j < block.visible[r])
        add_scaled(scores[r * score_stride + static_cast<size_t>(j)], row.data(), block.d_v, &block.o[r * d_v]);
  }
}

}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
// The attention formula itself, for a block of query rows that share keys and values:
//   s[r][j] = sm_scale * q[r] . k[j]                      for j < visible[r]
//   m[r]    = max_j s[r][j]
//   lse[r]  = m[r] + log(sum_j exp(s[r][j] - m[r]))
//   o[r]    = sum_j exp(s[r][j] - m[r]) v[j] / sum_j exp(s[r][j] - m[r])
// Causal masks are bottom-right aligned, so the keys a row sees are always a prefix. The keys are walked twice, for m
// and for the sums: no memory grows with their number.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <span>

#include "mla/types.h"

namespace mla::reference {

/// Rows computed together: each key is converted once per block and walk.
inline constexpr int64_t kRowsPerBlock = 64;

/// The elements lie in the caller's workspace.
struct RowBlock {
  int64_t rows = 0;
  int32_t d_qk = 0, d_v = 0;
  double sm_scale = 0;
  LseBase lse_base = LseBase::kE;
  double* q = nullptr;                              // [rows, d_qk]
  double* o = nullptr;                              // [rows, d_v]
  double* key = nullptr;                            // [d_qk]
  double* value = nullptr;                          // [d_v]
  std::array<int64_t, kRowsPerBlock> visible = {};  // keys 0 .. visible - 1 are seen; <= 0: none
  std::array<double, kRowsPerBlock> lse = {};

  double* q_row(int64_t r) const { return q + r * d_qk; }
  double* o_row(int64_t r) const { return o + r * d_v; }
};

/// Bytes of workspace that a block takes.
inline size_t block_bytes(int32_t d_qk, int32_t d_v) {
  return static_cast<size_t>(kRowsPerBlock + 1) * static_cast<size_t>(d_qk + d_v) * sizeof(double);
}

/// A block of kRowsPerBlock rows for the problem of `args` in a workspace of block_bytes.
template <class Args>
RowBlock make_block(const Args& args, std::span<std::byte> workspace) {
  RowBlock block;
  block.d_qk = args.d_qk;
  block.d_v = args.d_v;
  block.sm_scale = static_cast<double>(args.sm_scale);
  block.lse_base = args.lse_base;
  block.q = reinterpret_cast<double*>(workspace.data());
  block.o = block.q_row(kRowsPerBlock);
  block.key = block.o_row(kRowsPerBlock);
  block.value = block.key + args.d_qk;
  return block;
}

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

/// What is subtracted from scores before exp: their maximum, unless that is infinite. Then exp(-inf) is 0 and
/// exp(+inf) infinite as they should be.
inline double finite_or_zero(double max) { return std::isfinite(max) ? max : 0; }

/// Fills block.o and block.lse. `load_key(j, out)` writes the d_qk, `load_value(j, out)` the d_v elements of key j;
/// neither is called for keys that no row of the block sees.
template <class LoadKey, class LoadValue>
void attend(RowBlock& block, const LoadKey& load_key, const LoadValue& load_value) {
  const int64_t num_keys = *std::max_element(block.visible.begin(), block.visible.begin() + block.rows);
  std::array<double, kRowsPerBlock> max, sum = {};
  max.fill(-std::numeric_limits<double>::infinity());
  std::fill_n(block.o, block.rows * block.d_v, 0.0);
  const auto for_rows_that_see = [&](int64_t j, const auto& f) {
    for (int64_t r = 0; r < block.rows; ++r)
      if (j < block.visible[static_cast<size_t>(r)])
        f(static_cast<size_t>(r), block.sm_scale * dot(block.q_row(r), block.key, block.d_qk));
  };

  for (int64_t j = 0; j < num_keys; ++j) {
    load_key(j, block.key);
    for_rows_that_see(j, [&](size_t r, double score) { max[r] = std::max(max[r], score); });
  }
  for (double& value : max) value = finite_or_zero(value);

  for (int64_t j = 0; j < num_keys; ++j) {
    load_key(j, block.key);
    load_value(j, block.value);
    for_rows_that_see(j, [&](size_t r, double score) {
      const double weight = std::exp(score - max[r]);
      sum[r] += weight;
      add_scaled(weight, block.value, block.d_v, block.o_row(static_cast<int64_t>(r)));
    });
  }

  for (int64_t row = 0; row < block.rows; ++row) {
    const auto r = static_cast<size_t>(row);
    double* o = block.o_row(row);
    // Without a weight o is 0 already, or what visible NaN values made of it.
    for (int32_t c = 0; c < block.d_v && sum[r] != 0; ++c) o[c] /= sum[r];
    block.lse[r] = max[r] + std::log(sum[r]);
    if (block.lse_base == LseBase::kTwo) block.lse[r] *= std::numbers::log2e;
  }
}

}  // namespace mla::reference

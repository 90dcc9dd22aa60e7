// SPDX-License-Identifier: Apache-2.0
// This file computes attention by its formula, for a block of query rows that share keys and values. Over the keys j
// that row r sees, the formula is:
//   s[r][j] = sm_scale * q_scale * k_scale * q[r] . k[j]
//             then cap * tanh(s / cap), then + slope * (position of the key - position of the query)
//   m[r]    = max_j s[r][j]
//   lse[r]  = m[r] + log(sum_j exp(s[r][j] - m[r]))
//   o[r]    = sum_j exp(s[r][j] - m[r]) v[j] / sum_j exp(s[r][j] - m[r])
//             then * exp(lse[r]) / (exp(lse[r]) + exp(sink)), then * v_scale / o_scale
// k_scale and v_scale are those of tensors; scales of a cache are factors of k and v.
// The loop over the keys runs twice, for m and for the sums, so that no memory grows with the number of keys. With
// compute = fp8, s is made of rounded queries, and fp8.h has the sum over v; the other sum is as above.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <span>

#include "core/args.h"
#include "core/avx2.h"
#include "mla/types.h"
#include "reference/finished.h"
#include "reference/fp8.h"
#include "reference/scalar.h"

namespace mla::reference {

/// This many rows are computed together. Each key is converted once per block of rows and loop.
inline constexpr int64_t kRowsPerBlock = 64;

/// Names one query of one head.
struct QueryRow {
  int64_t token = 0, head = 0;
  int64_t index = 0;     // index of the query in its request
  int64_t position = 0;  // position of the query in its request
};

/// Holds a block of rows, whose elements lie in the caller's workspace.
struct RowBlock {
  int64_t rows = 0;
  int32_t d_qk = 0, d_v = 0;
  double scale = 0;  // sm_scale * q_scale * k_scale
  core::Options options = {};
  double* q = nullptr;      // [rows, d_qk]
  double* o = nullptr;      // [rows, d_v]
  double* key = nullptr;    // [d_qk]
  double* value = nullptr;  // [d_v]
  KeyRun keys = {};         // with compute = fp8, instead of `value`
  std::array<QueryRow, kRowsPerBlock> row = {};
  std::array<double, kRowsPerBlock> max = {}, lse = {};

  double* q_row(int64_t r) const { return q + r * d_qk; }
  double* o_row(int64_t r) const { return o + r * d_v; }
};

/// Returns the bytes of workspace that a block takes for the problem of `args`.
template <class Args>
size_t block_bytes(const Args& args) {
  const size_t numbers = static_cast<size_t>(kRowsPerBlock + 1) * static_cast<size_t>(args.d_qk + args.d_v);
  const bool fp8 = args.options.compute == Compute::kFP8;
  return (numbers + (fp8 ? static_cast<size_t>(key_run_size(args.options.p_run, kRowsPerBlock, args.d_v)) : 0)) *
         sizeof(double);
}

/// Makes a block of kRowsPerBlock rows for the problem of `args` in a workspace of block_bytes().
template <class Args>
RowBlock make_block(const Args& args, std::span<std::byte> workspace) {
  RowBlock block;
  block.d_qk = args.d_qk;
  block.d_v = args.d_v;
  block.scale = static_cast<double>(args.sm_scale);
  if constexpr (requires { args.q_scale; })
    if (args.q_scale != nullptr) block.scale *= static_cast<double>(*args.q_scale);
  if constexpr (requires { args.k_scale; })
    if (args.k_scale != nullptr) block.scale *= static_cast<double>(*args.k_scale);
  block.options = args.options;
  block.q = reinterpret_cast<double*>(workspace.data());
  block.o = block.q_row(kRowsPerBlock);
  block.key = block.o_row(kRowsPerBlock);
  block.value = block.key + args.d_qk;
  if (args.options.compute == Compute::kFP8)
    block.keys = make_key_run(args.options.p_run, block.value + args.d_v, args.d_v);
  return block;
}

// The thread sanitizer passes over the two loops that take most of the time. They touch only rows of their caller's own
// memory, which the same call loads, clears or divides where the sanitizer looks. Where there is AVX2 they are its own,
// with the same bits.

/// Returns a . b. It has eight partial sums, because one sum is a chain of dependent additions that no compiler may
/// reorder.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline double dot_anywhere(const double* a, const double* b,
                                                                           int32_t n) {
  double partial[8] = {};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int32_t lane = 0; lane < 8; ++lane) partial[lane] += a[i + lane] * b[i + lane];
  double sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (double p : partial) sum += p;
  return sum;
}
MLA_AVX2 [[gnu::no_sanitize_thread]] inline double dot_avx2(const double* a, const double* b, int32_t n) {
  return dot_anywhere(a, b, n);
}
[[gnu::no_sanitize_thread]] inline double dot(const double* a, const double* b, int32_t n) {
  return core::kHasAvx2 ? dot_avx2(a, b, n) : dot_anywhere(a, b, n);
}

/// Computes y += weight * x.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline void add_scaled_anywhere(double weight,
                                                                                const double* __restrict x, int32_t n,
                                                                                double* __restrict y) {
  for (int32_t i = 0; i < n; ++i) y[i] += weight * x[i];
}
MLA_AVX2 [[gnu::no_sanitize_thread]] inline void add_scaled_avx2(double weight, const double* __restrict x, int32_t n,
                                                                 double* __restrict y) {
  add_scaled_anywhere(weight, x, n, y);
}
[[gnu::no_sanitize_thread]] inline void add_scaled(double weight, const double* __restrict x, int32_t n,
                                                   double* __restrict y) {
  core::kHasAvx2 ? add_scaled_avx2(weight, x, n, y) : add_scaled_anywhere(weight, x, n, y);
}

/// Returns what is subtracted from scores before exp: their maximum, or 0 if that is infinite. So exp(-inf) is 0 and
/// exp(+inf) is infinite, and no difference of infinities gives NaN.
inline double finite_or_zero(double max) { return std::isfinite(max) ? max : 0; }

/// Returns s[r][j] for the key that block.key holds.
inline double score(const RowBlock& block, int64_t r, int64_t key_position) {
  const QueryRow& row = block.row[static_cast<size_t>(r)];
  double s = block.scale * dot(block.q_row(r), block.key, block.d_qk);
  const auto cap = static_cast<double>(block.options.logits_soft_cap);
  if (cap > 0) s = cap * std::tanh(s / cap);
  if (block.options.alibi_slopes != nullptr)
    s += static_cast<double>(block.options.alibi_slopes[row.head]) * static_cast<double>(key_position - row.position);
  return s;
}

/// Calls use(r, j, s[r][j]) for every key j from `begin` to `end` that row r sees. `keys` has these functions:
/// - count() says that the keys are 0 ... count - 1, and position(j) where each is in its request;
/// - sees(row, j) returns whether a QueryRow sees key j;
/// - load(j, block) fills block.key and block.value; it is not called for keys that no row of the block sees;
/// and, where compute may be fp8, which then fills block.keys and not block.value:
/// - run_end(j) returns the end of the run of at most block.keys.size keys that key j is in;
/// - scales_of(j) returns the ValueScales of key j, which all keys of its run have.
template <class Keys, class Use>
void for_each_score(RowBlock& block, const Keys& keys, int64_t begin, int64_t end, const Use& use) {
  for (int64_t j = begin; j < end; ++j) {
    bool loaded = false;
    for (int64_t r = 0; r < block.rows; ++r) {
      if (!keys.sees(block.row[static_cast<size_t>(r)], j)) continue;
      if (!loaded) keys.load(j, block);
      loaded = true;
      use(static_cast<size_t>(r), j, score(block, r, keys.position(j)));
    }
  }
}

using Sums = std::array<double, kRowsPerBlock>;

/// Computes the sums of weights, and in block.o those of weighted values.
template <class Keys>
void add_values(RowBlock& block, const Keys& keys, Sums& sum) {
  for_each_score(block, keys, 0, keys.count(), [&](size_t r, int64_t, double s) {
    const double weight = std::exp(s - finite_or_zero(block.max[r]));
    sum[r] += weight;
    add_scaled(weight, block.value, block.d_v, block.o_row(static_cast<int64_t>(r)));
  });
}

/// Does the same with compute = fp8: run by run of keys.
template <class Keys>
void add_rounded_values(RowBlock& block, const Keys& keys, Sums& sum) {
  for (int64_t begin = 0, end = 0; begin < keys.count(); begin = end) {
    end = keys.run_end(begin);
    std::fill_n(block.keys.p, block.rows * block.keys.size, KeyRun::kUnseen);
    for_each_score(block, keys, begin, end, [&](size_t r, int64_t j, double s) {
      const double weight = std::exp(s - finite_or_zero(block.max[r]));
      sum[r] += weight;
      block.keys.of(static_cast<int64_t>(r), j) = weight;
    });
    for (int64_t r = 0; r < block.rows; ++r)
      add_rounded(block.keys, keys.scales_of(begin), block.keys.p_of(r), block.o_row(r));
  }
}

/// Computes block.max and block.lse (natural), and block.o before sink and o_scale.
template <class Keys>
void attend(RowBlock& block, const Keys& keys) {
  block.max.fill(-std::numeric_limits<double>::infinity());
  std::fill_n(block.o, block.rows * block.d_v, 0.0);
  for_each_score(block, keys, 0, keys.count(), [&](size_t r, int64_t, double s) {
    if (!std::isnan(block.max[r]) && !(s <= block.max[r])) block.max[r] = s;  // NaN stays NaN
  });

  Sums sum = {};
  if constexpr (requires { keys.run_end(0); }) {
    if (block.keys.given())
      add_rounded_values(block, keys, sum);
    else
      add_values(block, keys, sum);
  } else {
    add_values(block, keys, sum);
  }

  for (size_t r = 0; r < static_cast<size_t>(block.rows); ++r) {
    double* o = block.o_row(static_cast<int64_t>(r));
    // If the sum is 0, o is 0 already, or NaN by visible NaN values.
    for (int32_t c = 0; c < block.d_v && sum[r] != 0; ++c) o[c] /= sum[r];
    block.lse[r] = finite_or_zero(block.max[r]) + std::log(sum[r]);
  }
}

/// Returns exp(lse) / (exp(lse) + exp(sink)).
inline double sink_factor(double lse, double sink) {
  if (sink == -std::numeric_limits<double>::infinity()) return 1;
  return 1 / (1 + std::exp(sink - lse));
}

/// Returns a natural lse in the form in which it is written.
inline float written_lse(double lse, core::LseForm form) {
  if (lse == -std::numeric_limits<double>::infinity()) return form.without_keys();
  return static_cast<float>(form.base == LseBase::kTwo ? lse * std::numbers::log2e : lse);
}

/// Writes a computed row to the outputs of `args`.
template <class Args>
void store_outputs(RowBlock& block, int64_t r, const Args& args) {
  const QueryRow& row = block.row[static_cast<size_t>(r)];
  const double lse = block.lse[static_cast<size_t>(r)];
  double factor = 1;
  if (args.options.attn_sink != nullptr)
    factor = sink_factor(lse, static_cast<double>(args.options.attn_sink[row.head]));
  if constexpr (requires { args.v_scale; })
    if (args.v_scale != nullptr) factor *= static_cast<double>(*args.v_scale);
  if constexpr (requires { args.o_scale; })
    if (args.o_scale != nullptr) factor /= static_cast<double>(*args.o_scale);
  double* o = block.o_row(r);
  for (int32_t c = 0; c < args.d_v; ++c) o[c] *= factor;
  bool finishes = false;
  if constexpr (requires { args.finish; }) {
    finishes = args.finishes;
    if (finishes)
      write_finished(args.finish, {row.token, static_cast<int32_t>(row.head), args.d_v},
                     [&](int32_t c) { return static_cast<float>(o[c]); });
  }
  if (!finishes)
    store_row(o, args.o_dtype, row.token * args.o_stride_token + row.head * args.o_stride_head, args.d_v, args.o);
  if (args.lse != nullptr)
    args.lse[row.token * args.lse_stride_token + row.head * args.lse_stride_head] = written_lse(lse, args.lse_form);
  if constexpr (requires { args.max_logits; })
    if (args.max_logits != nullptr)
      args.max_logits[row.token * args.max_logits_stride_token + row.head * args.max_logits_stride_head] =
          static_cast<float>(block.max[static_cast<size_t>(r)]);
}

/// Computes `num_rows` rows that share keys, block by block. `row_at(i)` returns row i, and `load_q(row, out)` loads
/// its query.
template <class Args, class Keys, class RowAt, class LoadQ>
void attend_rows(RowBlock& block, const Args& args, const Keys& keys, int64_t num_rows, const RowAt& row_at,
                 const LoadQ& load_q) {
  for (int64_t first = 0; first < num_rows; first += kRowsPerBlock) {
    block.rows = std::min(kRowsPerBlock, num_rows - first);
    for (int64_t r = 0; r < block.rows; ++r) {
      const QueryRow& row = block.row[static_cast<size_t>(r)] = row_at(first + r);
      load_q(row, block.q_row(r));
    }
    attend(block, keys);
    for (int64_t r = 0; r < block.rows; ++r) store_outputs(block, r, args);
  }
}

/// Returns whether causality and the window let a query see a key.
inline bool is_visible(const core::Options& options, bool causal, int64_t query_position, int64_t key_position) {
  if (causal && key_position > query_position) return false;
  return options.window_left < 0 || key_position >= query_position - options.window_left;
}

/// Loads the query of a row in the absorbed form, [q_nope | q_pe], for keys of `cache`.
template <class Args>
void load_absorbed_query(const Args& args, const core::Cache& cache, const QueryRow& row, double* out) {
  const int64_t nope = row.token * args.q_nope_stride_token + row.head * args.q_nope_stride_head;
  const int64_t pe = row.token * args.q_pe_stride_token + row.head * args.q_pe_stride_head;
  load_row(args.q_nope, args.q_dtype, nope, cache.d_ckv, out);
  if (args.q_pe != nullptr) load_row(args.q_pe, args.q_dtype, pe, args.d_qk - cache.d_ckv, out + cache.d_ckv);
  if (args.options.compute == Compute::kFP8) round_query(cache, args.q_dtype, out);
}

/// Loads the row of key j: a key [ckv | kpe], whose first d_v channels are the value.
inline void load_absorbed_key(const CacheRow& row, int64_t j, RowBlock& block) {
  if (block.keys.given()) return read_exact_row(row, j, block.key, block.keys);
  read_row(row, block.key);
  std::copy_n(block.key, block.d_v, block.value);
}

}  // namespace mla::reference

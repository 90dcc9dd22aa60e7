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
// The loop over the keys runs twice, for m and for the sums, and keeps the scores of the first keys only, so that no
// memory grows with the number of keys. With compute = fp8, s is made of rounded queries, and fp8.h has the sum over v;
// the other sum is as above.
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
/// This many keys meet a row together: rows are read, and sums written, once for all of them.
inline constexpr int64_t kKeysPerGroup = 4;
/// The scores of this many keys are computed once, those of others in both loops.
inline constexpr int64_t kKeptKeys = 512;

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
  double* q = nullptr;       // [rows, d_qk]
  double* o = nullptr;       // [rows, d_v]
  double* key = nullptr;     // [kKeysPerGroup, d_qk]
  double* value = nullptr;   // [kKeysPerGroup, d_v]
  double* scores = nullptr;  // [kKeptKeys, kRowsPerBlock]
  KeyRun keys = {};          // with compute = fp8, instead of `value`
  std::array<QueryRow, kRowsPerBlock> row = {};
  std::array<double, kRowsPerBlock> max = {}, lse = {};

  double* q_row(int64_t r) const { return q + r * d_qk; }
  double* o_row(int64_t r) const { return o + r * d_v; }
  double* key_of(int64_t j) const { return key + j % kKeysPerGroup * d_qk; }
  double* value_of(int64_t j) const { return value + j % kKeysPerGroup * d_v; }
  double& score_of(int64_t r, int64_t j) const { return scores[j * kRowsPerBlock + r]; }
};

/// Returns the bytes of workspace that a block takes for the problem of `args`.
template <class Args>
size_t block_bytes(const Args& args) {
  const size_t numbers =
      static_cast<size_t>(kRowsPerBlock + kKeysPerGroup) * static_cast<size_t>(args.d_qk + args.d_v) +
      static_cast<size_t>(kKeptKeys * kRowsPerBlock);
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
  block.value = block.key + kKeysPerGroup * args.d_qk;
  block.scores = block.value + kKeysPerGroup * args.d_v;
  if (args.options.compute == Compute::kFP8)
    block.keys = make_key_run(args.options.p_run, block.scores + kKeptKeys * kRowsPerBlock, args.d_v);
  return block;
}

// The thread sanitizer passes over the two loops that take most of the time. They touch only rows of their caller's own
// memory, which the same call loads, clears or divides where the sanitizer looks. Where there is AVX2 they are its own,
// with the same bits.

/// Four numbers, which are read and written at once, and at which sanitizers look once.
using Four [[gnu::vector_size(32)]] = double;
struct [[gnu::packed, gnu::may_alias]] FourInMemory {
  Four x;
};
inline const FourInMemory& four_at(const double* at) { return *reinterpret_cast<const FourInMemory*>(at); }
inline FourInMemory& four_at(double* at) { return *reinterpret_cast<FourInMemory*>(at); }

/// Returns a . b, whose first `i` products are added up in eight partial sums, because one sum is a chain of dependent
/// additions that no compiler may reorder.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline double sum_up(const Four& low, const Four& high, const double* a,
                                                                     const double* b, int32_t i, int32_t n) {
  double sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (int lane = 0; lane < 4; ++lane) sum += low[lane];
  for (int lane = 0; lane < 4; ++lane) sum += high[lane];
  return sum;
}

/// Returns a . b.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline double dot_anywhere(const double* a, const double* b,
                                                                           int32_t n) {
  Four low = {}, high = {};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    low += four_at(a + i).x * four_at(b + i).x;
    high += four_at(a + i + 4).x * four_at(b + i + 4).x;
  }
  return sum_up(low, high, a, b, i, n);
}
MLA_AVX2 [[gnu::no_sanitize_thread]] inline double dot_avx2(const double* a, const double* b, int32_t n) {
  return dot_anywhere(a, b, n);
}
[[gnu::no_sanitize_thread]] inline double dot(const double* a, const double* b, int32_t n) {
  return core::kHasAvx2 ? dot_avx2(a, b, n) : dot_anywhere(a, b, n);
}

using GroupPointers = std::array<const double*, kKeysPerGroup>;
using GroupNumbers = std::array<double, kKeysPerGroup>;

/// Returns a . b of every b, as dot() does. What the loop uses has names, which are registers without optimization too.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline GroupNumbers dots_anywhere(const double* a,
                                                                                  const GroupPointers& b, int32_t n) {
  const auto [b0, b1, b2, b3] = b;
  Four low0 = {}, low1 = {}, low2 = {}, low3 = {}, high0 = {}, high1 = {}, high2 = {}, high3 = {};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const Four low = four_at(a + i).x, high = four_at(a + i + 4).x;
    low0 += low * four_at(b0 + i).x;
    low1 += low * four_at(b1 + i).x;
    low2 += low * four_at(b2 + i).x;
    low3 += low * four_at(b3 + i).x;
    high0 += high * four_at(b0 + i + 4).x;
    high1 += high * four_at(b1 + i + 4).x;
    high2 += high * four_at(b2 + i + 4).x;
    high3 += high * four_at(b3 + i + 4).x;
  }
  return {sum_up(low0, high0, a, b0, i, n), sum_up(low1, high1, a, b1, i, n), sum_up(low2, high2, a, b2, i, n),
          sum_up(low3, high3, a, b3, i, n)};
}
MLA_AVX2 [[gnu::no_sanitize_thread]] inline GroupNumbers dots_avx2(const double* a, const GroupPointers& b, int32_t n) {
  return dots_anywhere(a, b, n);
}
[[gnu::no_sanitize_thread]] inline GroupNumbers dots(const double* a, const GroupPointers& b, int32_t n) {
  return core::kHasAvx2 ? dots_avx2(a, b, n) : dots_anywhere(a, b, n);
}

/// Computes y += weight * x.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline void add_scaled_anywhere(double weight, const double* x,
                                                                                int32_t n, double* y) {
  int32_t i = 0;
  for (; i + 4 <= n; i += 4) four_at(y + i).x += weight * four_at(x + i).x;
  for (; i < n; ++i) y[i] += weight * x[i];
}
MLA_AVX2 [[gnu::no_sanitize_thread]] inline void add_scaled_avx2(double weight, const double* x, int32_t n, double* y) {
  add_scaled_anywhere(weight, x, n, y);
}
[[gnu::no_sanitize_thread]] inline void add_scaled(double weight, const double* x, int32_t n, double* y) {
  core::kHasAvx2 ? add_scaled_avx2(weight, x, n, y) : add_scaled_anywhere(weight, x, n, y);
}

/// Does the same with every weight and its x, one after another.
[[gnu::no_sanitize_thread, gnu::always_inline]] inline void add_all_scaled_anywhere(const GroupNumbers& weights,
                                                                                    const GroupPointers& x, int32_t n,
                                                                                    double* y) {
  const auto [w0, w1, w2, w3] = weights;
  const auto [x0, x1, x2, x3] = x;
  int32_t i = 0;
  for (; i + 4 <= n; i += 4)
    four_at(y + i).x = four_at(y + i).x + w0 * four_at(x0 + i).x + w1 * four_at(x1 + i).x + w2 * four_at(x2 + i).x +
                       w3 * four_at(x3 + i).x;
  for (; i < n; ++i) y[i] = y[i] + w0 * x0[i] + w1 * x1[i] + w2 * x2[i] + w3 * x3[i];
}
MLA_AVX2 [[gnu::no_sanitize_thread]] inline void add_all_scaled_avx2(const GroupNumbers& weights,
                                                                     const GroupPointers& x, int32_t n, double* y) {
  add_all_scaled_anywhere(weights, x, n, y);
}
[[gnu::no_sanitize_thread]] inline void add_all_scaled(const GroupNumbers& weights, const GroupPointers& x, int32_t n,
                                                       double* y) {
  core::kHasAvx2 ? add_all_scaled_avx2(weights, x, n, y) : add_all_scaled_anywhere(weights, x, n, y);
}

/// Returns what is subtracted from scores before exp: their maximum, or 0 if that is infinite. So exp(-inf) is 0 and
/// exp(+inf) is infinite, and no difference of infinities gives NaN.
inline double finite_or_zero(double max) { return std::isfinite(max) ? max : 0; }

/// Names the keys of a group that a row sees, with their scores.
struct SeenKeys {
  size_t count = 0;
  std::array<int64_t, kKeysPerGroup> key = {};
  GroupNumbers score = {};

  bool whole() const { return count == kKeysPerGroup; }
};

/// Returns the score of a product of query and key.
inline double score(const RowBlock& block, const QueryRow& row, double product, int64_t key_position) {
  double s = block.scale * product;
  const auto cap = static_cast<double>(block.options.logits_soft_cap);
  if (cap > 0) s = cap * std::tanh(s / cap);
  if (block.options.alibi_slopes != nullptr)
    s += static_cast<double>(block.options.alibi_slopes[row.head]) * static_cast<double>(key_position - row.position);
  return s;
}

/// Computes the scores of keys that block.key holds.
template <class Keys>
void compute_scores(const RowBlock& block, int64_t r, const Keys& keys, SeenKeys& seen) {
  GroupPointers with = {};
  for (size_t i = 0; i < seen.count; ++i) with[i] = block.key_of(seen.key[i]);
  if (seen.whole()) seen.score = dots(block.q_row(r), with, block.d_qk);
  for (size_t i = 0; i < seen.count; ++i) {
    if (!seen.whole()) seen.score[i] = dot(block.q_row(r), with[i], block.d_qk);
    seen.score[i] = score(block, block.row[static_cast<size_t>(r)], seen.score[i], keys.position(seen.key[i]));
  }
}

/// Calls use(r, seen) for every row r and the keys from `begin` to `end`, group by group; `again` if that was done
/// before for all keys. `keys` has these functions:
/// - count() says that the keys are 0 ... count - 1, and position(j) where each is in its request;
/// - sees(row, j) returns whether a QueryRow sees key j;
/// - load(j, block) fills block.key_of(j) and block.value_of(j); it is not called for keys that no row of the block
/// sees; and, where compute may be fp8, which then fills block.keys and no value:
/// - run_end(j) returns the end of the run of at most block.keys.size keys that key j is in;
/// - scales_of(j) returns the ValueScales of key j, which all keys of its run have.
template <class Keys, class Use>
void for_each_group(RowBlock& block, const Keys& keys, int64_t begin, int64_t end, bool again, const Use& use) {
  for (int64_t first = begin; first < end; first += kKeysPerGroup) {
    const bool kept = first + kKeysPerGroup <= kKeptKeys;
    std::array<bool, kKeysPerGroup> loaded = {};
    for (int64_t r = 0; r < block.rows; ++r) {
      const QueryRow& row = block.row[static_cast<size_t>(r)];
      SeenKeys seen;
      for (int64_t j = first; j < std::min(first + kKeysPerGroup, end); ++j) {
        if (!keys.sees(row, j)) continue;
        bool& here = loaded[static_cast<size_t>(j - first)];
        if (!here) keys.load(j, block);
        here = true;
        seen.key[seen.count++] = j;
      }
      if (kept && again)
        for (size_t i = 0; i < seen.count; ++i) seen.score[i] = block.score_of(r, seen.key[i]);
      else
        compute_scores(block, r, keys, seen);
      if (kept && !again)
        for (size_t i = 0; i < seen.count; ++i) block.score_of(r, seen.key[i]) = seen.score[i];
      use(static_cast<size_t>(r), seen);
    }
  }
}

using Sums = std::array<double, kRowsPerBlock>;

/// Computes the sums of weights, and in block.o those of weighted values.
template <class Keys>
void add_values(RowBlock& block, const Keys& keys, Sums& sum) {
  for_each_group(block, keys, 0, keys.count(), true, [&](size_t r, const SeenKeys& seen) {
    GroupNumbers weights = {};
    GroupPointers values = {};
    for (size_t i = 0; i < seen.count; ++i) {
      weights[i] = std::exp(seen.score[i] - finite_or_zero(block.max[r]));
      values[i] = block.value_of(seen.key[i]);
      sum[r] += weights[i];
    }
    double* const o = block.o_row(static_cast<int64_t>(r));
    if (seen.whole()) return add_all_scaled(weights, values, block.d_v, o);
    for (size_t i = 0; i < seen.count; ++i) add_scaled(weights[i], values[i], block.d_v, o);
  });
}

/// Does the same with compute = fp8: run by run of keys.
template <class Keys>
void add_rounded_values(RowBlock& block, const Keys& keys, Sums& sum) {
  for (int64_t begin = 0, end = 0; begin < keys.count(); begin = end) {
    end = keys.run_end(begin);
    std::fill_n(block.keys.p, block.rows * block.keys.size, KeyRun::kUnseen);
    for_each_group(block, keys, begin, end, true, [&](size_t r, const SeenKeys& seen) {
      for (size_t i = 0; i < seen.count; ++i) {
        const double weight = std::exp(seen.score[i] - finite_or_zero(block.max[r]));
        sum[r] += weight;
        block.keys.of(static_cast<int64_t>(r), seen.key[i]) = weight;
      }
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
  for_each_group(block, keys, 0, keys.count(), false, [&](size_t r, const SeenKeys& seen) {
    for (size_t i = 0; i < seen.count; ++i)
      if (!std::isnan(block.max[r]) && !(seen.score[i] <= block.max[r])) block.max[r] = seen.score[i];  // NaN stays NaN
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
  double* const key = block.key_of(j);
  if (block.keys.given()) return read_exact_row(row, j, key, block.keys);
  read_row(row, key);
  std::copy_n(key, block.d_v, block.value_of(j));
}

}  // namespace mla::reference

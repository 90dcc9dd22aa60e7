// SPDX-License-Identifier: Apache-2.0
// This file computes what AttentionOptions::compute = fp8 means for a query, for a key, and for a run of keys whose
// values a row sums. Nothing is rounded but what becomes e4m3, and queries that meet 16-bit channels:
//   x[j][g] = exp(s[j] - m) * scale[j][g]            for the keys j of the run that the row sees, and a group g
//   S[g]    = max_j x[j][g] / 448
//   o[c]   += S[g] * e4m3(x[j][g] / S[g]) * element[j][c]     for the channels c of group g
//   o[c]   += exp(s[j] - m) * k[j][c]                         for rotary channels c of a value
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/cache.h"
#include "mla/numeric.h"
#include "mla/types.h"
#include "reference/cache_rows.h"

namespace mla::reference {

/// Says which channels of a value have one scale: the first num_scales * channels_per_scale, in groups. The others have
/// none.
struct ValueScales {
  int32_t num_scales = 1, channels_per_scale = 0;
};

inline ValueScales value_scales(const core::Cache& cache) { return {cache.num_scales, cache.channels_per_scale}; }

/// Holds the keys of one run, whose P have their scales in common; key j at j % size, in memory of the caller.
struct KeyRun {
  /// Stands for P of a key that a row does not see.
  static constexpr double kUnseen = -1;

  int64_t size = 0;  // keys
  int32_t d_v = 0;
  double* elements = nullptr;  // [size, d_v]: latent channels without their scales, rotary channels of a value
  double* scales = nullptr;    // [size, d_v], of which a key has num_scales
  double* p = nullptr;         // [rows, size]

  bool given() const { return elements != nullptr; }
  double* elements_of(int64_t j) const { return elements + j % size * d_v; }
  double* scales_of(int64_t j) const { return scales + j % size * d_v; }
  double* p_of(int64_t row) const { return p + row * size; }
  double& of(int64_t row, int64_t j) const { return p_of(row)[j % size]; }
};

/// Returns the number of doubles that a run of keys takes.
constexpr int64_t key_run_size(int64_t keys, int64_t rows, int32_t d_v) { return keys * (2 * int64_t{d_v} + rows); }

inline KeyRun make_key_run(int64_t keys, double* memory, int32_t d_v) {
  double* const scales = memory + keys * d_v;
  return {.size = keys, .d_v = d_v, .elements = memory, .scales = scales, .p = scales + keys * d_v};
}

/// Returns the end of the run of so many keys that key j is in, where runs begin with key `first` and no key follows
/// `end`.
constexpr int64_t end_of_run(int64_t keys, int64_t j, int64_t first, int64_t end) {
  return std::min(first + ((j - first) / keys + 1) * keys, end);
}

/// Rounds the query [q_nope | q_pe] that meets rows of `cache`.
inline void round_query(const core::Cache& cache, DType dtype, double* q) {
  if (dtype == DType::kE4M3) return;
  const int32_t width = cache.d_ckv + cache.d_kpe, quantized = cache.has_quantized_kpe() ? width : cache.d_ckv;
  const auto channel = [q](int32_t c) { return static_cast<float>(q[c]); };  // exact: it was loaded from at most f32
  float scale = finite_amax(channel, 0, quantized) / kE4M3Max;
  if (scale == 0) scale = 1;
  for (int32_t c = 0; c < quantized; ++c)
    q[c] = static_cast<double>(e4m3_to_f32(quantize_e4m3(channel(c), scale))) * static_cast<double>(scale);
  for (int32_t c = quantized; c < width; ++c) q[c] = static_cast<double>(bf16_to_f32(f32_to_bf16(channel(c))));
}

/// Reads the row of key j: writes [ckv | kpe] to `key`, and what its value is made of to `keys`.
inline void read_exact_row(const CacheRow& row, int64_t j, double* key, const KeyRun& keys) {
  const core::Cache& cache = row.cache;
  const Channels ckv = row.ckv(), kpe = row.kpe();
  double* const elements = keys.elements_of(j);
  double* const scales = keys.scales_of(j);
  for (int32_t g = 0; g < cache.num_scales; ++g) scales[g] = ckv.scales.exact(g);
  for (int32_t c = 0; c < cache.d_ckv; ++c) {
    elements[c] = static_cast<double>(ckv.element(c));
    key[c] = elements[c] * scales[c / cache.channels_per_scale];
  }
  const double kpe_scale = cache.has_quantized_kpe() ? kpe.scales.exact(0) : 1;
  for (int32_t c = 0; c < cache.d_kpe; ++c) key[cache.d_ckv + c] = static_cast<double>(kpe.element(c)) * kpe_scale;
  std::copy_n(key + cache.d_ckv, keys.d_v - cache.d_ckv, elements + cache.d_ckv);
}

/// Adds to `o` the values of a run's keys, which have these scales, for a row that has these P.
inline void add_rounded(const KeyRun& keys, const ValueScales& scales, const double* p, double* o) {
  const auto for_each_seen = [&](const auto& f) {
    for (int64_t j = 0; j < keys.size; ++j)
      if (p[j] != KeyRun::kUnseen) f(j);
  };
  for (int32_t g = 0; g < scales.num_scales; ++g) {
    const auto product = [&](int64_t j) { return p[j] * keys.scales_of(j)[g]; };
    double largest = 0;
    for_each_seen([&](int64_t j) {
      if (!std::isnan(largest) && !(product(j) <= largest)) largest = product(j);  // NaN stays NaN
    });
    const double unit = largest / static_cast<double>(kE4M3Max);
    for_each_seen([&](int64_t j) {
      const float quotient = unit == 0 ? 0.0F : static_cast<float>(product(j) / unit);
      const double rounded = unit * static_cast<double>(e4m3_to_f32(f32_to_e4m3(quotient)));
      for (int32_t c = g * scales.channels_per_scale; c < (g + 1) * scales.channels_per_scale; ++c)
        o[c] += rounded * keys.elements_of(j)[c];
    });
  }
  for_each_seen([&](int64_t j) {
    for (int32_t c = scales.num_scales * scales.channels_per_scale; c < keys.d_v; ++c)
      o[c] += p[j] * keys.elements_of(j)[c];
  });
}

}  // namespace mla::reference

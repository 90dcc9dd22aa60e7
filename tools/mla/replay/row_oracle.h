// SPDX-License-Identifier: Apache-2.0
// Computes what rows of a request's caches have to hold, in float64 and from nothing but the generated activations of
// its tokens: no state is kept from step to step, and no cache is read.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "mla/kv_layout.h"
#include "mla/replay/cache_pool.h"
#include "mla/replay/check_log.h"
#include "mla/replay/compressor_shape.h"
#include "mla/replay/generator.h"
#include "mla/replay/operations.h"
#include "mla/replay/prologue.h"

namespace mla::cli::replay {

/// Returns the seed of the request's token at a position.
using SeedOf = std::function<uint64_t(int32_t position)>;

class RowOracle {
 public:
  /// `dtype` is that of the activations.
  RowOracle(const ModelConfig& model, const Generator& generator, DType dtype)
      : model_(model), generator_(generator), dtype_(dtype) {}

  /// Returns what the projection gives of a token's latent row.
  std::vector<double> projected(const SeedOf& seed_of, int32_t position) const;
  /// Returns a token's latent row: normalized, and its rotary channels turned.
  std::vector<double> latent(const SeedOf& seed_of, int32_t position) const;
  /// Returns the parts of a token's query that are normalized and turned on their way to attention, [H, n]: its heads
  /// (value_is_row), or their q_pe.
  std::vector<double> query(uint64_t token_seed, int32_t position) const;
  /// Returns a head's output with its rotary channels, the last ones, turned back.
  std::vector<double> turned_back(std::span<const float> output, int32_t position) const;
  /// Returns the latent of a group, computed from all of its tokens, not yet rotated, and rounded to the activations'
  /// type.
  std::vector<double> pooled(const CompressorShape& shape, const SeedOf& seed_of, int32_t group) const;
  /// Returns it as the cache holds it: its last channels turned by the angles of the group's first position.
  std::vector<double> row(const CompressorShape& shape, const SeedOf& seed_of, int32_t group) const;
  /// Returns the channels of a latent that stand in for the indexer's key.
  std::vector<double> key_of(const std::vector<double>& latent) const;

 private:
  std::vector<double> widened(const std::byte* values, int64_t count) const;
  void turn(double* channels, int32_t count, double positions) const;

  ModelConfig model_;
  const Generator& generator_;
  DType dtype_;
};

/// Returns which rows to check of those below `count`: all of them if that reads at most some thousand tokens, else the
/// newest, the first, and others that `salt` decides.
std::vector<int32_t> rows_to_check(int32_t count, int32_t tokens_per_row, uint64_t salt);

/// Stores rows of the oracle as a cache of a format does, by the reference backend in a cache of its own, and says how
/// far another cache's row is from what may be stored.
class RowFormat {
 public:
  RowFormat(const ModelConfig& model, CacheFormat format, Operations& reference);
  /// Makes a format of the indexer's keys.
  explicit RowFormat(Operations& reference);

  /// Returns by how much the channels of `got` [width] are farther from those of `truth` than rounding explains, as a
  /// share of the row's norm. What f32 and float64 tell apart may fall to either side where something is rounded: a
  /// channel of a latent to bf16, an element or its scale to the format. So a channel may be as far away as it is where
  /// the reference stores the row, or the row times 1 - 2^-8 or 1 + 2^-8: then a scale at a boundary is the other one.
  Result<double> error(const float* got, const std::vector<double>& truth);

 private:
  Result<std::vector<float>> stored(const std::vector<float>& rows);

  Operations& reference_;
  CachePool rows_;
  IndexerPool keys_;
  bool is_keys_ = false;
};

/// This is the largest error that is accepted. A channel that was rounded to the other bf16 number is 2^-8 of it away,
/// and its element may then be at a boundary that the three rows of error() are not at: 2^-7 allows for both in all
/// channels of a row.
inline constexpr double kRowTolerance = 0x1p-7;

/// This is the largest error of a head's query that is accepted: each channel is rounded once, and that is at most 2^-8
/// of it in bf16. The rest is for the arithmetic in f32.
inline constexpr double kQueryTolerance = 0x1p-8 + 0x1p-14;

/// Compares the queries of a token's heads, of which attention got `got`, with `expected`, both [heads, width].
void check_queries(const std::string& what, std::span<const float> got, std::span<const double> expected, int64_t heads,
                   CheckLog& log);

/// Compares rows `rows` of a request, of which `got` [rows, width] was read, with what `expected` returns for each.
Status check_rows(const std::string& what, std::span<const int32_t> rows, const Result<std::vector<float>>& got,
                  RowFormat& format, const std::function<std::vector<double>(int32_t row)>& expected, CheckLog& log);

}  // namespace mla::cli::replay

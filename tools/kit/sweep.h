// SPDX-License-Identifier: Apache-2.0
// Checks many random problems over operations, formats and backends.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kit/check.h"
#include "mla/backend.h"

namespace mla::kit {

struct SweepOptions {
  std::optional<Op> op;  ///< all, if not given
  std::string backend;   ///< a row or a family ("cpu"); empty = every usable row
  std::string device;    ///< as ContextOptions: "cpu", "cuda:1", "emulated:sm90"; empty = where MLA_EMULATE says
  /// Selects the format; every format is checked if it is not given. Prefill and merge_states take a data type instead,
  /// bf16 or f16: they and the index tools, which have no format at all, are left out where the format is another.
  std::optional<CacheFormat> cache;
  /// Selects the format of the indexer's keys; each is checked if it is not given. Operations on no such keys are left
  /// out then.
  std::optional<IndexerFormat> indexer_format = {};
  bool quick = false;  ///< a tenth of the cases
  int64_t cases = 0;   ///< of every operation and format; 0: 120, or 12 if quick
  uint64_t seed = 1;
  int32_t num_threads = 0;  ///< as ContextOptions
};

/// Counts the cases that a row would not take.
struct Skipped {
  std::string backend;
  std::string reason;  ///< the row's verdict
  int64_t cases = 0;
};

struct SweepResult {
  int64_t cases = 0;
  int64_t failed = 0;
  std::vector<Outcome> failures;  ///< the first 100
  std::vector<Skipped> skipped;   ///< one entry for every reason of every row
};

/// Is called after every case; it returns false to stop early.
using SweepProgress = std::function<bool(int64_t done, int64_t total, const Outcome& last)>;

/// Checks every case that the options ask for. An error says what is wrong with the options: an unknown backend, a
/// format that the operation does not take, no usable row.
Result<SweepResult> sweep(const SweepOptions& options, const SweepProgress& progress = {});

/// Adds a case that `row` would not take.
void count_skipped(const BackendVerdict& row, std::vector<Skipped>& skipped);

/// Returns the rows of an operation's table that can run `problem`, best first.
std::vector<std::string> usable_backends(const Problem& problem);

}  // namespace mla::kit

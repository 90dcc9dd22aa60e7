// SPDX-License-Identifier: Apache-2.0
// Reports what a replay came to, for people and as the JSON of docs/replay.md.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mla/output.h"
#include "mla/replay/check_log.h"
#include "mla/replay/recorder.h"
#include "mla/replay/scheduler.h"
#include "mla/types.h"

namespace mla::cli::replay {

struct Percentiles {
  double p50, p90, p99;
};

/// Returns percentiles by linear interpolation between the sorted samples; nothing if there are no samples.
std::optional<Percentiles> percentiles(std::vector<double> samples);

/// Holds the machine's ceilings for the two kinds of attention, in GFLOP/s.
struct Ceilings {
  double prefill_gflops = 0.0;
  double decode_gflops = 0.0;
};

/// Says where serving's time went: the calls of one operation of the library, or other work.
struct OperationTime {
  std::string name;   ///< the operation's: "append_rope", "decode_sparse"; or "projections", "plan"
  int64_t calls = 0;  ///< 0 of "plan", which has none of its own
  double prefill_seconds = 0.0, decode_seconds = 0.0;
  double seconds = 0.0;  ///< all of them; of calls for the tokens of prompts and answers at once, these alone
};

/// Describes a request that the time budget had no room for.
struct LeftOut {
  int64_t line = 0;
  int32_t input_length = 0, output_length = 0;
  int32_t num_computed = 0;  ///< tokens that were computed, or shared, before it was given up
};

struct Report {
  std::string model, cache, pool_cache, prefill_backend, decode_backend;  // pool_cache: empty without pools
  Op prefill_op = Op::kPrefill, decode_op = Op::kDecode;                  ///< what computes attention
  std::string device = "cpu";
  std::string layers = "one layer";                  ///< what was computed, for people
  std::string other_way = "prefill against decode";  ///< the second way in which tokens are computed, for people
  int32_t drafts = 0, ranks = 1;
  bool shared_prefix = false;
  bool sparse = false;
  int32_t threads = 1;
  bool interrupted = false;
  double time_budget = 0.0;  ///< seconds; 0 = none
  std::vector<LeftOut> left_out;
  int64_t total_requests = 0, requests = 0;
  int64_t input_tokens = 0, prefill_tokens = 0, hit_tokens = 0, decode_tokens = 0, decode_rows = 0, steps = 0;
  int64_t evicted_blocks = 0;
  int64_t draft_tokens = 0, accepted_drafts = 0;
  std::optional<Percentiles> ttft_ms, tpot_ms;
  std::vector<std::pair<Phase, double>> phase_seconds;
  std::vector<OperationTime> operations;  ///< those that were called, in the order of a layer
  double serving_seconds = 0.0;           ///< work only, no idle time
  double wall_seconds = 0.0;
  double prefill_tokens_per_s = 0.0, decode_tokens_per_s = 0.0;
  double gflops = 0.0, prefill_gflops = 0.0, decode_gflops = 0.0, projection_gflops = 0.0;
  double ceiling_share = 0.0;
  Ceilings ceilings;
  int64_t checks = 0;
  double worst_error = 0.0, worst_prefill_decode = 0.0, worst_reference = 0.0;
  int64_t checked_rows = 0;      ///< cached rows and keys that were compared with the activations
  double worst_row_share = 0.0;  ///< the largest of their errors, as a share of what the format allows
  int64_t checked_queries = 0;   ///< of heads, as append_rope left them, compared with the activations
  double worst_query_share = 0.0;
  int64_t checked_outputs = 0;  ///< of heads, as finish_output left them, compared with attention's
  double worst_output_share = 0.0;
  std::vector<std::string> failures;

  /// Returns whether attention was faster than the machine can be: then something disturbed the samples of the
  /// ceilings.
  bool noisy() const { return ceiling_share > 1.02; }
  /// Adds up what the scheduler, the recorder and the checker know.
  void collect(const Scheduler& scheduler, const Recorder& recorder, const CheckLog& log, const Ceilings& best);
  Json to_json() const;
  void print(const Output& output) const;

 private:
  void collect_operations(const Recorder& recorder);
  void print_times(const Output& output) const;
  void print_checks(const Output& output) const;
};

}  // namespace mla::cli::replay

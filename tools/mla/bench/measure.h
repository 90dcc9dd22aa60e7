// SPDX-License-Identifier: Apache-2.0
// Times workloads between samples of the ceilings.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mla/bench/cases.h"
#include "mla/bench/ceilings.h"
#include "mla/bench/gpu.h"
#include "mla/bench/workload.h"

namespace mla::bench {

struct MeasureOptions {
  double min_time = 0.3;      ///< seconds of kernel runs for each case
  int64_t max_runs = 100000;  ///< of each case
  bool cold = false;          ///< flush the caches before every run
  bool refcheck = false;
  uint64_t seed = 1;
};

/// Holds what runs with AMX took while each thread had its core alone, or while all shared theirs with others.
struct TileRuns {
  int64_t runs = 0;
  double median_s = 0;
  double loaded_gflops = 0;  ///< what all threads multiply, with tiles loaded from L1, beside these runs
};

struct Measurement {
  Case description;
  std::string backend;
  std::string plan;
  int64_t runs = 0;
  double median_s = 0, p10_s = 0, p90_s = 0;
  double gflops = 0, gbps = 0;
  /// Names the ceiling: "bf16", "f32", "f32_avx2", "dram", "l3", "memcpy"; on a GPU by the names of GpuCeiling; in the
  /// emulator it is empty.
  std::string ceiling_kind;
  double ceiling = 0;                     ///< GFLOP/s or GB/s, of the samples taken around the runs
  std::optional<double> ceiling_share;    ///< none without a ceiling, or without arithmetic to compare with it
  std::optional<TileRuns> alone, shared;  ///< with AMX; most runs belong to neither where that changes often
  std::optional<double> plan_s;           ///< of the plan's kernels, on a GPU
  int64_t copies = 1;                     ///< of all memory, which the runs take in turns (GPU)
  std::optional<double> error;            ///< against the reference
  std::optional<double> method_error;     ///< where compute is fp8: against the reference with compute = default
  std::string error_text;                 ///< why the error is too large; empty if it is not
  /// Holds the rate (gflops, without arithmetic gbps) against that of the group's first case; for top_k against
  /// std::nth_element of the same rows.
  std::optional<double> ratio;
  std::string target;  ///< "share >= 90.0 %"; empty without one
  std::optional<bool> met;

  /// Returns whether the share is more than the machine can do, give or take the clock: something disturbed the samples
  /// of the ceiling.
  bool noisy() const { return ceiling_share.value_or(0.0) > 1.02; }
};

/// Holds one meter per thread count, so that ceilings and kernels always use the same number; and one per GPU.
class Meters {
 public:
  CeilingMeter& of(int32_t threads);
  GpuMeter& of(const Gpu& gpu);
  /// Returns the meters of the GPUs that something ran on, by device.
  const std::map<std::string, std::unique_ptr<GpuMeter>>& gpus() const { return gpus_; }

 private:
  std::map<int32_t, std::unique_ptr<CeilingMeter>> meters_;
  std::map<std::string, std::unique_ptr<GpuMeter>> gpus_;
};

/// Measures the cases of a group in turns: in each of a few rounds a sample of the ceiling, then a slice of each
/// case's runs. `progress` is told what is going on; what it throws ends the measurement.
std::vector<Measurement> measure(const CaseGroup& group, Meters& meters, const MeasureOptions& options,
                                 const std::function<void(const std::string&)>& progress);

}  // namespace mla::bench

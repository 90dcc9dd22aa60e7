// SPDX-License-Identifier: Apache-2.0
// Estimates how long decode and sparse attention take on GPUs that nobody here has, from the table of steps
// (step_table.h), the plan's rules and datasheets. docs/estimate.md describes the model and its errors.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include "mla/backend.h"

namespace mla::cli {

/// Describes a kind of GPU by its datasheet.
struct GpuKind {
  std::string_view name;
  int32_t arch;
  int32_t num_sms;
  double clock_ghz;       ///< boost clock
  double memory_gbps;     ///< bandwidth
  double mma_flops;       ///< of mma.sync with 16-bit operands and f32 sums, per SM and clock
  double mma_e4m3_flops;  ///< the same with e4m3; 0 where it has no such multiply
  double best_flops;      ///< of its fastest multiplies of 16 bits, per SM and clock
  bool measured;          ///< whether kernels were timed on one
};

std::span<const GpuKind> gpu_kinds();

/// Says what is to be estimated. `problem` has the operation, the cache and the queries.
struct EstimatedWork {
  Problem problem;
  std::string backend;
  int64_t batch = 64;
  int64_t keys = 8192;  ///< that each query attends to
  int32_t kernels = 0;  ///< architecture whose kernels run, in a build with a profile; 0: the GPU's own
};

enum class Bound : uint8_t { kMemory, kLatency, kIssue, kTensor, kShared };

/// Returns "memory", "latency of a warp's instructions", ...
std::string_view name(Bound bound);

struct Estimate {
  std::string unknown;      ///< why there is no estimate; empty if there is one
  int32_t block_rows = 0;   ///< query rows of a block
  double instructions = 0;  ///< of all warps of a block, per key; 0 where the table does not count the kernel
  double multiplies = 0;    ///< the same
  double bytes = 0;         ///< of a key's row in memory
  double step_clocks = 0;   ///< of a step of a block; 0 where only bytes are known
  double steps = 0;         ///< of the worker that has most to do, with the plan's overheads
  double memory_us = 0;     ///< of all bytes
  double ceiling_us = 0;    ///< of bytes at the datasheet's bandwidth, or of multiplies at its rate: the longer one
  double us = 0;
  Bound bound = Bound::kMemory;
};

Estimate estimate(const EstimatedWork& work, const GpuKind& gpu);

/// Returns what the plan's most loaded worker costs, in steps, where all `batch` requests have `steps` steps and
/// `row_blocks` blocks of rows, and how many row lanes it chooses. The rules are those of src/cuda/common/plan.cuh.
struct PlannedCost {
  int64_t steps = 0;
  int32_t row_lanes = 1;
};
PlannedCost planned_cost(int32_t grid, int64_t batch, int32_t row_blocks, int32_t steps);

/// Is a time that was measured, to hold the model against.
struct MeasuredCase {
  std::string_view gpu;  ///< of gpu_kinds()
  std::string_view backend;
  int32_t kernels;  ///< as in EstimatedWork
  Op op;
  CacheFormat cache;
  int32_t heads, q_len, batch, keys;
  double us;
  bool fitted;  ///< whether a constant of the model was fitted to it
};

std::span<const MeasuredCase> measured_cases();
Estimate estimate(const MeasuredCase& measured);
/// Returns the share by which the estimate of a case is too long, negative if it is too short.
double error_of(const MeasuredCase& measured);
/// Returns the largest error of all cases of a backend, without sign; 0 if there is none.
double largest_error(std::string_view backend);

/// Says what is known of the times of an architecture's kernels on its own GPUs: "measured"; "estimated", where the
/// model knows such GPUs and the emulator ran the kernels; or "emulated only".
std::string_view evidence_of(int32_t arch);

/// Prints all that docs/estimate.md has of the model's numbers, as tables of Markdown.
void print_estimate_tables(std::FILE* file);

}  // namespace mla::cli

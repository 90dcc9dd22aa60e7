// SPDX-License-Identifier: Apache-2.0
#include "mla/estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "mla/kv_layout.h"
#include "mla/step_table.h"

namespace mla::cli {
namespace {

// By ncu, 136 multiplies and the 38 loads of their operands took 1,797 clocks of a warp (64 rows, H100, profile sm120,
// 2026-11-23). Without the loads that is 11.8 a multiply, of which 6.8 are at the tensor core.
constexpr double kMultiplyLatency = 5.0;
// Fitted together to the ten cases that are marked so, by the least of their largest errors: the clocks of a warp's
// instruction that does not multiply, and the time of a launch with next to nothing to do, first loads and combine
// included.
constexpr double kInstructionClocks = 5.15;
constexpr double kStartUs = 10.5;
// cuda_sm90's products are not counted: the clocks of its step of 64 keys are fitted to one case each (H100,
// 2026-11-22).
constexpr double kSm90StepClocks = 3450;
constexpr double kSm90QuantizedStepClocks = 4590;
// An H100 reads 3,011 of 3,350 GB/s, an H200 4,320 of 4,800, and an H100 under load runs at 1.70 of 1.83 GHz. Other
// GPUs are taken to be alike.
constexpr double kMemoryShare = 0.90;
constexpr double kClockShare = 0.93;

constexpr int32_t kSchedulers = 4;            // of an SM
constexpr double kSharedBytesPerClock = 128;  // of an SM
constexpr double kMultiplyFlops = 16 * 8 * 16 * 2, kE4m3MultiplyFlops = 16 * 8 * 32 * 2;
constexpr double kMostScores = 1e15;  // so that places on the plan's line fit int64
constexpr int32_t kSm90Keys = 64;     // of a step

/// Returns what all warps of a block execute for one key.
double per_key(int32_t of_warp_and_step) { return static_cast<double>(of_warp_and_step) * kStepWarps / kStepKeys; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Resources {
  double clocks = 0;
  Bound bound = Bound::kLatency;

  void need(double other, Bound of) {
    if (other <= clocks) return;
    clocks = other;
    bound = of;
  }
};

/// Returns how long a warp is at its scheduler's tensor core in each step, waiting or served for `served` clocks, where
/// it spends `elsewhere` clocks on all else and so many warps share the tensor core. This is the mean of a closed
/// queue: a warp finds there what the other warps would leave without it.
double clocks_at_tensor_core(double served, double elsewhere, int32_t warps) {
  double there = 0, found = 0;
  for (int32_t n = 1; n <= warps; ++n) {
    there = served * (1 + found);
    found = n * there / (there + elsewhere);
  }
  return there;
}

/// Returns the clocks of a step, where an SM has `blocks` blocks.
Resources step_of(const StepCount& count, const GpuKind& gpu, int32_t blocks) {
  const double multiply = kMultiplyFlops * kSchedulers / gpu.mma_flops;
  const double e4m3 = gpu.mma_e4m3_flops > 0 ? kE4m3MultiplyFlops * kSchedulers / gpu.mma_e4m3_flops : 0;
  const int32_t multiplies = count.multiplies + count.e4m3, warps = kStepWarps * blocks;
  const double elsewhere = (count.instructions - multiplies) * kInstructionClocks + multiplies * kMultiplyLatency;
  const double at_tensor_core =
      clocks_at_tensor_core(count.multiplies * multiply + count.e4m3 * e4m3, elsewhere, warps / kSchedulers);
  Resources step;
  step.need(elsewhere + at_tensor_core, at_tensor_core > elsewhere ? Bound::kTensor : Bound::kLatency);
  step.need(static_cast<double>(warps) / kSchedulers * count.instructions, Bound::kIssue);
  step.need(warps * count.shared_bytes / kSharedBytesPerClock, Bound::kShared);
  return step;
}

/// Returns the row of the table for a kernel with blocks of so many query rows; null if there is none.
const StepCount* find_count(Kernel kernel, int32_t rows, int32_t arch, int32_t on) {
  for (const int32_t compiled_for : {on, arch})
    for (const StepCount& count : kStepCounts)
      if (count.kernel == kernel && count.rows == rows && count.arch == arch && count.on == compiled_for) return &count;
  return nullptr;
}

/// Returns how many query rows a block of cuda_portable has, by the rules of its decode.cu.
int32_t portable_rows(const EstimatedWork& work, int64_t rows, bool quantized, int32_t arch, int32_t num_sms) {
  const int32_t large = arch == 100 ? 32 : 64;
  if (rows <= 16) return 16;
  if (work.problem.op == Op::kDecode) return large;
  const int64_t small_steps = work.batch * ceil_div(rows, 16) * ceil_div(work.keys, kStepKeys) / num_sms;
  if (small_steps < 4) return 16;
  return quantized && (arch == 86 || arch == 89 || arch == 120) && small_steps < 8 ? 32 : large;
}

/// Returns whether all elements of a row are e4m3, with one scale for the latent channels of a cache.
bool has_one_scale(const KvLayout& layout) {
  return layout.nope.element == DType::kE4M3 && layout.nope.channels_per_scale == 0 &&
         layout.rope.element == DType::kE4M3;
}

std::string unknown_to_table(const EstimatedWork& work) {
  const Problem& problem = work.problem;
  if (problem.op != Op::kDecode && problem.op != Op::kDecodeSparse && problem.op != Op::kPrefillSparse)
    return fmt::format("the model knows absorbed attention only, not {}", name(problem.op));
  if (std::max(problem.d_v, problem.d_qk) > 576 || problem.d_v < 512)
    return fmt::format("the model knows kernels of 512 latent channels only, not head dims {}/{}", problem.d_qk,
                       problem.d_v);
  const DType multiplied = value_dtype(kv_layout(problem.cache).nope.element);
  if (problem.q_dtype != multiplied && problem.q_dtype != DType::kE4M3)
    return fmt::format("the model does not know kernels for queries of {} on {} caches", name(problem.q_dtype),
                       name(problem.cache));
  return {};
}

double row_bytes_of(const Problem& problem) {
  const KvLayout layout = kv_layout(problem.cache);
  return static_cast<double>(row_bytes(problem.cache, problem.d_qk) +
                             (layout.has_footer() ? layout.scale_bytes_per_token : 0));
}

/// Mirrors PlanKernel for requests that are alike, with the SplitCosts of kernels that have none of their own: the
/// model was fitted with these, and others move few batches of equal requests.
class Planner {
 public:
  Planner(int64_t workers, int64_t items, int64_t steps)
      : most_workers_(workers), items_(items), steps_(steps), item_cost_(steps + kUnitOverhead) {}

  int64_t most_cost() const {
    const int64_t total_steps = items_ * steps_;
    const bool thin = total_steps * 4 <= most_workers_ * 3 && steps_ <= kMostThinPortions;
    const int64_t min_share = thin ? 1 : kMinShare;
    const int64_t workers = std::clamp<int64_t>(std::max(total_steps / min_share, items_), 1, most_workers_);
    int64_t best = INT64_MAX;
    if (items_ <= most_workers_) {
      best = item_cost_;
      int64_t portion = std::max((total_steps - 1) / most_workers_ + 1, min_share);
      while (portion < steps_ && items_ * ceil_div(steps_, portion) > most_workers_) ++portion;
      if (portion < steps_) best = std::min(best, portion + kUnitOverhead + 2 * kSplitOverhead);
    }
    const int64_t eighth = items_ * item_cost_ / workers / 8;
    for (const int64_t tolerance : {kWhole, eighth > 1 ? eighth : 2, int64_t{1}})
      best = std::min(best, most_load(workers, tolerance) + (tolerance == kWhole ? 0 : kSplitOverhead));
    return best;
  }

 private:
  static constexpr int64_t kUnitOverhead = 2, kSplitOverhead = 3, kMinShare = 2, kMostThinPortions = 64;
  static constexpr int64_t kWhole = INT32_MAX;
  struct Cut {
    int64_t item, step;
  };

  Cut cut(int64_t worker, int64_t workers, int64_t tolerance) const {
    const int64_t total = items_ * item_cost_, place = worker * total / workers;
    if (place >= total) return {items_, 0};
    const int64_t item = place / item_cost_, offset = place % item_cost_, rest = steps_ - offset;
    const bool to_begin = offset <= tolerance && (rest > tolerance || offset < rest);
    if (offset == 0 || (rest > 0 && to_begin)) return {item, 0};
    if (rest <= tolerance) return {item + 1, 0};
    return {item, offset};
  }

  int64_t most_load(int64_t workers, int64_t tolerance) const {
    int64_t most = 0;
    Cut begin = cut(0, workers, tolerance);
    for (int64_t w = 0; w < workers; ++w) {
      const Cut end = cut(w + 1, workers, tolerance);
      const bool begins_inside = begin.step > 0, ends_inside = end.step > 0;
      const int64_t segments = end.item - begin.item + (ends_inside ? 1 : 0);
      const int64_t partials =
          (begins_inside ? 1 : 0) + (ends_inside && !(begins_inside && begin.item == end.item) ? 1 : 0);
      const int64_t steps = (end.item - begin.item) * steps_ + end.step - begin.step;
      most = std::max(most, steps + segments * kUnitOverhead + partials * kSplitOverhead);
      begin = end;
    }
    return most;
  }

  int64_t most_workers_, items_, steps_, item_cost_;
};

}  // namespace

std::string_view name(Bound bound) {
  switch (bound) {
    case Bound::kMemory: return "memory";
    case Bound::kLatency: return "latency of a warp's instructions";
    case Bound::kIssue: return "issue slots";
    case Bound::kTensor: return "tensor cores";
    case Bound::kShared: return "shared memory";
  }
  return {};
}

PlannedCost planned_cost(int32_t grid, int64_t batch, int32_t row_blocks, int32_t steps) {
  constexpr int32_t kMostRowLanes = 16, kMostWorkers = 1024;
  PlannedCost cost;
  for (int32_t lanes = std::min({row_blocks, grid, kMostRowLanes}); lanes > 1; --lanes) {
    if (row_blocks % lanes != 0 || grid / lanes * lanes * 10 < grid * 9) continue;
    cost.row_lanes = lanes;
    break;
  }
  cost.steps =
      Planner(std::min(grid / cost.row_lanes, kMostWorkers), batch * (row_blocks / cost.row_lanes), steps).most_cost();
  return cost;
}

Estimate estimate(const EstimatedWork& work, const GpuKind& gpu) {
  const Problem& problem = work.problem;
  Estimate result;
  result.unknown = unknown_to_table(work);
  if (!result.unknown.empty()) return result;

  const bool dense = problem.op == Op::kDecode;
  const int64_t rows = problem.num_heads * (dense ? problem.q_len : 1);
  const double scores = static_cast<double>(work.batch) * static_cast<double>(work.keys) * static_cast<double>(rows);
  if (scores > kMostScores) {
    result.unknown = "the model does not know work of more than 1e15 scores";
    return result;
  }
  const bool quantized = is_quantized(kv_layout(problem.cache).nope.element);
  const int32_t arch = work.kernels != 0 ? work.kernels : gpu.arch;
  int32_t blocks = 1, step_keys = kStepKeys;
  Resources step;
  if (work.backend == "cuda_sm90") {
    result.block_rows = 64;
    step_keys = kSm90Keys;
    step.need(quantized ? kSm90QuantizedStepClocks : kSm90StepClocks, Bound::kLatency);
  } else if (work.backend == "cuda_bulk" && rows <= 16 && arch == 90) {
    result.block_rows = 16;  // bound by memory; its steps are not counted
  } else if (work.backend == "cuda_portable" || work.backend == "cuda_fp8") {
    const Kernel kernel = work.backend == "cuda_fp8" ? Kernel::kFp8 : quantized ? Kernel::kQuantized : Kernel::kBf16;
    const StepCount* count = nullptr;
    const int32_t block_rows =
        kernel == Kernel::kFp8 ? (rows <= 16 ? 16 : 64) : portable_rows(work, rows, quantized, arch, gpu.num_sms);
    // Small batches do without the large blocks of e4m3.
    const bool small_batch = block_rows > 16 && work.batch * rows < int64_t{8} * 64;
    if (kernel == Kernel::kQuantized && has_one_scale(kv_layout(problem.cache)) && !small_batch)
      count = find_count(Kernel::kCodes, block_rows == 16 ? 16 : 64, arch, gpu.arch);
    if (count == nullptr) count = find_count(kernel, block_rows, arch, gpu.arch);
    if (count != nullptr) {
      result.block_rows = count->rows;
      result.instructions = per_key(count->instructions);
      result.multiplies = per_key(count->multiplies + count->e4m3);
      blocks = count->blocks;
      step = step_of(*count, gpu, blocks);
    }
  }
  if (result.block_rows == 0) {
    result.unknown =
        fmt::format("the model does not know {} on sm{} for {} query rows of a request", work.backend, arch, rows);
    return result;
  }

  const auto row_blocks = static_cast<int32_t>(ceil_div(rows, result.block_rows));
  const PlannedCost cost =
      planned_cost(gpu.num_sms * blocks, work.batch, row_blocks, static_cast<int32_t>(ceil_div(work.keys, step_keys)));
  // Row lanes read a key at the same time, all but one of them from L2.
  const int32_t passes = row_blocks / cost.row_lanes;
  const double reads = static_cast<double>(work.batch * work.keys * passes);
  const auto dims = static_cast<double>(problem.d_qk + problem.d_v);
  result.bytes = row_bytes_of(problem);
  const double bytes = reads * result.bytes + 2 * static_cast<double>(work.batch * rows) * dims;
  const bool multiplies_e4m3 = work.backend == "cuda_fp8" && gpu.mma_e4m3_flops > 0;
  const double rate = work.backend == "cuda_sm90" ? gpu.best_flops
                      : multiplies_e4m3           ? gpu.mma_e4m3_flops
                                                  : gpu.mma_flops;
  result.ceiling_us = std::max(bytes / gpu.memory_gbps, 2 * scores * dims / (rate * gpu.num_sms * gpu.clock_ghz)) / 1e3;
  result.memory_us = bytes / (gpu.memory_gbps * kMemoryShare) / 1e3;
  result.step_clocks = step.clocks;
  result.steps = static_cast<double>(cost.steps);
  const double computing_us = result.steps * step.clocks / (gpu.clock_ghz * kClockShare) / 1e3;
  result.bound = computing_us > result.memory_us ? step.bound : Bound::kMemory;
  result.us = kStartUs + std::max(computing_us, result.memory_us);
  return result;
}

Estimate estimate(const MeasuredCase& measured) {
  const std::span<const GpuKind> kinds = gpu_kinds();
  const auto gpu =
      std::find_if(kinds.begin(), kinds.end(), [&](const GpuKind& kind) { return kind.name == measured.gpu; });
  if (gpu == kinds.end()) return {.unknown = fmt::format("there is no GPU {} in the table", measured.gpu)};
  EstimatedWork work{.problem = {},
                     .backend = std::string(measured.backend),
                     .batch = measured.batch,
                     .keys = measured.keys,
                     .kernels = measured.kernels};
  work.problem.op = measured.op;
  work.problem.cache = measured.cache;
  work.problem.num_heads = measured.heads;
  work.problem.q_len = measured.q_len;
  return estimate(work, *gpu);
}

double error_of(const MeasuredCase& measured) { return estimate(measured).us / measured.us - 1; }

double largest_error(std::string_view backend) {
  double largest = 0;
  for (const MeasuredCase& measured : measured_cases())
    if (measured.backend == backend) largest = std::max(largest, std::abs(error_of(measured)));
  return largest;
}

}  // namespace mla::cli

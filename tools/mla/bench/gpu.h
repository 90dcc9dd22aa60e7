// SPDX-License-Identifier: Apache-2.0
// Times work on a GPU: graphs of many launches between two events, so that neither the host's part of a launch nor the
// clock shows; and measures the GPU's ceilings, timed the same way in the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mla/bench/workload.h"
#include "mla/device.h"

namespace mla::bench {

enum class GpuCeiling : uint8_t {
  kRead,     ///< reading memory once, GB/s
  kCopy,     ///< copying memory, bytes read plus bytes written, GB/s
  kMma,      ///< mma.sync on bf16 in registers, GFLOP/s
  kMmaE4M3,  ///< mma.sync on e4m3 in registers, GFLOP/s; 0 where the GPU has none
  kWgmma,    ///< wgmma on bf16, GFLOP/s; 0 where the GPU has none
};
inline constexpr GpuCeiling kAllGpuCeilings[] = {GpuCeiling::kRead, GpuCeiling::kCopy, GpuCeiling::kMma,
                                                 GpuCeiling::kMmaE4M3, GpuCeiling::kWgmma};

/// Returns "gpu_read", "gpu_copy", "mma_bf16", "mma_e4m3" or "wgmma_bf16".
std::string_view name(GpuCeiling ceiling);

/// Returns whether code that was compiled for an architecture has e4m3 in mma.sync only by name: of SM90, SM100 and its
/// kin ptxas makes conversions to f16 and products of f16, so that the ceiling lies below that of bf16.
bool converts_e4m3(int32_t arch);
/// Returns the same of the code that a GPU runs, which a build with a profile compiles for another architecture.
bool converts_e4m3(const Gpu& gpu);

/// Holds a stream with what is needed to time it. Throws UsageError with the library's message.
class GpuClock {
 public:
  explicit GpuClock(const Gpu& gpu);
  ~GpuClock();
  GpuClock(const GpuClock&) = delete;
  GpuClock& operator=(const GpuClock&) = delete;

  const Gpu& gpu() const { return gpu_; }
  Stream stream() const { return stream_; }
  /// Captures what `work` puts into the stream; the graph is destroyed with the clock.
  Graph capture(const std::function<void(Stream)>& work);
  /// Returns the seconds that the GPU takes for what `work` puts into the stream.
  double seconds(const std::function<void(Stream)>& work);
  double seconds(Graph graph);

 private:
  Gpu gpu_;
  Stream stream_;
  Event begin_, end_;
  std::vector<Graph> graphs_;
};

/// Measures the ceilings of one GPU. Samples are kept: the median of those taken between the kernels is the fair
/// figure.
class GpuMeter {
 public:
  explicit GpuMeter(const Gpu& gpu);
  ~GpuMeter();
  GpuMeter(const GpuMeter&) = delete;
  GpuMeter& operator=(const GpuMeter&) = delete;

  const Gpu& gpu() const { return clock_.gpu(); }
  /// Takes one sample of every ceiling, some milliseconds each.
  void sample();
  /// Returns the median of all samples so far; takes five if there is none. Returns 0 for what the GPU does not have.
  double median(GpuCeiling ceiling);

 private:
  double sample_once(GpuCeiling ceiling);
  double multiply(Gpu::Multiply how);

  GpuClock clock_;
  size_t bytes_;  // of the memory that is read
  void* memory_ = nullptr;
  void* copy_ = nullptr;
  void* sink_ = nullptr;
  std::map<Gpu::Multiply, int32_t> rounds_;  // that take some milliseconds; 0: none
  std::map<GpuCeiling, std::vector<double>> samples_;
};

/// Times runs of a workload that take turns over enough copies of its memory that none of it is still in the
/// second-level cache.
class GpuTimer {
 public:
  explicit GpuTimer(Workload& workload);

  size_t num_copies() const { return workload_.num_copies(); }
  int64_t runs_per_entry() const { return runs_; }
  /// Appends the seconds of a run to `entries`, one entry for every launch of the graph, until `seconds` are spent or
  /// `most` runs are done.
  void sample(double seconds, int64_t most, std::vector<double>& entries);
  /// Returns the seconds of the plan's kernels.
  double plan_seconds();

 private:
  Workload& workload_;
  GpuClock clock_;
  int64_t runs_ = 0;  // of a graph
  Graph graph_;
};

}  // namespace mla::bench

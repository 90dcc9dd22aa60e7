// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/gpu.h"

#include <algorithm>
#include <cmath>

#include "mla/bench/ceilings.h"
#include "mla/text.h"

namespace mla::bench {
namespace {

using cli::UsageError;

constexpr double kGraphSeconds = 2e-3;    // long against the events at both ends
constexpr double kCeilingSeconds = 5e-3;  // of one sample
constexpr int64_t kMaxNodes = 1000;       // runs of one graph
constexpr size_t kMaxCopies = 512;
// What the second-level cache may still hold of a copy when its turn comes again: at most this share.
constexpr double kCachedShare = 0.1;
constexpr double kMemoryShare = 0.4;               // of the GPU's that copies may take
constexpr int64_t kUnknownL2 = int64_t{64} << 20;  // if the driver does not say
constexpr int32_t kMostRounds = 1 << 24;

void require(const Status& status) {
  if (!status.ok()) throw UsageError("{}", status.message());
}

template <class T>
T require(Result<T> result) {
  require(result.status());
  return std::move(result).value();
}

int64_t l2_bytes(const Gpu& gpu) { return gpu.info().l2_bytes > 0 ? gpu.info().l2_bytes : kUnknownL2; }

// Enough that the cache holds little of what is read next; no more than fit the memory.
size_t copies_needed(const Workload& workload) {
  const Gpu& gpu = *workload.gpu();
  const double passed = static_cast<double>(l2_bytes(gpu)) / kCachedShare / std::max(workload.work().bytes, 1.0);
  const double room =
      kMemoryShare * static_cast<double>(gpu.info().memory_bytes) / static_cast<double>(workload.copy_bytes());
  const double most = std::min(std::floor(room), static_cast<double>(kMaxCopies));
  return static_cast<size_t>(std::max(std::min(std::ceil(passed), most), 1.0));
}

}  // namespace

std::string_view name(GpuCeiling ceiling) {
  switch (ceiling) {
    case GpuCeiling::kRead: return "gpu_read";
    case GpuCeiling::kCopy: return "gpu_copy";
    case GpuCeiling::kMma: return "mma_bf16";
    case GpuCeiling::kMmaE4M3: return "mma_e4m3";
    case GpuCeiling::kWgmma: return "wgmma_bf16";
  }
  return {};
}

bool converts_e4m3(int32_t arch) { return arch >= 90 && arch < 120; }

bool converts_e4m3(const Gpu& gpu) {
  const int32_t arch = gpu.info().arch;
  return converts_e4m3(gpu.emulated() ? arch : gpu_code(arch).compiled_for);
}

GpuClock::GpuClock(const Gpu& gpu)
    : gpu_(gpu),
      stream_(require(gpu.create_stream())),
      begin_(require(gpu.create_event())),
      end_(require(gpu.create_event())) {}

GpuClock::~GpuClock() {
  for (Graph graph : graphs_) static_cast<void>(gpu_.destroy(graph));
  static_cast<void>(gpu_.destroy(begin_));
  static_cast<void>(gpu_.destroy(end_));
  static_cast<void>(gpu_.destroy(stream_));
}

Graph GpuClock::capture(const std::function<void(Stream)>& work) {
  require(gpu_.begin_capture(stream_));
  work(stream_);
  graphs_.push_back(require(gpu_.end_capture(stream_)));
  return graphs_.back();
}

double GpuClock::seconds(const std::function<void(Stream)>& work) {
  require(gpu_.record(begin_, stream_));
  work(stream_);
  require(gpu_.record(end_, stream_));
  require(gpu_.synchronize(end_));
  return static_cast<double>(require(gpu_.elapsed_ms(begin_, end_))) * 1e-3;
}

double GpuClock::seconds(Graph graph) {
  return seconds([&](Stream stream) { require(gpu_.launch(graph, stream)); });
}

GpuMeter::GpuMeter(const Gpu& gpu) : clock_(gpu) {
  // What is read must pass the cache, and take long against the launch.
  const auto wanted = static_cast<size_t>(std::max<int64_t>(8 * l2_bytes(gpu), int64_t{1} << 30));
  bytes_ = std::min(wanted, static_cast<size_t>(gpu.info().memory_bytes / 8)) / 4096 * 4096;
  memory_ = require(gpu.allocate(bytes_));
  copy_ = require(gpu.allocate(bytes_));
  sink_ = require(gpu.allocate(256));
  // Even words: the sums that the kernel folds them into are never odd.
  require(gpu.fill(memory_, 2, bytes_, clock_.stream()));
}

GpuMeter::~GpuMeter() {
  for (void* memory : {memory_, copy_, sink_}) static_cast<void>(clock_.gpu().free(memory));
}

double GpuMeter::multiply(Gpu::Multiply how) {
  const auto time = [&](int32_t rounds, double& flops) {
    Status status;
    const double seconds = clock_.seconds([&](Stream stream) {
      const Result<double> enqueued = gpu().enqueue_multiply(how, rounds, sink_, stream);
      status = enqueued.status();
      if (enqueued.ok()) flops = *enqueued;
    });
    if (status.code() != StatusCode::kUnsupported) require(status);
    return status.ok() ? seconds : 0.0;
  };
  double flops = 0.0;
  if (rounds_.find(how) == rounds_.end()) {
    int32_t rounds = 256;
    double seconds = time(rounds, flops);
    while (seconds > 0.0 && seconds < kCeilingSeconds && rounds < kMostRounds) seconds = time(rounds *= 2, flops);
    rounds_[how] = seconds > 0.0 ? rounds : 0;
  }
  if (rounds_[how] == 0) return 0.0;
  const double seconds = time(rounds_[how], flops);
  return flops / seconds * 1e-9;
}

double GpuMeter::sample_once(GpuCeiling ceiling) {
  // Several at a time: between the events lies more than the kernels.
  constexpr int kPasses = 8;
  const double gigabytes = kPasses * static_cast<double>(bytes_) * 1e-9;
  const auto pass = [&](const auto& enqueue) {
    return clock_.seconds([&](Stream stream) {
      for (int i = 0; i < kPasses; ++i) require(enqueue(stream));
    });
  };
  switch (ceiling) {
    case GpuCeiling::kRead:
      return gigabytes / pass([&](Stream stream) { return gpu().enqueue_read(memory_, bytes_, sink_, stream); });
    case GpuCeiling::kCopy:
      return 2 * gigabytes / pass([&](Stream stream) { return gpu().enqueue_copy(copy_, memory_, bytes_, stream); });
    case GpuCeiling::kMma: return multiply(Gpu::Multiply::kMmaSync);
    case GpuCeiling::kMmaE4M3: return multiply(Gpu::Multiply::kMmaSyncE4M3);
    case GpuCeiling::kWgmma: return multiply(Gpu::Multiply::kWgmma);
  }
  return 0.0;
}

void GpuMeter::sample() {
  for (GpuCeiling ceiling : kAllGpuCeilings) {
    // The first finds cold instructions and low clocks.
    if (samples_[ceiling].empty()) static_cast<void>(sample_once(ceiling));
    samples_[ceiling].push_back(sample_once(ceiling));
  }
}

double GpuMeter::median(GpuCeiling ceiling) {
  if (samples_[ceiling].empty())
    for (int i = 0; i < 5; ++i) sample();
  return median_of(samples_[ceiling]);
}

GpuTimer::GpuTimer(Workload& workload) : workload_(workload), clock_(*workload.gpu()) {
  const size_t copies = copies_needed(workload);
  while (workload.num_copies() < copies) workload.add_copy();
  const auto rounds = static_cast<int64_t>(copies);
  const auto run_all = [&](Stream stream) {
    for (size_t copy = 0; copy < copies; ++copy) workload_.enqueue(copy, stream);
  };
  static_cast<void>(clock_.seconds(run_all));
  const double once = clock_.seconds(run_all) / static_cast<double>(rounds);
  const auto wanted = static_cast<int64_t>(std::ceil(kGraphSeconds / std::max(once, 1e-7)));
  runs_ = std::clamp((wanted + rounds - 1) / rounds * rounds, rounds, std::max(kMaxNodes / rounds * rounds, rounds));
  graph_ = clock_.capture([&](Stream stream) {
    for (int64_t run = 0; run < runs_; ++run) workload_.enqueue(static_cast<size_t>(run) % copies, stream);
  });
  static_cast<void>(clock_.seconds(graph_));
}

void GpuTimer::sample(double seconds, int64_t most, std::vector<double>& entries) {
  double spent = 0.0;
  do {
    const double all = clock_.seconds(graph_);
    entries.push_back(all / static_cast<double>(runs_));
    spent += all;
  } while (spent < seconds && static_cast<int64_t>(entries.size()) * runs_ < most);
}

double GpuTimer::plan_seconds() {
  if (!workload_.has_plan()) return 0.0;
  constexpr int kPlans = 20;
  const Graph graph = clock_.capture([&](Stream stream) {
    for (int i = 0; i < kPlans; ++i) workload_.enqueue_plan(stream);
  });
  std::vector<double> entries;
  for (int i = 0; i < 11; ++i) entries.push_back(clock_.seconds(graph) / kPlans);
  return median_of(entries);
}

}  // namespace mla::bench

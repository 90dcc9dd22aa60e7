// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "mla/bench/refcheck.h"
#include "mla/text.h"
#include "mla/values.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;
// A core that is a thread's alone loads tiles of AMX beside their products. One that is shared does not, and the probe
// falls to a fourth of the peak (docs/kernels/cpu.md).
constexpr double kAloneShare = 0.65, kSharedShare = 0.4;

// Whether the operation only moves bytes: its measure is a copy of them.
bool is_copy(Op op) {
  return op == Op::kAppend || op == Op::kAppendRope || op == Op::kGather || op == Op::kCopyPages ||
         op == Op::kAppendIndexer || op == Op::kCompress || op == Op::kFinishOutput;
}

// What the share of a case is taken of; empty means a copy of the same bytes.
std::optional<Ceiling> ceiling_of(const Workload& workload) {
  const Case& one = workload.description();
  const std::string& backend = workload.backend();
  switch (one.op) {
    case Op::kAppend:
    case Op::kAppendRope:
    case Op::kGather:
    case Op::kCopyPages:
    case Op::kAppendIndexer:
    case Op::kCompress:
    case Op::kFinishOutput: return std::nullopt;
    case Op::kMergeStates:
    case Op::kBlockTableToCsr:
    case Op::kPhysicalSlots:
    case Op::kTopK:
      return workload.work().bytes * 2 <= static_cast<double>(l3_cache_size()) ? Ceiling::kL3 : Ceiling::kDram;
    case Op::kDecode:
    case Op::kDecodeSparse:
    case Op::kPrefill:
    case Op::kPrefillSparse:
    case Op::kIndexerLogits:
    case Op::kIndexerTopK: break;
  }
  // A quantized element is a bf16 one once it is read, and an e4m3 query fits bf16.
  const bool bf16_queries = one.q_dtype == DType::kBF16 || one.q_dtype == DType::kE4M3;
  const bool bf16_keys = !cli::has_cache(one.op) || value_dtype(kv_layout(one.cache).nope.element) == DType::kBF16;
  return arithmetic_ceiling(backend, bf16_queries && bf16_keys);
}

// One case while it is being measured.
struct Subject {
  std::unique_ptr<Workload> workload;
  CeilingMeter* meter = nullptr;
  std::optional<Ceiling> ceiling;
  std::vector<double> seconds;                    // of the runs
  std::vector<std::pair<double, double>> probes;  // of loaded tiles, before each run and after it, GFLOP/s a thread
  std::vector<double> ceiling_samples;            // GFLOP/s or GB/s
  std::vector<double> baseline_seconds;           // std::nth_element on the rows of top_k
  GpuMeter* gpu_meter = nullptr;                  // on a GPU, in place of meter
  std::unique_ptr<GpuTimer> timer;
  std::optional<double> plan_seconds;

  bool emulated() const { return workload->emulated(); }
};

// Whether the ceiling is one of arithmetic.
bool counts_flops(const Subject& subject) {
  return subject.ceiling && *subject.ceiling != Ceiling::kDram && *subject.ceiling != Ceiling::kL3;
}

void sample_ceiling(Subject& subject) {
  if (subject.emulated()) return;  // the emulator's speed says nothing about the GPU's
  if (subject.gpu_meter != nullptr) return subject.gpu_meter->sample();
  if (subject.ceiling) {
    subject.ceiling_samples.push_back(subject.meter->sample(*subject.ceiling));
    return;
  }
  const Workload::CopyPair copy = subject.workload->copy_pair();
  if (copy.bytes == 0) return;
  const double once = median_of(subject.meter->copy_seconds(copy.destination, copy.source, copy.bytes, 3));
  const auto repetitions = static_cast<int32_t>(std::clamp(0.02 / std::max(once, 1e-7), 3.0, 1000.0));
  const double seconds = median_of(subject.meter->copy_seconds(copy.destination, copy.source, copy.bytes, repetitions));
  subject.ceiling_samples.push_back(2.0 * static_cast<double>(copy.bytes) / seconds * 1e-9);
}

void sample_baseline(Subject& subject) {
  const auto* top_k = std::get_if<kit::TopKCase>(&subject.workload->problem());
  if (top_k == nullptr || subject.meter == nullptr) return;
  const TopKParams params = top_k->params();
  const int64_t rows = params.logits.shape[0], columns = params.logits.shape[1];
  std::vector<float> logits;
  for (const double logit : kit::to_dense(params.logits)) logits.push_back(static_cast<float>(logit));
  const auto once = [&] {
    return subject.meter->nth_element_seconds(logits.data(), rows, columns, columns, params.indices.shape[1]);
  };
  for (double spent = 0.0; spent < 0.02;) {
    subject.baseline_seconds.push_back(once());
    spent += std::max(subject.baseline_seconds.back(), 1e-6);
  }
}

void run_slice(Subject& subject, const MeasureOptions& options) {
  const auto begin = Clock::now();
  const double slice = options.min_time / kRounds;
  if (subject.timer != nullptr) return subject.timer->sample(slice, options.max_runs, subject.seconds);
  // The first run after a sample finds other data in the caches and sleeping threads; a long one does not care.
  if (!options.cold && !subject.emulated() && (subject.seconds.empty() || subject.seconds.back() < slice))
    subject.workload->run();
  const bool probing = subject.ceiling == Ceiling::kTiles;
  do {
    if (options.cold && subject.meter != nullptr) subject.meter->flush_caches();
    const double before = probing ? subject.meter->probe_loaded_tiles() : 0.0;
    const auto start = Clock::now();
    subject.workload->run();
    subject.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    if (probing) subject.probes.emplace_back(before, subject.meter->probe_loaded_tiles());
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < slice &&
           static_cast<int64_t>(subject.seconds.size()) < options.max_runs && !subject.emulated());
}

Subject prepare(const Case& one, Meters& meters, const MeasureOptions& options) {
  Subject subject;
  subject.workload = std::make_unique<Workload>(one, options.seed);
  if (subject.emulated()) return subject;
  if (const Gpu* gpu = subject.workload->gpu(); gpu != nullptr) {
    subject.gpu_meter = &meters.of(*gpu);
    return subject;
  }
  subject.meter = &meters.of(subject.workload->context().num_threads());
  subject.ceiling = ceiling_of(*subject.workload);
  return subject;
}

// The peak of what the kernel multiplies by mma.sync: e4m3, where its backend does.
GpuCeiling arithmetic_ceiling(const Subject& subject) {
  const bool e4m3 = subject.workload->numerics().multiplied == Arithmetic::kE4M3;
  return e4m3 && subject.gpu_meter->median(GpuCeiling::kMmaE4M3) > 0.0 ? GpuCeiling::kMmaE4M3 : GpuCeiling::kMma;
}

// Whatever takes a perfect GPU longer bounds the kernel: moving its bytes, or its arithmetic.
void set_gpu_ceiling(const Subject& subject, Measurement& result) {
  const kit::Work& work = subject.workload->work();
  const GpuCeiling moving = is_copy(result.description.op) ? GpuCeiling::kCopy : GpuCeiling::kRead;
  const GpuCeiling multiplying = arithmetic_ceiling(subject);
  const double gbps = subject.gpu_meter->median(moving), gflops = subject.gpu_meter->median(multiplying);
  const bool arithmetic = gflops > 0.0 && gbps > 0.0 && work.flops / gflops > work.bytes / gbps;
  result.ceiling_kind = name(arithmetic ? multiplying : moving);
  result.ceiling = arithmetic ? gflops : gbps;
  const double rate = arithmetic ? result.gflops : result.gbps;
  if (result.ceiling > 0.0 && rate > 0.0) result.ceiling_share = rate / result.ceiling;
  result.runs *= subject.timer->runs_per_entry();
  result.copies = static_cast<int64_t>(subject.timer->num_copies());
  result.plan_s = subject.plan_seconds;
}

// Of the runs before and after which the probes lie in this range.
std::optional<TileRuns> runs_between(const Subject& subject, double least, double most) {
  std::vector<double> seconds, loaded;
  for (size_t i = 0; i < subject.probes.size(); ++i) {
    const auto [before, after] = std::minmax(subject.probes[i].first, subject.probes[i].second);
    if (before < least || after > most) continue;
    seconds.push_back(subject.seconds[i]);
    loaded.push_back(before);
  }
  if (seconds.empty()) return std::nullopt;
  return TileRuns{.runs = static_cast<int64_t>(seconds.size()),
                  .median_s = median_of(seconds),
                  .loaded_gflops = median_of(loaded) * subject.meter->threads()};
}

Measurement summarize(const Subject& subject) {
  Measurement result;
  result.description = subject.workload->description();
  result.backend = subject.workload->backend();
  result.plan = subject.workload->plan_text();
  result.runs = static_cast<int64_t>(subject.seconds.size());
  result.median_s = median_of(subject.seconds);
  result.p10_s = quantile_of(subject.seconds, 0.1);
  result.p90_s = quantile_of(subject.seconds, 0.9);
  const double seconds = std::max(result.median_s, 1e-9);
  result.gflops = subject.workload->work().flops / seconds * 1e-9;
  result.gbps = subject.workload->work().bytes / seconds * 1e-9;
  if (subject.emulated()) return result;
  if (subject.gpu_meter != nullptr) {
    set_gpu_ceiling(subject, result);
    return result;
  }
  result.ceiling_kind = subject.ceiling ? name(*subject.ceiling) : "memcpy";
  // Arithmetic in registers can be disturbed, but never helped, by others; memory is fast when they are idle.
  result.ceiling =
      counts_flops(subject) ? quantile_of(subject.ceiling_samples, 0.9) : median_of(subject.ceiling_samples);
  const double thread_peak = result.ceiling / subject.meter->threads();
  result.alone = runs_between(subject, kAloneShare * thread_peak, HUGE_VAL);
  result.shared = runs_between(subject, 0.0, kSharedShare * thread_peak);
  const double rate = counts_flops(subject) ? result.gflops : result.gbps;
  if (result.ceiling > 0.0 && rate > 0.0) result.ceiling_share = rate / result.ceiling;
  if (!subject.baseline_seconds.empty()) result.ratio = median_of(subject.baseline_seconds) / seconds;
  return result;
}

void judge_target(const Target& target, bool baseline, Measurement& result) {
  std::string text;
  bool met = true;
  const auto demand = [&](std::string_view format, bool reached) {
    text += (text.empty() ? "" : ", ") + std::string(format);
    met = met && reached;
  };
  if (target.min_share)
    demand("share >= " + cli::human_percent(*target.min_share),
           result.ceiling_share.value_or(0.0) >= *target.min_share);
  if (target.max_us) demand(fmt::format("<= {:g} us", *target.max_us), result.median_s * 1e6 <= *target.max_us);
  if (target.min_ratio && (!baseline || result.ratio))
    demand("ratio >= " + cli::human_percent(*target.min_ratio), result.ratio.value_or(0.0) >= *target.min_ratio);
  result.target = text;
  if (!text.empty()) result.met = met;
}

// Of what was achieved: shares of two ceilings would not say which of two backends is faster.
std::optional<double> ratio_of(const Measurement& result, const Measurement& baseline) {
  if (result.gflops > 0.0 && baseline.gflops > 0.0) return result.gflops / baseline.gflops;
  if (result.gflops > 0.0 || baseline.gflops > 0.0 || !(baseline.gbps > 0.0)) return std::nullopt;
  return result.gbps / baseline.gbps;
}

}  // namespace

CeilingMeter& Meters::of(int32_t threads) {
  auto& meter = meters_[threads];
  if (!meter) meter = std::make_unique<CeilingMeter>(threads);
  return *meter;
}

GpuMeter& Meters::of(const Gpu& gpu) {
  auto& meter = gpus_[gpu.name()];
  if (!meter) meter = std::make_unique<GpuMeter>(gpu);
  return *meter;
}

std::vector<Measurement> measure(const CaseGroup& group, Meters& meters, const MeasureOptions& options,
                                 const std::function<void(const std::string&)>& progress) {
  check_memory(group.cases);
  std::vector<Subject> subjects;
  for (const Case& one : group.cases) {
    progress("preparing");
    subjects.push_back(prepare(one, meters, options));
  }
  std::vector<RefcheckResult> checks(subjects.size());
  for (size_t i = 0; options.refcheck && i < subjects.size(); ++i) {
    progress("reference");
    checks[i] = refcheck(*subjects[i].workload);
  }
  for (Subject& subject : subjects) {
    if (subject.gpu_meter == nullptr) continue;
    progress("capturing");
    subject.timer = std::make_unique<GpuTimer>(*subject.workload);
    if (subject.workload->has_plan()) subject.plan_seconds = subject.timer->plan_seconds();
  }
  for (int round = 0; round < kRounds; ++round)
    for (Subject& subject : subjects) {
      // The emulator takes its time, which means little: one run says as much as five.
      if (subject.emulated() && round > 0) continue;
      progress("measuring");
      // A copy shares its memory with the kernel's output, so it comes before the runs, never after the last one.
      sample_ceiling(subject);
      sample_baseline(subject);
      run_slice(subject, options);
      if (subject.ceiling) sample_ceiling(subject);
    }
  std::vector<Measurement> results;
  for (size_t i = 0; i < subjects.size(); ++i) {
    Measurement result = summarize(subjects[i]);
    if (options.refcheck) {
      result.error = checks[i].error;
      result.method_error = checks[i].method_error;
      result.error_text = checks[i].failure;
    }
    if (i > 0 && !result.ratio) result.ratio = ratio_of(result, results.front());
    judge_target(group.target, i == 0, result);
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace mla::bench

// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/ceilings.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>

#include "mla/backend.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

constexpr size_t kMiB = 1024 * 1024;
constexpr size_t kReadStep = 256 * 1024;
constexpr double kChunkSeconds = 150e-6;  // long against a barrier, short against a scheduler's time slice

// Lets the calling thread run wherever the process may, as a context's workers do, though OpenMP may have bound the
// thread that started it.
void use_all_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int32_t processor : usable_processors())
    if (processor < CPU_SETSIZE) CPU_SET(static_cast<size_t>(processor), &set);
  if (CPU_COUNT(&set) > 0) sched_setaffinity(0, sizeof set, &set);
}

// How many of these steps take a chunk's time; the fastest of five counts, for the others may have been preempted.
template <class Step>
int64_t steps_per_chunk(const Step& step) {
  double fastest = kChunkSeconds;
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    step();
    fastest = std::min(fastest, seconds_between(start, Clock::now()));
  }
  return static_cast<int64_t>(std::ceil(kChunkSeconds / std::max(fastest, 1e-7)));
}

}  // namespace

std::string_view name(Ceiling ceiling) {
  switch (ceiling) {
    case Ceiling::kTiles: return "amx";
    case Ceiling::kBf16: return "bf16";
    case Ceiling::kF32: return "f32";
    case Ceiling::kF32Avx2: return "f32_avx2";
    case Ceiling::kDram: return "dram";
    case Ceiling::kL3: return "l3";
  }
  return "";
}

Ceiling arithmetic_ceiling(std::string_view backend, bool bf16) {
  if (bf16 && backend == "cpu_amx") return Ceiling::kTiles;
  if (bf16 && backend == "cpu_avx512_bf16") return Ceiling::kBf16;
  return backend == "cpu_avx2" ? Ceiling::kF32Avx2 : Ceiling::kF32;
}

struct Team::State {
  int32_t threads = 1;
  std::mutex mutex;
  std::condition_variable wake, done;
  const std::function<void(int32_t)>* job = nullptr;
  uint64_t generation = 0;
  int32_t running = 0;
  bool stop = false;
  std::atomic<int32_t> arrived{0};
  std::atomic<uint32_t> phase{0};
  std::vector<std::thread> workers;

  void work(int32_t worker) {
    uint64_t seen = 0;
    while (true) {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      const auto* current = job;
      lock.unlock();
      (*current)(worker);
      lock.lock();
      if (--running == 0) done.notify_one();
    }
  }
};

Team::Team(int32_t threads) : state_(std::make_unique<State>()) {
  state_->threads = std::max(threads, 1);
  for (int32_t worker = 1; worker < state_->threads; ++worker)
    state_->workers.emplace_back([state = state_.get(), worker] {
      use_all_processors();
      state->work(worker);
    });
}

Team::~Team() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

int32_t Team::size() const { return state_->threads; }

void Team::run(const std::function<void(int32_t)>& job) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->job = &job;
    state_->running = state_->threads - 1;
    ++state_->generation;
  }
  state_->wake.notify_all();
  job(0);
  std::unique_lock lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->running == 0; });
}

void Team::barrier() {
  const uint32_t phase = state_->phase.load(std::memory_order_acquire);
  if (state_->arrived.fetch_add(1, std::memory_order_acq_rel) == state_->threads - 1) {
    state_->arrived.store(0, std::memory_order_relaxed);
    state_->phase.store(phase + 1, std::memory_order_release);
    return;
  }
  // More threads than processors must not spin for a whole time slice.
  for (int spin = 0; state_->phase.load(std::memory_order_acquire) == phase; ++spin)
    if (spin > 4096) std::this_thread::yield();
}

CeilingMeter::CeilingMeter(int32_t threads)
    : team_(threads), position_(static_cast<size_t>(team_.size()), 0), l3_position_(position_) {}

double rate_of(const std::vector<Chunk>& workers) {
  Chunk all = workers.front();
  for (size_t worker = 1; worker < workers.size(); ++worker) {
    all.start = std::min(all.start, workers[worker].start);
    all.end = std::max(all.end, workers[worker].end);
    all.work += workers[worker].work;
  }
  return all.work / std::max(seconds_between(all.start, all.end), 1e-9);
}

// `chunk` returns the work it did.
double CeilingMeter::sample_chunks(double seconds, const std::function<double(int32_t)>& chunk) {
  std::vector<std::vector<Chunk>> chunks(static_cast<size_t>(threads()));
  std::atomic<size_t> last{std::numeric_limits<size_t>::max()};
  team_.run([&](int32_t worker) {
    std::vector<Chunk>& own = chunks[static_cast<size_t>(worker)];
    own.reserve(1024);
    const auto begin = Clock::now();
    for (size_t i = 0; i <= last.load(); ++i) {
      team_.barrier();
      const auto start = Clock::now();
      const double work = chunk(worker);
      own.push_back({.start = start, .end = Clock::now(), .work = work});
      // Known to all before the barrier of the next chunk, which therefore is the last.
      if (worker == 0 && last.load() > i + 1 && seconds_between(begin, own.back().end) >= seconds) last.store(i + 1);
    }
  });
  std::vector<double> rates;
  for (size_t i = 0; i < chunks.front().size(); ++i) {
    std::vector<Chunk> workers;
    for (const std::vector<Chunk>& own : chunks) workers.push_back(own[i]);
    rates.push_back(rate_of(workers));
  }
  return quantile_of(std::move(rates), 0.9);
}

double CeilingMeter::sample_flops(double (*kernel)(int64_t), double seconds) {
  constexpr int64_t kStep = 1000;
  const int64_t iterations = kStep * steps_per_chunk([&] { kernel(kStep); });
  return 1e-9 * sample_chunks(seconds, [&](int32_t) { return kernel(iterations); });
}

double CeilingMeter::probe_loaded_tiles() {
  const auto kernel = ceiling_kernels().loaded_tiles;
  if (kernel == nullptr) return 0.0;
  constexpr int64_t kIterations = 300;  // 10 us at the full rate
  std::vector<double> rates(static_cast<size_t>(threads()));
  team_.run([&](int32_t worker) {
    kernel(kIterations / 4);
    const auto start = Clock::now();
    const double flops = kernel(kIterations);
    rates[static_cast<size_t>(worker)] = 1e-9 * flops / std::max(seconds_between(start, Clock::now()), 1e-9);
  });
  return *std::min_element(rates.begin(), rates.end());
}

double CeilingMeter::sample_reads(const Buffer& buffer, bool shared, double seconds) {
  const auto read = ceiling_kernels().read;
  const size_t count = static_cast<size_t>(threads());
  // Threads that share a cache walk all of the buffer, each from its own place, so that no private cache holds it.
  const size_t slice = (shared ? buffer.size() : buffer.size() / count) / kReadStep * kReadStep;
  if (shared) {
    team_.run([&](int32_t) { read(buffer.data(), slice); });
    for (size_t worker = 0; worker < count; ++worker)
      l3_position_[worker] = slice / count * worker / kReadStep * kReadStep;
  }
  std::vector<size_t>& positions = shared ? l3_position_ : position_;
  const auto step = [&](size_t worker) {
    size_t& position = positions[worker];
    read(buffer.data() + (shared ? 0 : worker * slice) + position, kReadStep);
    position = position + kReadStep < slice ? position + kReadStep : 0;
  };
  const int64_t steps = steps_per_chunk([&] { step(0); });
  return 1e-9 * sample_chunks(seconds, [&](int32_t worker) {
           for (int64_t i = 0; i < steps; ++i) step(static_cast<size_t>(worker));
           return static_cast<double>(steps) * static_cast<double>(kReadStep);
         });
}

const Buffer& CeilingMeter::dram_buffer() {
  if (dram_.size() != 0) return dram_;
  // Walked from end to end, a buffer of four times the cache leaves none of its bytes in it. More takes seconds to
  // touch where a virtual machine must first be given the memory (512 MiB 6 s, later runs 0.2 s; 2026-11-27).
  const auto l3 = static_cast<size_t>(l3_cache_size());
  size_t bytes = l3 == 0 ? 512 * kMiB : std::max(128 * kMiB, 4 * l3);
  if (const int64_t available = available_memory(); available > 0)
    bytes = std::min(bytes, static_cast<size_t>(available) / 4);
  bytes = std::max(bytes, kReadStep * static_cast<size_t>(threads()));
  dram_ = Buffer(bytes, true);
  std::memset(dram_.data(), 1, dram_.size());
  return dram_;
}

double CeilingMeter::sample(Ceiling ceiling, double seconds) {
  const CeilingKernels& kernels = ceiling_kernels();
  if (!warm_) {
    warm_ = true;
    sample_flops(kernels.bf16, 0.1);
  }
  double value = 0.0;
  switch (ceiling) {
    case Ceiling::kTiles: value = sample_flops(kernels.tiles != nullptr ? kernels.tiles : kernels.bf16, seconds); break;
    case Ceiling::kBf16: value = sample_flops(kernels.bf16, seconds); break;
    case Ceiling::kF32: value = sample_flops(kernels.f32, seconds); break;
    case Ceiling::kF32Avx2: value = sample_flops(kernels.f32_avx2, seconds); break;
    case Ceiling::kDram: value = sample_reads(dram_buffer(), false, seconds); break;
    case Ceiling::kL3:
      if (l3_.size() == 0) {
        // A quarter of the cache: the rest may be busy with other tenants.
        const auto l3 = static_cast<size_t>(l3_cache_size());
        l3_ = Buffer(std::clamp(l3 / 4 / kMiB * kMiB, 4 * kMiB, 16 * kMiB), true);
        std::memset(l3_.data(), 1, l3_.size());
      }
      value = sample_reads(l3_, true, seconds);
      break;
  }
  samples_[ceiling].push_back(value);
  return value;
}

double CeilingMeter::median(Ceiling ceiling) {
  if (samples_[ceiling].empty())
    for (int i = 0; i < 5; ++i) sample(ceiling);
  return median_of(samples_[ceiling]);
}

std::vector<double> CeilingMeter::copy_seconds(void* destination, const void* source, size_t bytes,
                                               int32_t repetitions) {
  const size_t count = static_cast<size_t>(threads());
  std::vector<std::vector<Chunk>> copies(count, std::vector<Chunk>(static_cast<size_t>(repetitions)));
  const size_t share = (bytes / count + 63) / 64 * 64;
  team_.run([&](int32_t worker) {
    const size_t begin = std::min(bytes, share * static_cast<size_t>(worker));
    const size_t length = static_cast<size_t>(worker) + 1 == count ? bytes - begin : std::min(share, bytes - begin);
    for (Chunk& copy : copies[static_cast<size_t>(worker)]) {
      team_.barrier();
      copy.start = Clock::now();
      std::memcpy(static_cast<std::byte*>(destination) + begin, static_cast<const std::byte*>(source) + begin, length);
      copy.end = Clock::now();
    }
  });
  std::vector<double> seconds;
  for (size_t i = 0; i < static_cast<size_t>(repetitions); ++i) {
    Chunk all = copies.front()[i];
    for (const std::vector<Chunk>& own : copies) {
      all.start = std::min(all.start, own[i].start);
      all.end = std::max(all.end, own[i].end);
    }
    seconds.push_back(seconds_between(all.start, all.end));
  }
  return seconds;
}

double CeilingMeter::nth_element_seconds(const float* values, int64_t rows, int64_t columns, int64_t stride,
                                         int64_t k) {
  std::vector<double> busy(static_cast<size_t>(threads()), 0.0);
  team_.run([&](int32_t worker) {
    std::vector<float> row(static_cast<size_t>(columns));
    for (int64_t i = worker; i < rows; i += threads()) {
      std::copy_n(values + i * stride, columns, row.begin());
      const auto start = Clock::now();
      std::nth_element(row.begin(), row.begin() + std::min(k, columns) - 1, row.end(), std::greater<>());
      busy[static_cast<size_t>(worker)] += seconds_between(start, Clock::now());
    }
  });
  return *std::max_element(busy.begin(), busy.end());
}

void CeilingMeter::flush_caches() {
  const Buffer& buffer = dram_buffer();
  const size_t bytes = std::min(buffer.size(), std::max<size_t>(4 * static_cast<size_t>(l3_cache_size()), 64 * kMiB));
  const size_t share = bytes / static_cast<size_t>(threads()) / kReadStep * kReadStep;
  team_.run(
      [&](int32_t worker) { ceiling_kernels().read(buffer.data() + share * static_cast<size_t>(worker), share); });
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

double quantile_of(std::vector<double> values, double share) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values[std::min(rank, values.size() - 1)];
}

}  // namespace mla::bench

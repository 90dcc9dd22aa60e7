// SPDX-License-Identifier: Apache-2.0
// Measures what this machine can do at best, in the same process and with the same number of threads as the kernels.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "mla/bench/memory.h"

namespace mla::bench {

enum class Ceiling : uint8_t {
  kTiles,    ///< products of AMX's tiles of bf16, GFLOP/s; without AMX the figure of kBf16
  kBf16,     ///< bf16 dot product into f32 registers, GFLOP/s; without that instruction the f32 figure
  kF32,      ///< f32 FMA of the widest instruction set, GFLOP/s
  kF32Avx2,  ///< f32 FMA of AVX2, GFLOP/s; without AVX2 the f32 figure
  kDram,     ///< reading a buffer much larger than the caches, GB/s (10^9 bytes)
  kL3,       ///< reading a buffer that fits the last-level cache, GB/s
};

inline constexpr Ceiling kAllCeilings[] = {Ceiling::kTiles,   Ceiling::kBf16, Ceiling::kF32,
                                           Ceiling::kF32Avx2, Ceiling::kDram, Ceiling::kL3};

std::string_view name(Ceiling ceiling);

/// Returns the ceiling of a CPU backend's products, of operands that are bf16 or not.
Ceiling arithmetic_ceiling(std::string_view backend, bool bf16);

/// Holds threads that start a job together; the calling thread is worker 0, as in a mla::Context.
class Team {
 public:
  explicit Team(int32_t threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int32_t size() const;
  /// Calls job(worker) once on each worker and returns when all are done.
  void run(const std::function<void(int32_t)>& job);
  /// Makes all workers meet here; is called from inside a job.
  void barrier();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What one worker did in one chunk of a sample.
struct Chunk {
  std::chrono::steady_clock::time_point start, end;
  double work = 0;
};

/// Returns what the workers did in a second: all of their work, over the time from the first one's start to the last
/// one's end. A start and an end of each, not of worker 0 alone: with more threads than processors it may wake up when
/// the others are half through.
double rate_of(const std::vector<Chunk>& workers);

/// Takes short samples of the ceilings, each of many chunks of a fraction of a millisecond: one that was preempted does
/// not lower the sample. Samples of one kind are kept: on a machine shared with others the median of many, taken
/// between the kernels, is the fair figure.
class CeilingMeter {
 public:
  explicit CeilingMeter(int32_t threads);

  int32_t threads() const { return team_.size(); }
  /// Returns what each thread multiplies in a second, in GFLOP/s, while it loads tiles of AMX from L1, in some 20 us;
  /// the least of all threads. 0 without AMX.
  double probe_loaded_tiles();
  /// Runs one sample of about `seconds` and returns the rate (`rate_of`) that nine of ten chunks do not exceed. The
  /// first call warms the processor up.
  double sample(Ceiling ceiling, double seconds = 0.02);
  /// Returns the median of all samples so far; takes five if there is none.
  double median(Ceiling ceiling);
  /// Returns the seconds of each of `repetitions` copies of `bytes`, split evenly over the threads.
  std::vector<double> copy_seconds(void* destination, const void* source, size_t bytes, int32_t repetitions);
  /// Returns the seconds that std::nth_element takes for the k largest of every row of [rows, columns], the rows dealt
  /// out over the threads; it works on copies, which are made beside the clock.
  double nth_element_seconds(const float* values, int64_t rows, int64_t columns, int64_t stride, int64_t k);
  /// Pushes everything else out of the caches.
  void flush_caches();

 private:
  double sample_chunks(double seconds, const std::function<double(int32_t worker)>& chunk);
  double sample_flops(double (*kernel)(int64_t), double seconds);
  double sample_reads(const Buffer& buffer, bool shared, double seconds);
  const Buffer& dram_buffer();

  Team team_;
  bool warm_ = false;
  Buffer dram_, l3_;
  std::vector<size_t> position_;     // where each worker's walk through the DRAM buffer goes on
  std::vector<size_t> l3_position_;  // the same for the buffer that fits the cache
  std::map<Ceiling, std::vector<double>> samples_;
};

/// Returns the middle of the values (the mean of the two middle ones); 0 if there are none.
double median_of(std::vector<double> values);
/// Returns the value below which `share` of the values lie (nearest rank); 0 if there are none.
double quantile_of(std::vector<double> values, double share);

/// Holds loops that do nothing but arithmetic in registers, and one that reads memory. Each of the former returns the
/// floating-point operations it did, about `iterations` times a few hundred.
struct CeilingKernels {
  double (*tiles)(int64_t iterations) = nullptr;         ///< AMX on what tiles hold; null without it
  double (*loaded_tiles)(int64_t iterations) = nullptr;  ///< the same with each operand loaded from L1 for two products
  double (*bf16)(int64_t iterations);
  double (*f32)(int64_t iterations);
  double (*f32_avx2)(int64_t iterations);
  /// Reads [data, data + bytes), bytes a multiple of 512.
  void (*read)(const std::byte* data, size_t bytes);
  std::string_view bf16_name, f32_name;  ///< the instructions, for people
};

/// Returns the loops for the processor this runs on.
const CeilingKernels& ceiling_kernels();

}  // namespace mla::bench

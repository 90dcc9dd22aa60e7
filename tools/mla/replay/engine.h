// SPDX-License-Identifier: Apache-2.0
// Computes the scheduler's steps: makes the activations of the step's tokens, runs the layer on them, checks samples.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/replay/check_log.h"
#include "mla/replay/layer.h"
#include "mla/replay/recorder.h"
#include "mla/replay/scheduler.h"

namespace mla::cli::replay {

struct EngineOptions {
  LayerOptions layer;
  int64_t check_every = 16;  ///< steps with prefill, and steps with decode, between two checked samples; 0 = none
  uint64_t seed = 0;
};

/// Gives every running request a number below that of the seats, for what is kept of it between steps.
class Seats {
 public:
  explicit Seats(int32_t count);
  /// Frees the seats of requests that no longer run, and gives one to each request of the step.
  void update(const Step& step, std::span<const Sequence> sequences);
  int32_t of(int32_t sequence) const { return seats_.at(sequence); }

 private:
  std::map<int32_t, int32_t> seats_;  // by sequence
  std::vector<int32_t> free_;
};

class Engine {
 public:
  virtual ~Engine() = default;

  /// Computes one step. If was_cut_short() returns true afterwards, the step is not done.
  virtual Status run(const Step& step, std::span<const Sequence> sequences) = 0;
  virtual bool was_cut_short() const = 0;
  virtual Recorder& recorder() = 0;
  virtual const CheckLog& checks() const = 0;
};

/// Makes the engine for the model: projections around latent attention, or DeepSeek V4's pools. `context` computes,
/// `reference` is the oracle of the checks. Throws UsageError if the system refuses the memory for a buffer.
std::unique_ptr<Engine> make_engine(const EngineOptions& options, const Context& context, const Context& reference,
                                    const std::atomic<bool>& stop);

/// Returns the bytes of cache and buffers that an engine with these options allocates.
int64_t memory_needed(const EngineOptions& options);

inline bench::Buffer rows_buffer(int64_t rows, int64_t row_elements, size_t element_bytes) {
  return {static_cast<size_t>(rows * row_elements) * element_bytes, /*huge_pages=*/true};
}

/// Returns the seed of an answer token. A draft that is not accepted has another seed, since it is another token than
/// the one that will stand in its place.
constexpr uint64_t answer_seed(uint64_t token_seed, bool accepted) { return accepted ? token_seed : ~token_seed; }

}  // namespace mla::cli::replay

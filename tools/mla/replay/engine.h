// SPDX-License-Identifier: Apache-2.0
// Computes the scheduler's steps: makes the activations of the step's tokens, runs the layer on them, checks samples.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/replay/checker.h"
#include "mla/replay/generator.h"
#include "mla/replay/layer.h"
#include "mla/replay/projector.h"
#include "mla/replay/recorder.h"
#include "mla/replay/scheduler.h"
#include "mla/replay/team.h"

namespace mla::cli::replay {

struct EngineOptions {
  LayerOptions layer;
  int32_t max_batch = 64;
  int64_t check_every = 16;  ///< steps with prefill, and steps with decode, between two checked samples; 0 = none
  uint64_t seed = 0;
};

class Engine {
 public:
  /// `context` computes, `reference` is the oracle of the checks. Buffers that the system refuses are a UsageError.
  Engine(const EngineOptions& options, const Context& context, const Context& reference, const std::atomic<bool>& stop);

  /// Bytes of cache and buffers that an engine with these options allocates.
  static int64_t memory_needed(const EngineOptions& options);

  /// Computes one step. If was_cut_short() afterwards, it is not done.
  Status run(const Step& step, std::span<const Sequence> sequences);
  bool was_cut_short() const { return cut_short_; }

  Recorder& recorder() { return recorder_; }
  const Checker& checker() const { return checker_; }

 private:
  struct TokenJob {
    uint64_t seed;
    int32_t position;
    QueryRow query;
  };
  void generate(const Step& step, std::span<const Sequence> sequences);
  void add_tokens(const Sequence& sequence, int32_t start, int32_t count);
  Status run_prefill();
  Status run_decode();
  Status check(const Step& step, std::span<const Sequence> sequences);
  Status check_prefill(const Step& step, std::span<const Sequence> sequences);
  Status check_decode(const Step& step, std::span<const Sequence> sequences);

  EngineOptions options_;
  Recorder recorder_;
  Team team_;
  Generator generator_;
  Projector projector_;
  Layer layer_;
  Checker checker_;
  bool cut_short_ = false;
  int64_t prefill_steps_ = 0, decode_steps_ = 0;

  bench::Buffer latents_;                                    // [chunk + max_batch, d_qk]
  bench::Buffer q_, o_, lse_;                                // prefill: [chunk, H, ...]
  bench::Buffer q_nope_, q_pe_, absorbed_, o_latent_, out_;  // decode: [max_batch, H, ...]
  // Of the current step, in the order of the latents: prefill's tokens, then decode's.
  std::vector<TokenJob> jobs_;
  std::vector<int64_t> slots_;
  std::vector<TokenRange> prefill_, decode_;
};

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// Records where the time of a step goes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace mla::cli::replay {

enum class Phase : uint8_t {
  kPrefillPrologue,  ///< norms and rotation of keys, and of queries where their heads are as wide; their append
  kAppendKeys,       ///< keys of the indexer, of single tokens
  kCompress,         ///< keys of the indexer, of finished groups of tokens
  kPrefillCompress,  ///< pooled rows and keys of the indexer, of such groups, and with the rows the prologue
  kGather,
  kUpProjection,    ///< latents to keys and values
  kPrefillIndexer,  ///< logits of the keys among which sparse attention chooses
  kPrefillTopK,     ///< the choice of keys, and of candidate blocks
  kPrefillSlots,    ///< the slots in which the chosen keys lie
  kPrefillAttention,
  kPrefillSparse,      ///< absorbed, where the rest of a prompt is up-projected
  kPrefillProjection,  ///< as decode's, around it
  kPrefillFinish,      ///< outputs turned back and quantized for the projection
  kMerge,
  kDecodePrologue,    ///< as prefill's
  kDecodeCompress,    ///< as prefill's
  kDecodeProjection,  ///< queries into the latent space, outputs out of it
  kDecodeIndexer,     ///< these three are as prefill's
  kDecodeTopK,
  kDecodeSlots,
  kDecodeAttention,
  kDecodeFinish,  ///< as prefill's
  kDecodeMerge,   ///< merging of the ranks' states
  kPlan,          ///< page tables, workspaces, plans
  kTransfer,  ///< copies between the host's memory and a GPU's: not part of serving, which would make all on the GPU
  kGenerate,  ///< random activations: not part of serving
  kCheck,     ///< comparison of results: not part of serving
};

inline constexpr Phase kAllPhases[] = {Phase::kPrefillPrologue,
                                       Phase::kAppendKeys,
                                       Phase::kCompress,
                                       Phase::kPrefillCompress,
                                       Phase::kGather,
                                       Phase::kUpProjection,
                                       Phase::kPrefillIndexer,
                                       Phase::kPrefillTopK,
                                       Phase::kPrefillSlots,
                                       Phase::kPrefillAttention,
                                       Phase::kPrefillSparse,
                                       Phase::kPrefillProjection,
                                       Phase::kPrefillFinish,
                                       Phase::kMerge,
                                       Phase::kDecodePrologue,
                                       Phase::kDecodeCompress,
                                       Phase::kDecodeProjection,
                                       Phase::kDecodeIndexer,
                                       Phase::kDecodeTopK,
                                       Phase::kDecodeSlots,
                                       Phase::kDecodeAttention,
                                       Phase::kDecodeFinish,
                                       Phase::kDecodeMerge,
                                       Phase::kPlan,
                                       Phase::kTransfer,
                                       Phase::kGenerate,
                                       Phase::kCheck};
inline constexpr size_t kNumPhases = std::size(kAllPhases);

/// Returns the phase's name: "gather", "up_projection", ...
std::string_view name(Phase phase);
/// Returns whether the phase belongs to serving the requests: only such phases move the replay's clock.
constexpr bool is_serving(Phase phase) {
  return phase != Phase::kTransfer && phase != Phase::kGenerate && phase != Phase::kCheck;
}

/// Adds up seconds and calls by phase and floating-point operations, and keeps the serving phases of the current step.
class Recorder {
 public:
  struct Event {
    Phase phase;
    double start, duration;  // seconds on the serving clock
  };

  /// Calls `f` and books its time.
  template <class F>
  auto time(Phase phase, F&& f) {
    const Span span(*this, phase);
    return std::forward<F>(f)();
  }

  void add_prefill_flops(double flops) { prefill_flops_ += flops; }
  void add_decode_flops(double flops) { decode_flops_ += flops; }
  void add_projection_flops(double flops) { projection_flops_ += flops; }
  /// Moves the serving clock over a time in which nobody had work.
  void skip(double seconds) { serving_seconds_ += seconds; }
  void clear_events() { events_.clear(); }

  double seconds(Phase phase) const { return seconds_[static_cast<size_t>(phase)]; }
  /// Returns how often the phase was timed. Those of an operation are its calls.
  int64_t calls(Phase phase) const { return calls_[static_cast<size_t>(phase)]; }
  /// Returns the serving clock: the seconds of all serving phases, and those that were skipped.
  double serving_seconds() const { return serving_seconds_; }
  double prefill_flops() const { return prefill_flops_; }
  double decode_flops() const { return decode_flops_; }
  double projection_flops() const { return projection_flops_; }
  const std::vector<Event>& events() const { return events_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Span {
    Span(Recorder& owner, Phase timed) : recorder(owner), phase(timed), start(Clock::now()) {}
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() { recorder.book(phase, std::chrono::duration<double>(Clock::now() - start).count()); }
    Recorder& recorder;
    Phase phase;
    Clock::time_point start;
  };
  void book(Phase phase, double seconds);

  std::array<double, kNumPhases> seconds_ = {};
  std::array<int64_t, kNumPhases> calls_ = {};
  double serving_seconds_ = 0.0;
  double prefill_flops_ = 0.0, decode_flops_ = 0.0, projection_flops_ = 0.0;
  std::vector<Event> events_;
};

/// Calls `f`, and books its time if there is a recorder.
template <class F>
auto timed(Recorder* recorder, Phase phase, F&& f) {
  if (recorder == nullptr) return f();
  return recorder->time(phase, std::forward<F>(f));
}

}  // namespace mla::cli::replay

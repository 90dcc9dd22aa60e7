// SPDX-License-Identifier: Apache-2.0
// Lets a replay end in time: predicts what requests will take from what computing has taken so far.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/replay/recorder.h"
#include "mla/replay/scheduler.h"

namespace mla::cli::replay {

/// Holds how much there is to compute: one amount for each quantity that the time grows with.
struct Work {
  enum Kind : size_t {
    kPrefillTokens,  ///< tokens that are made and appended
    kPrefillKeys,    ///< rows that are gathered and projected; those of earlier chunks count again
    kPrefillPairs,   ///< pairs of a query and a key that it sees
    kDecodeKeys,     ///< keys that answer tokens see
    kDecodeSteps,    ///< steps in which a request answers: requests share a step's projections
    kChecks,         ///< checks of computed tokens
    kKinds
  };
  std::array<double, kKinds> amount = {};

  /// Adds the work of requests that run together. Amounts add up; only of the decode steps the larger number counts,
  /// since the requests share steps.
  Work& operator+=(const Work& other);
};

/// work_of() returns what a step computes, work_left() what a request still has to compute; neither counts checks.
Work work_of(const Step& step, std::span<const Sequence> sequences);
Work work_left(const Sequence& sequence, const SchedulerOptions& options);

/// Holds the seconds that each kind of work takes.
using WorkSeconds = std::array<double, Work::kKinds>;
/// Splits the `total` seconds of a step into kinds of work. `before` and `after` are the recorder's states at the
/// step's begin and end. Seconds outside of the phases of one kind count for the prompt tokens if there are some
/// (`with_prefill`), else for the decode steps.
WorkSeconds seconds_by_kind(const Recorder& before, const Recorder& after, double total, bool with_prefill);

/// Leaves out requests that do not fit into the time. Nothing is known before the first step, so that one is always
/// computed.
class TimeBudget {
 public:
  /// Steps with prompt tokens, and steps with answers, are checked every `check_every` steps, or never if that is 0.
  TimeBudget(double seconds, const SchedulerOptions& options, int64_t check_every)
      : seconds_(seconds), options_(options), check_every_(check_every) {}

  /// Takes note of a step: its work, and the seconds that each kind of it took.
  void observe(const Work& work, const WorkSeconds& seconds);
  /// Returns the seconds that the work will take at the speed of the steps that were observed; later ones count more.
  double predict(const Work& work) const;

  /// Returns whether a waiting request may run too, `elapsed` seconds after the start of the replay.
  bool admits(const Sequence& waiting, const Scheduler& scheduler, double elapsed) const;
  /// Gives running requests up, the longest first, until the others fit.
  void cut(Scheduler& scheduler, double elapsed) const;

 private:
  double seconds_;
  SchedulerOptions options_;
  int64_t check_every_;
  WorkSeconds observed_seconds_ = {};
  std::array<double, Work::kKinds> observed_amount_ = {};
};

}  // namespace mla::cli::replay

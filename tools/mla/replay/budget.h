// SPDX-License-Identifier: Apache-2.0
// A replay that must end in time: what requests will take is predicted from what computing has taken so far.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/replay/recorder.h"
#include "mla/replay/scheduler.h"

namespace mla::cli::replay {

/// What computing takes, by what its time grows with.
struct Work {
  enum Kind : size_t {
    kPrefillTokens,  ///< made, appended
    kPrefillKeys,    ///< rows that are gathered and projected, those of earlier chunks again
    kPrefillPairs,   ///< of a query and a key that it sees
    kDecodeKeys,     ///< that answer tokens see
    kDecodeSteps,    ///< in which somebody answers: requests share their projections
    kChecks,         ///< of computed tokens
    kKinds
  };
  std::array<double, kKinds> amount = {};

  /// Both at once.
  Work& operator+=(const Work& other);
};

/// What a step computes, and what a request still has to; their checks apart.
Work work_of(const Step& step, std::span<const Sequence> sequences);
Work work_left(const Sequence& sequence, const SchedulerOptions& options);

/// Seconds by kind of work.
using WorkSeconds = std::array<double, Work::kKinds>;
/// Those of a step that took `total`, of which a recorder booked the difference between two of its states.
WorkSeconds seconds_by_kind(const Recorder& before, const Recorder& after, double total, bool with_prefill);

/// Leaves out what does not fit into the time. Nothing is known before the first step, so that is always computed.
class TimeBudget {
 public:
  /// Steps with prompt tokens, and steps with answers, are checked every `check_every` steps; 0: never.
  TimeBudget(double seconds, const SchedulerOptions& options, int64_t check_every)
      : seconds_(seconds), options_(options), check_every_(check_every) {}

  /// A step that took so long.
  void observe(const Work& work, const WorkSeconds& seconds);
  /// Seconds, at the speed of the steps that were observed; later ones count more.
  double predict(const Work& work) const;

  /// Whether a waiting request may run too, `elapsed` seconds after the start.
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

// SPDX-License-Identifier: Apache-2.0
// Decides what each step computes, by continuous batching. This is pure bookkeeping; time is what the caller says it
// is.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "mla/replay/page_pool.h"
#include "mla/replay/prefix_cache.h"
#include "mla/replay/trace.h"
#include "mla/status.h"

namespace mla::cli::replay {

struct SchedulerOptions {
  int32_t page_size = 64;
  int32_t num_pages = 0;
  int32_t chunk = 4096;               ///< prompt tokens computed per step
  int32_t max_batch = 64;             ///< requests that run at once
  bool as_fast_as_possible = false;   ///< every request has arrived at time 0
  int32_t drafts = 0;                 ///< speculative tokens that are computed beside each answer token
  uint64_t seed = 0;                  ///< decides which drafts are accepted
  bool sharers_side_by_side = false;  ///< answers that begin with the same pages stand next to each other in a step
};

/// A draft is right with this probability if those before it are: about what multi-token prediction reaches.
inline constexpr double kDraftAcceptance = 0.7;

enum class SequenceState : uint8_t { kWaiting, kPrefill, kDecode, kFinished, kLeftOut };

/// Holds the state of one request. Times are milliseconds, NaN until they are known.
struct Sequence {
  const Request* request = nullptr;
  SequenceState state = SequenceState::kWaiting;
  int32_t num_hit = 0;       ///< prompt tokens found in the prefix cache
  int32_t num_computed = 0;  ///< tokens in the cache
  int32_t num_output = 0;    ///< answer tokens so far
  std::vector<int32_t> pages;
  std::vector<PrefixCache::NodeId> chain;
  int32_t num_drafts = 0;    ///< drafts that were computed
  int32_t num_accepted = 0;  ///< drafts that were right
  double arrival_ms = 0.0;
  double admitted_ms = std::numeric_limits<double>::quiet_NaN();
  double first_token_ms = std::numeric_limits<double>::quiet_NaN();
  double finished_ms = std::numeric_limits<double>::quiet_NaN();
};

/// Names the tokens `start` ... `start + count - 1` of a prompt, which are computed in one step.
struct PrefillPiece {
  int32_t sequence = 0;
  int32_t start = 0;
  int32_t count = 0;
};

/// Names the next `count` tokens of an answer, the first of them certain, the others drafts; `accepted` of them stay,
/// and the next step writes over the rest.
struct DecodePiece {
  int32_t sequence = 0;
  int32_t count = 1;
  int32_t accepted = 1;
};

/// Says what one step computes: pieces of prompts and of answers.
struct Step {
  std::vector<PrefillPiece> prefill;
  std::vector<DecodePiece> decode;
  bool empty() const { return prefill.empty() && decode.empty(); }
};

class Scheduler {
 public:
  /// `requests` must be sorted by arrival and outlive the scheduler.
  Scheduler(std::span<const Request> requests, const SchedulerOptions& options);

  /// Refuses options out of range, and a request that the whole pool could not hold.
  static Status check(std::span<const Request> requests, const SchedulerOptions& options);

  /// Returns what to compute at time `now_ms`; an empty step if no request runs and none that has arrived may start.
  /// The step must be completed before the next one is asked for. Requests that `admits`, if given, returns false for
  /// wait on; they are left out once no other request runs.
  Step next(double now_ms, const std::function<bool(const Sequence&)>& admits = {});
  /// Takes note that a step is done.
  void complete(const Step& step, double now_ms);

  /// Leaves a running request out, between two steps.
  void give_up(int32_t index);

  bool done() const { return num_finished_ + num_left_out_ == std::ssize(sequences_); }
  /// Returns when the next waiting request arrives, in milliseconds; infinity if none waits.
  double next_arrival_ms() const;
  int64_t num_finished() const { return num_finished_; }
  int64_t num_running() const { return std::ssize(running_); }
  int64_t num_left_out() const { return num_left_out_; }
  /// Returns the running requests as indices of sequences(), in order of admission.
  std::span<const int32_t> running() const { return running_; }
  /// Returns how many requests have arrived and wait to be admitted.
  int64_t num_queued(double now_ms) const;
  std::span<const Sequence> sequences() const { return sequences_; }
  const PagePool& pool() const { return pool_; }
  const PrefixCache& prefix_cache() const { return cache_; }

 private:
  bool admit(int32_t index, double now_ms);
  DecodePiece next_answer(int32_t index) const;
  void publish_blocks(Sequence& sequence);
  void release(Sequence& sequence);
  void leave_out(Sequence& sequence);

  SchedulerOptions options_;
  bool share_;  // whether blocks are shared: they are if a block is a whole number of pages
  PagePool pool_;
  PrefixCache cache_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> running_;  // in order of admission
  std::vector<int32_t> waiting_;  // in order of arrival
  int64_t num_finished_ = 0, num_left_out_ = 0;
};

}  // namespace mla::cli::replay

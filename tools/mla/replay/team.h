// SPDX-License-Identifier: Apache-2.0
// Runs what happens between the library's calls, random activations and projections, on several workers. They sleep
// while the library computes, so that its threads have the processors to themselves.
#pragma once

#include <cstdint>
#include <functional>

#include "mla/bench/ceilings.h"

namespace mla::cli::replay {

class Team {
 public:
  using Task = std::function<void(int64_t task, int32_t worker)>;

  /// Makes a team of `size` workers; the calling thread is worker 0. On each of them oneDNN uses that thread alone.
  explicit Team(int32_t size);

  int32_t size() const { return team_.size(); }
  /// Calls f(task, worker) for every task from 0 to count - 1 and returns when all are done; throws what one threw.
  void run(int64_t count, const Task& f);

 private:
  bench::Team team_;
};

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// Workers for what happens between the library's calls: random activations and projections. They sleep while the
// library computes, so that its threads have the processors to themselves.
#pragma once

#include <cstdint>
#include <functional>

#include "mla/bench/ceilings.h"

namespace mla::cli::replay {

class Team {
 public:
  using Task = std::function<void(int64_t task, int32_t worker)>;

  /// `size` workers; the calling thread is worker 0. On each of them oneDNN stays on its own thread.
  explicit Team(int32_t size);

  int32_t size() const { return team_.size(); }
  /// Calls f(task, worker) for every task from 0 to count - 1 and returns when all are done; throws what one threw.
  void run(int64_t count, const Task& f);

 private:
  bench::Team team_;
};

}  // namespace mla::cli::replay

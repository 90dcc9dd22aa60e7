// SPDX-License-Identifier: Apache-2.0
// A TaskList is a schedule in the workspace, with the loop in which workers take their tasks from it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/implementation.h"
#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "cpu/lse.h"
#include "plan/schedule.h"

namespace mla::cpu {

class TaskList {
 public:
  /// Holds the room of a list. It is kept in the workspace, so that `run` finds the layout that `plan` made.
  struct Capacity {
    int32_t tasks = 0;
    int32_t partials = 0;
  };

  TaskList(Carver& carver, const Capacity& capacity);

  /// Returns the capacity of the list at the start of a workspace.
  static Capacity stored_capacity(const std::byte* workspace);

  /// Copies a schedule that fits the capacity, and returns its description.
  core::PlanSummary store(const schedule::Schedule& schedule, const TileShape& shape);

  int32_t num_partials() const { return header_->num_partials; }

  /// Calls f(task, worker) for every task. Which worker gets which task may vary from run to run; what a task computes
  /// does not depend on it.
  template <class F>
  void for_each(core::ThreadPool& pool, const F& f) const {
    header_->next_group.store(0, std::memory_order_relaxed);
    pool.run(
        [&](int32_t worker) {
          for (;;) {
            const int32_t group = header_->next_group.fetch_add(1, std::memory_order_relaxed);
            if (group >= header_->num_groups) return;
            for (int32_t i = group_begin_[group]; i < group_begin_[group + 1]; ++i) f(tasks_[i], worker);
          }
        },
        header_->num_groups);
  }

 private:
  struct Header {
    Capacity capacity;
    int32_t num_tasks, num_groups, num_partials;
    alignas(64) std::atomic<int32_t> next_group;
  };

  Header* header_;
  schedule::Task* tasks_;
  int32_t* group_begin_;
  Capacity capacity_;
};

}  // namespace mla::cpu

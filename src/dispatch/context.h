// SPDX-License-Identifier: Apache-2.0
// What a context and a plan hold.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/thread_pool.h"
#include "dispatch/select.h"
#include "dispatch/tables.h"
#include "mla/plan.h"

namespace mla {
namespace dispatch {

/// The last few selections of an operation without a plan: its `run` must not allocate, and the verdicts of rows that
/// cannot run a problem do.
template <class Row>
class SelectionCache {
 public:
  const Row* find_or_select(const Problem& problem, std::string_view force, Status& error) {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_)
      if (entry.row != nullptr && entry.problem == problem) return entry.row;
    const Row* row = select(table<Row>(), problem, force, error);
    if (row != nullptr) entries_[next_++ % entries_.size()] = {problem, row};
    return row;
  }

 private:
  struct Entry {
    Problem problem;
    const Row* row = nullptr;
  };
  std::mutex mutex_;
  std::array<Entry, 8> entries_;
  size_t next_ = 0;
};

}  // namespace dispatch

struct Context::Impl {
  Impl(int32_t num_threads, std::span<const int32_t> affinity, std::string forced)
      : pool(num_threads, affinity), backend(std::move(forced)) {}

  core::ThreadPool pool;
  const std::string backend;
  dispatch::SelectionCache<dispatch::MergeStatesRow> merge_states;
  dispatch::SelectionCache<dispatch::AppendRow> append;
  dispatch::SelectionCache<dispatch::GatherRow> gather;
};

struct Plan::Impl {
  std::variant<const dispatch::DecodeRow*, const dispatch::PrefillRow*> row;
  int32_t num_threads = 1;
  std::vector<int64_t> shape;  // what `run` must find again, and
  std::vector<int32_t> q_len;  // the lengths of every request
  std::vector<int32_t> kv_len;
  std::span<std::byte> workspace;  // aligned part of the caller's
  dispatch::PlanSummary summary;
};

}  // namespace mla

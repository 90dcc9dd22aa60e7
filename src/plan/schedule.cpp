// SPDX-License-Identifier: Apache-2.0
#include "plan/schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>

namespace mla::schedule {
namespace {

/// A split has at least kMinSplitKeys keys. Splits shorter than kCoarseBlocks key blocks begin at multiples of
/// kFineAlignment keys, longer ones at multiples of a key block. All three were chosen without a recorded measurement.
constexpr int32_t kMinSplitKeys = 32;
constexpr int32_t kFineAlignment = 16;
constexpr int32_t kCoarseBlocks = 4;
/// A unit is cut into at most this many splits (chosen without a recorded measurement).
constexpr double kMaxSplits = 1024;
constexpr double kWorthwhile = 0.99;  // a makespan counts as shorter if it is at most this share of another

int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0 ? 1 : 0); }
int32_t round_up(int32_t a, int32_t b) { return ceil_div(a, b) * b; }

int32_t num_row_groups(const CostModel& cost, int32_t num_rows) { return ceil_div(num_rows, cost.group_rows); }

/// Returns the keys per split when a unit is cut into about `num_splits` splits.
int32_t split_length(int32_t num_keys, int32_t num_splits, int32_t key_block) {
  const int32_t keys = ceil_div(num_keys, num_splits);
  const int32_t alignment = keys >= kCoarseBlocks * key_block ? key_block : kFineAlignment;
  return std::max(kMinSplitKeys, round_up(keys, alignment));
}

/// Holds a block of rows of a sequence, over all keys that at least one of the rows sees.
struct Unit {
  const Sequence& sequence;
  int32_t row_begin;
  int32_t row_count;
  KeyRange keys;
};

/// Cuts the unit every `keys_per_split` keys, and adds the tasks and their costs.
void add_tasks(const Unit& unit, int32_t keys_per_split, const CostModel& cost, Schedule& schedule,
               std::vector<double>& costs) {
  const int32_t num_splits = std::max(1, ceil_div(unit.keys.count(), keys_per_split));
  const int32_t slot = num_splits > 1 ? schedule.num_partials : -1;
  for (int32_t i = 0; i < num_splits; ++i) {
    const int32_t begin = unit.keys.begin + i * keys_per_split;
    const int32_t end = std::min(unit.keys.end, begin + keys_per_split);
    schedule.tasks.push_back({.request = unit.sequence.request,
                              .head = unit.sequence.head,
                              .row_begin = unit.row_begin,
                              .row_count = unit.row_count,
                              .kv_begin = begin,
                              .kv_end = end,
                              .split_idx = i,
                              .num_splits = num_splits,
                              .partial_slot = slot});
    const double split_cost = num_splits > 1 ? cost.per_split_group * num_row_groups(cost, unit.row_count) : 0.0;
    costs.push_back(task_cost(cost, unit.row_count, end - begin) + split_cost);
  }
  if (num_splits > 1) schedule.num_partials += num_splits;
}

/// Orders tasks by cost, the largest first. Tasks of one sequence read the same keys and stay together, unless that
/// makes the makespan more than 1 % longer. `owners` holds the sequence of each task.
void order_tasks(Schedule& schedule, std::vector<double>& costs, const std::vector<int32_t>& owners,
                 int32_t num_workers) {
  using Index = size_t;
  const auto sorted = [&](const auto& key) {
    std::vector<Index> order(costs.size());
    std::iota(order.begin(), order.end(), Index{0});
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return key(a) < key(b); });
    return order;
  };
  const auto in_order = [](const auto& values, const std::vector<Index>& order) {
    auto result = values;
    std::transform(order.begin(), order.end(), result.begin(), [&](Index i) { return values[i]; });
    return result;
  };
  std::vector<Index> order = sorted([&](Index i) { return -costs[i]; });
  if (std::adjacent_find(owners.begin(), owners.end()) != owners.end()) {
    std::vector<double> longest(static_cast<Index>(owners.back()) + 1);  // largest cost of a task of each sequence
    for (Index i = 0; i < costs.size(); ++i) {
      double& cost = longest[static_cast<Index>(owners[i])];
      cost = std::max(cost, costs[i]);
    }
    std::vector<Index> together =
        sorted([&](Index i) { return std::tuple(-longest[static_cast<Index>(owners[i])], owners[i], -costs[i]); });
    if (kWorthwhile * simulate(in_order(costs, together), num_workers) <= simulate(in_order(costs, order), num_workers))
      order = std::move(together);
  }
  schedule.tasks = in_order(schedule.tasks, order);
  costs = in_order(costs, order);
}

/// Joins small neighbouring tasks to groups, so that taking a group from the shared counter costs little beside its
/// work.
void group_tasks(Schedule& schedule, const std::vector<double>& costs, int32_t num_workers) {
  constexpr double kGroupsPerWorker = 64;  // chosen without a recorded measurement
  const double least = schedule.total_cost / (num_workers * kGroupsPerWorker);
  schedule.group_begin.assign(1, 0);
  double sum = 0.0;
  for (size_t i = 0; i < costs.size(); ++i) {
    sum += costs[i];
    if (sum < least && i + 1 < costs.size()) continue;
    schedule.group_begin.push_back(static_cast<int32_t>(i + 1));
    sum = 0.0;
  }
}

/// Says how finely a batch is cut: into blocks of at most `max_rows` rows, and into tasks that cost little more than
/// `largest_task` (0: nothing is split).
struct Cut {
  int32_t max_rows;
  double largest_task;
};

Schedule schedule_with_cut(std::span<const Sequence> sequences, const SplitOptions& options, const Cut& cut) {
  Schedule schedule;
  std::vector<double> costs;
  std::vector<int32_t> owners;  // the sequence of each task
  schedule.tasks.reserve(sequences.size());
  costs.reserve(sequences.size());
  owners.reserve(sequences.size());
  for (const Sequence& sequence : sequences) {
    const int32_t block = even_block_rows(sequence.num_rows(), cut.max_rows, options.cost.group_rows);
    for (int32_t row = 0; row < sequence.num_rows(); row += block) {
      const int32_t count = std::min(block, sequence.num_rows() - row);
      const KeyRange range{.begin = visible_keys(sequence, row).begin,
                           .end = visible_keys(sequence, row + count - 1).end};
      const Unit unit{sequence, row, count, {range.begin, range.begin + range.count()}};
      int32_t keys = std::max(1, range.count());
      if (options.split_keys && options.batch_invariant) {
        keys = split_length(keys, invariant_num_splits(keys), options.key_block);
      } else if (options.split_keys && cut.largest_task > 0.0) {
        const double whole = task_cost(options.cost, unit.row_count, range.count());
        const auto num_splits = static_cast<int32_t>(std::min(kMaxSplits, whole / cut.largest_task + 0.5));
        if (num_splits > 1) keys = split_length(keys, num_splits, options.key_block);
      }
      add_tasks(unit, keys, options.cost, schedule, costs);
      owners.resize(costs.size(), static_cast<int32_t>(&sequence - sequences.data()));
    }
  }
  order_tasks(schedule, costs, owners, options.num_workers);
  for (double cost : costs) schedule.total_cost += cost;
  schedule.makespan = simulate(costs, options.num_workers);
  group_tasks(schedule, costs, options.num_workers);
  return schedule;
}

}  // namespace

int32_t invariant_num_splits(int32_t num_keys) {
  return std::clamp(num_keys / kInvariantSplitKeys, 1, kInvariantMaxSplits);
}

double task_cost(const CostModel& cost, int32_t num_rows, int32_t num_keys) {
  const int32_t groups = num_row_groups(cost, num_rows);
  return (groups + cost.per_key) * num_keys + cost.per_task_group * groups;
}

double simulate(std::span<const double> costs, int32_t num_workers) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int32_t i = 0; i < num_workers; ++i) free_at.push(0.0);
  double last = 0.0;
  for (double cost : costs) {
    const double end = free_at.top() + cost;
    free_at.pop();
    free_at.push(end);
    last = std::max(last, end);
  }
  return last;
}

int32_t even_block_rows(int32_t num_rows, int32_t max_rows, int32_t group_rows) {
  const int32_t blocks = std::max(1, ceil_div(num_rows, max_rows));
  return std::min(max_rows, round_up(ceil_div(num_rows, blocks), group_rows));
}

int32_t query_position(const Sequence& sequence, int32_t row) {
  return sequence.kv_len - sequence.q_len + row / sequence.rows_per_token;
}

KeyRange visible_keys(const Sequence& sequence, int32_t row) {
  const int64_t position = query_position(sequence, row);
  const int64_t end = sequence.causal ? std::clamp<int64_t>(position + 1, 0, sequence.kv_len) : sequence.kv_len;
  const int64_t begin =
      sequence.window_left < 0 ? 0 : std::clamp<int64_t>(position - sequence.window_left, 0, sequence.kv_len);
  const auto local = [&](int64_t length) {
    return static_cast<int32_t>(sequence.share.world == 1 ? length : local_length(sequence.share, length));
  };
  return {local(begin), local(end)};
}

int64_t max_tasks(int64_t num_rows, int64_t num_sequences, const SplitOptions& options) {
  const int32_t least_rows = std::min(options.max_rows, kMinBlockRows);
  return num_rows / least_rows + num_sequences + int64_t{kMaxPartialsPerWorker} * options.num_workers;
}

Schedule make_schedule(std::span<const Sequence> sequences, const SplitOptions& options) {
  Schedule best = schedule_with_cut(sequences, options, {options.max_rows, 0.0});
  if (options.batch_invariant || options.num_workers == 1) return best;

  // Finer cuts balance better and cost more. Each candidate that shortens the simulated makespan by more than 1 % is
  // taken, until at most 1 % is left to gain.
  constexpr double kTasksPerWorker[] = {0, 1, 2, 4, 8};
  const double share = best.total_cost / options.num_workers;
  for (int32_t rows = options.max_rows; rows >= std::min(kMinBlockRows, options.max_rows); rows /= 2)
    for (double tasks : kTasksPerWorker) {
      if (best.makespan * kWorthwhile <= share) return best;
      if (tasks > 0 && !options.split_keys) break;
      Schedule finer = schedule_with_cut(sequences, options, {rows, tasks > 0 ? share / tasks : 0.0});
      if (finer.num_partials > kMaxPartialsPerWorker * options.num_workers) break;
      if (finer.makespan < kWorthwhile * best.makespan) best = std::move(finer);
    }
  return best;
}

}  // namespace mla::schedule

// SPDX-License-Identifier: Apache-2.0
// Makes the schedule of the CPU: cuts a batch into tasks, and orders the tasks for the workers. All functions are pure:
// the same lengths and the same number of workers give the same schedule.
//
// A *unit* is a block of query rows of one sequence over all keys that they see. Where units leave workers idle, rows
// are cut into smaller blocks, and units are split along their keys; their partial states are then merged in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/context_parallel.h"

namespace mla::schedule {

/// Stands for the work on rows row_begin ... row_begin + row_count - 1 of a request (in prefill, of one head of it)
/// with keys kv_begin ... kv_end - 1.
struct Task {
  int32_t request = 0;
  int32_t head = 0;  // prefill only
  int32_t row_begin = 0, row_count = 0;
  int32_t kv_begin = 0, kv_end = 0;
  int32_t split_idx = 0, num_splits = 1;
  int32_t partial_slot = -1;  // first of the unit's num_splits consecutive partial states; -1 if it is not split
};

/// Holds query rows that attend to the same keys: a request (decode: rows = queries x heads), or one head of it
/// (prefill).
struct Sequence {
  int32_t request = 0;
  int32_t head = 0;            // prefill only
  int32_t q_len = 0;           // query tokens
  int32_t rows_per_token = 1;  // in decode the number of heads
  int32_t kv_len = 0;
  bool causal = true;
  int32_t window_left = -1;    // keys that a query sees before its own position; -1 for all
  ContextParallel share = {};  // kv_len counts the tokens of all ranks, keys are those of this rank

  int32_t num_rows() const { return q_len * rows_per_token; }
};

/// Holds keys begin ... end - 1.
struct KeyRange {
  int32_t begin = 0, end = 0;

  int32_t count() const { return end > begin ? end - begin : 0; }
};

/// Returns the position of a row's query in its request: the last query has the last position.
int32_t query_position(const Sequence& sequence, int32_t row);

/// Returns the keys that a row of the sequence sees.
KeyRange visible_keys(const Sequence& sequence, int32_t row);

/// Holds the costs of a task. The unit is one row group times one key. docs/kernels/cpu.md says from which measurements
/// the numbers come (two cores of an AMD EPYC, Zen 4, 2026-11-20).
struct CostModel {
  int32_t group_rows = 16;      // rows that are computed together
  double per_key = 0.08;        // cost of loading a key, for any number of rows
  double per_task_group = 20;   // cost of packing queries and writing outputs, per row group
  double per_split_group = 75;  // cost of handing a partial state to another core and of merging it, per row group
};

struct SplitOptions {
  int32_t num_workers = 1;
  int32_t max_rows = 128;        // most rows of a unit
  int32_t key_block = 64;        // splits of at least four key blocks begin at multiples of it
  bool split_keys = true;        // if false, a unit is one task
  bool batch_invariant = false;  // cuts depend on the sequence's own lengths alone, not on the batch and the workers
  CostModel cost = {};
};

/// Holds tasks in the order in which workers take them. A worker takes a whole group of tasks at a time.
struct Schedule {
  std::vector<Task> tasks;
  std::vector<int32_t> group_begin;  // [num_groups + 1], indices into tasks
  int32_t num_partials = 0;          // partial states of all split units
  double makespan = 0.0;             // predicted time, in the cost model's unit
  double total_cost = 0.0;

  int32_t num_groups() const { return static_cast<int32_t>(group_begin.size()) - 1; }
};

/// There are at most this many partial states per worker, unless batch_invariant is set. The limit was chosen without a
/// recorded measurement.
inline constexpr int32_t kMaxPartialsPerWorker = 16;
/// Rows are not cut into smaller blocks than this to balance a batch (chosen without a recorded measurement).
inline constexpr int32_t kMinBlockRows = 32;
/// With batch_invariant a split has this many keys, or more where kInvariantMaxSplits splits would not suffice. Both
/// were chosen without a recorded measurement.
inline constexpr int32_t kInvariantSplitKeys = 2048;
inline constexpr int32_t kInvariantMaxSplits = 8;

/// Returns into how many splits batch_invariant cuts a unit with this many keys.
int32_t invariant_num_splits(int32_t num_keys);

/// Returns the cost of `num_rows` rows over `num_keys` keys as one task.
double task_cost(const CostModel& cost, int32_t num_rows, int32_t num_keys);

/// Cuts the sequences into tasks and orders them.
Schedule make_schedule(std::span<const Sequence> sequences, const SplitOptions& options);

/// Returns an upper bound on the tasks of a schedule for `num_rows` rows in `num_sequences` sequences. It does not hold
/// with batch_invariant.
int64_t max_tasks(int64_t num_rows, int64_t num_sequences, const SplitOptions& options);

/// Returns the time until `num_workers` workers have done tasks of these costs, where each worker takes the next task
/// when it becomes free.
double simulate(std::span<const double> costs, int32_t num_workers);

/// Returns the rows of a block when rows are cut into blocks of at most `max_rows`, as evenly as multiples of
/// `group_rows` allow.
int32_t even_block_rows(int32_t num_rows, int32_t max_rows, int32_t group_rows);

}  // namespace mla::schedule

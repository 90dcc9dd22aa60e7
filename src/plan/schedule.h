// SPDX-License-Identifier: Apache-2.0
// How a batch is cut into tasks and the tasks are ordered for the workers. Pure functions: the same lengths and the
// same number of workers give the same schedule.
//
// A *unit* is a block of query rows of one sequence over all the keys it sees. Where units leave workers idle, rows are
// cut into smaller blocks, and units split along their keys, their partial states merged in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/context_parallel.h"

namespace mla::schedule {

/// Rows [row_begin, row_begin + row_count) of a request (of one head, in prefill) with keys [kv_begin, kv_end).
struct Task {
  int32_t request = 0;
  int32_t head = 0;  // prefill only
  int32_t row_begin = 0, row_count = 0;
  int32_t kv_begin = 0, kv_end = 0;
  int32_t split_idx = 0, num_splits = 1;
  int32_t partial_slot = -1;  // first partial state of the unit, which owns num_splits consecutive ones; -1: not split
};

/// Query rows that attend to the same keys: a request (decode: rows = queries x heads) or one head of it (prefill).
struct Sequence {
  int32_t request = 0;
  int32_t head = 0;            // prefill only
  int32_t q_len = 0;           // query tokens
  int32_t rows_per_token = 1;  // decode: heads
  int32_t kv_len = 0;
  bool causal = true;
  int32_t window_left = -1;    // keys before the query's own position; -1: all
  ContextParallel share = {};  // kv_len counts the tokens of all ranks, keys are those of this one

  int32_t num_rows() const { return q_len * rows_per_token; }
};

/// Keys [begin, end).
struct KeyRange {
  int32_t begin = 0, end = 0;

  int32_t count() const { return end > begin ? end - begin : 0; }
};

/// Position of a row's query in its request, bottom-right aligned.
int32_t query_position(const Sequence& sequence, int32_t row);

/// Keys that a row of the sequence sees.
KeyRange visible_keys(const Sequence& sequence, int32_t row);

/// What a task costs, in units of (row group x key): docs/kernels/cpu.md says where the numbers come from.
struct CostModel {
  int32_t group_rows = 16;      // rows computed together
  double per_key = 0.08;        // loading a key, whatever the rows
  double per_task_group = 20;   // packing queries and writing outputs, per row group
  double per_split_group = 75;  // handing one partial state to another processor and merging it, per row group
};

struct SplitOptions {
  int32_t num_workers = 1;
  int32_t max_rows = 128;        // of a unit
  int32_t key_block = 64;        // splits longer than a few of these fall on their multiples
  bool split_keys = true;        // false: a unit is one task
  bool batch_invariant = false;  // cut by the sequence's own lengths alone, whatever the batch and the workers
  CostModel cost = {};
};

/// Tasks in the order in which workers take them, cut into groups: a worker takes a whole group at a time.
struct Schedule {
  std::vector<Task> tasks;
  std::vector<int32_t> group_begin;  // [num_groups + 1] into tasks
  int32_t num_partials = 0;          // partial states of row blocks
  double makespan = 0.0;             // predicted, in the cost model's units
  double total_cost = 0.0;

  int32_t num_groups() const { return static_cast<int32_t>(group_begin.size()) - 1; }
};

/// More partial states than this times the workers never arise, unless batch_invariant is set.
inline constexpr int32_t kMaxPartialsPerWorker = 16;
/// Row blocks are not cut below this to balance a batch.
inline constexpr int32_t kMinBlockRows = 32;
/// Keys per split under batch_invariant, until kInvariantMaxSplits of them no longer suffice.
inline constexpr int32_t kInvariantSplitKeys = 2048;
inline constexpr int32_t kInvariantMaxSplits = 8;

/// Into how many splits batch_invariant cuts a unit with this many keys.
int32_t invariant_num_splits(int32_t num_keys);

/// Cost of `num_rows` rows over `num_keys` keys as one task.
double task_cost(const CostModel& cost, int32_t num_rows, int32_t num_keys);

/// Cuts the sequences into tasks and orders them.
Schedule make_schedule(std::span<const Sequence> sequences, const SplitOptions& options);

/// No schedule has more tasks than this, split or not, for `num_rows` rows in `num_sequences` sequences.
int64_t max_tasks(int64_t num_rows, int64_t num_sequences, const SplitOptions& options);

/// Time until `num_workers` have taken all of `costs` in order, each worker taking the next as it becomes free.
double simulate(std::span<const double> costs, int32_t num_workers);

/// Blocks of at most `max_rows` rows, as even as multiples of `group_rows` allow.
int32_t even_block_rows(int32_t num_rows, int32_t max_rows, int32_t group_rows);

}  // namespace mla::schedule

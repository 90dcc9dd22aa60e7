// SPDX-License-Identifier: Apache-2.0
// The work list, which the plan kernel writes and the absorbed attention kernels read, says which block of the grid
// computes which rows over which keys. Everything lies in the caller's workspace, at offsets that depend on shapes
// alone, so that one captured graph serves every batch up to its capacity.
//
// A *unit* is at most `block_rows` query rows (row = query * num_heads + head) of one request, or `row_lanes` times as
// many, over all keys that any query of the request sees. The units' steps (step_keys keys each), laid end to end, are
// cut into equal shares, one for each *worker* (a block of the persistent grid, or `row_lanes` of them). A worker's
// share is a few *segments*.
//
// Keys are numbered from 0 in each request. In decode they are the rank's local tokens. In decode_sparse, where every
// query token is a request, they are the entries of pool 0's row of indices, padded to a multiple of step_keys, and
// then those of pool 1's row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::cuda {

/// Describes rows row_begin ... row_begin + block_rows - 1 of a request over keys key_begin ... key_end - 1. A unit
/// without a visible key has one segment too, with key_begin = key_end: it writes o = 0 and an infinite lse.
struct alignas(16) Segment {
  int32_t request;
  // row_begin is that of row lane 0; row lane l computes rows from row_begin + l * block_rows on, as far as the request
  // has them.
  int32_t row_begin;
  int32_t key_begin, key_end;
  int32_t partial_slot;  // that of row lane 0 (row lane l adds l); -1: the segment has all keys of the unit and writes
                         // o and lse
  int32_t token_begin;   // the request's first query token
  int32_t q_len;         // query tokens of the request; 1 in decode_sparse
  int32_t kv_len;        // keys of the request on all ranks, clamped; in decode_sparse the entries of pool 0
};

/// Describes a unit whose segments went to several workers. Its partial states are to be merged in key order:
/// first_slot, then rest_slot, rest_slot + slot_stride, ... (num_splits in all). These are the slots of row lane 0; row
/// lane l adds l.
struct alignas(16) Merge {
  int32_t request;
  int32_t row_begin;    // that of row lane 0, as in Segment
  int32_t token_begin;  // the request's first query token
  int32_t num_rows;     // rows of the request: q_len * num_heads
  int32_t first_slot, rest_slot, slot_stride;
  int32_t num_splits;  // with fewer than 2 there is nothing to merge
};

/// Describes the share of a block of the grid: the block computes its row lane's rows of segments begin ... end - 1.
/// Blocks beyond num_workers * row_lanes have an empty share.
struct alignas(16) Share {
  int32_t begin, end;
  int32_t row_lane;
  Segment first;  // a copy of segments[begin], which saves a block a second, dependent load at its start
};

/// Merges of more splits than this are long. They come first in the list, because combine merges them in another way.
inline constexpr int32_t kFewSplits = 4;

/// Says what there is to merge, in the 16 bytes that combine reads first.
struct alignas(16) MergeCounts {
  int32_t num_merges;
  int32_t merge_rows;  // no unit has more rows, those of all its row lanes together
  int32_t num_long;    // the first merges, of more than kFewSplits splits each
};

struct alignas(16) WorkListHeader {
  // This many neighbouring blocks of the grid share a worker's segments: block b is row lane b % row_lanes of worker b
  // / row_lanes.
  int32_t row_lanes;
  int32_t num_workers;
  MergeCounts merges;
};

/// Says where everything lies, by pointers into the workspace.
struct WorkList {
  WorkListHeader* header;
  Share* shares;       // [grid]; the plan writes all of them
  Segment* segments;   // [max_segments]; the plan writes those that some share names
  Merge* merges;       // [max_merges]; the first num_merges are valid
  float* partial_o;    // [max_slots, block_rows, d_v]; unnormalized: sum over keys of 2^(score - max) v
  float* partial_max;  // [max_slots, block_rows]; base-2 logits; -inf if the row sees no key here: o and sum are then
                       // not read
  float* partial_sum;  // [max_slots, block_rows]: sum over keys of 2^(score - max)
  int64_t* request_cost;        // [max_requests + 1]; this and the next three are scratch of the plan kernel
  int32_t* request_items;       // [max_requests + 1]
  int32_t* request_steps;       // [max_requests]
  int32_t* request_row_blocks;  // [max_requests]
  int32_t max_workers, max_segments, max_merges, max_slots, max_requests;
  int32_t max_portions;  // most portions of a unit with batch_invariant
  int32_t block_rows;    // query rows of a unit and row lane
  int32_t step_keys;     // segments begin and end on multiples of it; only a unit's last segment may end elsewhere
};

inline constexpr int32_t kMaxInvariantPortions = 32;

/// Says what segments cost, in steps. Kernels that were measured have their own
/// (docs/notebook/2026-11-30-ragged-batches.md).
struct SplitCosts {
  int32_t segment = 2;  // to start a segment and to write its results
  int32_t split = 3;    // beyond that, of a segment whose partial state is to be merged
};

/// Holds everything that the work list depends on, apart from lengths. The unit of costs is the time that a block takes
/// for one step.
struct WorkShape {
  int64_t max_tokens = 0;  // T
  int32_t batch = 0;       // requests; T in decode_sparse
  int32_t num_heads = 0;
  int32_t d_v = 0;
  int32_t block_rows = 0;       // query rows of a block of the attention kernel
  int32_t step_keys = 0;        // keys of one step of that kernel
  int32_t max_grid_blocks = 0;  // that kernel's persistent grid: as many blocks as run at the same time
  bool batch_invariant = false;
  /// Bounds the keys of a request, as far as shapes tell: by the cache's slots; in decode_sparse by the entries of both
  /// rows of indices. It sizes the partial states of batch_invariant.
  int64_t max_keys = INT64_MAX;
  SplitCosts split_costs = {};
  int32_t min_share = 2;  // steps; with fewer a worker costs more for its partial states than it saves
  /// Single steps pay all the same where they leave a fourth of the workers without work, and no unit has more of them
  /// than this: with 128 portions, single steps were 2 to 7 % slower than pairs (H200, 2026-11-24).
  int32_t most_thin_portions = 64;
  /// With batch_invariant, units are cut every so many keys, and never into more than kMaxInvariantPortions. Both were
  /// chosen without a recorded measurement.
  int32_t invariant_portion_keys = 1024;
};

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
// What the plan kernel writes and the absorbed attention kernels read: which block of the grid computes which rows over
// which keys. Everything lies in the caller's workspace, at offsets that depend on shapes alone, so that one captured
// graph serves every batch up to its capacity.
//
// A *unit* is a block of at most `block_rows` query rows (row = query * num_heads + head) of one request, or
// `row_lanes` such blocks side by side, over all keys that any query of the request sees. The units' key blocks, laid
// end to end, are cut into equal shares, one for each *worker* (a block of the persistent grid, or `row_lanes` of
// them); a worker's share is a few *segments*.
//
// Keys are numbered from 0 in each request. decode: the rank's local tokens. decode_sparse, where every query token is
// a request: the entries of pool 0's row, padded to a multiple of step_keys, then those of pool 1's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::cuda {

/// Rows [row_begin, row_begin + block_rows) of a request over keys [key_begin, key_end). Without a visible key the two
/// are equal: such a unit has one segment all the same, for its o = 0 and lse = -inf.
struct alignas(16) Segment {
  int32_t request;
  // Of row lane 0; row lane l computes rows from row_begin + l * block_rows, as far as the request has them.
  int32_t row_begin;
  int32_t key_begin, key_end;
  int32_t partial_slot;  // of row lane 0 (row lane l: + l); -1: these are all the unit's keys, write o and lse
  int32_t token_begin;   // of the request: its first query
  int32_t q_len;         // of the request; decode_sparse: 1
  int32_t kv_len;        // of the request, clamped: tokens of all ranks; decode_sparse: entries of pool 0
};

/// A unit whose segments went to several workers, to be merged in key order: partial states first_slot, then
/// rest_slot, rest_slot + slot_stride, ... (num_splits in all). The slots of its row lane l follow by + l.
struct alignas(16) Merge {
  int32_t request;
  int32_t row_begin;    // of row lane 0, as in Segment
  int32_t token_begin;  // of the request: its first query
  int32_t num_rows;     // of the request: q_len * num_heads
  int32_t first_slot, rest_slot, slot_stride;
  int32_t num_splits;  // fewer than 2: nothing to merge
};

/// What a block of the grid computes: its row lane's rows of segments [begin, end). Blocks beyond num_workers *
/// row_lanes compute nothing.
struct alignas(16) Share {
  int32_t begin, end;
  int32_t row_lane;
  Segment first;  // segments[begin], so that a block begins with one load and not with two, one behind the other
};

struct alignas(16) WorkListHeader {
  // Blocks of the grid that share a worker's segments: block b is row lane b % row_lanes of worker b / row_lanes.
  int32_t row_lanes;
  int32_t num_workers;
  int32_t num_merges;
  int32_t merge_rows;  // no unit has more rows, over all its row lanes
};

/// Where everything lies; pointers into the workspace.
struct WorkList {
  WorkListHeader* header;
  Share* shares;       // [grid], all of them written
  Segment* segments;   // [max_segments], not all of them written
  Merge* merges;       // [max_merges], the first num_merges count
  float* partial_o;    // [max_slots, block_rows, d_v], unnormalized: sum over keys of 2^(score - max) v
  float* partial_max;  // [max_slots, block_rows], base-2 logits; -inf: the row sees no key here, o and sum are unread
  float* partial_sum;  // [max_slots, block_rows]: sum over keys of 2^(score - max)
  int64_t* request_cost;        // [max_requests + 1], scratch of the plan kernel, as the next three
  int32_t* request_items;       // [max_requests + 1]
  int32_t* request_steps;       // [max_requests]
  int32_t* request_row_blocks;  // [max_requests]
  int32_t max_workers, max_segments, max_merges, max_slots, max_requests;
  int32_t max_chunks;  // batch_invariant: into which a unit may be cut
  int32_t block_rows;  // of a unit
  int32_t step_keys;   // segments begin and end on its multiples, but for a unit's last
};

inline constexpr int32_t kMaxInvariantChunks = 32;

/// What the work list depends on, apart from lengths. The costs are in key blocks: what one row lane takes for a key
/// block.
struct WorkShape {
  int64_t max_tokens = 0;  // T
  int32_t batch = 0;       // requests; decode_sparse: T
  int32_t num_heads = 0;
  int32_t d_v = 0;
  int32_t block_rows = 0;       // rows of a block of the attention kernel
  int32_t step_keys = 0;        // keys of one step of its pipeline
  int32_t max_grid_blocks = 0;  // its persistent grid: all blocks that run at the same time
  bool batch_invariant = false;
  /// No request has more keys, as far as shapes say (cache slots; decode_sparse: entries of both rows). Sizes the
  /// partial states of batch_invariant.
  int64_t max_keys = INT64_MAX;
  int32_t unit_overhead = 2;   // starting a segment and writing its results
  int32_t split_overhead = 3;  // more for a segment whose partial state is to be merged
  int32_t min_share = 2;       // key blocks: a worker with less is not worth its partial states
  /// batch_invariant: units are cut every so many keys, and never into more than kMaxInvariantChunks.
  int32_t invariant_chunk_keys = 1024;
};

}  // namespace mla::cuda

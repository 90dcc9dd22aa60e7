// SPDX-License-Identifier: Apache-2.0
// Checks what every work list must hold, whatever the batch, by brute force against the requests' lengths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/emulated_list.h"
#include "plan/schedule.h"

namespace mla::plan_test {

/// Says what a request has to do, by an implementation of its own.
struct Expected {
  int32_t token_begin = 0, q_len = 0, kv_len = 0;
  int64_t key_begin = 0, key_end = 0;  // visible to any query; equal if none is
};

/// Holds a part of a unit, as one row lane sees it.
struct Piece {
  int32_t key_begin, key_end, slot;

  friend bool operator==(const Piece&, const Piece&) = default;
  friend bool operator<(const Piece& a, const Piece& b) {
    return std::pair(a.key_begin, a.key_end) < std::pair(b.key_begin, b.key_end);
  }
};

/// Holds the pieces of every row block, in key order: [{request, first row}].
using RowBlocks = std::map<std::pair<int32_t, int32_t>, std::vector<Piece>>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class ListChecker {
 public:
  ListChecker(const cuda::WorkShape& shape, const cuda::WorkList& list, const std::vector<Expected>& requests)
      : shape_(shape), list_(list), requests_(requests) {}

  /// Checks all of the list. Returns the row blocks for further tests.
  RowBlocks check() {
    read_segments();
    check_coverage();
    check_merges();
    if (!shape_.batch_invariant) check_balance();
    return row_blocks_;
  }

  int64_t num_splits() const { return num_splits_; }

 private:
  const cuda::WorkShape& shape_;
  const cuda::WorkList& list_;
  const std::vector<Expected>& requests_;
  RowBlocks row_blocks_;
  std::vector<int64_t> loads_;
  int64_t num_splits_ = 0;

  const cuda::WorkListHeader& header() const { return *list_.header; }

  int64_t rows_of(int32_t request) const {
    return int64_t{requests_[static_cast<size_t>(request)].q_len} * shape_.num_heads;
  }

  void read_segments() {
    ASSERT_GE(header().row_lanes, 1);
    ASSERT_GE(header().num_workers, 0);
    ASSERT_LE(header().num_workers, list_.max_workers);
    ASSERT_LE(int64_t{header().num_workers} * header().row_lanes, shape_.max_grid_blocks);
    std::set<int32_t> seen;
    for (int32_t w = 0; w < header().num_workers; ++w) {
      int64_t load = 0;
      const cuda::Share share = list_.shares[w * header().row_lanes];
      for (int32_t lane = 0; lane < header().row_lanes; ++lane) {
        const cuda::Share& of_lane = list_.shares[w * header().row_lanes + lane];
        EXPECT_EQ(of_lane.begin, share.begin);
        EXPECT_EQ(of_lane.end, share.end);
        EXPECT_EQ(of_lane.row_lane, lane);
        EXPECT_TRUE(same(of_lane.first, share.first));
      }
      ASSERT_GE(share.begin, 0);
      ASSERT_LE(share.end, list_.max_segments);
      if (share.begin < share.end) {
        EXPECT_TRUE(same(share.first, list_.segments[share.begin]));
      }
      for (int32_t s = share.begin; s < share.end; ++s) {
        EXPECT_TRUE(seen.insert(s).second) << "segment " << s << " twice";
        const cuda::Segment& segment = list_.segments[s];
        ASSERT_NO_FATAL_FAILURE(check_segment(segment));
        load += ceil_div(segment.key_end - segment.key_begin, shape_.step_keys) + shape_.split_costs.segment;
        if (segment.partial_slot >= 0) load += shape_.split_costs.split;
      }
      loads_.push_back(load);
    }
    for (int32_t block = header().num_workers * header().row_lanes; block < shape_.max_grid_blocks; ++block)
      EXPECT_EQ(list_.shares[block].begin, list_.shares[block].end) << "an idle block";
    for (auto& [at, pieces] : row_blocks_) std::sort(pieces.begin(), pieces.end());
  }

  static bool same(const cuda::Segment& a, const cuda::Segment& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

  void check_segment(const cuda::Segment& segment) {
    ASSERT_GE(segment.request, 0);
    ASSERT_LT(segment.request, static_cast<int32_t>(requests_.size()));
    const Expected& request = requests_[static_cast<size_t>(segment.request)];
    EXPECT_EQ(segment.token_begin, request.token_begin);
    EXPECT_EQ(segment.q_len, request.q_len);
    EXPECT_EQ(segment.kv_len, request.kv_len);
    EXPECT_EQ(segment.row_begin % (header().row_lanes * shape_.block_rows), 0);
    ASSERT_LT(segment.row_begin, rows_of(segment.request));
    EXPECT_GE(segment.partial_slot, -1);
    if (segment.partial_slot >= 0) {
      ASSERT_LE(segment.partial_slot + header().row_lanes, list_.max_slots);
    }
    for (int32_t lane = 0; lane < header().row_lanes; ++lane) {
      const int32_t row = segment.row_begin + lane * shape_.block_rows;
      const int32_t slot = segment.partial_slot < 0 ? -1 : segment.partial_slot + lane;
      if (row < rows_of(segment.request))
        row_blocks_[{segment.request, row}].push_back({segment.key_begin, segment.key_end, slot});
    }
  }

  /// Checks that every row of every request sees every key once, in pieces that begin and end on steps.
  void check_coverage() const {
    size_t num_row_blocks = 0;
    for (size_t r = 0; r < requests_.size(); ++r) {
      const Expected& request = requests_[r];
      for (int32_t row = 0; row < rows_of(static_cast<int32_t>(r)); row += shape_.block_rows) {
        ++num_row_blocks;
        const auto found = row_blocks_.find({static_cast<int32_t>(r), row});
        ASSERT_NE(found, row_blocks_.end()) << "request " << r << " row " << row;
        const std::vector<Piece>& pieces = found->second;
        int64_t next = request.key_begin;
        for (const Piece& piece : pieces) {
          EXPECT_EQ(piece.key_begin, next) << "request " << r << " row " << row;
          EXPECT_EQ(piece.key_begin % shape_.step_keys, 0);
          if (pieces.size() > 1) {
            EXPECT_GT(piece.key_end, piece.key_begin);
          }
          next = piece.key_end;
        }
        EXPECT_EQ(next, request.key_end) << "request " << r << " row " << row;
      }
    }
    EXPECT_EQ(row_blocks_.size(), num_row_blocks);
  }

  /// Checks that merges name the split row blocks and their slots in key order, the long merges first, and that no slot
  /// is used twice.
  void check_merges() {
    ASSERT_GE(header().merges.num_merges, 0);
    ASSERT_LE(header().merges.num_merges, list_.max_merges);
    std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> merged;
    int64_t largest_unit = 0;
    for (int32_t m = 0; m < header().merges.num_merges; ++m) {
      const cuda::Merge& merge = list_.merges[m];
      EXPECT_GE(merge.num_splits, 2);
      EXPECT_EQ(merge.num_splits > cuda::kFewSplits, m < header().merges.num_long);
      ASSERT_LT(static_cast<size_t>(merge.request), requests_.size());
      EXPECT_EQ(merge.token_begin, requests_[static_cast<size_t>(merge.request)].token_begin);
      EXPECT_EQ(merge.num_rows, rows_of(merge.request));
      num_splits_ += merge.num_splits;
      largest_unit = std::max<int64_t>(
          largest_unit, std::min(header().row_lanes * shape_.block_rows, merge.num_rows - merge.row_begin));
      for (int32_t lane = 0; lane < header().row_lanes; ++lane) {
        const int32_t row = merge.row_begin + lane * shape_.block_rows;
        if (row >= merge.num_rows) continue;
        std::vector<int32_t>& slots = merged[{merge.request, row}];
        EXPECT_TRUE(slots.empty());
        slots.push_back(merge.first_slot + lane);
        for (int32_t i = 1; i < merge.num_splits; ++i)
          slots.push_back(merge.rest_slot + (i - 1) * merge.slot_stride + lane);
      }
    }
    EXPECT_GE(header().merges.merge_rows, largest_unit);
    std::set<int32_t> used;
    for (const auto& [at, pieces] : row_blocks_) {
      if (pieces.size() == 1) {
        EXPECT_EQ(pieces[0].slot, -1);
        EXPECT_FALSE(merged.contains(at)) << "request " << at.first << " row " << at.second;
        continue;
      }
      std::vector<int32_t> slots;
      for (const Piece& piece : pieces) {
        slots.push_back(piece.slot);
        EXPECT_TRUE(used.insert(piece.slot).second) << "slot " << piece.slot << " twice";
      }
      EXPECT_EQ(merged[at], slots) << "request " << at.first << " row " << at.second;
    }
  }

  /// Checks that no worker has more than an even share of all work, but for the blocks and overheads that a split adds
  /// on each side.
  void check_balance() const {
    int64_t blocks = 0, units = 0;
    for (size_t r = 0; r < requests_.size(); ++r) {
      const int64_t of_request = ceil_div(rows_of(static_cast<int32_t>(r)), shape_.block_rows * header().row_lanes);
      units += of_request;
      blocks += of_request * ceil_div(requests_[r].key_end - requests_[r].key_begin, shape_.step_keys);
    }
    if (units == 0) return;
    const int64_t workers = std::min<int64_t>(shape_.max_grid_blocks / header().row_lanes, list_.max_workers);
    const int64_t useful = std::clamp<int64_t>(std::max(blocks / shape_.min_share, units), 1, workers);
    const int64_t share = ceil_div(blocks + units * shape_.split_costs.segment, useful);
    EXPECT_LE(*std::max_element(loads_.begin(), loads_.end()),
              share + 2 + shape_.split_costs.segment + 3 * shape_.split_costs.split);
  }
};

}  // namespace mla::plan_test

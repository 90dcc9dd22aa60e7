// SPDX-License-Identifier: Apache-2.0
// The plan kernel of absorbed attention turns lengths in device memory into the work list of work_list.h.
//
// The grid is one block. An *item* is a unit, or a *portion*: one of several even parts of a unit's keys. All items,
// laid end to end, are the *line* of all work. All items of a request cost the same, item_steps + split_costs.segment,
// so that prefix sums over requests say where on the line an item lies, and a binary search finds the item at any place
// of it. All threads take part in each phase:
//   measure     lengths -> row blocks and steps of each request; how many row lanes
//   accumulate  prefix sums of items and costs
//   choose      of three ways of sharing, the one whose most loaded worker has least to do: a worker for each unit; a
//               worker for each portion, where portions have the least size that leaves enough workers; or the line cut
//               evenly, with cuts near an item's end moved there
//   write       cuts -> segments (one warp per worker) and merges
// The segment of item t that worker w computes has index t + w, so that all segments can be written at once.
//
// Shared memory holds a PlanShared. Batches of more than kSharedRequests keep the prefix sums in the workspace instead.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/block_scan.cuh"
#include "cuda/tile/key_range.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr int kPlanThreads = 512;
/// The prefix sums of this many requests, and the cuts of this many workers, fit shared memory (PlanShared).
inline constexpr int kSharedRequests = 1024;
inline constexpr int kMaxPlanWorkers = 1024;
/// Row lanes walk the same keys side by side, so that all but the first of them read the keys from L2. The limit was
/// chosen without a recorded measurement: more row lanes were seen to gain nothing.
inline constexpr int kMaxRowLanes = 16;

/// Describes the work of one request. Keys are numbered from 0 in the request.
struct RequestWork {
  int32_t token_begin = 0;
  int32_t q_len = 0;
  int32_t kv_len = 0;
  int64_t key_begin = 0;  // a multiple of step_keys
  int64_t key_end = 0;    // equals key_begin if no query sees a key

  MLA_DEVICE int64_t num_keys() const { return key_end - key_begin; }
};

/// Gives the work of decode's requests: those keys of this rank that at least one of the request's queries sees. The
/// last query sees the keys to the end, causal or not, and the first query looks back farthest. Lengths that cannot be
/// right are clamped, so that they lead to no access outside of the tensors.
struct DecodeLengths {
  core::QueryRanges queries = {};
  core::Pages pages = {};
  ContextParallel share = {};
  int32_t window_left = -1;
  int64_t num_tokens = 0;
  int32_t step_keys = 1;

  MLA_DEVICE RequestWork of(int32_t request) const {
    RequestWork work;
    const int64_t begin = std::clamp<int64_t>(queries.begin(request), 0, num_tokens);
    const int64_t end = queries.indptr != nullptr ? queries.indptr[request + 1] : begin + queries.uniform_len;
    work.token_begin = static_cast<int32_t>(begin);
    work.q_len = static_cast<int32_t>(std::clamp<int64_t>(end - begin, 0, num_tokens - begin));
    if (work.q_len == 0) return work;
    work.kv_len = std::max(pages.kv_len[request], 0);
    const int32_t first_seen = visible_keys(work.kv_len - work.q_len, work.kv_len, false, window_left).begin;
    work.key_begin = local_length(share, first_seen) / step_keys * step_keys;
    work.key_end = std::max(std::min(local_length(share, work.kv_len), held(request)), work.key_begin);
    return work;
  }

  /// Returns how many keys the request's pages have room for; INT32_MAX where the page table does not say how many
  /// pages there are.
  MLA_DEVICE int64_t held(int32_t request) const {
    if (pages.kv_indptr == nullptr) return INT32_MAX;
    return std::max<int64_t>(int64_t{pages.kv_indptr[request + 1]} - pages.kv_indptr[request], 0) * pages.page_size;
  }
};

/// Gives the work of decode_sparse, where each query token is a request and its keys are the entries of its rows of
/// indices.
struct SparseLengths {
  const int32_t* topk_length[2] = {};
  int32_t topk[2] = {};
  bool length_per_request[2] = {};
  core::QueryRanges queries = {};
  int32_t batch_size = 0;
  int32_t step_keys = 1;

  MLA_DEVICE RequestWork of(int32_t token) const {
    RequestWork work;
    work.token_begin = token;
    int32_t length[2] = {};
    for (int32_t pool = 0; pool < 2; ++pool) {
      length[pool] = topk[pool];
      if (topk_length[pool] == nullptr) continue;
      const int32_t at = length_per_request[pool] ? request_of(token) : token;
      if (length_per_request[pool] && at == batch_size) return work;  // a token of the padding
      length[pool] = std::clamp(topk_length[pool][at], 0, topk[pool]);
    }
    work.q_len = 1;
    work.kv_len = length[0];
    const int64_t first = (int64_t{length[0]} + step_keys - 1) / step_keys * step_keys;
    work.key_end = length[1] > 0 ? first + length[1] : length[0];
    return work;
  }

  /// Returns the request that the token belongs to; batch_size if there is none.
  MLA_DEVICE int32_t request_of(int32_t token) const {
    if (queries.indptr == nullptr)
      return queries.uniform_len > 0 ? std::min(token / queries.uniform_len, batch_size) : batch_size;
    int32_t low = 0, high = batch_size;  // the search is for the first request that ends behind the token
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (queries.indptr[middle + 1] > token)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

struct PlanShared {
  int64_t scratch[kPlanThreads / kWarpSize];
  bool enough[kPlanThreads / kWarpSize];
  int64_t cost[kSharedRequests + 1];   // sum over the items of all earlier requests
  int32_t items[kSharedRequests + 1];  // number of items of all earlier requests
  int32_t steps[kSharedRequests];      // steps of one unit of the request
  int32_t row_blocks[kSharedRequests];
  int32_t cut_item[kMaxPlanWorkers + 1];
  int32_t cut_step[kMaxPlanWorkers + 1];
};

/// Returns the last i with prefix[i] <= value. Requires prefix[0] = 0 <= value < prefix[n].
template <class T>
MLA_DEVICE int32_t find_in_prefix(const T* prefix, int32_t n, T value) {
  int32_t low = 0, high = n;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (prefix[middle] <= value)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <class Lengths>
struct PlanKernel {
  struct Params {
    cuda::WorkShape shape;
    cuda::WorkList list;
    Lengths lengths;
  };
  static constexpr const char* kName = "plan";
  static constexpr int kThreads = kPlanThreads;
  static constexpr int kMinBlocks = 1;

  static MLA_DEVICE void run(const Params& params) {
    PlanKernel plan(params);
    plan.measure();
    plan.accumulate();
    if (!plan.fits()) return plan.write_nothing();
    plan.choose();
    plan.write_cuts();
    plan.write_segments();
    plan.write_merges();
  }

 private:
  /// Marks a place on the line of all work: `step` steps behind the beginning of an item, or between two items if
  /// `step` is 0.
  struct Cut {
    int32_t item = 0;
    int32_t step = 0;
    int64_t steps_before = 0;  // steps on the line before this place, without overheads
  };
  struct UnsnappedCut {
    Cut item_begin;
    int64_t offset = 0;  // from the item's beginning; the overhead counts as the item's end
    int32_t item_steps = 0;
  };

  /// This tolerance moves every cut to an end of its item.
  static constexpr int32_t kWhole = INT32_MAX;
  static constexpr int32_t kNumTolerances = 3;

  const cuda::WorkShape& shape_;
  const cuda::WorkList& list_;
  const Lengths& lengths_;
  PlanShared& shared_;
  int64_t* cost_;
  int32_t* items_;
  int32_t* steps_;
  int32_t* row_blocks_;
  int32_t portion_steps_ = 0;  // units are cut into even portions of about this many steps; 0: units are not cut
  int32_t row_lanes_ = 1;
  int32_t max_workers_ = 1;
  int32_t min_share_ = 1;  // steps that a worker has at least
  int64_t max_rows_ = 0;
  int64_t total_items_ = 0, total_cost_ = 0, largest_cost_ = 0;
  // These say which way of sharing was chosen: a worker for each item if owned_, else even cuts of the line, each moved
  // by at most tolerance_ to an item's end.
  int32_t num_workers_ = 0;
  bool owned_ = false;
  int32_t tolerance_ = kWhole;

  MLA_DEVICE explicit PlanKernel(const Params& params)
      : shape_(params.shape),
        list_(params.list),
        lengths_(params.lengths),
        shared_(*reinterpret_cast<PlanShared*>(ptx::shared_memory())) {
    const bool small = shape_.batch <= kSharedRequests;
    cost_ = small ? shared_.cost : list_.request_cost;
    items_ = small ? shared_.items : list_.request_items;
    steps_ = small ? shared_.steps : list_.request_steps;
    row_blocks_ = small ? shared_.row_blocks : list_.request_row_blocks;
    if (shape_.batch_invariant) portion_steps_ = std::max(shape_.invariant_portion_keys / shape_.step_keys, 1);
  }

  static MLA_DEVICE int32_t ceil_div(int32_t steps, int32_t size) { return (steps - 1) / size + 1; }

  /// Returns the steps of an item of a request whose units have `steps` steps.
  MLA_DEVICE int32_t item_steps(int32_t steps) const {
    if (portion_steps_ == 0 || steps == 0) return steps;
    const int32_t least = shape_.batch_invariant ? ceil_div(steps, list_.max_portions) : 1;
    return ceil_div(steps, ceil_div(steps, std::max(portion_steps_, least)));
  }
  MLA_DEVICE int32_t items_per_unit(int32_t steps) const { return steps == 0 ? 1 : ceil_div(steps, item_steps(steps)); }

  MLA_DEVICE void measure() {
    int64_t most = 0, least = -INT32_MAX;  // row blocks of the requests that have any; the least is negated, so that
                                           // block_max finds it
    for (int32_t r = ptx::thread_index(); r < shape_.batch; r += kThreads) {
      const RequestWork work = lengths_.of(r);
      const int64_t rows = int64_t{work.q_len} * shape_.num_heads;
      const int64_t row_blocks = (rows + shape_.block_rows - 1) / shape_.block_rows;
      row_blocks_[r] = static_cast<int32_t>(row_blocks);
      steps_[r] = static_cast<int32_t>((work.num_keys() + shape_.step_keys - 1) / shape_.step_keys);
      max_rows_ = std::max(max_rows_, rows);
      if (row_blocks == 0) continue;
      most = std::max(most, row_blocks);
      least = std::max(least, -row_blocks);
    }
    max_rows_ = block_max<kThreads>(max_rows_, shared_.scratch);
    most = block_max<kThreads>(most, shared_.scratch);
    least = block_max<kThreads>(least, shared_.scratch);
    if (most == -least) choose_row_lanes(static_cast<int32_t>(most));
    max_workers_ = std::min(shape_.max_grid_blocks / row_lanes_, int32_t{kMaxPlanWorkers});
  }

  /// Chooses the largest number of row lanes that divides the row blocks of a request and leaves at most a tenth of the
  /// grid idle (the tenth was chosen without a recorded measurement).
  MLA_DEVICE void choose_row_lanes(int32_t row_blocks) {
    const int32_t grid = shape_.max_grid_blocks;
    for (int32_t row_lanes = std::min(std::min(row_blocks, grid), int32_t{kMaxRowLanes}); row_lanes > 1; --row_lanes) {
      if (row_blocks % row_lanes != 0 || grid / row_lanes * row_lanes * 10 < grid * 9) continue;
      row_lanes_ = row_lanes;
      return;
    }
  }

  MLA_DEVICE void accumulate() {
    total_items_ = total_cost_ = largest_cost_ = 0;
    for (int32_t base = 0; base < shape_.batch; base += kThreads) {
      const int32_t r = base + ptx::thread_index();
      int64_t items = 0, cost = 0;
      if (r < shape_.batch) {
        const int64_t item_cost = int64_t{item_steps(steps_[r])} + shape_.split_costs.segment;
        items = int64_t{row_blocks_[r]} / row_lanes_ * items_per_unit(steps_[r]);
        cost = items * item_cost;
        if (items > 0) largest_cost_ = std::max(largest_cost_, item_cost);
      }
      int64_t items_of_round = 0, cost_of_round = 0;
      const int64_t items_before = total_items_ + exclusive_scan<kThreads>(items, shared_.scratch, items_of_round);
      const int64_t cost_before = total_cost_ + exclusive_scan<kThreads>(cost, shared_.scratch, cost_of_round);
      if (r < shape_.batch) {
        items_[r] = static_cast<int32_t>(items_before);
        cost_[r] = cost_before;
      }
      total_items_ += items_of_round;
      total_cost_ += cost_of_round;
    }
    if (ptx::thread_index() == 0) {
      items_[shape_.batch] = static_cast<int32_t>(total_items_);
      cost_[shape_.batch] = total_cost_;
    }
    // The barriers of block_max also make the sums visible to all threads.
    largest_cost_ = block_max<kThreads>(largest_cost_, shared_.scratch);
  }

  /// Returns whether there is work and the work list has room for it. Only a qo_indptr that decreases can ask for more
  /// room than the shapes allow.
  MLA_DEVICE bool fits() const {
    return total_items_ > 0 && total_items_ * row_lanes_ <= int64_t{list_.max_segments} - list_.max_workers;
  }

  MLA_DEVICE void write_idle_shares(int32_t first_block) const {
    for (int32_t b = first_block + ptx::thread_index(); b < shape_.max_grid_blocks; b += kThreads) list_.shares[b] = {};
  }

  MLA_DEVICE void write_nothing() const {
    write_idle_shares(0);
    if (ptx::thread_index() == 0) *list_.header = {.row_lanes = 1, .num_workers = 0, .merges = {}};
  }

  MLA_DEVICE UnsnappedCut find(int64_t place) const {
    UnsnappedCut cut;
    if (place >= total_cost_) {
      cut.item_begin.item = static_cast<int32_t>(total_items_);
      cut.item_begin.steps_before = total_cost_ - total_items_ * shape_.split_costs.segment;
      return cut;
    }
    const int32_t r = find_in_prefix(cost_, shape_.batch, place);
    cut.item_steps = item_steps(steps_[r]);
    const int64_t item_cost = int64_t{cut.item_steps} + shape_.split_costs.segment;
    const int64_t index = item_cost > 0 ? (place - cost_[r]) / item_cost : 0;
    cut.offset = place - cost_[r] - index * item_cost;
    cut.item_begin.item = static_cast<int32_t>(items_[r] + index);
    cut.item_begin.steps_before = place - cut.offset - int64_t{cut.item_begin.item} * shape_.split_costs.segment;
    return cut;
  }

  static MLA_DEVICE Cut snap(const UnsnappedCut& cut, int32_t tolerance) {
    const Cut& begin = cut.item_begin;
    const int64_t rest = cut.item_steps - cut.offset;
    const bool to_begin = cut.offset <= tolerance && (rest > tolerance || cut.offset < rest);
    if (cut.offset == 0 || (rest > 0 && to_begin)) return begin;
    if (rest <= tolerance) return {begin.item + 1, 0, begin.steps_before + cut.item_steps};
    return {begin.item, static_cast<int32_t>(cut.offset), begin.steps_before + cut.offset};
  }

  /// Returns the cost of a worker that has the line from `begin` to `end`.
  MLA_DEVICE int64_t load(const Cut& begin, const Cut& end) const {
    const bool begins_inside = begin.step > 0;
    const bool ends_inside = end.step > 0;
    const int32_t segments = end.item - begin.item + (ends_inside ? 1 : 0);
    const int32_t partials =
        (begins_inside ? 1 : 0) + (ends_inside && !(begins_inside && begin.item == end.item) ? 1 : 0);
    return end.steps_before - begin.steps_before + int64_t{segments} * shape_.split_costs.segment +
           int64_t{partials} * shape_.split_costs.split;
  }

  MLA_DEVICE int64_t even_cut(int32_t worker, int32_t workers) const { return worker * total_cost_ / workers; }

  MLA_DEVICE void choose() {
    const int64_t total_steps = total_cost_ - total_items_ * shape_.split_costs.segment;
    const bool thin = total_steps * 4 <= int64_t{max_workers_} * 3 &&
                      largest_cost_ - shape_.split_costs.segment <= shape_.most_thin_portions;
    min_share_ = thin ? 1 : std::max(shape_.min_share, 1);
    const int64_t useful = std::max(total_steps / min_share_, total_items_);
    const auto workers = static_cast<int32_t>(std::clamp<int64_t>(useful, 1, max_workers_));
    const int64_t share = total_cost_ / workers;

    // Even cuts are tried with three tolerances: every cut moves to an end of its item, cuts move by at most an eighth
    // of a share, or cuts move by at most one step (chosen without a recorded measurement).
    const auto eighth = static_cast<int32_t>(std::min<int64_t>(share / 8, INT32_MAX - 1));
    const int32_t tolerances[kNumTolerances] = {kWhole, eighth > 1 ? eighth : 2, 1};
    int64_t loads[kNumTolerances] = {};
    for (int32_t w = ptx::thread_index(); w < workers; w += kThreads) {
      const UnsnappedCut begin = find(even_cut(w, workers)), end = find(even_cut(w + 1, workers));
      for (int i = 0; i < kNumTolerances; ++i)
        loads[i] = std::max(loads[i], load(snap(begin, tolerances[i]), snap(end, tolerances[i])));
    }
    owned_ = total_items_ <= max_workers_;
    int64_t best = owned_ ? largest_cost_ : INT64_MAX;
    num_workers_ = owned_ ? static_cast<int32_t>(total_items_) : 0;
    if (owned_ && !shape_.batch_invariant) choose_chunks(total_steps, best);
    for (int i = 0; i < (shape_.batch_invariant ? 1 : kNumTolerances); ++i) {
      const int64_t merging = tolerances[i] == kWhole ? 0 : shape_.split_costs.split;
      const int64_t time = block_max<kThreads>(loads[i], shared_.scratch) + merging;
      if (time >= best) continue;
      best = time;
      owned_ = false;
      num_workers_ = workers;
      tolerance_ = tolerances[i];
    }
    if (!owned_) {
      if (!shape_.batch_invariant) portion_steps_ = 0;
    } else if (portion_steps_ > 0 && !shape_.batch_invariant) {
      accumulate();
      num_workers_ = static_cast<int32_t>(total_items_);
    }
  }

  /// Finds the least size of portions that leaves a worker for each portion, and takes it if that beats `best`. The
  /// warps try as many sizes at a time as there are warps.
  MLA_DEVICE void choose_chunks(int64_t total_steps, int64_t& best) {
    const auto largest = static_cast<int32_t>(largest_cost_ - shape_.split_costs.segment);
    auto low = static_cast<int32_t>((total_steps - 1) / max_workers_ + 1);
    low = std::max(low, min_share_);
    int32_t high = largest;  // invariant: portions of size `high` are few enough; sizes below `low` give too many
                             // portions, or too small ones
    constexpr int kWarps = kThreads / kWarpSize;
    while (low < high) {
      const int32_t stride = (high - low) / kWarps + 1;
      const bool few = num_portions(std::min(low + ptx::warp() * stride, high)) <= max_workers_;
      if (ptx::lane() == 0) shared_.enough[ptx::warp()] = few;
      ptx::sync_block();
      int first = 0;
      while (first < kWarps && !shared_.enough[first]) ++first;
      ptx::sync_block();  // all threads have read `enough`
      if (first < kWarps) high = std::min(low + first * stride, high);
      if (first > 0) low = std::min(low + (first - 1) * stride + 1, high);
    }
    const int64_t time = int64_t{high} + shape_.split_costs.segment + 2 * int64_t{shape_.split_costs.split};
    if (high >= largest || time >= best) return;
    best = time;
    portion_steps_ = high;
  }

  /// Returns how many portions all units have together if a portion has about `size` steps. All lanes of a warp call
  /// this.
  MLA_DEVICE int64_t num_portions(int32_t size) const {
    int64_t sum = 0;
    for (int32_t r = ptx::lane(); r < shape_.batch; r += kWarpSize)
      sum += int64_t{row_blocks_[r]} / row_lanes_ * (steps_[r] == 0 ? 1 : ceil_div(steps_[r], size));
    for (int mask = 1; mask < kWarpSize; mask *= 2) sum += shuffle_xor_64(sum, mask);
    return sum;
  }

  MLA_DEVICE void write_cuts() {
    for (int32_t w = ptx::thread_index(); w <= num_workers_; w += kThreads) {
      const Cut cut = owned_ ? Cut{w, 0, 0} : snap(find(even_cut(w, num_workers_)), tolerance_);
      shared_.cut_item[w] = cut.item;
      shared_.cut_step[w] = cut.step;
    }
    ptx::sync_block();
  }

  struct ItemPlace {
    int32_t request = 0;
    int32_t unit = 0, portion = 0;
    int32_t num_portions = 1;
  };
  MLA_DEVICE ItemPlace locate(int32_t item) const {
    ItemPlace at;
    at.request = find_in_prefix(items_, shape_.batch, item);
    at.num_portions = items_per_unit(steps_[at.request]);
    at.unit = (item - items_[at.request]) / at.num_portions;
    at.portion = (item - items_[at.request]) % at.num_portions;
    return at;
  }

  /// Returns the segment of steps first ... last - 1 of an item; a `last` of -1 stands for the item's end.
  MLA_DEVICE cuda::Segment segment_of(int32_t item, int32_t worker, int32_t first, int32_t last) const {
    const ItemPlace at = locate(item);
    const RequestWork work = lengths_.of(at.request);
    const int64_t portion_begin = int64_t{at.portion} * item_steps(steps_[at.request]);
    const int64_t begin = work.key_begin + (portion_begin + first) * shape_.step_keys;
    const int64_t end_step = last >= 0 ? portion_begin + last : portion_begin + item_steps(steps_[at.request]);
    int32_t slot = -1;
    if (at.num_portions > 1)
      slot = item * row_lanes_;
    else if (first > 0)
      slot = 2 * worker * row_lanes_;
    else if (last >= 0)
      slot = (2 * worker + 1) * row_lanes_;
    return {.request = at.request,
            .row_begin = at.unit * row_lanes_ * shape_.block_rows,
            .key_begin = static_cast<int32_t>(begin),
            .key_end = static_cast<int32_t>(std::min(work.key_end, work.key_begin + end_step * shape_.step_keys)),
            .partial_slot = slot,
            .token_begin = work.token_begin,
            .q_len = work.q_len,
            .kv_len = work.kv_len};
  }

  MLA_DEVICE void write_segments() const {
    write_idle_shares(num_workers_ * row_lanes_);
    for (int32_t w = ptx::warp(); w < num_workers_; w += kThreads / kWarpSize) {
      const int32_t first_item = shared_.cut_item[w], last_item = shared_.cut_item[w + 1];
      const int32_t last_step = shared_.cut_step[w + 1];
      const int32_t end_item = last_item + (last_step > 0 ? 1 : 0);
      for (int32_t row_lane = ptx::lane(); row_lane < row_lanes_; row_lane += kWarpSize) {
        cuda::Share& share = list_.shares[w * row_lanes_ + row_lane];
        share.begin = first_item + w;
        share.end = end_item + w;
        share.row_lane = row_lane;
      }
      for (int32_t item = first_item + ptx::lane(); item < end_item; item += kWarpSize) {
        const cuda::Segment segment =
            segment_of(item, w, item == first_item ? shared_.cut_step[w] : 0, item == last_item ? last_step : -1);
        list_.segments[item + w] = segment;
        for (int32_t row_lane = 0; item == first_item && row_lane < row_lanes_; ++row_lane)
          list_.shares[w * row_lanes_ + row_lane].first = segment;
      }
    }
  }

  /// Returns whether worker `w` has the first segment of an item that other workers continue.
  MLA_DEVICE bool begins_merge(int32_t w) const {
    const int32_t last_item = shared_.cut_item[w + 1];
    return shared_.cut_step[w + 1] > 0 && (last_item > shared_.cut_item[w] || shared_.cut_step[w] == 0);
  }

  /// Returns the merge of the unit whose first segment belongs to worker `index`, or, where units are cut into
  /// portions, whose first portion is item `index`.
  MLA_DEVICE cuda::Merge merge_at(int32_t index) const {
    const bool chunked = portion_steps_ > 0;
    const int32_t item = chunked ? index : shared_.cut_item[index + 1];
    const ItemPlace at = locate(item);
    const RequestWork work = lengths_.of(at.request);
    cuda::Merge merge{.request = at.request,
                      .row_begin = at.unit * row_lanes_ * shape_.block_rows,
                      .token_begin = work.token_begin,
                      .num_rows = work.q_len * shape_.num_heads,
                      .first_slot = item * row_lanes_,
                      .rest_slot = (item + 1) * row_lanes_,
                      .slot_stride = row_lanes_,
                      .num_splits = at.num_portions};
    if (chunked) return merge;
    merge.first_slot = (2 * index + 1) * row_lanes_;
    merge.rest_slot = 2 * (index + 1) * row_lanes_;
    merge.slot_stride = 2 * row_lanes_;
    merge.num_splits = find_in_prefix(shared_.cut_item, num_workers_, item) - index + 1;
    return merge;
  }

  /// Writes the merges, the long ones first.
  MLA_DEVICE void write_merges() const {
    cuda::MergeCounts counts = {
        .num_merges = 0,
        .merge_rows = static_cast<int32_t>(std::min<int64_t>(max_rows_, row_lanes_ * shape_.block_rows)),
        .num_long = 0};
    write_merges(true, counts);
    counts.num_long = counts.num_merges;
    write_merges(false, counts);
    if (ptx::thread_index() == 0)
      *list_.header = {.row_lanes = row_lanes_, .num_workers = num_workers_, .merges = counts};
  }
  /// Writes those that are long, or those that are not, behind the merges that `counts` counts, and counts them, too.
  MLA_DEVICE void write_merges(bool are_long, cuda::MergeCounts& counts) const {
    const bool chunked = portion_steps_ > 0;
    const int32_t candidates = chunked ? static_cast<int32_t>(total_items_) : num_workers_;
    for (int32_t base = 0; base < candidates; base += kThreads) {
      const int32_t index = base + ptx::thread_index();
      bool begins = false;
      if (index < candidates && chunked) {
        const ItemPlace at = locate(index);
        begins = at.num_portions > 1 && at.portion == 0;
      } else if (index < candidates) {
        begins = begins_merge(index);
      }
      const cuda::Merge merge = begins ? merge_at(index) : cuda::Merge{};
      begins = begins && (merge.num_splits > cuda::kFewSplits) == are_long;
      int64_t found = 0;
      const int64_t before = exclusive_scan<kThreads>(begins ? 1 : 0, shared_.scratch, found);
      if (begins) list_.merges[counts.num_merges + static_cast<int32_t>(before)] = merge;
      counts.num_merges += static_cast<int32_t>(found);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// This file has the kernels of block_table_to_csr and physical_slots.
//   ScanPagesKernel      one block sums up the page counts of all requests into kv_indptr
//   CopyPageRowsKernel   blocks stride over requests, and copy their page numbers to where kv_indptr says
//   PhysicalSlotsKernel  blocks stride over tokens, and hold the entries of one row of indices, 2048 at a time, in
//                        registers; all of them are read before any is written, so that a row may be its own output
// Shared memory holds the count of each warp (int32) from byte 0 on, and their sum behind them.
#pragma once

#include <bit>

#include "core/args.h"
#include "cuda/border/launch.h"
#include "cuda/tile/search.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Replaces each lane's value by the sum of the values of all lanes before it, and returns the warp's sum.
MLA_DEVICE int32_t sum_before_lane(int32_t& value) {
  int32_t sum = value;
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int32_t other = ptx::shuffle_up(sum, delta);
    if (ptx::lane() >= delta) sum += other;
  }
  value = sum - value;
  return ptx::shuffle(sum, kWarpSize - 1);
}

struct ScanPagesKernel {
  using Params = core::BlockTableToCsrArgs;
  static constexpr const char* kName = "scan_pages";
  static constexpr int kThreads = 1024;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSharedBytes = kThreads / kWarpSize * 4;

  static MLA_DEVICE void run(const Params& args) {
    ptx::allow_next_grid();
    if (ptx::thread_index() == 0) args.kv_indptr[0] = 0;
    auto* warp_sums = reinterpret_cast<int32_t*>(ptx::shared_memory());
    int32_t begin = 0;  // kv_indptr of the first request of this turn of the loop
    for (int32_t first = 0; first < args.batch_size; first += kThreads) {
      const int32_t request = first + ptx::thread_index();
      const int32_t own = request < args.batch_size ? num_pages(args, request) : 0;
      int32_t before = own;
      const int32_t sum = sum_before_lane(before);
      if (ptx::lane() == 0) warp_sums[ptx::warp()] = sum;
      ptx::sync_block();  // the sums of all warps are in shared memory
      int32_t warps_before = warp_sums[ptx::lane()];
      const int32_t total = sum_before_lane(warps_before);
      before += begin + ptx::shuffle(warps_before, ptx::warp());
      if (request < args.batch_size) args.kv_indptr[request + 1] = before + own;
      begin += total;
      ptx::sync_block();  // all threads have read the sums, which the next turn overwrites
    }
  }

 private:
  static MLA_DEVICE int32_t num_pages(const Params& args, int32_t request) {
    const int32_t kv_len = args.kv_len[request];
    return kv_len > 0 ? (kv_len - 1) / args.page_size + 1 : 0;
  }
};
static_assert(ScanPagesKernel::kThreads == kWarpSize * kWarpSize, "a warp scans the sums of all warps");

struct CopyPageRowsKernel {
  using Params = core::BlockTableToCsrArgs;
  static constexpr const char* kName = "copy_page_rows";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // until ScanPagesKernel has written kv_indptr
    for (int32_t request = ptx::block_index_x(); request < args.batch_size; request += ptx::grid_size_x()) {
      const int32_t begin = args.kv_indptr[request], count = args.kv_indptr[request + 1] - begin;
      const int32_t* pages = args.block_table + request * args.block_table_stride_request;
      int32_t* out = args.kv_indices + begin;
      for (int32_t i = ptx::thread_index(); i < count; i += kThreads) out[i] = pages[i];
    }
  }
};

struct PhysicalSlotsKernel {
  using Params = core::PhysicalSlotsArgs;
  static constexpr const char* kName = "physical_slots";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kPerThread = 8;  // entries of a thread, kThreads apart
  static constexpr int kCounts = kPerThread * kWarps;
  static constexpr int kSharedBytes = (kCounts + 1) * 4;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // which may write lengths, pages and indices
    for (int64_t token = ptx::block_index_x(); token < args.num_tokens; token += ptx::grid_size_x()) {
      const int32_t request = request_of(args, token);
      if (request >= 0) fill_row(args, request, token);
    }
  }

 private:
  static MLA_DEVICE int32_t request_of(const Params& args, int64_t token) {
    if (args.queries.indptr != nullptr) return find_range(args.queries.indptr, args.pages.batch_size, token);
    return static_cast<int32_t>(static_cast<uint32_t>(token) / static_cast<uint32_t>(args.queries.uniform_len));
  }

  /// Finds the slots of one request's tokens.
  struct Finder {
    const ContextParallel& share;
    const int32_t* pages;
    uint32_t page_size;
    int32_t num_rows;

    /// Returns the slot of a token or row; -1 if it is not valid or belongs to another rank.
    MLA_DEVICE int32_t operator()(int64_t token) const {
      if (token < 0 || token >= num_rows) return -1;
      auto local = static_cast<uint32_t>(token);
      if (share.world > 1) {
        if (!owns(share, token)) return -1;
        // The local index is how many earlier tokens the rank owns.
        local = static_cast<uint32_t>(local_length(share, token));
      }
      const uint32_t page = local / page_size;
      return static_cast<int32_t>(static_cast<uint32_t>(pages[page]) * page_size + (local - page * page_size));
    }
  };

  static MLA_DEVICE void fill_row(const Params& args, int32_t request, int64_t token) {
    const Finder find = {.share = args.context_parallel,
                         .pages = args.pages.of(request),
                         .page_size = static_cast<uint32_t>(args.pages.page_size),
                         .num_rows = args.num_rows(request)};
    const int32_t* indices = args.indices + token * args.indices_stride_token;
    int32_t* slots = args.slots + token * args.slots_stride_token;
    const int32_t given = args.topk_length != nullptr ? args.topk_length[token] : args.topk;
    const int32_t length = given < args.topk ? given : args.topk;
    const int32_t seen = args.num_seen(request, token);
    int32_t valid = 0;
    for (int64_t first = 0; first < args.num_slots; first += kPerThread * kThreads) {
      int32_t found[kPerThread];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int64_t i = first + j * kThreads + ptx::thread_index();
        found[j] = i < args.num_slots ? find(args.row_of_entry(indices, length, seen, static_cast<int32_t>(i))) : -1;
      }
      valid += write_entries(args, found, first, valid, slots);
    }
    if (args.compact)
      for (int64_t i = int64_t{valid} + ptx::thread_index(); i < args.num_slots; i += kThreads) slots[i] = -1;
    if (args.valid_count != nullptr && ptx::thread_index() == 0) args.valid_count[token] = valid;
  }

  /// Writes entries first, first + 1, ... of a row, of which `valid` valid ones stand before. Returns how many of all
  /// threads' entries are valid.
  static MLA_DEVICE int32_t write_entries(const Params& args, const int32_t (&found)[kPerThread], int64_t first,
                                          int32_t valid, int32_t* slots) {
    // One count per warp and entry of a thread, in the order of the entries.
    auto* counts = reinterpret_cast<int32_t*>(ptx::shared_memory());
    uint32_t valid_lanes[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      valid_lanes[j] = ptx::ballot(found[j] >= 0);
      if (ptx::lane() == 0) counts[j * kWarps + ptx::warp()] = std::popcount(valid_lanes[j]);
    }
    ptx::sync_block();  // all counts are in shared memory, and all entries have been read
    if (ptx::warp() == 0) {
      int32_t sum = 0;
      for (int i = ptx::lane(); i < kCounts; i += kWarpSize) {
        int32_t before = counts[i];
        const int32_t step_sum = sum_before_lane(before);
        counts[i] = sum + before;
        sum += step_sum;
      }
      if (ptx::lane() == 0) counts[kCounts] = sum;
    }
    ptx::sync_block();  // warp 0 has summed up the counts
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t i = first + j * kThreads + ptx::thread_index();
      const uint32_t lanes_before = valid_lanes[j] & ((1U << ptx::lane()) - 1U);
      if (args.compact) {
        if (found[j] >= 0) slots[valid + counts[j * kWarps + ptx::warp()] + std::popcount(lanes_before)] = found[j];
      } else if (i < args.num_slots) {
        slots[i] = found[j];
      }
    }
    const int32_t sum = counts[kCounts];
    ptx::sync_block();  // all threads have read the counts, which the next entries overwrite
    return sum;
  }
};
static_assert(PhysicalSlotsKernel::kCounts % kWarpSize == 0, "all lanes scan");

}  // namespace mla::MLA_CUDA_NAMESPACE

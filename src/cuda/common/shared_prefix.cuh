// SPDX-License-Identifier: Apache-2.0
// This file has the kernels that find which neighbouring requests begin with the same pages. Their results are those
// of plan/shared_prefix.cpp.
//   CommonPagesKernel   a warp for each request counts the leading pages that it has in common with the one before
//   PrefixGroupsKernel  one block; thread 0 goes over these counts, 1024 at a time from shared memory, and decides the
//                       groups; then all threads fill the lists of groups and of requests
#pragma once

#include <bit>

#include "core/args.h"
#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

struct CommonPagesKernel {
  using Params = core::SharedPrefixArgs;
  static constexpr const char* kName = "common_pages";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;

  static MLA_DEVICE void run(const Params& args) {
    constexpr int kWarps = kThreads / kWarpSize;
    for (int32_t request = ptx::block_index_x() * kWarps + ptx::warp(); request < args.batch_size;
         request += ptx::grid_size_x() * kWarps) {
      const int32_t common = request > 0 ? common_pages(args, request) : 0;
      if (ptx::lane() == 0) args.common_pages[request] = common;
    }
  }

 private:
  static MLA_DEVICE int32_t common_pages(const Params& args, int32_t request) {
    constexpr int kPerLane = 8;  // entries in flight
    const int32_t most = std::min(args.full_pages(request - 1), args.full_pages(request));
    const int32_t* const before = args.pages.table + args.table_begin(request - 1);
    const int32_t* const own = args.pages.table + args.table_begin(request);
    for (int32_t begin = 0; begin < most; begin += kPerLane * kWarpSize) {
      bool same[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int32_t i = begin + j * kWarpSize + ptx::lane();
        same[j] = i < most && own[i] == before[i];
      }
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const uint32_t differ = ~ptx::ballot(same[j]);
        const uint32_t first = differ & (0U - differ);
        if (differ != 0) return begin + j * kWarpSize + std::popcount(first - 1);
      }
    }
    return most;
  }
};

struct PrefixGroupsKernel {
  using Params = core::SharedPrefixArgs;
  static constexpr const char* kName = "prefix_groups";
  static constexpr int kThreads = 1024;
  static constexpr int kMinBlocks = 1;
  static constexpr int kChunk = kThreads;
  /// The counts of a chunk and the one behind it, and the number of groups.
  static constexpr int kSharedBytes = (kChunk + 2) * 4;

  static MLA_DEVICE void run(const Params& args) {
    auto* const counts = reinterpret_cast<int32_t*>(ptx::shared_memory());
    int32_t* const num_groups = counts + kChunk + 1;
    Groups groups = {.args = args};
    for (int32_t begin = 0; begin < args.batch_size; begin += kChunk) {
      for (int32_t i = ptx::thread_index(); i <= kChunk; i += kThreads)
        counts[i] = begin + i < args.batch_size ? args.common_pages[begin + i] : 0;
      ptx::sync_block();  // the counts are in shared memory
      const int32_t end = std::min(args.batch_size - begin, int32_t{kChunk});
      for (int32_t i = 0; ptx::thread_index() == 0 && i < end; ++i) groups.add(begin + i, counts[i], counts[i + 1]);
      ptx::sync_block();  // thread 0 has read them
    }
    if (ptx::thread_index() == 0) {
      groups.close(args.batch_size);
      *num_groups = groups.count;
    }
    ptx::sync_block();  // the first requests of all groups, their lengths and the pages of their members are written
    fill_groups(args, *num_groups);
    fill_requests(args);
  }

 private:
  /// Forms the groups. A group's first request goes to group_qo_indptr, the pages that a request shares to own_kv_len,
  /// until the other threads turn them into what stands there.
  struct Groups {
    const Params& args;
    core::PrefixGroup group = {};
    int32_t first = 0;
    int32_t count = 0;

    MLA_DEVICE void add(int32_t request, int32_t common, int32_t next) {
      if (request == 0 || group.take(common, next)) return;
      close(request);
      first = request;
      group = {};
    }
    /// Ends the group before request `end`.
    MLA_DEVICE void close(int32_t end) {
      if (first >= end) return;
      const auto pages = static_cast<int32_t>(group.pages);
      args.group_qo_indptr[count] = first;
      args.group_kv_len[count] = pages * args.pages.page_size;
      ++count;
      for (int32_t b = first; b < end; ++b) args.own_kv_len[b] = pages;
    }
  };

  static MLA_DEVICE void fill_groups(const Params& args, int32_t num_groups) {
    for (int32_t g = ptx::thread_index(); g <= args.batch_size; g += kThreads) {
      const int32_t first = g < num_groups ? args.group_qo_indptr[g] : args.batch_size;
      args.group_qo_indptr[g] = args.queries.begin(first);
      args.group_kv_indptr[g] = args.table_begin(first);
      if (g >= num_groups && g < args.batch_size) args.group_kv_len[g] = 0;
    }
  }

  static MLA_DEVICE void fill_requests(const Params& args) {
    for (int32_t b = ptx::thread_index(); b <= args.batch_size; b += kThreads) {
      const int32_t pages = b < args.batch_size ? args.own_kv_len[b] : 0;
      args.own_kv_indptr[b] = args.table_begin(b) + pages;
      if (b < args.batch_size) args.own_kv_len[b] = args.kv_len(b) - pages * args.pages.page_size;
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// Before the kernel in front of it has ended, while memory has little to do, a block prefetches the rows of its first
// steps into the L2 cache. The plan, the lengths and the page tables or indices tell where these rows are, and all of
// them may still be written at that time. So they are read past the L1 cache, which would keep what is out of date;
// every number is checked, so that no address outside the cache is touched; and the result is only a hint. Rows that
// were not needed cost their time, and rows that are missing are loaded later.
#pragma once

#include "cuda/attention/absorbed_keys.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class FirstRows {
 public:
  MLA_DEVICE explicit FirstRows(const cuda::AbsorbedArgs& args) : args_(args) {
    const cuda::Segment& first = args.list.shares[ptx::block_index_x()].first;
    const int32_t request = ptx::load_relaxed(&first.request);
    if (request < 0 || request >= args.list.max_requests) return;
    key_begin_ = ptx::load_relaxed(&first.key_begin);
    key_end_ = ptx::load_relaxed(&first.key_end);
    if (args.sparse()) {
      entries_ = args.pools[0].indices + request * args.pools[0].indices_stride_token;
      num_entries_ = args.pools[0].topk;
    } else {
      const core::Pages& pages = args.pages;
      const int64_t at = pages.kv_indptr != nullptr ? int64_t{ptx::load_relaxed(pages.kv_indptr + request)}
                                                    : request * pages.table_stride_request;
      entries_ = pages.table + at;
      num_entries_ = at < 0 ? 0 : pages.table_entries - at;
    }
  }

  /// Returns the addresses of the block's i-th key. They are null if there is no such key or its row is not known yet.
  /// Keys of a second pool are left out.
  MLA_DEVICE Place<Config> place(int32_t i) const {
    const int64_t key = int64_t{key_begin_} + i;
    if (key < 0 || key >= key_end_) return {};
    const core::Cache& cache = args_.pools[0].cache;
    const auto known = static_cast<int32_t>(key);
    const int32_t at = args_.sparse() ? known : place_in_pages(known, args_.pools[0].page_size).page;
    if (at >= num_entries_) return {};
    const int32_t entry = ptx::load_relaxed(entries_ + at);
    if (entry >= (args_.sparse() ? cache.num_slots() : cache.num_pages)) return {};
    return find_place<Config>(args_, args_.pools[0], known, entry);
  }

  /// Each value warp calls this, and prefetches its share of the rows of the first kStages - 1 steps. This took 16
  /// heads, bf16, batch 64, kv 4k from 83.2 to 80.9 us; four steps or two were 0 to 0.9 us slower than three (H200,
  /// 2026-11-22).
  MLA_DEVICE void prefetch(int value_warp) const {
    constexpr int kFirstKeys = (Config::kStages - 1) * Config::kKeys;
    static_assert(kFirstKeys <= Config::kValueWarps * kWarpSize);
    const int32_t i = value_warp * kWarpSize + ptx::lane();
    const Place<Config> row = i < kFirstKeys ? place(i) : Place<Config>{};
    if (row.ckv == nullptr) return;
    prefetch_lines(row.ckv, args_.pools[0].ckv_bytes);
    prefetch_lines(row.kpe, args_.pools[0].kpe_bytes);
  }

 private:
  static MLA_DEVICE void prefetch_lines(const std::byte* from, int32_t bytes) {
    constexpr int kLineBytes = 128;
    const auto behind_line = static_cast<int32_t>(reinterpret_cast<uintptr_t>(from) % kLineBytes);
    MLA_NO_UNROLL
    for (int32_t at = -behind_line; at < bytes; at += kLineBytes) ptx::prefetch_l2(from + std::max(at, 0));
  }

  const cuda::AbsorbedArgs& args_;
  int32_t key_begin_ = 0, key_end_ = 0;
  const int32_t* entries_ = nullptr;
  int64_t num_entries_ = 0;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

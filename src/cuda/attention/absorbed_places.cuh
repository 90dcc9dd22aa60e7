// SPDX-License-Identifier: Apache-2.0
// Finds the rows of the cache that hold the keys of a segment.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/absorbed_args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/page_place.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds the addresses of a key's latent channels, rotary channels and scales. They are null where the key has no row;
/// the tile then holds zeros instead.
template <class Config, bool kQuantized = Config::kQuantized>
struct alignas(16) Place {
  const std::byte* ckv = nullptr;
  const std::byte* kpe = nullptr;
};
template <class Config>
struct alignas(8) Place<Config, true> {
  const std::byte* ckv = nullptr;
  const std::byte* kpe = nullptr;
  const std::byte* scales = nullptr;
};

/// Returns how long the L2 cache keeps rows of keys.
MLA_DEVICE ptx::CachePolicy row_policy(const cuda::AbsorbedArgs& args) { return {args.row_policy}; }

/// Tells where the rows of a segment's keys are found. Every key has an entry in a list: in dense attention the entry
/// is the number of the key's page, in sparse attention the key's slot. In sparse attention the keys of pool 0 come
/// first, padded to a multiple of kPlanKeys, and those of pool 1 follow.
struct KeyList {
  const int32_t* entries[2];
  int32_t second_pool;  // number of the first key of pool 1; INT32_MAX: there is no pool 1
  int32_t length[2];    // keys of each pool; dense: the segment's end

  MLA_DEVICE int pool_of(int32_t key) const { return key >= second_pool ? 1 : 0; }
};

/// Returns how many keys of pool 1 a query token has.
MLA_DEVICE int32_t second_pool_length(const cuda::AbsorbedArgs& args, int32_t token) {
  const cuda::KeyPool& pool = args.pools[1];
  if (pool.topk_length == nullptr) return pool.topk;
  int32_t at = token;
  if (pool.length_per_request && args.queries.indptr == nullptr) {
    at = token / args.queries.uniform_len;
  } else if (pool.length_per_request) {
    int32_t last = args.batch_size;  // the loop leaves in `at` the last request that begins at or before the token
    for (at = 0; last - at > 1;) {
      const int32_t middle = (at + last) / 2;
      if (args.queries.indptr[middle] <= token)
        at = middle;
      else
        last = middle;
    }
  }
  return std::clamp<int32_t>(pool.topk_length[at], 0, pool.topk);
}

MLA_DEVICE KeyList make_key_list(const cuda::AbsorbedArgs& args, const cuda::Segment& segment) {
  if (!args.sparse()) return {{args.pages.of(segment.request), nullptr}, INT32_MAX, {segment.key_end, 0}};
  KeyList list = {{args.pools[0].indices + segment.request * args.pools[0].indices_stride_token, nullptr},
                  INT32_MAX,
                  {segment.kv_len, 0}};
  if (args.num_pools() == 2) {
    list.entries[1] = args.pools[1].indices + segment.request * args.pools[1].indices_stride_token;
    list.second_pool = (segment.kv_len + args.list.step_keys - 1) / args.list.step_keys * args.list.step_keys;
    list.length[1] = second_pool_length(args, segment.request);
  }
  return list;
}

/// Returns the address of a key's entry; null if the segment has no such key.
MLA_DEVICE const int32_t* entry_of(const cuda::AbsorbedArgs& args, const KeyList& list, int32_t key) {
  if (!args.sparse())
    return key < list.length[0] ? list.entries[0] + place_in_pages(key, args.pools[0].page_size).page : nullptr;
  const bool second = list.pool_of(key) == 1;
  const int32_t at = second ? key - list.second_pool : key;
  if (at >= (second ? list.length[1] : list.length[0])) return nullptr;
  return (second ? list.entries[1] : list.entries[0]) + at;
}

/// Returns where a key's row lies, from the key's entry; page -1 if it has none. A negative entry stands for a key
/// without a row.
MLA_DEVICE PagePlace find_row(const cuda::AbsorbedArgs& args, const cuda::KeyPool& pool, int32_t key, int32_t entry) {
  if (entry < 0 || (args.sparse() && entry >= pool.cache.num_slots())) return {-1, 0};
  const PagePlace at = place_in_pages(args.sparse() ? entry : key, pool.page_size);
  return {args.sparse() ? at.page : entry, at.offset};
}

/// Returns the addresses of the row that lies there.
template <class Config>
MLA_DEVICE Place<Config> row_at(const cuda::KeyPool& pool, PagePlace at) {
  if (at.page < 0) return {};
  const core::Cache& cache = pool.cache;
  Place<Config> place;
  place.ckv = cache.ckv.row(at.page, at.offset);
  place.kpe = cache.kpe.row(at.page, at.offset);
  if constexpr (Config::kQuantized) place.scales = cache.scales.row(at.page, at.offset);
  return place;
}

/// Returns the addresses of a key's row from the key's entry.
template <class Config>
MLA_DEVICE Place<Config> find_place(const cuda::AbsorbedArgs& args, const cuda::KeyPool& pool, int32_t key,
                                    int32_t entry) {
  return row_at<Config>(pool, find_row(args, pool, key, entry));
}

/// Is what is kept of a quantized row until it is copied. All three addresses would take more shared memory than 64
/// query rows leave.
struct alignas(16) FoundRow {
  const std::byte* ckv = nullptr;  // null if the key has no row
  union {
    const std::byte* scales = nullptr;  // of a row of a direct pool, whose rotary channels follow from `ckv`
    PagePlace at;                       // of other rows; all addresses follow from it
  };
};
template <class Config>
using KeptPlace = std::conditional_t<Config::kQuantized, FoundRow, Place<Config>>;

/// Returns what is kept of the row that lies there.
template <class Config>
MLA_DEVICE KeptPlace<Config> kept_place(const cuda::KeyPool& pool, PagePlace at) {
  if constexpr (Config::kQuantized) {
    FoundRow row;
    if (at.page < 0) return row;
    row.ckv = pool.cache.ckv.row(at.page, at.offset);
    if (pool.direct)
      row.scales = pool.cache.scales.row(at.page, at.offset);
    else
      row.at = at;
    return row;
  } else {
    return row_at<Config>(pool, at);
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE

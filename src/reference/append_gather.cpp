// SPDX-License-Identifier: Apache-2.0
// Rows into the cache and out of it.
#include <algorithm>
#include <array>
#include <cstring>

#include "reference/reference.h"
#include "reference/scalar.h"

namespace mla::reference {
namespace {

/// Equal types keep their bits, NaN payloads included; others are rounded.
void copy_row(const void* source, DType source_dtype, int64_t source_offset, int32_t n, void* target,
              DType target_dtype, int64_t target_offset) {
  if (n == 0) return;
  const auto size = static_cast<int64_t>(size_of(source_dtype));
  if (source_dtype == target_dtype) {
    std::memcpy(static_cast<std::byte*>(target) + target_offset * size,
                static_cast<const std::byte*>(source) + source_offset * size, static_cast<size_t>(n * size));
    return;
  }
  constexpr int32_t kChunk = 256;
  std::array<double, kChunk> values;
  for (int32_t i = 0; i < n; i += kChunk) {
    const int32_t count = std::min(kChunk, n - i);
    load_row(source, source_dtype, source_offset + i, count, values.data());
    store_row(values.data(), target_dtype, target_offset + i, count, target);
  }
}

}  // namespace

void append(const core::AppendArgs& args) {
  const core::Cache& cache = args.cache;
  const DType kv_dtype = cache_dtype(cache.format);
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
    copy_row(args.ckv, args.dtype, token * args.ckv_stride_token, cache.d_ckv, cache.ckv, kv_dtype,
             page * cache.ckv_stride_page + offset * cache.ckv_stride_token);
    copy_row(args.kpe, args.dtype, token * args.kpe_stride_token, cache.d_kpe, cache.kpe, kv_dtype,
             page * cache.kpe_stride_page + offset * cache.kpe_stride_token);
  }
}

void gather(const core::GatherArgs& args) {
  const core::Cache& cache = args.cache;
  const DType kv_dtype = cache_dtype(cache.format);
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int32_t* pages = args.pages.of(request);
    const int64_t start = args.token_start != nullptr ? args.token_start[request] : 0;
    for (int64_t row = args.out_indptr[request]; row < args.out_indptr[request + 1]; ++row) {
      const int64_t token = start + row - args.out_indptr[request];
      const int64_t page = pages[token / args.pages.page_size], offset = token % args.pages.page_size;
      copy_row(cache.ckv, kv_dtype, page * cache.ckv_stride_page + offset * cache.ckv_stride_token, cache.d_ckv,
               args.out_ckv, args.out_dtype, row * args.out_ckv_stride_token);
      copy_row(cache.kpe, kv_dtype, page * cache.kpe_stride_page + offset * cache.kpe_stride_token, cache.d_kpe,
               args.out_kpe, args.out_dtype, row * args.out_kpe_stride_token);
    }
  }
}

}  // namespace mla::reference

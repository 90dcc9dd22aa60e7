// SPDX-License-Identifier: Apache-2.0
// append and gather write rows into a cache, and read them out of it into dense tensors. They are bound by memory.
#include <algorithm>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

void append_share(const CacheWriter& writer, const core::AppendArgs& args, int64_t begin, int64_t end) {
  const int64_t ckv_bytes = args.cache.d_ckv * static_cast<int64_t>(size_of(args.dtype));
  const int64_t kpe_bytes = args.cache.d_kpe * static_cast<int64_t>(size_of(args.dtype));
  for (int64_t token = begin; token < end; ++token) {
    const int64_t ahead = token + kRowsAhead;
    if (ahead < end && args.slot_mapping[ahead] >= 0) {
      writer.prefetch(args.slot_mapping[ahead] / args.cache.page_size, args.slot_mapping[ahead] % args.cache.page_size);
      prefetch_for_read(at(args.ckv, ahead * args.ckv_stride_token, args.dtype), ckv_bytes);
      prefetch_for_read(at(args.kpe, ahead * args.kpe_stride_token, args.dtype), kpe_bytes);
    }
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t page = slot / args.cache.page_size, offset = slot % args.cache.page_size;
    writer.write_ckv(at(args.ckv, token * args.ckv_stride_token, args.dtype), page, offset);
    if (args.cache.d_kpe > 0)
      writer.write_kpe(at(args.kpe, token * args.kpe_stride_token, args.dtype), page, offset, 0, args.cache.d_kpe);
  }
  writer.finish();
}

void gather_share(const CacheReader& reader, const core::GatherArgs& args, int64_t begin, int64_t end) {
  const int32_t page_size = args.pages.page_size;
  const auto* bound = std::upper_bound(args.out_indptr, args.out_indptr + args.batch_size + 1, begin);
  auto request = static_cast<int32_t>(bound - args.out_indptr) - 1;
  for (int64_t row = begin; row < end; ++request) {
    const int32_t* pages = args.pages.of(request);
    const int64_t request_end = std::min<int64_t>(end, args.out_indptr[request + 1]);
    int64_t token = (args.token_start != nullptr ? args.token_start[request] : 0) + row - args.out_indptr[request];
    for (; row < request_end; ++row, ++token) {
      if (row + kRowsAhead < request_end)
        reader.prefetch(pages[(token + kRowsAhead) / page_size], (token + kRowsAhead) % page_size);
      const int64_t page = pages[token / page_size], offset = token % page_size;
      reader.read_ckv(page, offset, at(args.out_ckv, row * args.out_ckv_stride_token, args.out_dtype));
      if (args.cache.d_kpe > 0)
        reader.read_kpe(page, offset, at(args.out_kpe, row * args.out_kpe_stride_token, args.out_dtype));
    }
  }
  reader.finish();
}

}  // namespace

void run_append(const KernelSet& set, const core::AppendArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes = args.num_tokens * width * static_cast<int64_t>(size_of(args.dtype));
  const CacheWriter writer(set, args.cache, args.dtype, args.dtype, bytes);
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) { append_share(writer, args, begin, end); });
}

void run_gather(const KernelSet& set, const core::GatherArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes = args.num_rows * width * static_cast<int64_t>(size_of(args.out_dtype));
  const CacheReader reader(set, args.cache, args.out_dtype, bytes);
  share(pool, args.num_rows, bytes, [&](int64_t begin, int64_t end) { gather_share(reader, args, begin, end); });
}

}  // namespace mla::cpu

// SPDX-License-Identifier: Apache-2.0
// gather and copy_pages read rows out of a cache, and write them into dense tensors or into another cache.
#include <cstring>

#include "reference/cache_rows.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Returns whether the same bits mean the same values in both caches: then a copy must not round.
bool same_ckv_code(const core::Cache& from, const core::Cache& to) {
  if (from.format != to.format || from.num_scales != to.num_scales) return false;
  if (!from.is_quantized()) return true;
  if (CacheRow{from, 0, 0}.ckv().scales.outer_factor() != CacheRow{to, 0, 0}.ckv().scales.outer_factor()) return false;
  if (!from.writes_scales) return CacheRow{from, 0, 0}.ckv().scales[0] == CacheRow{to, 0, 0}.ckv().scales[0];
  return to.takes_scales_of(from);
}

bool same_kpe_code(const core::Cache& from, const core::Cache& to) {
  if (from.writes_kpe_scale() || to.writes_kpe_scale()) return from.format == to.format;
  const Channels a = CacheRow{from, 0, 0}.kpe(), b = CacheRow{to, 0, 0}.kpe();
  return a.dtype == b.dtype && (a.scales.data == nullptr || a.scales[0] == b.scales[0]);
}

}  // namespace

void gather(const core::GatherArgs& args) {
  const core::Cache& cache = args.cache;
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int32_t* pages = args.pages.of(request);
    const int64_t start = args.token_start != nullptr ? args.token_start[request] : 0;
    for (int64_t out = args.out_indptr[request]; out < args.out_indptr[request + 1]; ++out) {
      const int64_t token = start + out - args.out_indptr[request];
      const CacheRow row{cache, pages[token / args.pages.page_size], token % args.pages.page_size};
      write_channels(row.ckv(), cache.d_ckv, args.out_dtype, out * args.out_ckv_stride_token, args.out_ckv);
      write_channels(row.kpe(), cache.d_kpe, args.out_dtype, out * args.out_kpe_stride_token, args.out_kpe);
    }
  }
}

void copy_pages(const core::CopyPagesArgs& args) {
  if (args.num_tokens() == 0) return;
  const bool copies_ckv = same_ckv_code(args.from, args.to), copies_kpe = same_kpe_code(args.from, args.to);
  for (int64_t token = 0; token < args.num_tokens(); ++token) {
    const CacheRow from{args.from, args.from_pages[token / args.from.page_size], token % args.from.page_size};
    const CacheRow to{args.to, args.to_pages[token / args.to.page_size], token % args.to.page_size};
    const auto copy = [&](const core::Plane& source, const core::Plane& target, size_t bytes) {
      if (bytes > 0) std::memcpy(to.of(target), from.of(source), bytes);
    };
    if (copies_ckv) {
      copy(args.from.ckv, args.to.ckv, static_cast<size_t>(args.from.ckv_bytes()));
      if (args.to.writes_scales) copy(args.from.scales, args.to.scales, static_cast<size_t>(args.from.scale_bytes));
    } else {
      write_ckv(to, from.ckv());
    }
    if (copies_kpe) {
      copy(args.from.kpe, args.to.kpe, static_cast<size_t>(args.from.kpe_bytes()));
      if (args.to.writes_kpe_scale())
        copy(args.from.kpe_scales(), args.to.kpe_scales(), static_cast<size_t>(args.from.kpe_scale_bytes));
    } else {
      write_kpe(to, from.kpe());
    }
  }
}

}  // namespace mla::reference

// SPDX-License-Identifier: Apache-2.0
// copy_pages copies pages from cache to cache. It is bound by memory.
#include <algorithm>
#include <cstring>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

float outer_scale(const core::Cache& cache) { return cache.outer_scale != nullptr ? *cache.outer_scale : 1.0F; }
float first_scale(const core::Cache& cache) { return *reinterpret_cast<const float*>(cache.scales.base); }

/// Returns whether the same bytes mean the same values in both caches: then they are copied as they are.
bool same_ckv_code(const core::Cache& from, const core::Cache& to) {
  if (from.format != to.format || from.num_scales != to.num_scales) return false;
  if (!from.is_quantized()) return true;
  if (outer_scale(from) != outer_scale(to)) return false;
  if (!from.writes_scales) return first_scale(from) == first_scale(to);
  return to.takes_scales_of(from);
}

bool same_kpe_code(const core::Cache& from, const core::Cache& to) {
  if (from.d_kpe == 0) return true;
  if (from.writes_kpe_scale() || to.writes_kpe_scale()) return from.format == to.format;
  return from.kpe_dtype == to.kpe_dtype && (!is_quantized(from.kpe_dtype) || *from.kpe_scale == *to.kpe_scale);
}

/// Copies `bytes` bytes of each token, as they are, from a plane of one cache to the same plane of the other. Where
/// tokens are contiguous in both caches, runs of them are copied at once.
struct PlaneCopy {
  core::Plane from, to;
  int64_t bytes;

  bool contiguous() const { return from.stride_token == bytes && to.stride_token == bytes; }

  template <class Copy>
  void run(const core::CopyPagesArgs& args, int64_t begin, int64_t end, const Copy& copy) const {
    for (int64_t token = begin; token < end;) {
      const int64_t from_offset = token % args.from.page_size, to_offset = token % args.to.page_size;
      const int64_t together =
          contiguous() ? std::min({end - token, args.from.page_size - from_offset, args.to.page_size - to_offset})
                       : int64_t{1};
      copy(from.row(args.from_pages[token / args.from.page_size], from_offset),
           to.row(args.to_pages[token / args.to.page_size], to_offset), together * bytes);
      token += together;
    }
  }
};

class PageCopier {
 public:
  PageCopier(const KernelSet& set, const core::CopyPagesArgs& args, int64_t bytes)
      : args_(args),
        between_(value_dtype(args.from.ckv_dtype)),
        reader_(set, args.from, between_, copies_straight() ? bytes : 0),
        writer_(set, args.to, between_, between_, bytes),
        bytes_(set, DType::kU8, DType::kU8, bytes),
        copies_ckv_(same_ckv_code(args.from, args.to)),
        copies_kpe_(same_kpe_code(args.from, args.to)) {
    if (copies_ckv_) add({args.from.ckv, args.to.ckv, args.from.ckv_bytes()});
    if (copies_kpe_ && args.from.d_kpe > 0) add({args.from.kpe, args.to.kpe, args.from.kpe_bytes()});
    if (copies_ckv_ && args.to.writes_scales) add({args.from.scales, args.to.scales, args.from.scale_bytes});
    if (copies_kpe_ && args.to.writes_kpe_scale())
      add({args.from.kpe_scales(), args.to.kpe_scales(), args.from.kpe_scale_bytes});
  }

  void share_of_tokens(int64_t begin, int64_t end) const {
    for (int32_t i = 0; i < num_planes_; ++i)
      planes_[i].run(args_, begin, end, [&](const void* from, void* to, int64_t n) { bytes_.copy(from, to, n); });
    if (!copies_ckv_ || !copies_kpe_)
      for (int64_t token = begin; token < end; ++token) {
        if (token + kRowsAhead < end) prefetch(token + kRowsAhead);
        convert(token);
      }
    bytes_.finish();
    reader_.finish();
    writer_.finish();
  }

 private:
  /// Adds a plane. Planes that are contiguous inside every row are copied as one.
  void add(const PlaneCopy& plane) {
    if (num_planes_ > 0) {
      PlaneCopy& last = planes_[num_planes_ - 1];
      const auto follows = [&](const core::Plane& a, const core::Plane& b) {
        return a.base + last.bytes == b.base && a.stride_page == b.stride_page && a.stride_token == b.stride_token;
      };
      if (follows(last.from, plane.from) && follows(last.to, plane.to)) {
        last.bytes += plane.bytes;
        return;
      }
    }
    planes_[num_planes_++] = plane;
  }

  /// Returns whether rows are read directly to their place and not into a buffer.
  bool copies_straight() const { return args_.to.ckv_dtype == between_; }

  struct Place {
    int64_t page, offset;
  };
  Place source(int64_t token) const {
    return {args_.from_pages[token / args_.from.page_size], token % args_.from.page_size};
  }
  Place target(int64_t token) const { return {args_.to_pages[token / args_.to.page_size], token % args_.to.page_size}; }

  void prefetch(int64_t token) const {
    const Place from = source(token), to = target(token);
    reader_.prefetch(from.page, from.offset);
    writer_.prefetch(to.page, to.offset);
  }

  /// Converts a token's row through a buffer of type between_. The step whose cache has that type already is left out.
  void convert(int64_t token) const {
    alignas(64) uint16_t values[kMaxCopiedWidth];
    const Place from = source(token), to = target(token);
    if (!copies_ckv_) {
      const bool reads = args_.from.ckv_dtype != between_, writes = args_.to.ckv_dtype != between_;
      void* row = writes ? values : static_cast<void*>(args_.to.ckv.row(to.page, to.offset));
      if (reads) reader_.read_ckv(from.page, from.offset, row);
      if (writes) writer_.write_ckv(reads ? row : args_.from.ckv.row(from.page, from.offset), to.page, to.offset);
    }
    if (!copies_kpe_) {
      reader_.read_kpe(from.page, from.offset, values);
      writer_.write_kpe(values, to.page, to.offset, 0, args_.from.d_kpe);
    }
  }

  const core::CopyPagesArgs& args_;
  DType between_;  // a type that holds every value of `from`
  CacheReader reader_;
  CacheWriter writer_;
  ElementCopier bytes_;
  bool copies_ckv_, copies_kpe_;
  PlaneCopy planes_[4] = {};
  int32_t num_planes_ = 0;
};

}  // namespace

void run_copy_pages(const KernelSet& set, const core::CopyPagesArgs& args, core::ThreadPool& pool) {
  if (args.num_tokens() == 0) return;
  const int64_t bytes = args.num_tokens() * std::max(token_bytes(args.from), token_bytes(args.to));
  const PageCopier copier(set, args, bytes);
  share(pool, args.num_tokens(), bytes, [&](int64_t begin, int64_t end) { copier.share_of_tokens(begin, end); });
}

}  // namespace mla::cpu

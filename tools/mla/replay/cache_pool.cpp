// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/cache_pool.h"

#include <cmath>

#include "mla/text.h"

namespace mla::cli::replay {

PageMemory::PageMemory(int64_t page_bytes, int64_t num_pages, const Gpu* gpu)
    : host_(static_cast<size_t>(num_pages * page_bytes), /*huge_pages=*/gpu == nullptr), page_bytes_(page_bytes) {
  if (gpu == nullptr) return;
  gpu_ = *gpu;
  there_ = GpuBuffer(*gpu, host_.size());
  Status status = gpu->fill(there_.data(), 0, there_.size(), Stream{});
  if (status.ok()) status = gpu->synchronize(Stream{});
  if (!status.ok()) throw UsageError("{}", status.message());
}

TensorView PageMemory::where_it_computes(TensorView view) const {
  if (!gpu_ || !view.given()) return view;
  view.data = there_.data() + (static_cast<const std::byte*>(view.data) - host_.data());
  view.device = gpu_->device();
  return view;
}

Status PageMemory::fetch(std::span<const int32_t> pages) const {
  if (!gpu_) return {};
  for (int32_t page : pages) {
    const int64_t at = page * page_bytes_;
    Status status = gpu_->copy(host_.data() + at, there_.data() + at, static_cast<size_t>(page_bytes_));
    if (!status.ok()) return status;
  }
  return {};
}

CachePool::CachePool(CacheFormat format, int64_t d_qk, int64_t d_rms, int32_t page_size, int64_t num_pages,
                     const Gpu* gpu)
    : PagedPool(PageMemory(page_bytes(format, d_qk, page_size, true), num_pages, gpu)),
      scale_(sizeof(float), /*huge_pages=*/false) {
  KvCache cache;
  cache.format = format;
  const Codec codec = kv_layout(format).nope;
  switch (codec.scale_place) {
    case ScalePlace::kNone: cache.kv = contiguous(pages_.host(), codec.element, {num_pages, page_size, d_qk}); break;
    case ScalePlace::kTensor:
      // No channel can hold more than all of a row's energy.
      *scale_.as<float>() = e4m3_scale(std::sqrt(static_cast<float>(d_rms)));
      cache.kv = contiguous(pages_.host(), codec.element, {num_pages, page_size, d_qk});
      cache.ckv_scale = contiguous(scale_.data(), DType::kF32, {1});
      break;
    case ScalePlace::kRow:
      cache.kv = contiguous(pages_.host(), DType::kU8, {num_pages, page_size, row_bytes(format, d_qk)});
      break;
    case ScalePlace::kFooter:
      cache.kv = contiguous(pages_.host(), DType::kU8, {num_pages, page_bytes(format, d_qk, page_size, true)});
      cache.page_size = page_size;
      break;
  }
  describe(cache);
}

IndexerPool::IndexerPool(int32_t page_size, int64_t num_pages, const Gpu* gpu)
    : PagedPool(PageMemory(indexer_page_bytes(page_size), num_pages, gpu)) {
  describe({.kv = contiguous(pages_.host(), DType::kU8, {num_pages, indexer_page_bytes(page_size)}),
            .page_size = page_size});
}

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/cache_pool.h"

#include <cmath>
#include <cstring>

#include "mla/numeric.h"
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

void PageMemory::send() const {
  if (!gpu_) return;
  if (const Status status = gpu_->copy(there_.data(), host_.data(), host_.size()); !status.ok())
    throw UsageError("{}", status.message());
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

// Every row is gathered as a request of its own, whose last token it is.
Result<std::vector<float>> CachePool::rows(Operations& operations, int64_t d_qk, int32_t page_size,
                                           std::span<const int32_t> pages, std::span<const int32_t> rows) const {
  const auto cache = PagedPool::cache(operations, pages);
  if (!cache.ok()) return cache.status();
  std::vector<float> values(rows.size() * static_cast<size_t>(d_qk));
  if (rows.empty()) return values;
  std::vector<int32_t> kv_indptr = {0}, kv_indices, kv_len, out_indptr = {0};
  for (int32_t row : rows) {
    const auto used = pages.first(static_cast<size_t>(row / page_size + 1));
    kv_indices.insert(kv_indices.end(), used.begin(), used.end());
    kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
    kv_len.push_back(row + 1);
    out_indptr.push_back(out_indptr.back() + 1);
  }
  GatherParams params;
  params.cache = *cache;
  params.pages = {
      .kv_indptr = ints(kv_indptr), .kv_indices = ints(kv_indices), .block_table = {}, .kv_len = ints(kv_len)};
  params.token_start = contiguous(rows.data(), DType::kI32, {std::ssize(rows)});
  params.out_indptr = ints(out_indptr);
  params.out_kv = contiguous(values.data(), DType::kF32, {std::ssize(rows), d_qk});
  if (Status status = operations.run(params, Phase::kCheck, nullptr); !status.ok()) return status;
  return values;
}

Result<std::vector<float>> IndexerPool::keys(const Operations& operations, std::span<const int32_t> pages,
                                             std::span<const int32_t> keys) const {
  const auto cache = PagedPool::cache(operations, pages);
  if (!cache.ok()) return cache.status();
  std::vector<float> values;
  for (int32_t key : keys) {
    const auto page = static_cast<size_t>(key / cache->page_size), place = static_cast<size_t>(key % cache->page_size);
    const auto* bytes = static_cast<const uint8_t*>(cache->kv.data) + pages[page] * cache->kv.stride[0];
    float scale = 0.0F;
    std::memcpy(
        &scale,
        bytes + static_cast<size_t>(cache->page_size) * kIndexerLayout.key_bytes + place * kIndexerLayout.scale_bytes,
        sizeof(scale));
    for (int32_t c = 0; c < kIndexerLayout.head_dim; ++c)
      values.push_back(e4m3_to_f32(bytes[place * kIndexerLayout.key_bytes + static_cast<size_t>(c)]) * scale);
  }
  return values;
}

}  // namespace mla::cli::replay

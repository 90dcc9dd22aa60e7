// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/cache_pool.h"

#include <cmath>

namespace mla::cli::replay {

CachePool::CachePool(CacheFormat format, int64_t d_qk, int64_t d_rms, int32_t page_size, int64_t num_pages)
    : memory_(static_cast<size_t>(num_pages * page_bytes(format, d_qk, page_size, true)), /*huge_pages=*/true),
      scale_(sizeof(float), /*huge_pages=*/false) {
  cache_.format = format;
  switch (kv_layout(format).scale_kind) {
    case ScaleKind::kNone:
      cache_.kv = contiguous(memory_.data(), format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16,
                             {num_pages, page_size, d_qk});
      break;
    case ScaleKind::kPerTensorF32:
      // No channel can hold more than all of a row's energy.
      *scale_.as<float>() = e4m3_scale(std::sqrt(static_cast<float>(d_rms)));
      cache_.kv = contiguous(memory_.data(), DType::kE4M3, {num_pages, page_size, d_qk});
      cache_.ckv_scale = contiguous(scale_.data(), DType::kF32, {1});
      break;
    case ScaleKind::kInlineF32:
      cache_.kv = contiguous(memory_.data(), DType::kU8, {num_pages, page_size, row_bytes(format, d_qk)});
      break;
    case ScaleKind::kFooterUE8M0:
      cache_.kv = contiguous(memory_.data(), DType::kU8, {num_pages, page_bytes(format, d_qk, page_size, true)});
      cache_.page_size = page_size;
      break;
  }
}

IndexerPool::IndexerPool(int32_t page_size, int64_t num_pages)
    : memory_(static_cast<size_t>(num_pages * indexer_page_bytes(page_size)), /*huge_pages=*/true) {
  cache_.kv = contiguous(memory_.data(), DType::kU8, {num_pages, indexer_page_bytes(page_size)});
  cache_.page_size = page_size;
}

}  // namespace mla::cli::replay

// SPDX-License-Identifier: Apache-2.0
// Makes caches of the quantized formats over a problem's own buffers, of 8 pages of 4 tokens unless they say otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "problems.h"

namespace mla::test {

/// Holds buffers for every quantized format; outputs start as sentinels.
struct QuantizedBuffers {
  static constexpr int64_t kFooterPage = kPageSize * 584;

  std::vector<uint16_t> codes = std::vector<uint16_t>(kPages * kPageSize * (kCkv + kKpe) / 2, kSentinel);
  std::vector<uint16_t> ckv_codes = std::vector<uint16_t>(kPages * kPageSize * kCkv / 2, kSentinel);
  std::vector<uint16_t> kpe_codes = std::vector<uint16_t>(kPages * kPageSize * kKpe / 2, kSentinel);
  std::vector<uint16_t> bytes = std::vector<uint16_t>(kPages * kPageSize * 656 / 2, kSentinel);
  std::vector<float> scale = {0.5F};
  std::vector<float> kpe_scale = {0.25F};
  std::vector<float> quarter_scales = std::vector<float>(kPages * kPageSize * 4, 1.0F);

  TensorView one(std::vector<float>& values) { return contiguous(values.data(), DType::kF32, {1}); }
  KvCache fp8() {
    return {.format = CacheFormat::kFP8,
            .kv = of(codes, {kPages, kPageSize, kCkv + kKpe}, DType::kE4M3),
            .ckv_scale = one(scale)};
  }
  KvCache fp8_parts() {
    return {.format = CacheFormat::kFP8,
            .ckv = of(ckv_codes, {kPages, kPageSize, kCkv}, DType::kE4M3),
            .kpe = of(kpe_codes, {kPages, kPageSize, kKpe}, DType::kE4M3),
            .ckv_scale = one(scale),
            .kpe_scale = one(kpe_scale)};
  }
  /// Returns a cache with a scale for every quarter of a token.
  KvCache fp8_quarters() {
    KvCache cache = fp8_parts();
    cache.ckv_scale = contiguous(quarter_scales.data(), DType::kF32, {kPages, kPageSize, 4});
    return cache;
  }
  KvCache ds_mla() { return {.format = CacheFormat::kFP8DsMla, .kv = of(bytes, {kPages, kPageSize, 656}, DType::kU8)}; }
  KvCache dsv4() {
    return {.format = CacheFormat::kFP8DsV4,
            .kv = of(bytes, {kPages, kFooterPage}, DType::kU8),
            .page_size = static_cast<int32_t>(kPageSize)};
  }
  bool untouched() const { return all_sentinels({&codes, &ckv_codes, &kpe_codes, &bytes}); }
};

/// Holds a decode with queries wide enough for every format.
struct WideDecode : Decode {
  std::vector<uint16_t> wide_q = std::vector<uint16_t>(3 * kHeads * 576, 0);
  std::vector<uint16_t> wide_o = std::vector<uint16_t>(3 * kHeads * 512, kSentinel);
  QuantizedBuffers quantized;

  WideDecode() { use_ds_mla(); }
  void use_ds_mla() {
    params.q = of(wide_q, {3, kHeads, 576});
    params.o = of(wide_o, {3, kHeads, 512});
    params.cache = quantized.ds_mla();
  }
  void use_dsv4() {
    params.q = of(wide_q, {3, kHeads, 512});
    params.o = of(wide_o, {3, kHeads, 512});
    params.cache = quantized.dsv4();
  }
  bool untouched() const { return all_sentinels({&wide_o, &lse}); }
};

/// Holds a decode over fp8 rows of the small widths.
struct Fp8Decode : Decode {
  QuantizedBuffers quantized;

  Fp8Decode() { params.cache = quantized.fp8(); }
};

}  // namespace mla::test

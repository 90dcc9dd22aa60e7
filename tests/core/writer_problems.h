// SPDX-License-Identifier: Apache-2.0
// Holds small valid problems of the operations that write caches.
#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"

namespace mla::test {

struct QuantizingAppend {
  std::vector<uint16_t> rows = std::vector<uint16_t>(3 * 576, 0);
  std::vector<int64_t> slots = {0, -1, 31};
  QuantizedBuffers quantized;
  AppendParams params;

  QuantizingAppend() {
    params = {.kv = of(rows, {3, 576}),
              .slot_mapping = contiguous(slots.data(), DType::kI64, {3}),
              .cache = quantized.ds_mla()};
  }
  bool untouched() const { return quantized.untouched(); }
};

struct AppendRope {
  std::vector<uint16_t> q_nope = std::vector<uint16_t>(3 * kHeads * kCkv, 0),
                        q_pe = std::vector<uint16_t>(3 * kHeads * kKpe, 0),
                        q_out = std::vector<uint16_t>(3 * kHeads * (kCkv + kKpe), kSentinel),
                        ckv = std::vector<uint16_t>(3 * kCkv, 0), kpe = std::vector<uint16_t>(3 * kKpe, 0);
  std::vector<float> cos_sin = std::vector<float>(10 * kKpe, 1.0F), scale = {2.0F};
  std::vector<int64_t> positions = {0, 9, 4}, slots = {0, -1, 31};
  CacheBuffers cache;
  AppendRopeParams params;

  AppendRope() {
    params = {.q_nope = of(q_nope, {3, kHeads, kCkv}),
              .q_pe = of(q_pe, {3, kHeads, kKpe}),
              .q_out = of(q_out, {3, kHeads, kCkv + kKpe}),
              .ckv = of(ckv, {3, kCkv}),
              .kpe = of(kpe, {3, kKpe}),
              .cos_sin = contiguous(cos_sin.data(), DType::kF32, {10, kKpe}),
              .positions = contiguous(positions.data(), DType::kI64, {3}),
              .slot_mapping = contiguous(slots.data(), DType::kI64, {3}),
              .cache = cache.whole()};
  }
  bool untouched() const { return all_sentinels({&q_out, &cache.data}); }
};

/// Copies pages 2, 0 of 4 tokens to pages 1, 3, 5, 0 of 2 tokens.
struct CopyPages {
  CacheBuffers from;
  std::vector<uint16_t> to = std::vector<uint16_t>(6 * 2 * (kCkv + kKpe), kSentinel);
  std::vector<int32_t> from_pages = {2, 0}, to_pages = {1, 3, 5, 0};
  QuantizedBuffers quantized;
  CopyPagesParams params;

  CopyPages() {
    params = {.from = from.whole(),
              .from_pages = of(from_pages),
              .to = {.kv = of(to, {6, 2, kCkv + kKpe})},
              .to_pages = of(to_pages)};
  }
  bool untouched() const { return all_sentinels({&to}) && quantized.untouched(); }
};

}  // namespace mla::test

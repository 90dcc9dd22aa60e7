// SPDX-License-Identifier: Apache-2.0
// Holds small valid problems of the operations that write caches.
#pragma once

#include <algorithm>
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

/// Finishes the outputs of three tokens, as two groups of heads with the exponents of four scales each.
struct FinishOutput {
  std::vector<uint16_t> o = std::vector<uint16_t>(3 * 4 * 128, 0), gate = o;
  std::vector<float> cos_sin = std::vector<float>(10 * 64, 1.0F);
  std::vector<int64_t> positions = {0, 9, 4};
  std::vector<uint16_t> out = std::vector<uint16_t>(3 * 4 * 128 / 2, kSentinel),
                        scale = std::vector<uint16_t>(3 * 4 * 4 / 2, kSentinel);
  FinishOutputParams params;

  FinishOutput() {
    params = {.o = of(o, {3, 4, 128}),
              .finish = {.cos_sin = contiguous(cos_sin.data(), DType::kF32, {10, 64}),
                         .positions = contiguous(positions.data(), DType::kI64, {3}),
                         .gate = of(gate, {3, 4, 128}),
                         .scale = contiguous(scale.data(), DType::kI32, {3, 2, 2, 1})},
              .out = contiguous(out.data(), DType::kE4M3, {3, 2, 2, 128})};
  }
  bool untouched() const { return all_sentinels({&out, &scale}); }
};

/// Pools pairs of the tokens of two requests: positions 3 and 4 of one, of which 3 ends a group, and 6, 7 and 8 of the
/// other, of which 7 does. Entries of the lists that nobody uses are garbage.
struct Compress {
  static constexpr int64_t kWidth = kCkv + kKpe, kGarbage = INT64_MAX;

  std::vector<uint16_t> kv = std::vector<uint16_t>(5 * kWidth, 0), score = kv, norm_weight = kv;
  std::vector<float> bias = std::vector<float>(2 * 2 * kWidth, 0.5F), cos_sin = std::vector<float>(7 * kKpe, 1.0F);
  std::vector<int32_t> qo_indptr = {0, 2, 5}, kv_len = {5, 9}, state_table = {99, 1, 2, 3, 4, 99};
  std::vector<uint16_t> state = std::vector<uint16_t>(6 * 2 * 2 * kWidth * 2, kSentinel);
  std::vector<uint16_t> latent = std::vector<uint16_t>(5 * kWidth, kSentinel);
  std::vector<int64_t> slots = {31, kGarbage, kGarbage, 0, kGarbage};
  CacheBuffers cache;
  QuantizedBuffers quantized;
  std::vector<uint16_t> keys = std::vector<uint16_t>(kPages * kPageSize * 132 / 2, kSentinel);
  std::vector<uint16_t> wide = std::vector<uint16_t>(5 * 512, 0), wide_latent = std::vector<uint16_t>(wide);
  std::vector<float> wide_state = std::vector<float>(6 * 2 * 2 * 512, 0.0F), wide_angles = std::vector<float>(7 * 128);
  CompressParams params;

  Compress() {
    params = {.kv = of(kv, {5, kWidth}),
              .score = of(score, {5, kWidth}),
              .position_bias = contiguous(bias.data(), DType::kF32, {2, kWidth}),
              .qo_indptr = of(qo_indptr),
              .kv_len = of(kv_len),
              .ratio = 2,
              .state = contiguous(state.data(), DType::kF32, {6, 2, 2 * kWidth}),
              .state_table = contiguous(state_table.data(), DType::kI32, {2, 3}),
              .norm_weight = of(norm_weight, {kWidth}),
              .latent = of(latent, {5, kWidth}),
              .slot_mapping = contiguous(slots.data(), DType::kI64, {5}),
              .cos_sin = contiguous(cos_sin.data(), DType::kF32, {7, kKpe}),
              .cache = cache.whole()};
  }
  /// Makes latents of `width` channels, at most 512, that go nowhere yet.
  void widen(int64_t width) {
    params.kv = of(wide, {5, width});
    params.score = of(wide, {5, width});
    params.position_bias = {};
    params.state = contiguous(wide_state.data(), DType::kF32, {6, 2, 2 * width});
    params.norm_weight = {};
    params.latent = of(wide_latent, {5, width});
    params.cos_sin = {};
    params.cache = {};
  }
  void use_indexer() {
    widen(128);
    params.indexer = {.kv = of(keys, {kPages, kPageSize * 132}, DType::kU8), .page_size = kPageSize};
  }
  /// Makes a group of each token, and with it its latent.
  void use_ratio_1() {
    params.ratio = 1;
    params.score = {};
    params.position_bias = {};
    params.state = {};
    params.state_table = {};
    slots = {31, -1, 7, 0, 1};
  }
  /// Makes latents of half the width, each from two groups, that go nowhere.
  void use_overlap() {
    params.overlap = true;
    params.norm_weight = {};
    params.latent = of(latent, {5, kWidth / 2});
    params.slot_mapping = {};
    params.cos_sin = {};
    params.cache = {};
    state_table = {0, 1, 2, 3, 4, 5};
  }
  bool untouched() const {
    return all_sentinels({&state, &latent, &cache.data, &cache.ckv, &cache.kpe, &keys}) && quantized.untouched() &&
           std::count(wide_latent.begin(), wide_latent.end(), 0) == static_cast<int64_t>(wide_latent.size()) &&
           std::count(wide_state.begin(), wide_state.end(), 0.0F) == static_cast<int64_t>(wide_state.size());
  }
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

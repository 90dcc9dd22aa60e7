// SPDX-License-Identifier: Apache-2.0
// Holds small valid problems of the sparse operations.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "formats.h"

namespace mla::test {

inline constexpr int64_t kTopk = 4;

/// Holds four queries of two requests; pools of fp8_ds_mla, or of bf16 rows 8 + 4 wide.
struct DecodeSparse {
  std::vector<uint16_t> q = std::vector<uint16_t>(4 * kHeads * 576, 0);
  std::vector<uint16_t> o = std::vector<uint16_t>(4 * kHeads * 512, kSentinel);
  std::vector<uint16_t> lse = std::vector<uint16_t>(4 * kHeads * 2, kSentinel);
  std::vector<int32_t> indices = std::vector<int32_t>(4 * kTopk, 1 << 30);  // never dereferenced
  std::vector<int32_t> extra_indices = std::vector<int32_t>(4 * 2, -7);
  std::vector<int32_t> lengths = {9, -1, 3, 0}, qo_indptr = {0, 1, 4};
  std::vector<float> per_head = {0.0F, INFINITY}, cos_sin = std::vector<float>(10 * 64);
  std::vector<int64_t> positions = {0, 9, 3, 3};
  std::vector<uint16_t> scale = std::vector<uint16_t>(4 * kHeads * 2, kSentinel);
  CacheBuffers rows;
  QuantizedBuffers quantized, extra_quantized;
  std::vector<std::byte> workspace = std::vector<std::byte>(kWorkspaceBytes);
  DecodeSparseParams params;

  DecodeSparse() {
    params.q = of(q, {4, kHeads, 576});
    params.pool = {.cache = quantized.ds_mla(),
                   .indices = contiguous(indices.data(), DType::kI32, {4, kTopk}),
                   .topk_length = of(lengths)};
    params.options.attn_sink = contiguous(per_head.data(), DType::kF32, {kHeads});
    params.sm_scale = 0.25F;
    params.o = of(o, {4, kHeads, 512});
    params.lse = contiguous(lse.data(), DType::kF32, {4, kHeads});
  }
  void use_extra_pool() {
    params.extra_pool = {.cache = extra_quantized.ds_mla(),
                         .indices = contiguous(extra_indices.data(), DType::kI32, {4, 2}),
                         .topk_length = {}};
  }
  void use_per_request() { set_extent(params.pool.topk_length, 0, 2); }
  /// Makes them four requests, one of which has two queries and one none.
  void use_equal_counts() {
    qo_indptr = {0, 2, 2, 3, 4};
    params.qo_indptr = of(qo_indptr);
  }
  /// Asks for outputs of e4m3 in two groups of a head each, turned back and gated.
  void finish() {
    params.o = contiguous(o.data(), DType::kE4M3, {4, kHeads, 1, 512});
    params.finish = {.cos_sin = contiguous(cos_sin.data(), DType::kF32, {10, 64}),
                     .positions = contiguous(positions.data(), DType::kI64, {4}),
                     .gate = contiguous(per_head.data(), DType::kF32, {4, kHeads, 1}),
                     .scale = contiguous(scale.data(), DType::kI32, {4, kHeads, 1, 1})};
    params.finish.gate.stride = {0, 1, 1};
  }
  bool untouched() const { return all_sentinels({&o, &lse, &scale}); }
};

/// Holds three queries over five rows, 6 wide, of which 4 are the value.
struct PrefillSparse {
  std::vector<uint16_t> q = std::vector<uint16_t>(3 * kHeads * 6, 0), kv = std::vector<uint16_t>(5 * 6, 0),
                        o = std::vector<uint16_t>(3 * kHeads * 4, kSentinel),
                        lse = std::vector<uint16_t>(3 * kHeads * 2, kSentinel),
                        max_logits = std::vector<uint16_t>(3 * kHeads * 2, kSentinel);
  std::vector<int32_t> indices = std::vector<int32_t>(3 * 2, 77), lengths = {1, 2, 99};
  std::vector<float> per_head = {0.0F, 1.0F};
  std::vector<std::byte> workspace = std::vector<std::byte>(kWorkspaceBytes);
  PrefillSparseParams params;

  PrefillSparse() {
    params.q = of(q, {3, kHeads, 6});
    params.kv = of(kv, {5, 6});
    params.indices = contiguous(indices.data(), DType::kI32, {3, 2});
    params.topk_length = of(lengths);
    params.options.attn_sink = contiguous(per_head.data(), DType::kF32, {kHeads});
    params.sm_scale = 0.25F;
    params.o = of(o, {3, kHeads, 4});
    params.max_logits = contiguous(max_logits.data(), DType::kF32, {3, kHeads});
    params.lse = contiguous(lse.data(), DType::kF32, {3, kHeads});
  }
  bool untouched() const { return all_sentinels({&o, &lse, &max_logits}); }
};

}  // namespace mla::test

// SPDX-License-Identifier: Apache-2.0
// The verbs of everything but attention: rows in and out of caches, the indexer, top-k. As TileKernels: one table per
// instruction set, from one source (row_kernels-inl.h). All tables give the same bits in caches.
#pragma once

#include <cstdint>

#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla::cpu {

inline constexpr int32_t kIndexerHeads = 64;    // whose queries are packed together
inline constexpr int32_t kIndexerKeys = 64;     // decoded together
inline constexpr int32_t kMaxDigits = 1 << 11;  // of a histogram

/// Which ranks a pass over a row of logits counts or takes: a rank orders as the logit does, NaN lowest, both zeros
/// alike.
struct RankRange {
  uint32_t first = 0, last = UINT32_MAX;
};

struct RowKernels {
  /// Copies forwards. memcpy turns round where the low bits of its addresses look as if the buffers overlapped, and the
  /// hardware prefetchers then lose a row after row copy: up to 10 times slower.
  void (*copy)(const void* src, void* dst, int64_t bytes);

  /// num_groups groups of `group` codes with a scale each, every product rounded to bf16, into `dst`, of any float
  /// type.
  void (*dequantize)(const uint8_t* codes, const float* scales, int32_t num_groups, int64_t group, void* dst,
                     DType dtype);

  /// n floats divided by `scale`, as codes.
  void (*quantize)(const void* src, DType dtype, float scale, int64_t n, uint8_t* codes);

  /// The largest finite magnitude of n floats, 0 if there is none.
  float (*finite_amax)(const void* src, DType dtype, int64_t n);

  /// num_groups groups of `group` floats, each quantized with a scale chosen by its own finite_amax.
  void (*quantize_groups)(const void* src, DType dtype, int32_t num_groups, int32_t group, bool power_of_two,
                          float* scales, uint8_t* codes);

  /// Turns n pairs of channels: out = x * own + partner of x * factor of the partner, every step rounded to f32. Pairs
  /// are neighbours, or, where `second` is given, channel i of x and of `second`; then out is the n of x, then those of
  /// second.
  void (*rotate)(const void* x, const void* second, DType dtype, const float* own, const float* partner, int32_t n,
                 float* out);

  /// Queries of at most kIndexerHeads heads, `head_stride` elements apart: f32 or bf16 pairs by head and channel, as
  /// the table multiplies. Tables that multiply pairs take bf16 and e4m3, the others any type.
  void (*pack_indexer_queries)(const void* q, DType dtype, int64_t head_stride, int32_t num_heads, uint32_t* packed);
  bool multiplies_pairs;

  /// sums[j] (+)= sum over heads of weights[h] * max(0, q[h] . key j), scales aside, for at most kIndexerKeys keys of
  /// consecutive rows. `weights` has kIndexerHeads entries, 0 from num_heads on.
  void (*indexer_sums)(const uint32_t* packed, int32_t num_heads, const float* weights, const uint8_t* keys,
                       int32_t num_keys, bool add, float* sums);

  /// Adds to counts[(rank >> shift) % kMaxDigits] the logits whose rank lies in the range.
  void (*count_ranks)(const float* logits, int64_t n, const RankRange& range, int32_t shift, uint32_t* counts);

  /// Writes the indices of all logits above `rank`, and of the first `ties` of that rank, ascending.
  /// Returns how many; there is room for exactly these.
  int64_t (*select_ranks)(const float* logits, int64_t n, uint32_t rank, int64_t ties, int64_t room, int32_t* indices);
};

// One per instruction set, null where this build has none.
const RowKernels* row_kernels_avx512_bf16();
const RowKernels* row_kernels_avx512();
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_portable();

}  // namespace mla::cpu

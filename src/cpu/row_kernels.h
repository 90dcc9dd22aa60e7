// SPDX-License-Identifier: Apache-2.0
// This file declares the kernels of all operations but attention: rows in and out of caches, the indexer, top-k. As
// with TileKernels there is one table per instruction set, from one source (row_kernels-inl.h). All tables write the
// same bits into caches.
#pragma once

#include <cstdint>

#include "cpu/quantized_row.h"
#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla::cpu {

inline constexpr int32_t kIndexerHeads = 64;    // heads whose queries are packed together
inline constexpr int32_t kIndexerKeys = 64;     // keys that are decoded together
inline constexpr int32_t kMaxDigits = 1 << 11;  // bins of a histogram

inline constexpr int32_t kPooledTokens = 8;  // tokens that are pooled together
inline constexpr int32_t kMaxLatent = 4096;  // channels of a pooled latent

/// Holds a token's share of a latent: values and scores of one channel after another.
struct PooledToken {
  const void* kv = nullptr;
  const void* score = nullptr;
  DType dtype = DType::kF32;    // of both
  const float* bias = nullptr;  // is added to the scores; may be null
};

/// Holds sums over tokens for every channel: of the weights e^(score - max), and of the weights times the values.
struct Pool {
  alignas(64) float max[kMaxLatent];
  alignas(64) float weights[kMaxLatent];
  alignas(64) float values[kMaxLatent];
};

/// Gives the ranks that a pass over a row of logits counts or takes. A rank is an integer that orders as its logit
/// does; NaN is lowest, and both zeros have the same rank.
struct RankRange {
  uint32_t first = 0, last = UINT32_MAX;
};

/// Holds keys of the indexer that lie in consecutive rows of a page.
struct IndexerKeys {
  IndexerFormat format = IndexerFormat::kFP8;
  const uint8_t* elements = nullptr;
  const uint8_t* scales = nullptr;  // at any address
};

struct RowKernels {
  /// Copies from the first byte to the last. memcpy copies backwards where the low bits of its addresses look as if the
  /// buffers overlapped, and the hardware prefetchers then lose a sequence of rows: append_rope took 20 ms instead of 3
  /// (AMD EPYC, Zen 4, 2026-11-20; docs/notebook/2026-11-20-cpu.md).
  void (*copy)(const void* src, void* dst, int64_t bytes);

  /// Multiplies every element by its group's scale. The products are rounded to bf16 and stored in `dst`, of any float
  /// type.
  void (*dequantize)(const QuantizedRow& row, void* dst, DType dtype);

  /// Divides n floats by `scale`, and stores them as e4m3.
  void (*quantize)(const void* src, DType dtype, float scale, int64_t n, uint8_t* e4m3);

  /// Sets the largest finite magnitude of each of num_groups groups of `group` floats; 0 where there is none.
  void (*finite_amaxes)(const void* src, DType dtype, int32_t num_groups, int32_t group, float* amaxes);

  /// Divides each group of floats by its scale, and stores them as e2m1. `group` is even, at most kMostE2M1Group.
  void (*quantize_e2m1)(const void* src, DType dtype, int32_t num_groups, int32_t group, const float* scales,
                        uint8_t* e2m1);

  /// Quantizes num_groups groups of `group` floats to e4m3, each with a scale chosen by its own finite
  /// amax, but at least `least`, which is 0 or a power of two.
  void (*quantize_groups)(const void* src, DType dtype, int32_t num_groups, int32_t group, bool power_of_two,
                          float least, float* scales, uint8_t* e4m3);

  /// Rotates n pairs of channels: a channel becomes itself times its entry of `own` plus its partner times its entry of
  /// `partner`, every step rounded to f32. Pairs are neighbouring channels of x, or, where `second` is given, channel i
  /// of x and channel i of `second`; `out` then holds the n channels of x and after them those of `second`.
  void (*rotate)(const void* x, const void* second, DType dtype, const float* own, const float* partner, int32_t n,
                 float* out);

  /// Adds at most kPooledTokens tokens to the sums of n channels, or begins the sums with them if `first` is set.
  void (*pool)(const PooledToken* tokens, int32_t num_tokens, int32_t n, bool first, Pool* pool);

  /// Sets latent[c] to the mean that the sums make.
  void (*finish_pool)(const Pool& pool, int32_t n, float* latent);

  /// Returns 1 / the root of `epsilon` plus the mean of the squares of n floats, at most kMaxLatent. Squares of
  /// neighbours are summed, neighbours of these sums, and so on, so that all tables and the GPUs have the same bits.
  float (*norm_factor)(const float* x, int32_t n, float epsilon);

  /// Stores n floats times `factor` and times `weight`, which is 1 if it is null. All NaN become one.
  void (*scale_channels)(const float* x, int32_t n, float factor, const float* weight, void* dst, DType dtype);

  /// Divides n floats by 1 + e^-gate.
  void (*apply_gate)(float* x, const float* gate, int32_t n);

  /// A thread calls `begin` before indexer_sums and `end` after it; null where nothing is to be done.
  void (*begin)();
  void (*end)();

  /// Packs the queries of at most kIndexerHeads heads, `head_stride` elements apart, by head and channel as f32 or bf16
  /// pairs, whichever the table multiplies. Tables that multiply pairs take bf16 and e4m3, the others any type.
  void (*pack_indexer_queries)(const void* q, DType dtype, int64_t head_stride, int32_t num_heads, uint32_t* packed);
  bool multiplies_pairs;

  /// Sets sums[j] to the sum over heads of weights[h] * max(0, q[h] . key j), or adds it if `add` is set, for at most
  /// kIndexerKeys keys. A key with one scale is taken without it. `weights` has kIndexerHeads entries, which are 0 from
  /// num_heads on.
  void (*indexer_sums)(const uint32_t* packed, int32_t num_heads, const float* weights, const IndexerKeys& keys,
                       int32_t num_keys, bool add, float* sums);

  /// Stores n logits, rounded to nearest even; finite ones stay finite in types of 16 bits too.
  void (*store_logits)(const float* logits, int64_t n, void* dst, DType dtype);

  /// Converts n logits to f32.
  void (*load_logits)(const void* src, DType dtype, int64_t n, float* logits);

  /// Adds the number of logits whose rank lies in the range to counts[(rank >> shift) % kMaxDigits].
  void (*count_ranks)(const float* logits, int64_t n, const RankRange& range, int32_t shift, uint32_t* counts);

  /// Writes, in ascending order, the indices of all logits above `rank` and of the first `ties` logits of that rank.
  /// Returns how many; `room` is exactly this number.
  int64_t (*select_ranks)(const float* logits, int64_t n, uint32_t rank, int64_t ties, int64_t room, int32_t* indices);
};

// There is one table per instruction set; null where this build has none.
const RowKernels* row_kernels_amx();
const RowKernels* row_kernels_amx_emulated();
const RowKernels* row_kernels_avx512_bf16();
const RowKernels* row_kernels_avx512();
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_neon_bf16();
const RowKernels* row_kernels_portable();

}  // namespace mla::cpu

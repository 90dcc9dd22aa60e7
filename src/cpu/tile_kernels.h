// SPDX-License-Identifier: Apache-2.0
// The verbs from which the cpu backend's operations are made. Each instruction set provides one table of them, all
// from the same source (tile_kernels-inl.h); the order of work lives in decode.cpp and prefill.cpp.
//
// A matrix product runs over *steps* of 32 bits: one f32 element, or two bf16 elements where the machine multiplies
// pairs. Query rows fill the lanes of a vector, so scores need no transposition and the softmax no horizontal
// reduction; rows come in groups of `lanes`.
//
//   q  [group][step][lanes]            queries, 32-bit steps along d_qk
//   s  [group][key][lanes]      f32    scores of one block of keys
//   p  [group][key step][lanes]        probabilities, 32-bit steps along the keys
//   v  [slab][key step][kSlab]         values, kSlab channels a slab, 32-bit steps along the keys
//   o  [slab][row][kSlab]       f32    running output
#pragma once

#include <array>
#include <cstdint>

#include "mla/types.h"

namespace mla::cpu {

inline constexpr int32_t kSlab = 32;       // value channels that one pass of `accumulate` keeps in L1
inline constexpr int32_t kMaxLanes = 16;   // of the widest table
inline constexpr int32_t kStepChunk = 16;  // steps of every segment come in multiples of this: one cache line
inline constexpr int32_t kKeyTile = 8;     // keys whose scores one tile computes; row lists are padded to it
inline constexpr int32_t kRowVectors = 2;  // groups whose scores are best computed together

/// A run of steps of every key: rows[key] points at the first. Rows need no alignment; the list fills whole key tiles.
struct Segment {
  const void* const* rows = nullptr;
  int32_t steps = 0;
};

/// Rows to bring into L2 while keys are scored: beside key `key`, `lines` cache lines of rows[key] of both lists,
/// spread over the steps. Lists as long as those of the segments.
struct Prefetch {
  const void* const* rows[2] = {nullptr, nullptr};
  int32_t lines[2] = {0, 0};
  int32_t num_rows = INT32_MAX;  // in shorter lists: a multiple of kKeyTile
};

/// `width` channels (a multiple of 32, at most kSlab) from `channel` on of num_keys rows, to become one slab of v.
/// pack 2: rows of bf16, interleaved by pairs; a missing last key is zero. pack 1: rows of `dtype`, converted to f32.
struct SlabSource {
  const void* const* rows = nullptr;
  DType dtype = DType::kBF16;
  int32_t num_keys = 0;
  int64_t channel = 0;
  int32_t width = kSlab;
};

/// num_rows rows of `lines` times 64 bytes, to be laid one after another.
struct RowCopy {
  const void* const* rows = nullptr;
  int32_t num_rows = 0;
  int32_t lines = 0;
  void* to = nullptr;
};

/// Work for the next slab or block that hides behind the multiplies of `accumulate`; pack 2 only.
struct Background {
  std::array<RowCopy, 2> copies = {};
  SlabSource slab = {};  // to be packed into v, if v is given, after the copies
  uint32_t* v = nullptr;
};

struct TileKernels {
  int32_t lanes;  // rows per group
  int32_t pack;   // elements per step: 2 (bf16 pairs) or 1 (f32)

  /// One group of query rows, `d` elements of `dtype` each, into q. Null rows give zeros; they come last.
  void (*pack_queries)(const void* const* rows, DType dtype, int32_t d, uint32_t* q);

  /// Scores of `num_groups` groups of rows with keys [key_begin, key_end); key_begin is a multiple of kKeyTile, key_end
  /// is rounded up to one.
  void (*scores)(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments,
                 int32_t num_segments, const Prefetch& prefetch, int32_t key_begin, int32_t key_end, float* s,
                 int64_t s_group_stride);

  /// s = cap * tanh(scale * s / cap) + slope[r] * (key_position[j] - query_position[r]) for num_keys keys of one group;
  /// no tanh if cap is 0, no slopes if null.
  void (*shape_scores)(float* s, int32_t num_keys, float scale, float cap, const float* slope,
                       const int32_t* query_position, const int32_t* key_position);

  /// Online softmax of one group over one block, base 2. Row r sees key j iff j < limit[r]; a null limit masks nothing.
  /// m, l [lanes]: running maximum (of score * scale_log2) and sum. alpha [lanes]: out, what o must be multiplied by.
  /// num_keys is a multiple of `pack`.
  void (*softmax)(const float* s, int32_t num_keys, const int32_t* limit, float scale_log2, float* m, float* l,
                  float* alpha, uint32_t* p);

  /// Packs a slab.
  void (*pack_slab)(const SlabSource& source, uint32_t* v);

  /// Copies rows.
  void (*copy_rows)(const RowCopy& copy);

  /// One slab of o = alpha * o + p . v for num_rows rows; rows up to the end of the last group may be written. Group g
  /// sums its first key_steps[g] steps; where these are 0, alpha is 1. `first`: o is not read. Meanwhile `background`
  /// is done: its loads, shuffles and stores hide behind the multiplies.
  void (*accumulate)(const uint32_t* p, int64_t p_group_stride, const uint32_t* v, const int32_t* key_steps,
                     int32_t num_rows, const float* alpha, bool first, float* o, const Background& background);

  /// d e4m3 codes times `scale`, rounded to bf16.
  void (*decode_row)(const void* codes, int32_t d, float scale, uint16_t* to);

  /// Whether all `d` elements (a multiple of 2 * kMaxLanes) are finite.
  bool (*finite)(const void* row, DType dtype, int32_t d);

  /// One row of o times `factor` into `dst`, d_v elements of `dtype`.
  void (*store_row)(const float* o, int64_t o_slab_stride, int32_t d_v, float factor, void* dst, DType dtype);

  /// dst = init + sum_i weight[i * weight_stride] * (row i of src), n rows of d elements, src_stride elements apart; d
  /// is a multiple of kMaxLanes. A row of weight 0 is not read; a null init is 0; dst may be init.
  void (*weighted_sum)(const void* src, int64_t src_stride, DType src_dtype, int32_t n, const float* weight,
                       int64_t weight_stride, int32_t d, const float* init, void* dst, DType dst_dtype);

  /// Copies past the caches, where dst is aligned to a vector; finish_streams before another thread may read it.
  void (*stream)(const void* src, void* dst, int64_t bytes);
  void (*finish_streams)();

  /// Asks for exclusive ownership of the cache lines of a buffer that another processor read last.
  void (*prefetch_for_write)(const void* begin, int64_t bytes);

  /// Converts d elements.
  void (*convert)(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t d);
};

// One per instruction set, null where this build has none. "pairs" multiplies bf16 pairs, the others f32.
const TileKernels* tile_kernels_avx512_bf16_pairs();
const TileKernels* tile_kernels_avx512();
const TileKernels* tile_kernels_avx2();
const TileKernels* tile_kernels_portable();

}  // namespace mla::cpu

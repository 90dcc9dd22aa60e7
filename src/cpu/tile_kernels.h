// SPDX-License-Identifier: Apache-2.0
// This file declares the kernels from which the cpu backend's attention is made. Each instruction set provides one
// table of them, all from the same source (tile_kernels-inl.h). The order of work is in attention.cpp, decode.cpp and
// prefill.cpp.
//
// A matrix product runs over *steps* of 32 bits: one f32 element, or two bf16 elements where the machine multiplies
// pairs. Query rows fill the lanes of a vector, so that scores need no transposition and the softmax no horizontal
// reduction. Rows come in groups of `lanes`.
//
//   q  [group][step][lanes]            queries, 32-bit steps along d_qk
//   s  [group][key][lanes]      f32    scores of one key block
//   p  [group][key step][lanes]        P, 32-bit steps along the keys
//   v  [slab][key step][kSlab]         values, kSlab channels a slab, 32-bit steps along the keys
//   o  [slab][row][kSlab]       f32    running output
//
// Kernels that multiply whole tiles with AMX read p as [group][32 keys][lanes][16 steps], where a step has key i and
// key i + 16 of the 32; v has the same steps, and the channels of a slab of v and o are in the order of slab_positions.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/quantized_row.h"
#include "mla/types.h"

namespace mla::cpu {

inline constexpr int32_t kSlab = 32;       // value channels that one pass of `accumulate` keeps in L1
inline constexpr int32_t kMaxLanes = 16;   // lanes of the widest table
inline constexpr int32_t kStepChunk = 16;  // the steps of every segment are a multiple of this, one cache line
// Keys whose scores one tile computes; row lists are padded to a multiple of it.
inline constexpr int32_t kKeyTile = 8;
inline constexpr int32_t kPanelGroups = 2;  // groups whose scores are computed together, a panel

/// Describes a run of steps of every key. rows[key] points at the first step; rows need no alignment, and the list
/// fills whole key tiles.
struct Segment {
  const void* const* rows = nullptr;
  int32_t steps = 0;
};

/// Says which rows to prefetch into L2 while keys are scored: with key `key`, `lines` cache lines of rows[key] of both
/// lists, spread over the steps. The lists are as long as those of the segments, unless num_rows says less.
struct Prefetch {
  const void* const* rows[2] = {nullptr, nullptr};
  int32_t lines[2] = {0, 0};
  int32_t num_rows = INT32_MAX;  // rows of the lists if they are shorter; a multiple of kKeyTile
};

/// Describes the source of one slab of v: `width` channels (a multiple of 32, at most kSlab) from `channel` on of
/// num_keys rows. With pack 2 the rows are bf16 and are interleaved by pairs, where a missing last key is zero. With
/// pack 1 the rows are of `dtype` and are converted to f32.
struct SlabSource {
  const void* const* rows = nullptr;
  DType dtype = DType::kBF16;
  int32_t num_keys = 0;
  int64_t channel = 0;
  int32_t width = kSlab;
  // With pack 2 the slabs behind it may follow, slab_stride steps apart.
  int32_t num_slabs = 1;
  int64_t slab_stride = 0;
};

/// Describes a copy of num_rows rows of `lines` times 64 bytes to one contiguous place.
struct RowCopy {
  const void* const* rows = nullptr;
  int32_t num_rows = 0;
  int32_t lines = 0;
  void* to = nullptr;
};

/// Describes the online softmax, in base 2, of one group over one key block. Row r sees key j iff j < limit[r]; a null
/// limit hides nothing. For each row, max is the largest score so far (of s * scale_log2), and sum that of
/// 2^(score - base). alpha receives the factors by which o must be multiplied.
struct SoftmaxBlock {
  const float* s = nullptr;
  int32_t num_keys = 0;  // a multiple of `pack`
  const int32_t* limit = nullptr;
  int64_t s_stride = 0;  // from a query's scores to the next one's, where keys fill the lanes
  float scale_log2 = 1.0F;
  float* max = nullptr;
  float* base = nullptr;
  float* sum = nullptr;
  float* alpha = nullptr;
  uint32_t* p = nullptr;
};

/// Describes work that the multiplies of `scores` and `accumulate` hide, with pack 2 only.
struct Background {
  std::array<RowCopy, 2> copies = {};  // only where tile_keys is 1
  SlabSource slab = {};                // packed into v after the copies, if v is given
  uint32_t* v = nullptr;
  // Only where tile_keys > 1:
  const SoftmaxBlock* softmax = nullptr;
  int32_t num_softmax = 0;
};

/// Describes one slab of o = alpha * o + p . v for num_rows rows; rows up to the end of the last group may be written.
/// Group g sums its first key_steps[g] steps; where these are 0, alpha is 1. If `first`, o is not read.
struct ValueProducts {
  const uint32_t* p = nullptr;
  int64_t p_group_stride = 0;
  const uint32_t* v = nullptr;
  const int32_t* key_steps = nullptr;
  int32_t num_rows = 0;
  const float* alpha = nullptr;
  bool first = false;
  float* o = nullptr;
  // Where tile_keys > 1 the slabs behind it may follow, as far apart as is said here, for at most kPanelGroups groups.
  int32_t num_slabs = 1;
  int64_t v_stride = 0, o_stride = 0;
};

/// Holds kernels of AMX for many query rows: a block's keys are packed once, so that keys instead of queries fill the
/// lanes of scores. The softmax then needs no transposition of P, and keys may lie anywhere.
///
///   q     [group][16 steps][lanes][step]      queries as they lie
///   keys  [16 keys][16 steps][step][lanes]    packed keys
///   s     [group][row][key]              f32  scores, s_stride from one row to the next
struct KeyLaneKernels {
  /// Packs one group of query rows of d bf16. Null rows give zeros; they come last.
  void (*pack_queries)(const void* const* rows, int32_t d, uint32_t* q);

  /// Packs whole tiles of 16 keys of `steps` steps.
  void (*pack_keys)(const void* const* rows, int32_t num_keys, int32_t steps, uint32_t* keys);

  /// Computes the scores of `num_groups` groups of rows, at most kPanelGroups, with whole tiles of keys, and prefetches
  /// prefetch.num_rows rows beside that.
  void (*scores)(const uint32_t* q, int32_t num_groups, int32_t steps, const uint32_t* keys, int32_t num_keys, float* s,
                 int64_t s_stride, const Prefetch& prefetch);

  /// Does what TileKernels::shape_scores does.
  void (*shape_scores)(float* s, int64_t s_stride, int32_t num_keys, float scale, float cap, const float* slope,
                       const int32_t* query_position, const int32_t* key_position);

  void (*softmax)(const SoftmaxBlock& block);
};

struct TileKernels {
  int32_t lanes;  // query rows of a group
  int32_t pack;   // elements of a step: 2 (bf16 pairs) or 1 (f32)
  // Keys that are loaded as one tile; the row lists of segments are padded to a multiple of it, and the rows of a tile
  // are equally spaced. 1 where keys may lie anywhere.
  int32_t tile_keys;
  int32_t key_block;                // keys that are loaded and scored together
  const uint8_t* slab_positions;    // [kSlab] where v and o hold a channel of a slab; null where in its place
  const KeyLaneKernels* key_lanes;  // null where there are none

  // A thread calls `begin` before it multiplies and `end` after that; null where nothing is to be done.
  void (*begin)();
  void (*end)();

  /// Packs one group of query rows, `d` elements of `dtype` each, into q. Null rows give zeros; they come last.
  void (*pack_queries)(const void* const* rows, DType dtype, int32_t d, uint32_t* q);

  /// Computes the scores of `num_groups` groups of rows, at most kPanelGroups, with keys [key_begin, key_end).
  /// key_begin is a multiple of kKeyTile and of tile_keys, and key_end is rounded up to one. The background is only
  /// done where tile_keys > 1.
  void (*scores)(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments,
                 int32_t num_segments, const Prefetch& prefetch, int32_t key_begin, int32_t key_end, float* s,
                 int64_t s_group_stride, const Background& background);

  /// Computes s = cap * tanh(scale * s / cap) + slope[r] * (key_position[j] - query_position[r]) for num_keys keys of
  /// one group. There is no tanh if cap is 0, and no slope if `slope` is null.
  void (*shape_scores)(float* s, int32_t num_keys, float scale, float cap, const float* slope,
                       const int32_t* query_position, const int32_t* key_position);

  void (*softmax)(const SoftmaxBlock& block);

  /// Packs a slab.
  void (*pack_slab)(const SlabSource& source, uint32_t* v);

  /// Copies rows.
  void (*copy_rows)(const RowCopy& copy);

  /// Computes products, and between the multiplies, which hide its loads, shuffles and stores, the background.
  void (*accumulate)(const ValueProducts& products, const Background& background);

  /// Multiplies every element by its group's scale, and rounds the products to bf16.
  void (*decode_row)(const QuantizedRow& row, uint16_t* to);

  /// Returns whether all `d` elements (a multiple of 2 * kMaxLanes) are finite.
  bool (*finite)(const void* row, DType dtype, int32_t d);

  /// Stores one row of o times `factor` into `dst`, d_v elements of `dtype`.
  void (*store_row)(const float* o, int64_t o_slab_stride, int32_t d_v, float factor, void* dst, DType dtype);

  /// Computes dst = init + sum_i weight[i * weight_stride] * (row i of src) over n rows of d elements, src_stride
  /// elements apart. d is a multiple of kMaxLanes. A row of weight 0 is not read, a null init is 0, and dst may be
  /// init.
  void (*weighted_sum)(const void* src, int64_t src_stride, DType src_dtype, int32_t n, const float* weight,
                       int64_t weight_stride, int32_t d, const float* init, void* dst, DType dst_dtype);

  /// Copies past the caches, where dst is aligned to a vector. finish_streams must be called before another thread
  /// reads dst.
  void (*stream)(const void* src, void* dst, int64_t bytes);
  void (*finish_streams)();

  /// Prefetches exclusive ownership of the cache lines of a buffer that another core has read last. It took the merge
  /// of 32 KiB from 19 to 5 us (AMD EPYC, Zen 4, 2026-11-20; docs/notebook/2026-11-20-cpu.md).
  void (*prefetch_for_write)(const void* begin, int64_t bytes);

  /// Converts d elements of src_dtype to dst_dtype.
  void (*convert)(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t d);
};

// There is one table per instruction set; null where this build has none. "pairs" multiplies bf16 pairs, the others
// f32.
const TileKernels* tile_kernels_amx_pairs();
const TileKernels* tile_kernels_amx_emulated_pairs();
const TileKernels* tile_kernels_avx512_bf16_pairs();
const TileKernels* tile_kernels_avx512();
const TileKernels* tile_kernels_avx2();
const TileKernels* tile_kernels_neon_bf16_pairs();
const TileKernels* tile_kernels_portable();

}  // namespace mla::cpu

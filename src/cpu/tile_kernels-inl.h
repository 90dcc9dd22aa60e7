// SPDX-License-Identifier: Apache-2.0
// This is the one source of all tile kernels. One translation unit per instruction set, compiled with that set's flags,
// includes it after defining MLA_CPU_ISA (a namespace), MLA_CPU_BF16_PAIRS (0 or 1) and MLA_CPU_TILES (0 for vectors;
// see tile_unit-inl.h). Everything has internal linkage, so that the linker never picks a function compiled for a newer
// processor in place of one for an older.
// Scores, softmax and the products with values are those of vectors or of AMX's tiles.
#include <hwy/cache_control.h>

#include <array>
#include <cstring>

#include "cpu/block_parts-inl.h"
#include "cpu/dequantize-inl.h"
#include "cpu/e4m3-inl.h"
#include "cpu/tile_kernels.h"
#include "cpu/vectors-inl.h"
#if MLA_CPU_TILES
#include "cpu/key_lanes-inl.h"
#include "cpu/tile_products-inl.h"
#else
#include "cpu/vector_products-inl.h"
#endif

namespace mla::cpu::MLA_CPU_ISA {
namespace {

void convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t d) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes)
    store_from_f32(load_as_f32(advance(src, src_dtype, i), src_dtype), advance(dst, dst_dtype, i), dst_dtype);
  if (i == d) return;
  alignas(64) unsigned char from[kLanes * sizeof(float)] = {};
  alignas(64) unsigned char to[kLanes * sizeof(float)];
  std::memcpy(from, advance(src, src_dtype, i), static_cast<size_t>(d - i) * size_of(src_dtype));
  store_from_f32(load_as_f32(from, src_dtype), to, dst_dtype);
  std::memcpy(advance(dst, dst_dtype, i), to, static_cast<size_t>(d - i) * size_of(dst_dtype));
}

// ---- queries ----

template <bool kPadded>
HWY_INLINE void pack_query_rows(const void* const* rows, [[maybe_unused]] DType dtype, int32_t d, uint32_t* q) {
  for (int32_t t = 0; t < d / kPack; t += kLanes) {
    WordVec words[kLanes];
    MLA_UNROLL for (int32_t lane = 0; lane < kLanes; ++lane) {
      if (kPadded && rows[lane] == nullptr) {
        words[lane] = hn::Zero(kWords);
        continue;
      }
#if MLA_CPU_BF16_PAIRS
      words[lane] = hn::LoadU(kWords, static_cast<const uint32_t*>(rows[lane]) + t);
#else
      words[lane] = hn::BitCast(kWords, load_as_f32(advance(rows[lane], dtype, t), dtype));
#endif
    }
    transpose(words);
    for (int32_t i = 0; i < kLanes; ++i) hn::StoreU(words[i], kWords, q + static_cast<int64_t>(t + i) * kLanes);
  }
}

void pack_queries(const void* const* rows, DType dtype, int32_t d, uint32_t* q) {
  if (rows[kLanes - 1] == nullptr) return pack_query_rows<true>(rows, dtype, d, q);
  pack_query_rows<false>(rows, dtype, d, q);
}

// ---- the shape of scores ----

void shape_scores(float* s, int32_t num_keys, float scale, float cap, const float* slope, const int32_t* query_position,
                  const int32_t* key_position) {
  const bool capped = cap != 0.0F;
  const FloatVec before = hn::Set(kFloats, capped ? scale / cap : scale);
  const FloatVec after = hn::Set(kFloats, cap);
  const FloatVec slopes = slope != nullptr ? hn::LoadU(kFloats, slope) : hn::Zero(kFloats);
  const auto positions = hn::LoadU(kInts, query_position);
  for (int32_t key = 0; key < num_keys; ++key, s += kLanes) {
    FloatVec x = hn::LoadU(kFloats, s) * before;
    if (capped) x = tanh(x) * after;
    if (slope != nullptr)
      x = hn::MulAdd(slopes, hn::ConvertTo(kFloats, hn::Set(kInts, key_position[key]) - positions), x);
    hn::StoreU(x, kFloats, s);
  }
}

// ---- output ----

/// Returns whether no element of a row of `bytes` bytes has all exponent bits set, so that all are finite.
template <class Tag>
HWY_INLINE bool exponents_below(Tag words, hn::TFromD<Tag> exponent, const void* row, int64_t bytes) {
  const auto field = hn::Set(words, exponent);
  auto top = hn::Zero(words);
  const auto* from = static_cast<const hn::TFromD<Tag>*>(row);
  const auto count = bytes / static_cast<int64_t>(sizeof exponent);
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(words)))
    top = hn::Max(top, hn::And(hn::LoadU(words, from + i), field));
  return hn::AllTrue(words, hn::Lt(top, field));
}

bool finite(const void* row, DType dtype, int32_t d) {
  const hn::CappedTag<uint16_t, 2 * kMaxLanes> halves;
  switch (dtype) {
    case DType::kBF16: return exponents_below(halves, uint16_t{0x7F80}, row, int64_t{d} * 2);
    case DType::kF16: return exponents_below(halves, uint16_t{0x7C00}, row, int64_t{d} * 2);
    default: return exponents_below(kWords, 0x7F800000U, row, int64_t{d} * 4);
  }
}

void decode_row(const QuantizedRow& row, uint16_t* to) { dequantize_row(row, to); }

/// Does what store_from_f32 does, also for e4m3.
HWY_INLINE void store_output(FloatVec x, void* to, DType dtype) {
  if (dtype != DType::kE4M3) return store_from_f32(x, to, dtype);
  store_low_bytes(f32_to_e4m3(x), static_cast<uint8_t*>(to));
}

template <DType kDtype>
HWY_INLINE void store_row_as(const float* o, int64_t o_slab_stride, int32_t d_v, float factor, void* dst) {
  const FloatVec scale = hn::Set(kFloats, factor);
  for (int32_t slab = 0; slab < d_v / kSlab; ++slab, o += o_slab_stride) {
    FloatVec values[kSlab / kLanes];
    MLA_UNROLL for (int32_t i = 0; i < kSlab / kLanes; ++i) values[i] = hn::LoadU(kFloats, o + i * kLanes);
#if MLA_CPU_TILES
    order_slab(values);
#endif
    MLA_UNROLL for (int32_t i = 0; i < kSlab / kLanes; ++i)
        store_output(values[i] * scale, advance(dst, kDtype, slab * kSlab + i * kLanes), kDtype);
  }
}

void store_row(const float* o, int64_t o_slab_stride, int32_t d_v, float factor, void* dst, DType dtype) {
  switch (dtype) {
    case DType::kBF16: return store_row_as<DType::kBF16>(o, o_slab_stride, d_v, factor, dst);
    case DType::kF16: return store_row_as<DType::kF16>(o, o_slab_stride, d_v, factor, dst);
    case DType::kE4M3: return store_row_as<DType::kE4M3>(o, o_slab_stride, d_v, factor, dst);
    default: return store_row_as<DType::kF32>(o, o_slab_stride, d_v, factor, dst);
  }
}

void weighted_sum(const void* src, int64_t src_stride, DType src_dtype, int32_t n, const float* weight,
                  int64_t weight_stride, int32_t d, const float* init, void* dst, DType dst_dtype) {
  for (int32_t i = 0; i < d; i += kLanes) {
    FloatVec sum = init != nullptr ? hn::LoadU(kFloats, init + i) : hn::Zero(kFloats);
    for (int32_t state = 0; state < n; ++state) {
      const float w = weight[state * weight_stride];
      if (w == 0.0F) continue;  // a state that saw no key may hold anything, NaN included
      const void* row = advance(src, src_dtype, state * src_stride + i);
      sum = hn::MulAdd(hn::Set(kFloats, w), load_as_f32(row, src_dtype), sum);
    }
    store_output(sum, advance(dst, dst_dtype, i), dst_dtype);
  }
}

void stream(const void* src, void* dst, int64_t bytes) {
  constexpr int64_t kVectorBytes = kLanes * sizeof(uint32_t);
  const auto* from = static_cast<const char*>(src);
  auto* to = static_cast<char*>(dst);
  int64_t i = 0;
  if (reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0)
    for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
      const WordVec words = hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(from + i));
      hn::Stream(words, kWords, reinterpret_cast<uint32_t*>(to + i));
    }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

void finish_streams() { hwy::FlushStream(); }

void prefetch_for_write(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(begin) + i, 1, 3);
}

constexpr TileKernels kTable = {
    .lanes = kLanes,
    .pack = kPack,
#if MLA_CPU_TILES
    .tile_keys = kTileRows,
    .key_block = 256,
    .slab_positions = kSlabPositions.data(),
    .key_lanes = &kKeyLanes,
    .begin = configure_tiles,
    .end = release_tiles,
#else
    .tile_keys = 1,
    // With 96 keys, two slabs of pairs (2 x 6 KiB) or one of floats (12 KiB) stay in L1 while all rows are multiplied
    // with them. 96 instead of 128 or 192 gained 1 to 2 percent of the peak at 16 heads (AMD EPYC, Zen 4, 2026-11-20;
    // docs/notebook/2026-11-20-cpu.md).
    .key_block = 96,
    .slab_positions = nullptr,
    .key_lanes = nullptr,
    .begin = nullptr,
    .end = nullptr,
#endif
    .pack_queries = pack_queries,
    .scores = scores,
    .shape_scores = shape_scores,
    .softmax = softmax,
    .pack_slab = pack_slab,
    .copy_rows = copy_rows,
    .accumulate = accumulate,
    .decode_row = decode_row,
    .finite = finite,
    .store_row = store_row,
    .weighted_sum = weighted_sum,
    .stream = stream,
    .finish_streams = finish_streams,
    .prefetch_for_write = prefetch_for_write,
    .convert = convert,
};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

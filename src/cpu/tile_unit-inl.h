// SPDX-License-Identifier: Apache-2.0
// This file wraps the tile instructions of AMX: eight tiles of 16 rows of 64 bytes, which hold 16 x 16 floats or words,
// or 16 x 32 bf16. MLA_CPU_TILES says what executes them: 1 the processor, 2 software, with the same bits (but for the
// payloads of NaN). It is included in one translation unit for each.
//
// The wrappers are in assembly because GCC 12 declares that ldtilecfg reads 8 of its 64 bytes and that tileloadd reads
// no memory, so that stores before them may vanish.
#pragma once

#include <hwy/highway.h>  // includes the intrinsics without their warnings

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/tile_kernels.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

constexpr int32_t kTileRows = 16, kTileBytes = 64, kTileWords = 16;
constexpr int32_t kTileSize = kTileRows * kTileWords;  // words of a tile
constexpr int32_t kTileKeys = 32;                      // keys of a tile of P

#if MLA_CPU_TILES == 1

/// Is what ldtilecfg reads: the shape of every tile.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfiguration) == 64);

/// Gives the calling thread its tiles, until release_tiles.
void configure_tiles() {
  static constexpr TileConfiguration kConfiguration;
  asm volatile("ldtilecfg %0" : : "m"(kConfiguration));
}
void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int32_t kTile>
HWY_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
/// Loads a tile from rows that lie `stride` bytes apart.
template <int32_t kTile>
HWY_INLINE void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(rows), "r"(stride) : "memory");
}
template <int32_t kTile>
HWY_INLINE void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(rows), "r"(stride) : "memory");
}
/// Adds to kSum, a tile of floats, the product of kA, rows of pairs of bf16, and kB, whose row holds a pair for each
/// column.
template <int32_t kSum, int32_t kA, int32_t kB>
HWY_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

#else

alignas(64) thread_local uint32_t tiles[8][kTileRows][kTileWords];

void configure_tiles() { std::memset(tiles, 0, sizeof tiles); }
void release_tiles() {}

template <int32_t kTile>
void zero_tile() {
  std::memset(tiles[kTile], 0, sizeof tiles[kTile]);
}
template <int32_t kTile>
void load_tile(const void* rows, int64_t stride) {
  for (int32_t i = 0; i < kTileRows; ++i)
    std::memcpy(tiles[kTile][i], static_cast<const char*>(rows) + i * stride, kTileBytes);
}
template <int32_t kTile>
void store_tile(void* rows, int64_t stride) {
  for (int32_t i = 0; i < kTileRows; ++i)
    std::memcpy(static_cast<char*>(rows) + i * stride, tiles[kTile][i], kTileBytes);
}

/// Sums the products of the first elements of all pairs, those of the second apart, and adds both to the sum. Denormal
/// inputs and results are flushed to 0, as the processor does whatever MXCSR says.
__attribute__((noinline)) void multiply_software_tiles(uint32_t (*sum)[kTileWords], const uint32_t (*a)[kTileWords],
                                                       const uint32_t (*b)[kTileWords]) {
  constexpr unsigned kFlush = 0x9FC0;  // no exceptions, nearest, results and inputs flushed
  const unsigned before = _mm_getcsr();
  const unsigned flushing = kFlush;
  asm volatile("ldmxcsr %0" : : "m"(flushing) : "memory");
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  for (int32_t row = 0; row < kTileRows; ++row) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int32_t step = 0; step < kTileWords; ++step) {
      const __m512i pair = _mm512_set1_epi32(static_cast<int>(a[row][step]));
      const __m512i pairs = _mm512_load_si512(b[step]);
      first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), first);
      second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, high)),
                               _mm512_castsi512_ps(_mm512_and_si512(pairs, high)), second);
    }
    const __m512 total = _mm512_add_ps(_mm512_load_ps(sum[row]), _mm512_add_ps(first, second));
    _mm512_store_ps(sum[row], total);
  }
  asm volatile("ldmxcsr %0" : : "m"(before) : "memory");
}

template <int32_t kSum, int32_t kA, int32_t kB>
void multiply_tiles() {
  multiply_software_tiles(tiles[kSum], tiles[kA], tiles[kB]);
}

#endif

// ---- products of one or two tiles with one or two ----
//
// Of the eight tiles 0 ... 3 hold sums, number 2 i + j that of row tile i and column tile j, and 4 and 5 what is
// multiplied, one of them loaded twice. Fewer tiles in use leave the processor more to rename: where the core's other
// thread is busy, two by two sums with four operands took 1.6 times as long (Intel, Emerald Rapids, 2026-11-28;
// docs/notebook/2026-11-28-amx.md).

/// Calls f(integral constant rows, integral constant columns), each 1 or 2.
template <class F>
HWY_INLINE void with_tiles(bool two_row_tiles, bool two_column_tiles, const F& f) {
  constexpr std::integral_constant<int32_t, 1> kOne;
  constexpr std::integral_constant<int32_t, 2> kTwo;
  if (two_row_tiles)
    two_column_tiles ? f(kTwo, kTwo) : f(kTwo, kOne);
  else
    two_column_tiles ? f(kOne, kTwo) : f(kOne, kOne);
}

template <int32_t kRows, int32_t kColumns>
HWY_INLINE void zero_sums() {
  zero_tile<0>();
  if constexpr (kColumns == 2) zero_tile<1>();
  if constexpr (kRows == 2) zero_tile<2>();
  if constexpr (kRows == 2 && kColumns == 2) zero_tile<3>();
}

/// Says where sums lie: tiles `down` and `right` floats behind the first, with lines row_bytes apart.
struct SumPlaces {
  int64_t down, right, row_bytes;
};
template <int32_t kRows, int32_t kColumns>
HWY_INLINE void load_sums(const float* sums, const SumPlaces& at) {
  load_tile<0>(sums, at.row_bytes);
  if constexpr (kColumns == 2) load_tile<1>(sums + at.right, at.row_bytes);
  if constexpr (kRows == 2) load_tile<2>(sums + at.down, at.row_bytes);
  if constexpr (kRows == 2 && kColumns == 2) load_tile<3>(sums + at.down + at.right, at.row_bytes);
}
template <int32_t kRows, int32_t kColumns>
HWY_INLINE void store_sums(float* sums, const SumPlaces& at) {
  store_tile<0>(sums, at.row_bytes);
  if constexpr (kColumns == 2) store_tile<1>(sums + at.right, at.row_bytes);
  if constexpr (kRows == 2) store_tile<2>(sums + at.down, at.row_bytes);
  if constexpr (kRows == 2 && kColumns == 2) store_tile<3>(sums + at.down + at.right, at.row_bytes);
}

/// Points at a tile's rows, `stride` bytes apart.
struct TileRows {
  const void* rows;
  int64_t stride;
};

/// Adds to the sums the products of row tiles (pairs of bf16 along a row) and column tiles (along a column).
template <int32_t kRows, int32_t kColumns>
HWY_INLINE void add_products(const TileRows (&a)[2], const TileRows (&b)[2]) {
  load_tile<4>(a[0].rows, a[0].stride);
  load_tile<5>(b[0].rows, b[0].stride);
  multiply_tiles<0, 4, 5>();
  if constexpr (kColumns == 2) {
    load_tile<5>(b[1].rows, b[1].stride);
    multiply_tiles<1, 4, 5>();
  }
  if constexpr (kRows == 2) {
    load_tile<4>(a[1].rows, a[1].stride);
    if constexpr (kColumns == 2) {
      multiply_tiles<3, 4, 5>();
      load_tile<5>(b[0].rows, b[0].stride);
    }
    multiply_tiles<2, 4, 5>();
  }
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

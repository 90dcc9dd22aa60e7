// SPDX-License-Identifier: Apache-2.0
// Tiles in shared memory have rows of whole 128-byte segments, whose eight 16-byte chunks are stored in the order chunk
// ^ (row & 7). Eight consecutive rows then have the same chunk in eight different bank groups, so that ldmatrix and
// row-wise copies both run without bank conflicts, and no byte is spent on padding.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr int kChunkBytes = 16;
inline constexpr int kSegmentBytes = 128;
inline constexpr int kChunksPerSegment = kSegmentBytes / kChunkBytes;

/// Returns where a 16-byte chunk of a row lies, in bytes from the tile's base, which must be a multiple of 128.
template <int kRowBytes>
constexpr uint32_t tile_offset(int row, int chunk) {
  static_assert(kRowBytes % kSegmentBytes == 0);
  return static_cast<uint32_t>(row * kRowBytes + (chunk & ~(kChunksPerSegment - 1)) * kChunkBytes +
                               ((chunk ^ row) & (kChunksPerSegment - 1)) * kChunkBytes);
}

/// Holds the address that a lane gives to ldmatrix, and moves it through a tile in steps of 8 rows and of 2 chunks. All
/// of it but one exclusive or is known at compile time.
template <int kRowBytes>
class TileLane {
 public:
  /// `row` and `half` (0 or 1) are the lane's row and chunk in the first 16 x 32-byte piece.
  MLA_DEVICE TileLane(ptx::SharedAddress tile, int row, int half)
      : address_(tile + static_cast<uint32_t>(row * kRowBytes + ((row & 7) ^ half) * kChunkBytes)) {}

  /// Returns the address `rows` (a multiple of 8) further down and `chunks` (even) to the right.
  MLA_DEVICE ptx::SharedAddress at(int rows, int chunks) const {
    const int in_segment = chunks & (kChunksPerSegment - 1);
    return (address_ ^ static_cast<uint32_t>(in_segment * kChunkBytes)) +
           static_cast<uint32_t>(rows * kRowBytes + (chunks - in_segment) * kChunkBytes);
  }

 private:
  ptx::SharedAddress address_;  // rows begin at multiples of 128, so that the chunk has bits of its own
};

/// Returns the lane's address of ldmatrix_x4 for the A operand of m16n8k16. The tile's rows are the rows of A, and
/// r[0...3] = a[0...3]. With kAnew, here and below, the address takes no register between its uses (ptx/thread.h).
template <int kRowBytes, bool kAnew = false>
MLA_DEVICE TileLane<kRowBytes> lane_of_a(ptx::SharedAddress tile) {
  return {tile, ptx::lane<kAnew>() & 15, ptx::lane<kAnew>() >> 4};
}

/// Returns the lane's address for two B operands from a tile whose rows are the columns of B (keys of Q K^T). The
/// operand of rows 0 ... 7 is r[0], r[1], that of rows 8 ... 15 is r[2], r[3].
template <int kRowBytes, bool kAnew = false>
MLA_DEVICE TileLane<kRowBytes> lane_of_b(ptx::SharedAddress tile) {
  return {tile, (ptx::lane<kAnew>() & 7) | (ptx::lane<kAnew>() >> 4) << 3, (ptx::lane<kAnew>() >> 3) & 1};
}

/// Returns the lane's address of ldmatrix_x4_trans for two B operands from a tile whose rows are the rows of B (keys of
/// P V). The operand of columns 0 ... 7 is r[0], r[1], that of columns 8 ... 15 is r[2], r[3].
template <int kRowBytes>
MLA_DEVICE TileLane<kRowBytes> lane_of_b_trans(ptx::SharedAddress tile) {
  return {tile, ptx::lane() & 15, ptx::lane() >> 4};
}

}  // namespace mla::MLA_CUDA_NAMESPACE

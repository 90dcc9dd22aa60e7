// SPDX-License-Identifier: Apache-2.0
// This file turns the fragments of mma.sync into matrices and back, by the PTX ISA's layouts ("Warp-level Matrix
// Instructions").
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/block.h"

namespace mla::emulator {

/// Holds what a lane gives to an mma.
struct MmaLane {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

/// Holds the operands of one warp as matrices: c[16, 8] += a[16, depth] b[depth, 8]. A register has kPer elements: two
/// of m16n8k16, four of m16n8k32, eight of m16n8k64.
template <int kPer>
struct MmaTiles {
  static constexpr int kDepth = 8 * kPer;
  uint32_t a[16][kDepth];  // bits of the elements
  uint32_t b[kDepth][8];
  float c[16][8];

  /// lane(l) returns the MmaLane of lane l.
  template <class Lane>
  void gather(const Lane& lane) {
    constexpr int kHalf = kDepth / 2;
    constexpr uint32_t kBits = 32 / kPer;
    constexpr uint32_t kMask = (1U << kBits) - 1;
    for (int l = 0; l < kWarpSize; ++l) {
      const MmaLane& of = lane(l);
      const int g = l / 4;
      const int t = l % 4;
      for (int i = 0; i < kPer; ++i) {
        const uint32_t shift = kBits * static_cast<uint32_t>(i);
        const int k = kPer * t + i;
        a[g][k] = of.a[0] >> shift & kMask;
        a[g + 8][k] = of.a[1] >> shift & kMask;
        a[g][k + kHalf] = of.a[2] >> shift & kMask;
        a[g + 8][k + kHalf] = of.a[3] >> shift & kMask;
        b[k][g] = of.b[0] >> shift & kMask;
        b[k + kHalf][g] = of.b[1] >> shift & kMask;
      }
      std::memcpy(&c[g][2 * t], of.c, 8);
      std::memcpy(&c[g + 8][2 * t], of.c + 2, 8);
    }
  }

  /// Writes the sums to the lanes' registers.
  template <class Lane>
  void scatter(const Lane& lane) const {
    for (int l = 0; l < kWarpSize; ++l) {
      const MmaLane& of = lane(l);
      std::memcpy(of.c, &c[l / 4][2 * (l % 4)], 8);
      std::memcpy(of.c + 2, &c[l / 4 + 8][2 * (l % 4)], 8);
    }
  }
};

}  // namespace mla::emulator

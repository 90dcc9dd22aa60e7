// SPDX-License-Identifier: Apache-2.0
// Measures how fast a thread multiplies with AMX. It is included like tile_unit-inl.h.
#pragma once

#include <chrono>

#include "cpu/tile_unit-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

/// Returns the rate of a burst of some 20 us, in 10^9 operations a second, of products of what is in tiles already.
double burst_of_tiles() {
  constexpr int kIterations = 700;
  configure_tiles();
  for (int warm = 0; warm < 2; ++warm) multiply_tiles<0, 4, 5>();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kIterations; ++i) {  // of four sums, since each waits 52 clocks for itself
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
  release_tiles();
  return double{kIterations} * 4 * 2 * kTileRows * kTileWords * kTileKeys / time.count();
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA

// SPDX-License-Identifier: Apache-2.0
// This file has fast division by a number that the host knows. A GPU has no instruction for integer division and needs
// some thirty instructions for it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace mla::cuda {

/// Divides numbers of [0, 2^31) by one of [1, 2^31); a divisor below 1 counts as 1. The method is that of Granlund and
/// Montgomery, "Division by invariant integers using multiplication" (1994), with the dividend doubled so that the
/// factor has 32 bits.
struct FastDivisor {
  int32_t value = 1;
  uint32_t factor = (1U << 31) + 1;
  int32_t shift = 0;

  constexpr FastDivisor() = default;
  constexpr explicit FastDivisor(int32_t divisor)
      : value(std::max(divisor, 1)), shift(std::bit_width(static_cast<uint32_t>(value) - 1)) {
    factor = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / static_cast<uint32_t>(value) + 1);
  }

  constexpr int32_t divide(int32_t dividend) const {
    const uint64_t product = uint64_t{static_cast<uint32_t>(dividend) * 2} * factor;
    return static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift);
  }
};

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
// This file converts 16-bit operands to f32. The conversions are exact and have no branches, so that the compiler
// vectorizes them.
#pragma once

#include <bit>
#include <cstdint>

namespace mla::emulator {

struct F16 {
  static constexpr int kPerRegister = 2;
  static float to_float(uint32_t bits) {
    const uint32_t magnitude = (bits & 0x7FFFU) << 13;
    const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
    const uint32_t special = magnitude >= 0x0F800000U ? 0x70000000U | magnitude : scaled;
    return std::bit_cast<float>(special | (bits & 0x8000U) << 16);
  }
};

struct Bf16 {
  static constexpr int kPerRegister = 2;
  static float to_float(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
};

/// Holds a row of 8 floats. It is a vector type because GCC 12 vectorizes sums of products over ordinary arrays along
/// k, with more shuffles than products.
using Row [[gnu::vector_size(32)]] = float;

/// MLA_EMULATOR_AVX2 compiles a function for AVX2, and kHasAvx2 says whether it may be called. It gives the same bits,
/// since AVX2 without FMA fuses nothing.
#if defined(__x86_64__)
#define MLA_EMULATOR_AVX2 [[gnu::target("avx2")]]
inline const bool kHasAvx2 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
}();
#else
#define MLA_EMULATOR_AVX2
inline constexpr bool kHasAvx2 = false;
#endif

}  // namespace mla::emulator

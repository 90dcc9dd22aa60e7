// SPDX-License-Identifier: Apache-2.0
// This file converts operands to f32. The conversions are exact; those of 16 bits have no branches, so that the
// compiler vectorizes them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/avx2.h"
#include "mla/numeric.h"

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

struct E4M3 {
  static constexpr int kPerRegister = 4;
  static float to_float(uint32_t bits) {
    static constexpr auto kTable = [] {
      std::array<float, 256> table{};
      for (uint32_t code = 0; code < 256; ++code) table[code] = e4m3_to_f32(static_cast<uint8_t>(code));
      return table;
    }();
    return kTable[bits];
  }
};

struct E2M1 {
  static constexpr int kPerRegister = 8;
  static float to_float(uint32_t bits) { return e2m1_to_f32(static_cast<uint8_t>(bits)); }
};

/// Stands for an e2m1 in the middle four bits of a byte, as mma has it where the other operand may be e4m3.
struct E2M1InByte {
  static constexpr int kPerRegister = 4;
  static constexpr uint32_t kPadding = 0xC3C3C3C3U;  // of a register
  static float to_float(uint32_t bits) { return E2M1::to_float(bits >> 2); }
};

/// Holds a row of 8 floats. It is a vector type because GCC 12 vectorizes sums of products over ordinary arrays along
/// k, with more shuffles than products.
using Row [[gnu::vector_size(32)]] = float;

using core::kHasAvx2;

}  // namespace mla::emulator

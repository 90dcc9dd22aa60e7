// SPDX-License-Identifier: Apache-2.0
// This file converts f32 to e4m3. convert.h has the inverse.
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"
#include "mla/numeric.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// Packs two floats as e4m3, `low` in the low byte. Values are rounded to nearest even, and beyond 448 they saturate. A
/// NaN gives 0x7F, with or without the NaN's sign. It is cvt.rn.satfinite.e4m3x2.f32 (PTX ISA "Data Movement and
/// Conversion Instructions: cvt") from SM89 on, and bit arithmetic before.
MLA_DEVICE uint32_t pack_e4m3x2(float low, float high) {
#if !MLA_EMULATED && MLA_CUDA_ARCH >= 89
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return static_cast<uint32_t>(f32_to_e4m3(low)) | static_cast<uint32_t>(f32_to_e4m3(high)) << 8;
#endif
}

/// Packs four floats likewise, `a` in the lowest byte. The halves of the word are written where they stay.
MLA_DEVICE uint32_t pack_e4m3x4(float a, float b, float c, float d) {
#if !MLA_EMULATED && MLA_CUDA_ARCH >= 89
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
#else
  return pack_e4m3x2(a, b) | pack_e4m3x2(c, d) << 16;
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

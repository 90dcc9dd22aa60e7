// SPDX-License-Identifier: Apache-2.0
// These functions compute f32 arithmetic that no compiler contracts or reorders: every result is rounded once, to
// nearest even, and denormals are kept, whatever the compiler's flags are. opaque() hides a value from the compiler.
#pragma once

#include <bit>
#include <cmath>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// mov.b32: returns the value, about which the compiler can assume nothing any more.
MLA_DEVICE uint32_t opaque(uint32_t value) {
#if !MLA_EMULATED
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
#endif
  return value;
}

/// max.f32: returns the larger number; of a number and a NaN the number.
MLA_DEVICE float max_number(float a, float b) {
#if MLA_EMULATED
  if (a != a) return b;  // std::fmax treats signalling NaNs differently
  return b != b || b < a ? a : b;
#else
  float result;
  asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

/// max.NaN.f32: returns the larger number; NaN if one is NaN.
MLA_DEVICE float max_or_nan(float a, float b) {
#if MLA_EMULATED
  if (a != a || b != b) return std::bit_cast<float>(0x7FFFFFFFU);  // the NaN that the instruction gives
  return b < a ? a : b;
#else
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

#if MLA_EMULATED

// A product of two floats is exact in double, so that it is rounded once, and no compiler fuses it into a sum.
inline float mul_rn(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }
inline float add_rn(float a, float b) { return a + b; }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }

#else

/// mul.rn.f32: returns a * b (PTX ISA "Floating Point Instructions: mul"; with .rn it is never fused).
MLA_DEVICE float mul_rn(float a, float b) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// add.rn.f32: returns a + b (PTX ISA "Floating Point Instructions: add").
MLA_DEVICE float add_rn(float a, float b) {
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// fma.rn.f32: returns a * b + c (PTX ISA "Floating Point Instructions: fma").
MLA_DEVICE float fma_rn(float a, float b, float c) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

#endif

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

// SPDX-License-Identifier: Apache-2.0
// Says what goes into the kernels of wrapper_kernels.cu, and what must come out by scalar code.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mla::cuda {

/// Says how many words the input and the output have; kernels that are not elementwise use only the first of them.
inline constexpr int kWrapperWords = 1 << 17;

/// Says how outputs are compared.
enum class Compare : uint8_t {
  kBits,
  kBf16,  // any NaN equals any other
  kF16,
  kE4M3,
  kF32,
  kF32Relative,   // within 2^-20 of the value
  kF32Logarithm,  // within 2^-20 of the value, or of 1 if that is more
};

struct WrapperCase {
  const char* name;
  Compare compare;
  /// Fills kWrapperWords words.
  void (*fill)(std::vector<uint32_t>& in);
  /// Computes from that input the leading words of the output, which starts as zeros.
  void (*expect)(const std::vector<uint32_t>& in, std::vector<uint32_t>& out);
};

std::span<const WrapperCase> wrapper_cases();

}  // namespace mla::cuda

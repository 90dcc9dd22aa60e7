// SPDX-License-Identifier: Apache-2.0
// MLA_AVX2 compiles a function for AVX2, and kHasAvx2 says whether it may be called. It gives the same bits, since AVX2
// without FMA fuses nothing.
#pragma once

namespace mla::core {

#if defined(__x86_64__)
#define MLA_AVX2 [[gnu::target("avx2")]]
inline const bool kHasAvx2 = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
}();
#else
#define MLA_AVX2
inline constexpr bool kHasAvx2 = false;
#endif

}  // namespace mla::core

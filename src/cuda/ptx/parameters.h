// SPDX-License-Identifier: Apache-2.0
// A kernel's parameters lie in constant memory (PTX ISA: ld.param), of which an SM holds nothing when the kernel
// starts. Each line that a warp asks for first takes hundreds of clocks, in the middle of what the warp does.
#pragma once

#include <algorithm>

#include "cuda/ptx/thread.h"
#include "cuda/ptx/warp.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// Brings all of the parameters into the SM's cache: each of the block's warps reads a line or two, all at the same
/// time. Every thread of the block calls this where a load that all of them wait for is under way
/// (docs/notebook/2026-11-30-cold-parameters.md has what it gains, and where it loses).
template <int kWarps, class Params>
MLA_DEVICE void warm_parameters([[maybe_unused]] const Params& params) {
#if !MLA_EMULATED
  constexpr int kWords = static_cast<int>(sizeof(Params) / sizeof(uint32_t)), kLineWords = 16;
  static_assert(sizeof(Params) % sizeof(uint32_t) == 0);
  constexpr int kLines = kWords / kLineWords + 1;  // the first word need not be the first of its line
  const auto* const words = reinterpret_cast<const uint32_t*>(&params);
  uint32_t bits = 0;
  MLA_UNROLL
  for (int first = 0; first < kLines; first += kWarps)
    bits ^= words[std::min((first + warp()) * kLineWords, kWords - 1)];
  // Something must depend on the loads, and a vote leaves the warp's threads together for the compiler.
  if (any(bits == 0x5bd1e995U)) asm volatile("nanosleep.u32 0;");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

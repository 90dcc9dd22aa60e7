// SPDX-License-Identifier: Apache-2.0
// How long the L2 cache keeps what an instruction brings into it. PTX ISA: createpolicy, .L2::cache_hint (SM80 and
// later). The emulator has no caches.
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

struct CachePolicy {
  uint64_t bits = 0;
};

/// createpolicy.fractional.L2::evict_first: for what is read once. Its lines make room for one another, so that all
/// else stays: instructions, plans, page tables, queries.
MLA_DEVICE CachePolicy evict_first() {
  CachePolicy policy;
#if !MLA_EMULATED
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

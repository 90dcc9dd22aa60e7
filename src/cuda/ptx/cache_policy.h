// SPDX-License-Identifier: Apache-2.0
// A cache policy says how long the L2 cache keeps the lines that an instruction brings into it (PTX ISA: createpolicy,
// .L2::cache_hint; SM80 and later). The emulator has no caches.
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

struct CachePolicy {
  uint64_t bits = 0;
};

/// createpolicy.fractional.L2::evict_first: returns the policy for data that is read once. Its lines are evicted first,
/// so that instructions, plans, page tables and queries stay in the cache.
MLA_DEVICE CachePolicy evict_first() {
  CachePolicy policy;
#if !MLA_EMULATED
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

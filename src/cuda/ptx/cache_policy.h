// SPDX-License-Identifier: Apache-2.0
// A cache policy says how long the L2 cache keeps the lines that an instruction brings into it (PTX ISA: createpolicy,
// .L2::cache_hint; SM80 and later). The emulator has no caches.
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// Holds what createpolicy makes. ptxas 13.0 puts these bits in the place of createpolicy.fractional with a fraction of
/// 1, the same ones for SM80 to SM120, so that the arguments of a kernel can hold a policy.
struct CachePolicy {
  uint64_t bits = 0;
};

/// L2::evict_first: for data that is read once. Its lines are evicted first, so that instructions, plans, page tables
/// and queries stay in the cache.
inline constexpr CachePolicy kEvictFirst = {0x12F0'0000'0000'0000};
/// L2::evict_last: for data that is read again and again while much else streams through the cache.
inline constexpr CachePolicy kEvictLast = {0x14F0'0000'0000'0000};

#if MLA_EMULATED
/// Faults for bits that createpolicy does not make, as those of an argument that was never set.
inline void check_policy(CachePolicy policy, emulator::Site site) {
  if (policy.bits != kEvictFirst.bits && policy.bits != kEvictLast.bits) emulator::policy_fault(policy.bits, site);
}
#endif

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

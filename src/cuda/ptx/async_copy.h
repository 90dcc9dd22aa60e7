// SPDX-License-Identifier: Apache-2.0
// These functions copy from global to shared memory; the issuing thread waits for its copies in groups (PTX ISA:
// cp.async, cp.async.commit_group, cp.async.wait_group). Other threads see the data after a barrier that follows the
// wait.
#pragma once

#include "cuda/ptx/cache_policy.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

// These use the predicate ignore-src and not the operand src-size, because a size that is known only at run time costs
// instructions that compute the source's address.
#if MLA_EMULATED
#define MLA_PTX_COPY(name, bytes, instruction)                                        \
  MLA_DEVICE void name(SharedAddress to, const void* from, bool valid MLA_PTX_SITE) { \
    emulator::copy_async(to, from, bytes, valid, MLA_PTX_HERE);                       \
  }
#else
#define MLA_PTX_COPY(name, bytes, instruction)                                                                       \
  MLA_DEVICE void name(SharedAddress to, const void* from, bool valid) {                                             \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n" instruction " [%0], [%1], " #bytes ", p;\n}" ::"r"(to), \
                 "l"(__cvta_generic_to_global(from)), "r"(static_cast<uint32_t>(valid))                              \
                 : "memory");                                                                                        \
  }
#endif

/// cp.async.cg: copies 16 bytes past the L1 cache. Unless `valid`, it writes zeros and does not read `from`.
MLA_PTX_COPY(cp_async_16, 16, "cp.async.cg.shared.global")
/// cp.async.ca: copies 8 bytes, else as cp_async_16.
MLA_PTX_COPY(cp_async_8, 8, "cp.async.ca.shared.global")
/// cp.async.ca: copies 4 bytes, else as cp_async_16.
MLA_PTX_COPY(cp_async_4, 4, "cp.async.ca.shared.global")
#undef MLA_PTX_COPY

/// cp.async.cg with a cache hint: copies 16 bytes, which stay in the L2 cache as `policy` says.
MLA_DEVICE void cp_async_16(SharedAddress to, const void* from, bool valid, CachePolicy policy MLA_PTX_SITE) {
#if MLA_EMULATED
  check_policy(policy, MLA_PTX_HERE);
  emulator::copy_async(to, from, 16, valid, MLA_PTX_HERE);
#else
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, p, %3;\n}" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(static_cast<uint32_t>(valid)), "l"(policy.bits)
      : "memory");
#endif
}

/// cp.async.commit_group: closes a group of copies, which may be empty.
MLA_DEVICE void cp_async_commit() {
#if MLA_EMULATED
  emulator::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// cp.async.wait_group: waits until at most the kGroups latest groups of this thread are in flight.
template <int kGroups>
MLA_DEVICE void cp_async_wait() {
  static_assert(kGroups >= 0);
#if MLA_EMULATED
  emulator::copy_async_wait(kGroups);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

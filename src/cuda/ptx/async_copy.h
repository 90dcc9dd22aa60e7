// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that the issuing thread waits for in groups. PTX ISA: cp.async,
// cp.async.commit_group, cp.async.wait_group. Other threads see the data after a barrier that follows the wait.
#pragma once

#include "cuda/ptx/cache_policy.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// cp.async.cg: 16 bytes, past the L1 cache; zeros, and `from` not read, unless `valid`.
MLA_DEVICE void cp_async_16(SharedAddress to, const void* from, bool valid MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::copy_async(to, from, 16, valid, MLA_PTX_HERE);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 16 : 0)
               : "memory");
#endif
}

/// The same, kept in the L2 cache as `policy` says.
MLA_DEVICE void cp_async_16(SharedAddress to, const void* from, bool valid,
                            [[maybe_unused]] CachePolicy policy MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::copy_async(to, from, 16, valid, MLA_PTX_HERE);
#else
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0), "l"(policy.bits)
               : "memory");
#endif
}

/// cp.async.ca: 8 bytes
MLA_DEVICE void cp_async_8(SharedAddress to, const void* from, bool valid MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::copy_async(to, from, 8, valid, MLA_PTX_HERE);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 8 : 0)
               : "memory");
#endif
}

/// cp.async.ca: 4 bytes
MLA_DEVICE void cp_async_4(SharedAddress to, const void* from, bool valid MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::copy_async(to, from, 4, valid, MLA_PTX_HERE);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 4 : 0)
               : "memory");
#endif
}

/// cp.async.commit_group: closes a group, which may be empty.
MLA_DEVICE void cp_async_commit() {
#if MLA_EMULATED
  emulator::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// cp.async.wait_group: until at most the kGroups latest groups of this thread are in flight.
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

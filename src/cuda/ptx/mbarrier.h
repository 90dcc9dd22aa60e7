// SPDX-License-Identifier: Apache-2.0
// These functions are for barriers in shared memory that count threads, and on SM90 and later bytes as well, and for
// bulk copies that report to them (PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier",
// cp.async.bulk). Functions that need SM90 are templates, so that code for older architectures may name them where it
// does not call them.
//
// A barrier is 8 bytes at a multiple of 8. Each of its phases ends when `count` threads have arrived and all expected
// bytes have landed. mbarrier_wait(bar, p) waits for the end of the current phase if its parity is p (the first phase
// has parity 0), and returns at once if its parity is not p.
#pragma once

#include "cuda/ptx/cache_policy.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// mbarrier.init: initializes a barrier. The same thread must then call fence_mbarrier_init(), and the block must pass
/// a barrier before any thread uses it.
MLA_DEVICE void mbarrier_init(SharedAddress bar, int count MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::mbarrier_init(bar, static_cast<uint32_t>(count), MLA_PTX_HERE);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
#endif
}

/// mbarrier.arrive: counts the calling thread.
MLA_DEVICE void mbarrier_arrive(SharedAddress bar MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::mbarrier_arrive(bar, 0, MLA_PTX_HERE);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

/// mbarrier.expect_tx: lets the current phase end only after `bytes` more bytes have landed. It does not arrive.
template <int kOn = kArch>
MLA_DEVICE void mbarrier_expect_bytes(SharedAddress bar, uint32_t bytes MLA_PTX_SITE) {
  static_assert(kOn >= 90, "mbarriers with transactions need SM90");
#if MLA_EMULATED
  emulator::mbarrier_expect_bytes(bar, bytes, MLA_PTX_HERE);
#else
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}

/// mbarrier.arrive.expect_tx: expects bytes and arrives, as the thread that issues the copies does.
template <int kOn = kArch>
MLA_DEVICE void mbarrier_arrive_expect_bytes(SharedAddress bar, uint32_t bytes MLA_PTX_SITE) {
  static_assert(kOn >= 90, "mbarriers with transactions need SM90");
#if MLA_EMULATED
  emulator::mbarrier_arrive(bar, bytes, MLA_PTX_HERE);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}

/// cp.async.mbarrier.arrive.noinc: arrives, as mbarrier_arrive() does, once all cp_async_* of this thread so far have
/// landed; they need no cp_async_commit() and no cp_async_wait().
MLA_DEVICE void mbarrier_arrive_after_copies(SharedAddress bar MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::mbarrier_arrive_after_copies(bar, MLA_PTX_HERE);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

/// mbarrier.try_wait.parity, before SM90 test_wait: repeats the instruction until the phase of this parity has ended.
MLA_DEVICE void mbarrier_wait(SharedAddress bar, uint32_t parity MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::mbarrier_wait(bar, parity, MLA_PTX_HERE);
#else
#if MLA_CUDA_ARCH >= 90
#define MLA_PTX_WAIT "mbarrier.try_wait"
#else
#define MLA_PTX_WAIT "mbarrier.test_wait"
#endif
  asm volatile("{\n.reg .pred done;\nwait:\n" MLA_PTX_WAIT
               ".parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait;\n}" ::"r"(bar),
               "r"(parity)
               : "memory");
#undef MLA_PTX_WAIT
#endif
}

/// fence.mbarrier_init: makes the initialization visible to bulk copies and to the cluster. Where there are neither,
/// the barrier of the block is enough.
MLA_DEVICE void fence_mbarrier_init() {
#if MLA_EMULATED
  emulator::fence_mbarrier_init();
#elif MLA_CUDA_ARCH >= 90
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// fence.proxy.async.shared::cta: orders accesses to shared memory by ordinary loads and stores and by cp.async, the
/// thread's own and those it has waited for, before later bulk copies and wgmmas.
template <int kOn = kArch>
MLA_DEVICE void fence_async_proxy() {
  static_assert(kOn >= 90, "the asynchronous proxy came with SM90");
#if MLA_EMULATED
  emulator::fence_async_proxy();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// cp.async.bulk from global to shared memory: copies `bytes` bytes and reports them to `bar`. `bytes`, `to` and `from`
/// are multiples of 16.
template <int kOn = kArch>
MLA_DEVICE void bulk_copy(SharedAddress to, const void* from, uint32_t bytes, SharedAddress bar,
                          CachePolicy policy MLA_PTX_SITE) {
  static_assert(kOn >= 90, "bulk copies need SM90");
#if MLA_EMULATED
  check_policy(policy, MLA_PTX_HERE);
  emulator::bulk_copy(to, from, bytes, bar, MLA_PTX_HERE);
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar), "l"(policy.bits)
      : "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

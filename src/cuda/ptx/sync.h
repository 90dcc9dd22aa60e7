// SPDX-License-Identifier: Apache-2.0
// These are the barriers and fences of a block (PTX ISA, "Parallel Synchronization and Communication Instructions").
#pragma once

#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// bar.sync 0: waits for all threads of the block, and orders their shared and global accesses.
MLA_DEVICE void sync_block(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::sync_block(MLA_PTX_HERE);
#else
  asm volatile("bar.sync 0;" ::: "memory");
#endif
}

/// bar.sync id, n: waits until n threads (a multiple of 32, whole warps) have arrived at barrier 0 ... 15 by this
/// function or by arrive_threads(). sync_block() uses barrier 0.
MLA_DEVICE void sync_threads(int barrier, int num_threads MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::sync_threads(barrier, num_threads, MLA_PTX_HERE);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
#endif
}

/// bar.red.or.pred: does what sync_threads() does, and returns whether `predicate` holds in any of the n threads.
MLA_DEVICE bool sync_threads_any(int barrier, int num_threads, bool predicate MLA_PTX_SITE) {
#if MLA_EMULATED
  return emulator::sync_threads_any(barrier, num_threads, predicate, MLA_PTX_HERE);
#else
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(num_threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return any != 0;
#endif
}

/// bar.arrive id, n: counts the calling threads without waiting.
MLA_DEVICE void arrive_threads(int barrier, int num_threads MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::arrive_threads(barrier, num_threads, MLA_PTX_HERE);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
#endif
}

/// bar.warp.sync: waits for all lanes of the warp, and orders their accesses.
MLA_DEVICE void sync_warp(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::sync_warp(MLA_PTX_HERE);
#else
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
#endif
}

/// fence.acq_rel.cta (membar.cta): orders the thread's accesses as seen by its block.
MLA_DEVICE void fence_block() {
#if MLA_EMULATED
  emulator::fence();
#else
  asm volatile("fence.acq_rel.cta;" ::: "memory");
#endif
}

/// fence.acq_rel.gpu (membar.gl): orders the thread's accesses as seen by all blocks.
MLA_DEVICE void fence_device() {
#if MLA_EMULATED
  emulator::fence();
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

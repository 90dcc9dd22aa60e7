// SPDX-License-Identifier: Apache-2.0
// Clusters: blocks that run at the same time and reach each other's shared memory (SM90 and later; LaunchShape has how
// many). PTX ISA: %cluster_ctarank, mapa, barrier.cluster, cp.async.bulk, mbarrier.arrive. Templates, so that code for
// older architectures may name these functions where it does not call them.
#pragma once

#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// %cluster_ctarank: which block of its cluster this is.
template <int kOn = kArch>
MLA_DEVICE int cluster_rank() {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  return emulator::current_thread->cluster_rank;
#else
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

/// mapa.shared::cluster: where `address` of this block lies in block `rank` of the cluster. Only functions that say so
/// take what it returns; it may be moved within that block's shared memory.
template <int kOn = kArch>
MLA_DEVICE SharedAddress map_shared(SharedAddress address, int rank MLA_PTX_SITE) {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  return emulator::map_shared(address, rank, MLA_PTX_HERE);
#else
  SharedAddress mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
#endif
}

/// barrier.cluster.arrive.relaxed and .wait: for all threads of the cluster. Before it nobody may touch another block's
/// mbarriers, and no block may end while others still touch its shared memory. It orders nothing but what
/// fence_mbarrier_init() was called for: a release would wait until all stores to global memory are done.
template <int kOn = kArch>
MLA_DEVICE void sync_cluster(MLA_PTX_SITE_ONLY) {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  emulator::sync_cluster(MLA_PTX_HERE);
#else
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// cp.async.bulk shared::cta to shared::cluster: `bytes`, `to` and `from` multiples of 16; reports its bytes to `bar`.
/// `to` and `bar` are mapped, of one block. `from` may change once who waits at `bar` has been woken.
template <int kOn = kArch>
MLA_DEVICE void bulk_copy_in_cluster(SharedAddress to, SharedAddress from, uint32_t bytes,
                                     SharedAddress bar MLA_PTX_SITE) {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  emulator::bulk_copy_in_cluster(to, from, bytes, bar, MLA_PTX_HERE);
#else
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(bar)
               : "memory");
#endif
}

/// mbarrier.arrive at a mapped barrier. Says that this block is done with what it has read; it orders no stores of this
/// block before loads of another, which a release for the cluster would take a thousand clocks for.
template <int kOn = kArch>
MLA_DEVICE void mbarrier_arrive_in_cluster(SharedAddress bar MLA_PTX_SITE) {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  emulator::mbarrier_arrive_in_cluster(bar, MLA_PTX_HERE);
#else
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

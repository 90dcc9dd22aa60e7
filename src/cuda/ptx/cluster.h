// SPDX-License-Identifier: Apache-2.0
// The blocks of a cluster run at the same time and reach each other's shared memory (SM90 and later; LaunchShape says
// how many they are). PTX ISA: %cluster_ctarank, mapa, barrier.cluster, ld, cp.async.bulk, mbarrier.arrive. These
// functions are templates, so that code for older architectures may name them where it does not call them.
#pragma once

#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// %cluster_ctarank: returns which block of its cluster this is.
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

/// mapa.shared::cluster: returns the address in block `rank` of the cluster that corresponds to `address` in this
/// block. Only functions that say so take such a *mapped* address; offsets within that block's shared memory may be
/// added to it.
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

/// barrier.cluster.arrive.relaxed and .wait: waits for all threads of the cluster. Before the first such barrier no
/// thread may touch another block's mbarriers, and a block may end only behind one that follows all accesses to its
/// shared memory. It orders only the initialization of mbarriers before fence_mbarrier_init(); a release would wait
/// until all stores to global memory are done.
template <int kOn = kArch>
MLA_DEVICE void sync_cluster(MLA_PTX_SITE_ONLY) {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  emulator::sync_cluster(MLA_PTX_HERE);
#else
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// barrier.cluster.arrive.release and .wait.acquire: does the same, and what threads of the cluster have stored before
/// it, the others see behind it.
template <int kOn = kArch>
MLA_DEVICE void sync_cluster_memory(MLA_PTX_SITE_ONLY) {
  static_assert(kOn >= 90, "clusters came with SM90");
#if MLA_EMULATED
  emulator::sync_cluster_memory(MLA_PTX_HERE);
#else
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// ld.shared::cluster.u64: loads 8 bytes from a mapped address, a multiple of 8. The block has stored them before a
/// sync_cluster_memory().
template <int kOn = kArch>
MLA_DEVICE uint64_t load_in_cluster(SharedAddress from MLA_PTX_SITE) {
  static_assert(kOn >= 90, "clusters came with SM90");
  uint64_t bits;
#if MLA_EMULATED
  emulator::load_in_cluster(from, &bits, sizeof(bits), MLA_PTX_HERE);
#else
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(bits) : "r"(from) : "memory");
#endif
  return bits;
}

/// cp.async.bulk from shared::cta to shared::cluster: copies `bytes` bytes and reports them to `bar`. `bytes`, `to` and
/// `from` are multiples of 16. `to` and `bar` are mapped addresses in the same block. `from` may be overwritten once a
/// wait for `bar` has returned.
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

/// mbarrier.arrive: arrives at a mapped barrier. It tells that this block has read what it needed. It does not order
/// stores of this block before loads of another, for which a release at cluster scope would take a thousand clocks.
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

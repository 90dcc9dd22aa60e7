// SPDX-License-Identifier: Apache-2.0
// Tensor copies bring a box of a tensor in global memory into shared memory, by one instruction of one thread (PTX ISA:
// cp.async.bulk.tensor; SM90 and later). A tensor map says where the tensor lies, how large boxes are, and that their
// rows of 128 bytes are swizzled (cuda/border/queue.h makes it).
#pragma once

#include "cuda/ptx/mbarrier.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// cp.async.bulk.tensor.3d: copies the box of 64 channels from `channel` on, of rows from `row` on, of heads from
/// `head` on, one head behind the other, and reports its bytes to `bar`. Heads and rows behind the tensor's last ones,
/// and channels behind its last, become zero, and count. `map` lies in the kernel's arguments; `to` is a multiple of
/// 1,024, where the swizzle begins.
template <int kOn = kArch>
MLA_DEVICE void tensor_copy(SharedAddress to, const void* map, int32_t channel, int32_t row, int32_t head,
                            SharedAddress bar MLA_PTX_SITE) {
  static_assert(kOn >= 90, "tensor copies need SM90");
#if MLA_EMULATED
  emulator::tensor_copy(to, map, {channel, row, head}, bar, MLA_PTX_HERE);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(to),
      "l"(map), "r"(channel), "r"(row), "r"(head), "r"(bar)
      : "memory");
#endif
}

/// Does the same, and says how long the L2 cache keeps the box.
template <int kOn = kArch>
MLA_DEVICE void tensor_copy(SharedAddress to, const void* map, int32_t channel, int32_t row, int32_t head,
                            SharedAddress bar, CachePolicy policy MLA_PTX_SITE) {
  static_assert(kOn >= 90, "tensor copies need SM90");
#if MLA_EMULATED
  check_policy(policy, MLA_PTX_HERE);
  emulator::tensor_copy(to, map, {channel, row, head}, bar, MLA_PTX_HERE);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(channel), "r"(row), "r"(head), "r"(bar), "l"(policy.bits)
      : "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

// SPDX-License-Identifier: Apache-2.0
// This file has atomic addition to shared memory by its 32-bit addresses, for histograms (PTX ISA: red).
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda/ptx/shared.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// red.relaxed.cta.shared.add.u32: adds `value` atomically.
MLA_DEVICE void add_shared(SharedAddress to, uint32_t value MLA_PTX_SITE) {
#if MLA_EMULATED
  auto* const word = reinterpret_cast<uint32_t*>(emulator::shared_pointer(to, 4, 4, MLA_PTX_HERE));
  std::atomic_ref<uint32_t>(*word).fetch_add(value, std::memory_order_relaxed);
#else
  asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

// SPDX-License-Identifier: Apache-2.0
// Registers that groups of four warps give each other, in a kernel whose launch bounds fix what each has at first. PTX
// ISA, "Miscellaneous Instructions": setmaxnreg (SM90 and SM100, with the architecture's own features).
#pragma once

#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// setmaxnreg.dec: the warps of the group, all of them, keep `kRegisters` (a multiple of 8) for each thread.
template <int kRegisters, int kOn = kArch>
MLA_DEVICE void give_registers() {
  static_assert(kOn == 90 || kOn == 100, "setmaxnreg needs SM90a or SM100a");
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if !MLA_EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// setmaxnreg.inc: waits until there are as many.
template <int kRegisters, int kOn = kArch>
MLA_DEVICE void take_registers() {
  static_assert(kOn == 90 || kOn == 100, "setmaxnreg needs SM90a or SM100a");
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if !MLA_EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

// SPDX-License-Identifier: Apache-2.0
// Groups of four warps may give registers to each other, in a kernel whose launch bounds fix how many each thread has
// at first (PTX ISA, "Miscellaneous Instructions": setmaxnreg; SM90, compiled for its own features, and SM100 and its
// kin, compiled for their family's).
#pragma once

#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// setmaxnreg.dec: all warps of the group keep `kRegisters` registers (a multiple of 8) for each thread, and release
/// the rest.
template <int kRegisters, int kOn = kArch>
MLA_DEVICE void give_registers() {
  static_assert(kOn == 90 || cuda::written_for(kOn) == 100, "setmaxnreg needs SM90a or SM100f");
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if !MLA_EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// setmaxnreg.inc: waits until `kRegisters` registers for each thread of the group are available, and takes them.
template <int kRegisters, int kOn = kArch>
MLA_DEVICE void take_registers() {
  static_assert(kOn == 90 || cuda::written_for(kOn) == 100, "setmaxnreg needs SM90a or SM100f");
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if !MLA_EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Keeps `value` in a register from here on, where the compiler would rather compute it anew for each use. It is no
/// instruction.
MLA_DEVICE void keep_in_register([[maybe_unused]] uint32_t& value) {
#if !MLA_EMULATED
  asm volatile("" : "+r"(value));
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

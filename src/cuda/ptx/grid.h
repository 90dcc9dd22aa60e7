// SPDX-License-Identifier: Apache-2.0
// These functions serve programmatic dependent launches (PTX ISA: griddepcontrol; SM90 and later). On older
// architectures the kernels of a stream do not overlap, and these functions do nothing. The emulator runs launches one
// after another, but can make a kernel believe that the previous one never ends.
#pragma once

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// griddepcontrol.wait: waits until all kernels that this one depends on have ended and their writes are visible.
MLA_DEVICE void wait_for_previous_grid() {
#if MLA_EMULATED
  if (kHasGridDependencies) emulator::wait_for_previous_grid();
#elif MLA_CUDA_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// griddepcontrol.launch_dependents: lets the next kernel start once all blocks have called this or ended.
MLA_DEVICE void allow_next_grid() {
#if !MLA_EMULATED && MLA_CUDA_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

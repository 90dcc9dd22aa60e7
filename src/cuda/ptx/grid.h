// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch. PTX ISA: griddepcontrol (SM90 and later; before, kernels of a stream do not overlap
// and these do nothing). The emulator runs launches one after another, but can let the previous one never end.
#pragma once

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// griddepcontrol.wait: until all kernels that this one depends on have ended and their writes are visible.
MLA_DEVICE void wait_for_previous_grid() {
#if MLA_EMULATED
  if (kHasGridDependencies) emulator::wait_for_previous_grid();
#elif MLA_CUDA_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// griddepcontrol.launch_dependents: the next kernel may start once all blocks have called this or ended.
MLA_DEVICE void allow_next_grid() {
#if !MLA_EMULATED && MLA_CUDA_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

// SPDX-License-Identifier: Apache-2.0
// This file says which architectures this build holds kernels for, as GPU code and as code of the emulator.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/border/ceilings.h"

namespace mla::cuda {

/// Holds the code of one architecture. The kernels of operations belong to backends (border/backend.h).
struct Code {
  int32_t arch = 0;  // 0 if there is no code
  bool emulated = false;
  const CeilingKernels* ceilings = nullptr;
};

/// Return the architectures in ascending order.
std::span<const int32_t> built_archs();
std::span<const int32_t> emulated_archs();

/// Returns the shared memory that a block may take (CUDA programming guide, table "Technical Specifications per Compute
/// Capability"). ptx/machine.h has the same numbers for kernels.
constexpr int32_t shared_bytes_of(int32_t arch) {
  constexpr int32_t kKiB = 1024;
  if (arch == 80) return 163 * kKiB;
  return (arch == 90 || arch == 100 ? 227 : 99) * kKiB;
}

/// A build with a profile has the code of `arch`, compiled for GPUs of `gpu`, which pass for GPUs of `arch`.
struct Profile {
  int32_t arch = 0;  // 0: the build has no profile
  int32_t gpu = 0;
};
Profile profile();

/// This is the oldest architecture that the kernels can be compiled for.
inline constexpr int32_t kOldestArch = 80;

/// Returns which of the architectures in `built` has the code that a GPU of `arch` runs; 0 if there is none. That is
/// the GPU's own architecture; else, for a GPU of 8.x, the newest older one of 8.x, whose instructions it has; else
/// sm80, whose code is also there as PTX that a driver compiles for newer GPUs.
constexpr int32_t arch_of_code(int32_t arch, std::span<const int32_t> built) {
  int32_t best = 0;
  for (const int32_t candidate : built) {
    const bool same_family = arch / 10 == 8 && candidate / 10 == 8 && candidate <= arch;
    if (candidate == arch || same_family || (candidate == kOldestArch && best == 0 && arch > candidate))
      best = candidate;
  }
  return best;
}

/// Returns the code that a GPU of `arch` runs; its arch is 0 if this build has none.
Code code_for(int32_t arch);
/// Returns the emulator's code of exactly this architecture.
Code emulated_code(int32_t arch);

}  // namespace mla::cuda

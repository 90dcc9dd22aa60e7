// SPDX-License-Identifier: Apache-2.0
// Which architectures this build holds kernels for, as GPU code and as code of the emulator.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/border/ceilings.h"

namespace mla::cuda {

/// The kernels of one architecture. Those of operations are the backends' (border/backend.h).
struct Code {
  int32_t arch = 0;  // 0: there are none
  bool emulated = false;
  const CeilingKernels* ceilings = nullptr;
};

/// Ascending.
std::span<const int32_t> built_archs();
std::span<const int32_t> emulated_archs();

/// Oldest architecture that the kernels can be compiled for.
inline constexpr int32_t kOldestArch = 80;

/// Which of `built` a GPU of `arch` runs; 0 if none. Its own; else, among 8.x, the newest older one, whose instructions
/// it has; else that of sm80, which is also there in the form that a newer driver compiles.
constexpr int32_t arch_of_code(int32_t arch, std::span<const int32_t> built) {
  int32_t best = 0;
  for (const int32_t candidate : built) {
    const bool same_family = arch / 10 == 8 && candidate / 10 == 8 && candidate <= arch;
    if (candidate == arch || same_family || (candidate == kOldestArch && best == 0 && arch > candidate))
      best = candidate;
  }
  return best;
}

/// What a GPU of `arch` runs; arch 0 if this build has nothing for it.
Code code_for(int32_t arch);
/// Exactly that architecture's.
Code emulated_code(int32_t arch);

}  // namespace mla::cuda

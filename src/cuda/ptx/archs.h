// SPDX-License-Identifier: Apache-2.0
// These are facts of architectures, as numbers: 103 is a GPU of compute capability 10.3. Kernels and what launches them
// ask the same functions.
#pragma once

#include <cstdint>

namespace mla::cuda {

/// These architectures have no kernels of their own: theirs were written for another one (written_for). Without a build
/// by name (MLA_CUDA_ARCHS) a GPU of 10.3 and of 12.1 runs the code of that other one.
inline constexpr int32_t kKindredArchs[] = {103, 110, 121};

/// Returns the architecture that the kernels of `arch` were written for: 10.0 for all of 10.x and 11.x, 12.0 for all of
/// 12.x. The GPUs have every instruction that those kernels use, and as much shared memory for a block.
constexpr int32_t written_for(int32_t arch) {
  const int32_t major = arch / 10;
  return major == 10 || major == 11 ? 100 : major == 12 ? 120 : arch;
}

/// Returns the shared memory that a block may take (CUDA programming guide, table "Technical Specifications per Compute
/// Capability"). Architectures that are newer than this list are taken for large ones.
constexpr int32_t shared_bytes_of(int32_t arch) {
  constexpr int32_t kKiB = 1024;
  if (arch == 80 || arch == 87) return 163 * kKiB;
  const int32_t model = written_for(arch);
  return (model < 90 || model == 120 ? 99 : 227) * kKiB;
}

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
// This file says which architectures this build holds kernels for, as GPU code and as code of the emulator, and which
// of them a GPU runs.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/border/ceilings.h"
#include "cuda/ptx/archs.h"

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
/// Lists the architectures of a full build, ascending: one for every GPU that has cubins of its own or of its family.
inline constexpr int32_t kFullBuild[] = {80, 86, 89, 90, 100, 110, 120};

/// A build with a profile has the code of `arch`, compiled for GPUs of `gpu`, which pass for GPUs of `arch`.
struct Profile {
  int32_t arch = 0;  // 0: the build has no profile
  int32_t gpu = 0;
};
Profile profile();

/// Returns the architecture whose instructions the code of `arch` has.
constexpr int32_t compiled_for(int32_t arch, const Profile& profile) {
  return profile.arch != 0 && arch == profile.arch ? profile.gpu : arch;
}

/// This is the oldest architecture that the kernels can be compiled for.
inline constexpr int32_t kOldestArch = 80;
/// From this architecture on, kernels are compiled for a whole family (cmake/MlaCudaBackend.cmake).
inline constexpr int32_t kOldestWithFamily = 100;

/// Says whether a GPU of `arch` runs the cubins that were compiled for `code`: its own; and older ones of the same
/// major number, which from 10.0 on are compiled for the whole family (nvcc's target sm_100f: 10.0 and 10.3). Those of
/// 9.0 have instructions of 9.0 alone. 10.1 is a family of its own: so CUDA called Jetson Thor before 13.0, now 11.0.
constexpr bool runs_cubins(int32_t arch, int32_t code) {
  return code == arch || (code < arch && code / 10 == arch / 10 && code != 90 && arch != 101);
}

/// Returns which of the architectures in `built`, and of `best` if it is not 0, has the code that a GPU of `arch` runs;
/// 0 if there is none. That is the newest one whose cubins it runs; else sm80, whose code is also there as PTX that a
/// driver compiles for newer GPUs. Kernels take the shared memory of the architecture that they were compiled for, so
/// that the GPU must have as much.
constexpr int32_t arch_of_code(int32_t arch, std::span<const int32_t> built, int32_t best = 0) {
  for (const int32_t code : built) {
    if (shared_bytes_of(code) > shared_bytes_of(arch)) continue;
    const bool better = !runs_cubins(arch, best) || code > best;
    if (runs_cubins(arch, code) ? better : code == kOldestArch && best == 0 && code < arch) best = code;
  }
  return best;
}

/// Names the code of a build that a GPU runs.
struct CodeChoice {
  int32_t arch = 0;        ///< architecture that it was compiled for; 0 if there is none
  bool by_driver = false;  ///< the GPU's driver compiles it, from PTX
  bool family = false;     ///< it was compiled for the family of an older GPU
  friend bool operator==(const CodeChoice&, const CodeChoice&) = default;
};

/// Returns the code that a GPU of `arch` runs in a build for the architectures `built`. `full` asks about a build for
/// these and for those of a full build (kFullBuild). A build with a profile has code for GPUs alone that pass for GPUs
/// of the profile's architecture.
constexpr CodeChoice choose_code(int32_t arch, std::span<const int32_t> built, bool full = false,
                                 const Profile& profile = {}) {
  int32_t code = profile.arch == 0 || profile.arch == arch ? arch_of_code(arch, built) : 0;
  if (full) code = arch_of_code(arch, kFullBuild, code);
  const bool cubins = runs_cubins(arch, code);
  return {
      .arch = code, .by_driver = code != 0 && !cubins, .family = cubins && code != arch && code >= kOldestWithFamily};
}

/// Returns the code that a GPU of `arch` runs; its arch is 0 if this build has none.
Code code_for(int32_t arch);
/// Returns the code that an emulated GPU of `arch` runs: of exactly this architecture, or for one of kKindredArchs the
/// code that a GPU would run. Its arch is 0 if there is none.
Code emulated_code(int32_t arch);

}  // namespace mla::cuda

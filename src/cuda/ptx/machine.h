// SPDX-License-Identifier: Apache-2.0
// These constants say for which machine a translation unit is compiled. Every kernel is compiled once per architecture
// and machine, each time in a namespace of its own, so that one program can hold all of them:
//   nvcc            -DMLA_CUDA_ARCH=90                    namespace mla::sm90           runs on a GPU
//   host compiler   -DMLA_CUDA_ARCH=90 -DMLA_EMULATED=1   namespace mla::emulated_sm90  runs in src/emulator
#pragma once

#include <cstdint>

#include "cuda/ptx/archs.h"

#ifndef MLA_CUDA_ARCH
#error "compile with -DMLA_CUDA_ARCH=80, 86, 89, 90, 100, 103, 110, 120 or 121"
#endif
#ifndef MLA_EMULATED
#define MLA_EMULATED 0
#endif
// This is the architecture whose instructions the code has; another one than MLA_CUDA_ARCH in a build with a profile.
#ifndef MLA_CUDA_GPU
#define MLA_CUDA_GPU MLA_CUDA_ARCH
#endif

// This is the architecture whose code of src/cuda/common it calls. That of SM80 runs on an SM86, which has the same
// instructions, and would be compiled into the same.
#if MLA_CUDA_ARCH == 86
#define MLA_COMMON_ARCH 80
#else
#define MLA_COMMON_ARCH MLA_CUDA_ARCH
#endif

#define MLA_CUDA_JOIN_(a, b) a##b
#define MLA_CUDA_JOIN(a, b) MLA_CUDA_JOIN_(a, b)
#if MLA_EMULATED
#define MLA_CUDA_NAMESPACE MLA_CUDA_JOIN(emulated_sm, MLA_CUDA_ARCH)
#define MLA_COMMON_NAMESPACE MLA_CUDA_JOIN(emulated_sm, MLA_COMMON_ARCH)
#define MLA_DEVICE inline
#define MLA_UNROLL
#define MLA_NO_UNROLL
#else
#define MLA_CUDA_NAMESPACE MLA_CUDA_JOIN(sm, MLA_CUDA_ARCH)
#define MLA_COMMON_NAMESPACE MLA_CUDA_JOIN(sm, MLA_COMMON_ARCH)
#define MLA_DEVICE __device__ __forceinline__
#define MLA_UNROLL _Pragma("unroll")
#define MLA_NO_UNROLL _Pragma("unroll 1")
#endif

#if MLA_COMMON_ARCH != MLA_CUDA_ARCH
namespace mla::MLA_COMMON_NAMESPACE {}
#endif

namespace mla::MLA_CUDA_NAMESPACE {

#if MLA_COMMON_ARCH != MLA_CUDA_ARCH
using namespace mla::MLA_COMMON_NAMESPACE;
#endif

inline constexpr int kArch = MLA_CUDA_ARCH;
/// Names the architecture that this one's kernels were written for: 100 for 103 and 110, 120 for 121. What is tuned for
/// an architecture asks for this one.
inline constexpr int kWrittenFor = cuda::written_for(kArch);
/// Says how many bytes of shared memory one block may take.
inline constexpr int kSharedBytesPerBlock = cuda::shared_bytes_of(kArch);
/// Says whether the architecture has cvt between e4m3x2 and f16x2, and mma on e4m3.
inline constexpr bool kHasE4M3 = kArch >= 89;
/// These say whether the architecture has bulk copies with mbarrier transactions, and griddepcontrol.
inline constexpr bool kHasBulkCopies = kArch >= 90;
inline constexpr bool kHasClusters = kArch >= 90;
inline constexpr bool kHasGridDependencies = kArch >= 90;
/// Says whether the architecture has wgmma, which only SM90 has.
inline constexpr bool kHasWgmma = kArch == 90;
/// Says whether the GPU has mma with block scales. A GPU that passes for an SM120 has not.
inline constexpr bool kHasBlockScales = cuda::written_for(MLA_CUDA_GPU) == 120;

inline constexpr int kWarpSize = 32;

}  // namespace mla::MLA_CUDA_NAMESPACE

// SPDX-License-Identifier: Apache-2.0
// These functions are multiplications by a warpgroup (4 warps, 128 threads): D [64, kN] = A [64, 16] B [16, kN] + D,
// with B in shared memory and A in shared memory or in registers (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions": wgmma.fence, wgmma.mma_async, wgmma.commit_group, wgmma.wait_group, and "Matrix Descriptor"). Only
// SM90 has them (sm_90a).
//   D: warp w of the warpgroup, lane 4 g + t: d[4 n + 0..1]: row 16 w + g, columns 8 n + 2t, 2t+1; d[4 n + 2..3]: row 8
//   below.
//   A in registers: as that of mma.m16n8k16 for the warp's 16 rows: a[0]: row 16 w + g, k = 2t, 2t+1; a[1]: row 8
//   below; a[2..3]: k + 8 of both.
// The order is: write the operands, fence_async_proxy(), a barrier, wgmma_fence(), multiplications, wgmma_commit(),
// wgmma_wait(). Between a multiplication and its wait no thread may touch d, change a, or write the operands.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// Says in what order 16-byte units lie in shared memory. k128 changes address bits 4-6 by exclusive or with bits 7-9,
/// k64 bits 4-5 with bits 7-8. Tiles begin at multiples of 1024 bytes (k64: 512).
enum class Swizzle : uint8_t { kNone = 0, k128 = 1, k64 = 2 };

/// Returns the descriptor that says where an operand of 16-bit elements lies. `begin`, `leading` and `stride` are in
/// bytes, multiples of 16.
///   Contiguous along k (A, and B [kN, 16] unless kTransposeB):
///     kNone    cores of 8 rows by 16 bytes, each of 128 contiguous bytes; `leading` between cores that are neighbours
///              along k, `stride` between those 8 rows apart
///     k128/64  rows of 128 (64) bytes, groups of 8 rows contiguous; `stride` between those groups; `leading` is not
///              used. The next 16 along k: begin + 32.
///   Contiguous along n (B [16, kN] with kTransposeB):
///     kNone    cores of 8 k by 16 bytes; `leading` between groups of 8 k, `stride` between groups of 8 columns
///     k128/64  cores of 8 k by 128 (64) bytes, 64 (32) columns; `leading` between groups of 64 (32) columns, `stride`
///              between groups of 8 k
MLA_DEVICE uint64_t matrix_descriptor(SharedAddress begin, uint32_t leading, uint32_t stride,
                                      Swizzle swizzle = Swizzle::kNone) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3FFFFU) >> 4); };
  return field(begin) | field(leading) << 16 | field(stride) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

/// Returns the descriptor of the operand that lies `bytes` further on, a multiple of 16. The address is in the lower
/// half and never carries into the upper one; a sum of 64 bits would take twice the instructions.
MLA_DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
  return (descriptor >> 32) << 32 | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16));
}

/// wgmma.fence.sync.aligned: lets the next wgmma use registers and shared memory that were written before.
MLA_DEVICE void wgmma_fence(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::wgmma_fence(MLA_PTX_HERE);
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// wgmma.commit_group.sync.aligned: closes a group of multiplications.
MLA_DEVICE void wgmma_commit(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::wgmma_commit(MLA_PTX_HERE);
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// wgmma.wait_group.sync.aligned: waits until at most the kGroups latest groups are in flight.
template <int kGroups>
MLA_DEVICE void wgmma_wait(MLA_PTX_SITE_ONLY) {
  static_assert(kGroups >= 0 && kGroups <= 7);
#if MLA_EMULATED
  emulator::wgmma_wait(kGroups, MLA_PTX_HERE);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
#endif
}

/// Keeps the compiler from moving an access of `d` across this call; it is no instruction. It is called for
/// accumulators before wgmma_fence() and after wgmma_wait().
template <int kCount>
MLA_DEVICE void wgmma_hold([[maybe_unused]] float (&d)[kCount]) {
#if !MLA_EMULATED
  MLA_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

/// Does the same for operands in registers, which must outlive the multiplication.
template <int kRows, int kColumns>
MLA_DEVICE void wgmma_hold([[maybe_unused]] uint32_t (&a)[kRows][kColumns]) {
#if !MLA_EMULATED
  MLA_UNROLL
  for (int i = 0; i < kRows * kColumns; ++i) asm volatile("" : "+r"(a[i / kColumns][i % kColumns])::"memory");
#endif
}

#if !MLA_EMULATED
// MLA_NAMES_* are the names %0 ... of 16, 32, 64 and 128 accumulators in an asm statement; the operands are d[0] ...
#define MLA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MLA_NAMES_32 MLA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_NAMES_64                                                                                          \
  MLA_NAMES_32                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52" \
  ", %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_NAMES_128                                                                                            \
  MLA_NAMES_64                                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84"    \
  ", %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104"    \
  ", %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122" \
  ", %123, %124, %125, %126, %127"
#define MLA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_D16(i) MLA_D4(i), MLA_D4(i + 4), MLA_D4(i + 8), MLA_D4(i + 12)
#define MLA_D_16 MLA_D16(0)
#define MLA_D_32 MLA_D_16, MLA_D16(16)
#define MLA_D_64 MLA_D_32, MLA_D16(32), MLA_D16(48)
#define MLA_D_128 MLA_D_64, MLA_D16(64), MLA_D16(80), MLA_D16(96), MLA_D16(112)
// Each of these macros is one wgmma of n columns with `count` accumulators. The further arguments are the type and the
// names of the other operands.
#define MLA_WGMMA_SHARED(n, count, type, a_name, b_name, accumulate_name, transpose_name)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" MLA_NAMES_##count "}, " a_name ", " b_name                         \
                                                               ", p, 1, 1, 0, " transpose_name ";\n}"           \
               : MLA_D_##count                                                                                  \
               : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)), "n"(kTransposeB ? 1 : 0))
#define MLA_WGMMA_REGISTERS(n, count, type, a_names, b_name, accumulate_name, transpose_name)                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" MLA_NAMES_##count "}, {" a_names "}, " b_name                      \
                                                               ", p, 1, 1, " transpose_name ";\n}"              \
               : MLA_D_##count                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)),     \
                 "n"(kTransposeB ? 1 : 0))
#define MLA_WGMMA_E4M3(n, count, a_name, b_name, accumulate_name)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k32.f32.e4m3.e4m3 {" MLA_NAMES_##count "}, " a_name ", " b_name ", p, 1, 1;\n}"                 \
               : MLA_D_##count                                                                                  \
               : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)))
#define MLA_WGMMA_E4M3_REGISTERS(n, count, a_names, b_name, accumulate_name)                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k32.f32.e4m3.e4m3 {" MLA_NAMES_##count "}, {" a_names "}, " b_name ", p, 1, 1;\n}"              \
               : MLA_D_##count                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)))
#define MLA_WGMMA_OF_SHARED(type)                                \
  if constexpr (kN == 64)                                        \
    MLA_WGMMA_SHARED(64, 32, type, "%32", "%33", "%34", "%35");  \
  else if constexpr (kN == 128)                                  \
    MLA_WGMMA_SHARED(128, 64, type, "%64", "%65", "%66", "%67"); \
  else                                                           \
    MLA_WGMMA_SHARED(256, 128, type, "%128", "%129", "%130", "%131")
#define MLA_WGMMA_OF_REGISTERS(type)                                               \
  if constexpr (kN == 64)                                                          \
    MLA_WGMMA_REGISTERS(64, 32, type, "%32, %33, %34, %35", "%36", "%37", "%38");  \
  else if constexpr (kN == 128)                                                    \
    MLA_WGMMA_REGISTERS(128, 64, type, "%64, %65, %66, %67", "%68", "%69", "%70"); \
  else                                                                             \
    MLA_WGMMA_REGISTERS(256, 128, type, "%128, %129, %130, %131", "%132", "%133", "%134")
#endif

/// wgmma.mma_async.sync.aligned.m64n{64,128,256}k16.f32.bf16.bf16: computes d = a b + (accumulate ? d : 0), with A
/// given by its descriptor.
template <int kN, bool kTransposeB = false>
MLA_DEVICE void wgmma_bf16(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate MLA_PTX_SITE) {
  static_assert(kN == 64 || kN == 128 || kN == 256);
#if MLA_EMULATED
  emulator::wgmma({d, nullptr, a, b, kN, emulator::MmaType::kBf16, kTransposeB, accumulate}, MLA_PTX_HERE);
#else
  MLA_WGMMA_OF_SHARED("bf16");
#endif
}

/// Computes the same with A in registers, which must not change until wgmma_wait().
template <int kN, bool kTransposeB = false>
MLA_DEVICE void wgmma_bf16(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate MLA_PTX_SITE) {
  static_assert(kN == 64 || kN == 128 || kN == 256);
#if MLA_EMULATED
  emulator::wgmma({d, a, 0, b, kN, emulator::MmaType::kBf16, kTransposeB, accumulate}, MLA_PTX_HERE);
#else
  MLA_WGMMA_OF_REGISTERS("bf16");
#endif
}

/// wgmma.mma_async.sync.aligned.m64n{64,128,256}k16.f32.f16.f16: computes d = a b + (accumulate ? d : 0).
template <int kN, bool kTransposeB = false>
MLA_DEVICE void wgmma_f16(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate MLA_PTX_SITE) {
  static_assert(kN == 64 || kN == 128 || kN == 256);
#if MLA_EMULATED
  emulator::wgmma({d, nullptr, a, b, kN, emulator::MmaType::kF16, kTransposeB, accumulate}, MLA_PTX_HERE);
#else
  MLA_WGMMA_OF_SHARED("f16");
#endif
}

template <int kN, bool kTransposeB = false>
MLA_DEVICE void wgmma_f16(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate MLA_PTX_SITE) {
  static_assert(kN == 64 || kN == 128 || kN == 256);
#if MLA_EMULATED
  emulator::wgmma({d, a, 0, b, kN, emulator::MmaType::kF16, kTransposeB, accumulate}, MLA_PTX_HERE);
#else
  MLA_WGMMA_OF_REGISTERS("f16");
#endif
}

/// wgmma.mma_async.sync.aligned.m64n{32,64,128}k32.f32.e4m3.e4m3: computes d = a b + (accumulate ? d : 0) of 32
/// channels, one byte each, with both operands contiguous along k in shared memory. Hopper keeps 14 bits of a
/// sum, and so does the emulator (docs/notebook/2026-11-29-e4m3-sums.md).
template <int kN>
MLA_DEVICE void wgmma_e4m3(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate MLA_PTX_SITE) {
  static_assert(kN == 32 || kN == 64 || kN == 128);
#if MLA_EMULATED
  emulator::wgmma({d, nullptr, a, b, kN, emulator::MmaType::kE4M3, false, accumulate}, MLA_PTX_HERE);
#else
  if constexpr (kN == 32)
    MLA_WGMMA_E4M3(32, 16, "%16", "%17", "%18");
  else if constexpr (kN == 64)
    MLA_WGMMA_E4M3(64, 32, "%32", "%33", "%34");
  else
    MLA_WGMMA_E4M3(128, 64, "%64", "%65", "%66");
#endif
}

/// Computes the same with A in registers, which must not change until wgmma_wait(). a[0]: row 16 w + g, k = 4t ... 4t +
/// 3; a[1]: row 8 below; a[2..3]: k + 16 of both.
template <int kN>
MLA_DEVICE void wgmma_e4m3(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate MLA_PTX_SITE) {
  static_assert(kN == 32 || kN == 64 || kN == 128);
#if MLA_EMULATED
  emulator::wgmma({d, a, 0, b, kN, emulator::MmaType::kE4M3, false, accumulate}, MLA_PTX_HERE);
#else
  if constexpr (kN == 32)
    MLA_WGMMA_E4M3_REGISTERS(32, 16, "%16, %17, %18, %19", "%20", "%21");
  else if constexpr (kN == 64)
    MLA_WGMMA_E4M3_REGISTERS(64, 32, "%32, %33, %34, %35", "%36", "%37");
  else
    MLA_WGMMA_E4M3_REGISTERS(128, 64, "%64, %65, %66, %67", "%68", "%69");
#endif
}

#if !MLA_EMULATED
#undef MLA_WGMMA_E4M3_REGISTERS
#undef MLA_WGMMA_E4M3
#undef MLA_WGMMA_OF_REGISTERS
#undef MLA_WGMMA_OF_SHARED
#undef MLA_WGMMA_REGISTERS
#undef MLA_WGMMA_SHARED
#undef MLA_D_128
#undef MLA_D_64
#undef MLA_D_32
#undef MLA_D_16
#undef MLA_D16
#undef MLA_D4
#undef MLA_NAMES_128
#undef MLA_NAMES_64
#undef MLA_NAMES_32
#undef MLA_NAMES_16
#endif

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

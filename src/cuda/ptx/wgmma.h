// SPDX-License-Identifier: Apache-2.0
// Multiplication by a warpgroup (4 warps, 128 threads) with both operands in shared memory. PTX ISA, "Asynchronous
// Warpgroup Level Matrix Instructions": wgmma.fence, wgmma.mma_async, wgmma.commit_group, wgmma.wait_group, and
// "Matrix Descriptor". SM90 alone (sm_90a).
//   Fragment: warp w of the warpgroup, lane 4 g + t, of [64, 256]: d[4 n + 0..1]: row 16 w + g, columns 8 n + 2t, 2t+1;
//   d[4 n + 2..3]: row 8 below.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// An operand whose rows (of A, columns of B) are contiguous along k, unswizzled: cores of 8 rows by 16 bytes, each of
/// 128 contiguous bytes. `k_stride` lies between cores that are neighbours along k, `row_stride` between those 8 rows
/// apart; all of them, and `begin`, are multiples of 16 bytes.
MLA_DEVICE uint64_t matrix_descriptor(SharedAddress begin, uint32_t k_stride, uint32_t row_stride) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3FFFFU) >> 4); };
  return field(begin) | field(k_stride) << 16 | field(row_stride) << 32;
}

/// wgmma.fence.sync.aligned: registers and shared memory written before may be used by the next wgmma.
MLA_DEVICE void wgmma_fence(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::wgmma_fence(MLA_PTX_HERE);
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// wgmma.commit_group.sync.aligned
MLA_DEVICE void wgmma_commit(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::wgmma_commit(MLA_PTX_HERE);
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// wgmma.wait_group.sync.aligned: until at most the kGroups latest groups are in flight.
template <int kGroups>
MLA_DEVICE void wgmma_wait(MLA_PTX_SITE_ONLY) {
#if MLA_EMULATED
  emulator::wgmma_wait(kGroups, MLA_PTX_HERE);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
#endif
}

/// wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16: d += a b. Not to be touched before wgmma_wait().
MLA_DEVICE void wgmma_bf16_m64n256(float (&d)[128], uint64_t a, uint64_t b MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::wgmma_bf16_m64n256(d, a, b, MLA_PTX_HERE);
#else
#define MLA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_D16(i) MLA_D4(i), MLA_D4(i + 4), MLA_D4(i + 8), MLA_D4(i + 12)
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127} "
      ", %128, %129, 1, 1, 1, 0, 0;"
      : MLA_D16(0), MLA_D16(16), MLA_D16(32), MLA_D16(48), MLA_D16(64), MLA_D16(80), MLA_D16(96), MLA_D16(112)
      : "l"(a), "l"(b));
#undef MLA_D16
#undef MLA_D4
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

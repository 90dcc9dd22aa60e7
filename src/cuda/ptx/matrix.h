// SPDX-License-Identifier: Apache-2.0
// These functions are ldmatrix, stmatrix and mma.sync. A warp's lanes hold fragments of matrices as follows (PTX ISA,
// "Warp-level Matrix Instructions", which draws them):
//   lane = 4 g + t.  c[0..1]: row g, columns 2t, 2t+1; c[2..3]: row g+8.
//   m16n8k16, 16-bit: a[0]: row g, k 2t, 2t+1; a[1]: row g+8; a[2], a[3]: the same, k + 8. b0: k 2t, 2t+1, column g;
//   b1: k + 8. m16n8k32, 8-bit:  a[0]: row g, k 4t ... 4t+3; a[1]: row g+8; a[2], a[3]: the same, k + 16. b0, b1 alike.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// ldmatrix.sync.aligned.m8n8.x4.shared.b16: loads four 8 x 8 matrices of 16-bit elements. Lane 8 i + j gives the
/// address of row j (16 bytes, at a multiple of 16) of matrix i; r[i] gets row g, columns 2t, 2t+1 of matrix i.
MLA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::ldmatrix(r, row, 4, false, MLA_PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
#endif
}

/// ldmatrix with .trans: r[i] gets rows 2t, 2t+1, column g of matrix i.
MLA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::ldmatrix(r, row, 4, true, MLA_PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
#endif
}

/// ldmatrix with .x2: loads two matrices, from the addresses of lanes 0 ... 15.
MLA_DEVICE void ldmatrix_x2(uint32_t (&r)[2], SharedAddress row MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::ldmatrix(r, row, 2, false, MLA_PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
#endif
}

MLA_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], SharedAddress row MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::ldmatrix(r, row, 2, true, MLA_PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
#endif
}

/// stmatrix.sync.aligned.m8n8.x4.shared.b16 (SM90 and later): stores four 8 x 8 matrices of 16-bit elements, as
/// ldmatrix_x4 loads them.
template <int kOn = kArch>
MLA_DEVICE void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4] MLA_PTX_SITE) {
  static_assert(kOn >= 90, "stmatrix came with SM90");
#if MLA_EMULATED
  emulator::stmatrix(row, r, MLA_PTX_HERE);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

/// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: computes c += a b.
MLA_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::mma(c, a, b0, b1, emulator::MmaType::kBf16, MLA_PTX_HERE);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: computes c += a b.
MLA_DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::mma(c, a, b0, b1, emulator::MmaType::kF16, MLA_PTX_HERE);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 (SM89 and later): computes c += a b.
template <int kOn = kArch>
MLA_DEVICE void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 MLA_PTX_SITE) {
  static_assert(kOn >= 89, "mma on e4m3 needs SM89");
#if MLA_EMULATED
  emulator::mma(c, a, b0, b1, emulator::MmaType::kE4M3, MLA_PTX_HERE);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

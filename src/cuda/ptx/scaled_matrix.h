// SPDX-License-Identifier: Apache-2.0
// These functions are mma.sync with block scales, of GPUs 12.x: c += (a scale_a) (b scale_b) (PTX ISA, "Block Scaling
// for mma.sync"). Elements of 8 bits lie as matrix.h has them. A row of A and a column of B have one scale for all
// their elements, or two or four for equal parts of the depth. With lane = 4 g + t:
//   m16n8k64, 4-bit: a[0]: row g, k 8t ... 8t+7; a[1]: row g+8; a[2], a[3]: the same, k + 32. b0, b1 alike.
//   Scales of A: row g in lane t = 2 thread_id, row g+8 in lane t = 2 thread_id + 1; thread_id is 0 or 1.
//   Scales of B: column g in lane t = thread_id, which is 0 ... 3.
//   The first scale is byte byte_id of the lane's word, and others are the bytes behind it: byte_id is 0 ... 3 where
//   there is one, 0 or 2 where there are two, 0 where there are four. What else is in the lanes' words does not matter.
#pragma once

#include <cstdint>

#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// Holds the lane's word of scales for one operand, and the selectors, which are the same for all lanes.
struct BlockScales {
  uint32_t data;
  int byte_id = 0, thread_id = 0;
};
/// These scales are UE8M0 of 1.
inline constexpr BlockScales kScalesOfOne = {0x7F7F7F7FU};

#if MLA_EMULATED
#define MLA_PTX_SCALED_MMA(form, kind)                                                      \
  emulator::scaled_mma(c, a, b0, b1, {scales_a.data, scales_a.byte_id, scales_a.thread_id}, \
                       {scales_b.data, scales_b.byte_id, scales_b.thread_id}, emulator::ScaledMma::form, MLA_PTX_HERE)
#else
#define MLA_PTX_SCALED_MMA(form, kind)                                                                              \
  asm volatile("mma.sync.aligned." kind                                                                             \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, %12}, %13, {%14, %15};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scales_a.data),                  \
                 "h"(static_cast<uint16_t>(scales_a.byte_id)), "h"(static_cast<uint16_t>(scales_a.thread_id)),      \
                 "r"(scales_b.data), "h"(static_cast<uint16_t>(scales_b.byte_id)),                                  \
                 "h"(static_cast<uint16_t>(scales_b.thread_id)))
#endif

/// mma.sync.aligned.m16n8k32 of kind::mxf8f6f4, e4m3 by e4m3, with one UE8M0 for 32 elements.
template <bool kOn = kHasBlockScales>
MLA_DEVICE void mma_mxf8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BlockScales scales_a,
                         BlockScales scales_b MLA_PTX_SITE) {
  static_assert(kOn, "mma with block scales needs SM120");
  MLA_PTX_SCALED_MMA(kMxf8, "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0");
}

/// The same of e4m3 by e2m1. An e2m1 has a byte, of which it takes bits 2 to 5; the others are zeros.
template <bool kOn = kHasBlockScales>
MLA_DEVICE void mma_mxf8f4(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BlockScales scales_a,
                           BlockScales scales_b MLA_PTX_SITE) {
  static_assert(kOn, "mma with block scales needs SM120");
  MLA_PTX_SCALED_MMA(kMxf8f4, "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0");
}

/// mma.sync.aligned.m16n8k64 of kind::mxf4nvf4, e2m1 by e2m1, with one UE8M0 for 32 elements.
template <bool kOn = kHasBlockScales>
MLA_DEVICE void mma_mxf4(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BlockScales scales_a,
                         BlockScales scales_b MLA_PTX_SITE) {
  static_assert(kOn, "mma with block scales needs SM120");
  MLA_PTX_SCALED_MMA(kMxf4, "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0");
}

/// The same with one UE4M3 for 16 elements: an e4m3 without a sign, in the lower seven bits of a byte.
template <bool kOn = kHasBlockScales>
MLA_DEVICE void mma_nvf4(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BlockScales scales_a,
                         BlockScales scales_b MLA_PTX_SITE) {
  static_assert(kOn, "mma with block scales needs SM120");
  MLA_PTX_SCALED_MMA(kNvf4, "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3");
}

#undef MLA_PTX_SCALED_MMA

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

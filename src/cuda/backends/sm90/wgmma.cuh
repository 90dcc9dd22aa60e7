// SPDX-License-Identifier: Apache-2.0
// These functions serve kernels that use wgmma and are compiled for several types.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "mla/types.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Issues d = a b + (accumulate ? d : 0). A lies in shared memory, given by its descriptor, or in registers.
template <DType kType, int kN, bool kTransposeB = false, class A>
MLA_DEVICE void wgmma(float (&d)[kN / 2], const A& a, uint64_t b, bool accumulate) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16)
    ptx::wgmma_bf16<kN, kTransposeB>(d, a, b, accumulate);
  else
    ptx::wgmma_f16<kN, kTransposeB>(d, a, b, accumulate);
}

using ptx::advance;

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

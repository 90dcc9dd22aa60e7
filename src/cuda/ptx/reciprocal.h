// SPDX-License-Identifier: Apache-2.0
// This file has the fast reciprocal (PTX ISA: rcp).
#pragma once

#include "cuda/ptx/convert.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// rcp.approx.ftz.f32: returns 1 / x with a relative error of up to 2^-23; subnormal arguments and results become 0.
MLA_DEVICE float reciprocal_approx(float x) {
#if MLA_EMULATED
  return detail::flush(1.0F / detail::flush(x));
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx

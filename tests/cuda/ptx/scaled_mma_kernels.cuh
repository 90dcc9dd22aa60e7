// SPDX-License-Identifier: Apache-2.0
// Has the kernels that call the wrappers of scaled_matrix.h.
#pragma once

#include "cuda/ptx/ptx.h"
#include "cuda/ptx/wrapper_kernel_base.cuh"

#if MLA_CUDA_GPU >= 120
namespace mla::MLA_CUDA_NAMESPACE {

enum class ScaledMultiply { kMxf8, kMxf8f4, kMxf4, kNvf4 };

/// Multiplies raw fragments once with every selector of the form: registers a, b, c and the scales of A and of B of
/// lane l are words 12 l ... of the input.
template <ScaledMultiply kForm>
struct ScaledMma : WrapperKernelBase<32> {
  static constexpr int kScales = kForm == ScaledMultiply::kNvf4 ? 4 : kForm == ScaledMultiply::kMxf4 ? 2 : 1;

  static MLA_DEVICE void run(const Params& p) {
    const uint32_t* const in = p.in + ptx::lane() * 12;
    const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
    uint32_t* out = p.out + ptx::lane() * 4;
    MLA_UNROLL
    for (int byte_a = 0; byte_a < 4; byte_a += kScales) MLA_UNROLL
    for (int thread_a = 0; thread_a < 2; ++thread_a) MLA_UNROLL
    for (int byte_b = 0; byte_b < 4; byte_b += kScales) MLA_UNROLL
    for (int thread_b = 0; thread_b < 4; ++thread_b, out += 32 * 4) {
      const ptx::BlockScales of_a = {in[10], byte_a, thread_a}, of_b = {in[11], byte_b, thread_b};
      float c[4];
      for (int i = 0; i < 4; ++i) c[i] = std::bit_cast<float>(in[6 + i]);
      if constexpr (kForm == ScaledMultiply::kMxf8) ptx::mma_mxf8(c, a, in[4], in[5], of_a, of_b);
      if constexpr (kForm == ScaledMultiply::kMxf8f4) ptx::mma_mxf8f4(c, a, in[4], in[5], of_a, of_b);
      if constexpr (kForm == ScaledMultiply::kMxf4) ptx::mma_mxf4(c, a, in[4], in[5], of_a, of_b);
      if constexpr (kForm == ScaledMultiply::kNvf4) ptx::mma_nvf4(c, a, in[4], in[5], of_a, of_b);
      for (int i = 0; i < 4; ++i) out[i] = std::bit_cast<uint32_t>(c[i]);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
#endif

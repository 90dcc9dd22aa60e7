// SPDX-License-Identifier: Apache-2.0
// This file has the kernels of decode and decode_sparse of cuda_fp8.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/fp8/absorbed.cuh"
#include "cuda/backends/fp8/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {
namespace {

/// AbsorbedProblem chooses the kernel here.
struct Kernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& /*args*/, int32_t block_rows, int64_t /*small_steps*/, const F& f) {
    if (block_rows == 16) return f.template operator()<AbsorbedKernel<AbsorbedConfig<16>>>();
    return f.template operator()<AbsorbedKernel<AbsorbedConfig<64>>>();
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<Kernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<Kernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8

// SPDX-License-Identifier: Apache-2.0
// This file has the kernels of decode and decode_sparse of cuda_sm90_fp8.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/sm90_fp8/absorbed.cuh"
#include "cuda/backends/sm90_fp8/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {
namespace {

/// AbsorbedProblem asks for the kernel here.
struct Kernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t /*block_rows*/, int64_t /*small_steps*/, const F& f) {
    bool tensor_scale = true;
    for (int i = 0; i < args.num_pools(); ++i)
      tensor_scale = tensor_scale && args.pools[i].cache.num_scales == 1 && !args.pools[i].cache.writes_scales;
    return tensor_scale ? f.template operator()<AbsorbedKernel<true>>()
                        : f.template operator()<AbsorbedKernel<false>>();
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<Kernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<Kernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8

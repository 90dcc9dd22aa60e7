// SPDX-License-Identifier: Apache-2.0
// The host side of decode, decode_sparse and prefill_sparse in cuda_sm90 chooses the kernel.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/sm90/absorbed.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

/// Picks the kernel for AbsorbedProblem.
struct Kernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t /*block_rows*/, int64_t /*small_steps*/, const F& f) {
    return with_key_rows(args, [&]<int kLatentDims, KeyKind kKind>() {
      return f.template operator()<AbsorbedKernel<AbsorbedConfig<kLatentDims, kKind>>>();
    });
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<Kernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<Kernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

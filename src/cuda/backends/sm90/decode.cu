// SPDX-License-Identifier: Apache-2.0
// decode, decode_sparse and prefill_sparse of cuda_sm90.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/sm90/absorbed.cuh"
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

/// For AbsorbedProblem.
struct WgmmaKernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t, const F& f) {
    const auto for_kind = [&]<int kLatentDims>() {
      switch (key_kind(args.pools[0].cache.ckv_dtype)) {
        case KeyKind::kQuantized:
          return f.template operator()<WgmmaKernel<WgmmaConfig<kLatentDims, KeyKind::kQuantized>>>();
        case KeyKind::kF16: return f.template operator()<WgmmaKernel<WgmmaConfig<kLatentDims, KeyKind::kF16>>>();
        case KeyKind::kBF16: break;
      }
      return f.template operator()<WgmmaKernel<WgmmaConfig<kLatentDims, KeyKind::kBF16>>>();
    };
    return args.d_v == 512 ? for_kind.template operator()<512>() : for_kind.template operator()<256>();
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<WgmmaKernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<WgmmaKernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90

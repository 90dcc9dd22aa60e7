// SPDX-License-Identifier: Apache-2.0
// This file has the kernels of decode, decode_sparse and prefill_sparse of cuda_bulk.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/bulk/absorbed.cuh"
#include "cuda/backends/bulk/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::bulk {
namespace {

/// A block of more than 16 query rows has so many. On SM90 more than 32 are left to wgmma, unless this backend is asked
/// for by name.
constexpr int kManyRows = kHasWgmma ? 32 : 64;

/// AbsorbedProblem chooses the kernel here. The backend takes quantized rows only with few query rows (backend.cpp), so
/// that there is no kernel for many rows of them; and rows of e2m1 only with 512 latent channels (limits.h).
struct Kernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t block_rows, int64_t /*small_steps*/, const F& f) {
    if (args.pools[0].cache.ckv_dtype == DType::kE2M1)
      return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, 512, KeyKind::kE2M1>>>();
    return with_key_rows(args, [&]<int kLatentDims, KeyKind kKind>() {
      if constexpr (kKind != KeyKind::kQuantized)
        if (block_rows != 16)
          return f.template operator()<AbsorbedKernel<AbsorbedConfig<kManyRows, kLatentDims, kKind>>>();
      return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind>>>();
    });
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<Kernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<Kernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk

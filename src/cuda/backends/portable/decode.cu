// SPDX-License-Identifier: Apache-2.0
// decode, decode_sparse and prefill_sparse of cuda_portable: which block shape.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/portable/absorbed.cuh"
#include "cuda/backends/portable/operations.h"
#include "cuda/backends/portable/specialized.cuh"

namespace mla::MLA_CUDA_NAMESPACE::portable {
namespace {

/// The kernels of cuda_portable, for AbsorbedProblem.
struct PortableKernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t block_rows, const F& f) {
    const auto for_parts = [&]<int kLatentDims, KeyKind kKind>() {
      constexpr DType kType = kKind == KeyKind::kF16 ? DType::kF16 : DType::kBF16;
      if (args.q_dtype != kType && args.q_dtype != DType::kE4M3)
        return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 2>>>();
      using Specialized = SpecializedConfig<16, kLatentDims, kKind>;
      constexpr bool kSpecialized = Specialized::kAvailable;
      if constexpr (kSpecialized) {
        if (block_rows == 16 && Specialized::takes(args.pools[0]) &&
            (args.num_pools() == 1 || Specialized::takes(args.pools[1])))
          return f.template operator()<SpecializedKernel<Specialized>>();
      } else {
        if (block_rows == 16) return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 1>>>();
      }
      if constexpr (kSpecialized && kKind != KeyKind::kQuantized) {
        return f.template operator()<SpecializedKernel<SpecializedConfig<64, kLatentDims, kKind>>>();
      } else {
        // SM100 has the memory for 64 rows, but nvcc 13.0 spills 20 to 90 bytes there. Re-check:
        // tests/cuda/ptxas_reports.py.
        constexpr int kLargeRows = kSharedBytesPerBlock >= 163 * 1024 && kArch != 100 ? 64 : 32;
        return f.template operator()<AbsorbedKernel<AbsorbedConfig<kLargeRows, kLatentDims, kKind, 1>>>();
      }
    };
    const auto for_kind = [&]<int kLatentDims>() {
      switch (key_kind(args.pools[0].cache.ckv_dtype)) {
        case KeyKind::kQuantized: return for_parts.template operator()<kLatentDims, KeyKind::kQuantized>();
        case KeyKind::kF16: return for_parts.template operator()<kLatentDims, KeyKind::kF16>();
        case KeyKind::kBF16: break;
      }
      return for_parts.template operator()<kLatentDims, KeyKind::kBF16>();
    };
    return args.d_v == 512 ? for_kind.template operator()<512>() : for_kind.template operator()<256>();
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<PortableKernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<PortableKernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

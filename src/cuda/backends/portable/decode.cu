// SPDX-License-Identifier: Apache-2.0
// The host side of decode, decode_sparse and prefill_sparse in cuda_portable chooses the size of the block.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/portable/absorbed.cuh"
#include "cuda/backends/portable/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {
namespace {

/// Picks the kernel for AbsorbedProblem.
struct Kernels {
  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t block_rows, const F& f) {
    return with_key_rows(args, [&]<int kLatentDims, KeyKind kKind>() {
      constexpr DType kType = kKind == KeyKind::kF16 ? DType::kF16 : DType::kBF16;
      if (args.q_dtype != kType && args.q_dtype != DType::kE4M3)
        return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 2>>>();
      if (block_rows == 16) return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 1>>>();
      // 64 rows of quantized keys need two tiles beside the raw rows. On SM100 nvcc 13.0 spills 8 to 16 bytes of 64
      // rows; tests/cuda/ptxas_reports.py tells whether a later one still does.
      constexpr bool kHasTwoTiles = kKind != KeyKind::kQuantized || kSharedBytesPerBlock >= 163 * 1024;
      constexpr int kLargeRows = kHasTwoTiles && kWrittenFor != 100 ? 64 : 32;
      return f.template operator()<AbsorbedKernel<AbsorbedConfig<kLargeRows, kLatentDims, kKind, 1>>>();
    });
  }
};

}  // namespace

cuda::PlannedOperation<core::DecodeArgs> decode() { return absorbed_operation<Kernels, core::DecodeArgs>(); }
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse() {
  return absorbed_operation<Kernels, core::DecodeSparseArgs>();
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable

// SPDX-License-Identifier: Apache-2.0
// The host side of decode, decode_sparse and prefill_sparse in cuda_portable chooses the size of the block.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/portable/absorbed.cuh"
#include "cuda/backends/portable/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {
namespace {

/// Whether rows of e4m3 with one scale have kernels of their own for blocks of so many rows. On SM90 and SM100 another
/// backend has them. Before SM89, where e4m3 is converted by arithmetic, blocks of 64 rows with a scale that is no
/// power of two would take 1.6 times as long as with rows that are decoded once (profile sm80, H100, 2026-11-23).
template <int kRows>
constexpr bool kMultipliesCodes = kWrittenFor == 120 || kWrittenFor == 89 || (kWrittenFor < 89 && kRows == 16);

/// Large blocks of such rows begin slowly. So many at least have the keys of a request to themselves for long enough:
/// 128 heads, kv 4k, took 46 us with batch 1, not 33, but 60 with batch 4, not 63 (profile sm120, H100, 2026-11-23).
constexpr int64_t kLeastCodeBlocks = 8;

/// Picks the kernel for AbsorbedProblem.
struct Kernels {
  /// Large blocks load and store for longer before and behind their steps, so that fewer rows are faster where each
  /// multiprocessor would have fewer of the smallest blocks' steps than this. Sparse attention of 64 heads to 640 keys
  /// took, in us by blocks of 16 / 32 / 64 rows, 13.6 / 19.8 / 20.1 with batch 1, 18.3 / 21.5 / 22.3 with batch 4, and
  /// 25.4 / 22.5 / 26.7 with batch 8, where there are 4.8 steps (fp8_dsv4, profile sm120, H100 and H200, 2026-11-24 and
  /// 25). How many steps are too many for 32 rows was estimated from the times of a step.
  static constexpr int kStepsOf16Rows = 4, kStepsOf32Rows = 8;

  /// Rows of so many channels, of 16 bits as the queries or with queries of e4m3, have blocks of 16 query rows only.
  static constexpr int kWideDims = 1024;

  template <class F>
  static auto with(const cuda::AbsorbedArgs& args, int32_t block_rows, int64_t small_steps, const F& f) {
    const bool small = block_rows == 16 || small_steps < kStepsOf16Rows;
    if (has_plain_e4m3(args) && args.d_v == 512 && (args.q_dtype == DType::kBF16 || args.q_dtype == DType::kE4M3)) {
      if constexpr (kMultipliesCodes<16>)
        if (small) return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, 512, KeyKind::kE4M3, 1>>>();
      if constexpr (kMultipliesCodes<64>)
        if (!small && (args.batch_invariant || args.num_tokens * args.num_heads.value >= kLeastCodeBlocks * 64))
          return f.template operator()<AbsorbedKernel<AbsorbedConfig<64, 512, KeyKind::kE4M3, 1>>>();
    }
    if (args.d_v == kWideDims)
      return args.pools[0].cache.ckv_dtype == DType::kF16
                 ? f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kWideDims, KeyKind::kF16, 1>>>()
                 : f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kWideDims, KeyKind::kBF16, 1>>>();
    return with_key_rows(args, [&]<int kLatentDims, KeyKind kKind>() {
      constexpr DType kType = kKind == KeyKind::kF16 ? DType::kF16 : DType::kBF16;
      if (args.q_dtype != kType && args.q_dtype != DType::kE4M3)
        return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 2>>>();
      if (small) return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 1>>>();
      if constexpr (kKind == KeyKind::kQuantized && kLatentDims == 512 && kSharedBytesPerBlock < 163 * 1024)
        if (small_steps < kStepsOf32Rows)
          return f.template operator()<AbsorbedKernel<AbsorbedConfig<32, kLatentDims, kKind, 1>>>();
      // On SM100 nvcc 13.0 spills 8 to 16 bytes of 64 rows; tests/cuda/ptxas_reports.py tells whether a later one still
      // does.
      constexpr int kLargeRows = kWrittenFor != 100 ? 64 : 32;
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

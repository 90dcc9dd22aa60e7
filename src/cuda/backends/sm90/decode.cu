// SPDX-License-Identifier: Apache-2.0
// The host side of decode, decode_sparse and prefill_sparse in cuda_sm90 chooses the kernel.
#include "cuda/attention/absorbed_problem.cuh"
#include "cuda/backends/sm90/absorbed.cuh"
#include "cuda/backends/sm90/operations.h"
#include "cuda/backends/sm90/paired.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {
namespace {

/// Returns whether all rows of queries of 16 bits can be copied 16 bytes at a time.
bool copies_queries(const cuda::AbsorbedArgs& args) {
  const auto has_chunks = [](const void* from, int64_t stride_token, int64_t stride_head) {
    return reinterpret_cast<uintptr_t>(from) % kChunkBytes == 0 && stride_token * 2 % kChunkBytes == 0 &&
           stride_head * 2 % kChunkBytes == 0;
  };
  return has_chunks(args.q_nope, args.q_nope_stride_token, args.q_nope_stride_head) &&
         has_chunks(args.q_pe, args.q_pe_stride_token, args.q_pe_stride_head);
}

/// Returns whether the paired kernel is likely to be faster. It takes some 5,800 clocks for 128 keys of 64 rows instead
/// of 7,100, but 2 to 3 us more for each run, and for each unit behind another. 128 heads, 32 requests of 1k, 2k and 8k
/// tokens, 64 of 4k, 128 of 8k, 100 of 2,047: 37.3, 50.8, 135.6, 130.7, 499, 152.5 us instead of 34.5, 49.9, 148.3,
/// 144.6, 551, 143.7; 64 heads, 64 of 4k: 102.7 instead of 97.0 (H200, 2026-11-29). How long requests are is not known
/// here. Servers with many requests have full caches, so that a full cache stands for the lengths.
template <class Config>
bool is_long(const cuda::AbsorbedArgs& args, const cuda::DeviceProperties& device) {
  constexpr int64_t kFewestTokens = 4096, kSmsOfUnit = 3;
  if (args.batch_invariant || args.batch_size == 0) return false;
  const int64_t rows = args.num_tokens * args.num_heads.value / args.batch_size;
  const int64_t units = args.batch_size * ((rows + Config::kRows - 1) / Config::kRows);
  return rows > Config::kRows && units * kSmsOfUnit >= device.num_sms &&
         args.pools[0].cache.num_slots() >= kFewestTokens * args.batch_size;
}

/// Describes the keys for tensor copies. Returns false where the paired kernel cannot compute the problem: it copies
/// boxes of at least eight rows of a page, and queries 16 bytes at a time.
template <class Config>
bool describe(const cuda::Queue& queue, PairedArgs& params) {
  const cuda::AbsorbedArgs& args = params.args;
  const cuda::KeyPool& pool = args.pools[0];
  const core::Cache& cache = pool.cache;
  constexpr int32_t kFewestBoxRows = 8;  // an atom of the swizzle
  params.box_rows = std::min(cache.page_size & -cache.page_size, Config::kKeys);
  if (args.sparse() || cache.d_ckv != Config::kLatentDims || cache.d_kpe != Config::kRopeDims ||
      args.q_dtype != Config::kType || params.box_rows < kFewestBoxRows || !pool.contiguous || !copies_queries(args) ||
      !needs_only_scale(args.options))
    return false;
  return queue.make_tensor_map({.base = cache.ckv.base,
                                .channels = Config::kLatentDims + Config::kRopeDims,
                                .rows = cache.page_size,
                                .heads = cache.num_pages,
                                .row_stride = cache.ckv.stride_token,
                                .head_stride = cache.ckv.stride_page,
                                .box_rows = params.box_rows},
                               params.keys);
}

/// Picks the kernel for AbsorbedProblem.
struct Kernels {
  /// Launches the paired kernel, which takes the same work list, where it can compute the problem.
  template <class Kernel>
  static Status launch(cuda::Queue& queue, cuda::LaunchShape shape, const cuda::AbsorbedArgs& args) {
    if constexpr (!Kernel::Config::kQuantized && Kernel::Config::kLatentDims == 512) {
      using Config = PairedConfig<Kernel::Config::kType>;
      static_assert(Config::kRows == Kernel::Config::kRows && Config::kPlanKeys == Kernel::Config::kPlanKeys &&
                    PairedKernel<Config>::kMinBlocks == Kernel::kMinBlocks && Kernel::kCluster == 1);
      PairedArgs params{.args = args, .keys = {}, .box_rows = 0};
      if (is_long<Config>(args, queue.device()) && describe<Config>(queue, params)) {
        shape.shared_bytes = Config::kSharedBytes;
        return mla::MLA_CUDA_NAMESPACE::launch<PairedKernel<Config>>(queue, shape, params);
      }
    }
    return mla::MLA_CUDA_NAMESPACE::launch<Kernel>(queue, shape, args);
  }

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

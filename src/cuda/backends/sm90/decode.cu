// SPDX-License-Identifier: Apache-2.0
// The host side of decode, decode_sparse and prefill_sparse in cuda_sm90 chooses the kernel.
#include <bit>

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

/// Returns whether the paired kernel is likely to be faster. Steps take it less time, a run some 2 us more.
/// Microseconds on an H200, 2026-11-29, instead of those of the other kernel:
///   pages   128 heads, 4, 8 and 16 requests of 1k tokens: 19.8, 24.8, 28.8 instead of 17.8, 22.8, 27.1; 8 of 4k, 16 of
///           2k and 32 of 1k: 35.2, 35.4, 35.8 instead of 34.7, 35.0, 34.9; 16 of 4k: 48.1 instead of 50.0; two query
///           tokens, 4 of 4k: 37.7 instead of 41.5; 64 heads, 64 of 4k: 98.9 instead of 97.0; random rows at the power
///           limit, 2026-11-30, 64 heads, 64 and 128 of 8k: 173, 301 instead of 183, 313; 32 heads: 167, 301 instead of
///           182, 318
///   slots   1,024 queries over 32k rows, 1,024 keys, 128 and 64 heads: 546, 293 instead of 601, 308; 64 heads, 1,536
///           keys: 404 instead of 434. Of the kernel as it was before its votes became one, no rotary channels, 4,096
///           queries, 512 keys: 1,213, 642 instead of 1,271, 647; rows that mostly come from memory, 64 queries over
///           256k rows, 2,048 keys: 76.9, 58.3 instead of 77.8, 56.1
///   slots of quantized rows, fp8_ds_mla, 128 heads, 2026-11-30: 64 tokens, 512, 1,024, 2,048 keys: 34.1, 53.6, 88.2
///           instead of 35.8, 57.8, 102.2; earlier versions, 128 and 256 keys: 20.4, 25.2 instead of 18.1, 24.3; 512
///           keys, 3, 4, 8, 16, 32 tokens: 17.2, 17.4, 20.4, 26.5, 31.7 instead of 18.0, 18.6, 19.8, 25.5, 33.9; 1,024
///           keys, 4, 8, 16, 32 tokens: 20.9, 26.6, 30.9, 39.5 instead of 20.3, 26.5, 31.3, 42.1
/// How long requests are is not known here. Servers with many requests have full caches, so that the room for each
/// request stands for its length. With few requests it would do so badly: they stay with the other kernel.
template <class Config>
bool is_faster(const cuda::AbsorbedArgs& args, const cuda::DeviceProperties& device) {
  const auto units_of = [](int64_t rows) { return (rows + Config::kRows - 1) / Config::kRows; };
  int64_t keys = 0, slots = 0;  // in sparse attention
  for (int i = 0; i < args.num_pools(); ++i) {
    keys += args.pools[i].topk;
    slots += args.pools[i].cache.num_slots();
  }
  // Channels are summed in an order that depends on whether a step has an even number, and so on the units before.
  if (args.batch_invariant) return false;
  if constexpr (Config::kQuantized) {
    // Of a token with two units the plan makes two row lanes (plan.cuh), which are the two blocks of a cluster.
    constexpr int64_t kFewestKeys = 512, kFewKeysOfSm = 32, kManyKeysOfSm = 192;
    const int64_t keys_of_sm = args.num_tokens * 2 * keys / device.num_sms;
    return args.sparse() && units_of(args.num_heads.value) == 2 && keys >= kFewestKeys &&
           (keys_of_sm <= kFewKeysOfSm || keys_of_sm >= kManyKeysOfSm);
  }
  if (args.sparse()) {
    constexpr int64_t kUnitsOfSm = 4, kManyReads = 8;
    const int64_t fewest_keys = args.d_qk == Config::kLatentDims ? 512 : 1024;
    return keys >= fewest_keys && args.num_tokens * keys >= kManyReads * slots &&
           args.num_tokens * units_of(args.num_heads.value) >= kUnitsOfSm * device.num_sms;
  }
  if (args.batch_size == 0) return false;
  constexpr int64_t kFewestTokens = 2048, kSmsOfUnit = 5, kFewestKeysOfSm = 640;
  constexpr int64_t kSmsOfOneUnit = 3, kManyKeysOfSm = 3840;  // where requests have one unit
  const int64_t rows = args.num_tokens * args.num_heads.value,
                tokens = args.pools[0].cache.num_slots() / args.batch_size;
  // Of requests of one unit only what keeps the GPU at its power limit: below it, steps take both kernels the same.
  if (rows <= Config::kRows * args.batch_size)
    return tokens >= kFewestTokens && args.batch_size * kSmsOfOneUnit >= device.num_sms &&
           args.batch_size * tokens >= kManyKeysOfSm * device.num_sms;
  // Units of requests with several query tokens take the other kernel longer, for a reason that is not known.
  const int64_t counts = args.num_tokens >= 2 * args.batch_size ? 2 : 1, units = units_of(rows) * counts;
  return tokens >= kFewestTokens && units * kSmsOfUnit >= device.num_sms &&
         units * tokens >= kFewestKeysOfSm * device.num_sms;
}

/// Returns whether the paired kernel can compute rows of a pool: they are copied 16 bytes at a time. It decodes e4m3
/// whose scales are those of 64 channels or more.
template <class Config>
bool has_rows(const cuda::AbsorbedArgs& args, const cuda::KeyPool& pool) {
  const core::Cache& cache = pool.cache;
  if (cache.d_ckv + cache.d_kpe != args.d_qk || (cache.d_kpe != 0 && cache.d_kpe != Config::kRopeDims)) return false;
  if constexpr (Config::kQuantized) {
    constexpr int kShift = std::bit_width(uint32_t{Config::kPieceDims / kVector}) - 1;
    const bool all_latent = cache.d_ckv == Config::kLatentDims;
    return (all_latent || args.d_qk == Config::kLatentDims) && cache.d_ckv == args.pools[0].cache.d_ckv &&
           pool.direct && pool.common_e4m3 && pool.scale_shift >= kShift && !pool.quantized_kpe;
  } else {
    return cache.ckv_dtype == Config::kType && cache.d_ckv == Config::kLatentDims && pool.contiguous;
  }
}

/// Describes the problem for the paired kernel. Returns false where it cannot compute it: of pages it copies boxes of
/// at least eight rows, and queries 16 bytes at a time.
template <class Config>
bool describe(const cuda::Queue& queue, PairedArgs& params) {
  const cuda::AbsorbedArgs& args = params.args;
  for (int i = 0; i < args.num_pools(); ++i)
    if (!has_rows<Config>(args, args.pools[i])) return false;
  if (args.q_dtype != Config::kType || !copies_queries(args) || !needs_only_scale(args.options)) return false;
  if (args.sparse()) return true;
  const core::Cache& cache = args.pools[0].cache;
  constexpr int32_t kFewestBoxRows = 8;  // an atom of the swizzle
  params.box_rows = std::min(cache.page_size & -cache.page_size, Config::kKeys);
  return params.box_rows >= kFewestBoxRows && queue.make_tensor_map({.base = cache.ckv.base,
                                                                     .channels = args.d_qk,
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
    if constexpr (Kernel::Config::kLatentDims == 512) {
      using Config = PairedConfig<Kernel::Config::kType, Kernel::Config::kQuantized>;
      static_assert(Config::kRows == Kernel::Config::kRows && Config::kPlanKeys == Kernel::Config::kPlanKeys &&
                    PairedKernel<Config>::kMinBlocks == Kernel::kMinBlocks && Kernel::kCluster == Config::kCluster);
      PairedArgs params{.args = args, .keys = {}, .box_rows = 0};
      if (is_faster<Config>(args, queue.device()) && describe<Config>(queue, params)) {
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

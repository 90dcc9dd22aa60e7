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

/// Returns whether the paired kernel is likely to be faster. Steps take it less time, a run up to 1 us more. Times of
/// the other kernel, those of this one = 1 (H200, 2026-11-30; docs/notebook/2026-11-30-paired-choice.md has them all):
///   pages   two to 16 query tokens, 1 to 64 requests of 256 to 4k tokens: 1.02 to 1.34; one, by keys for each
///           multiprocessor: 62 0.92 to 1.00, 124 0.95 to 1.01, 155 and 186 0.99 to 1.03, 248 0.99 to 1.09, more 0.99
///           to 1.23; with windows 31 to 124 0.89 to 1.02, 248 0.99, 496 0.92, 993 1.16
///   slots   by keys for each multiprocessor, lists of 2,048 keys: 124 0.95, 248 0.98, 496 and 993 0.99 to 1.15, more
///           1.12 to 1.20; of 512 and 1,024 keys: 124 0.91, 248 to 993 0.90 to 1.09, 1,986 1.03 to 1.16; of 256 keys:
///           0.91 to 1.04
///   slots of quantized rows of 65 to 128 heads, by keys for each multiprocessor: 31 1.00 to 1.03, 62 0.96, 124 0.98 to
///           1.02, 186 1.07, more 1.03 to 1.11; lists of 128 keys: 0.89
/// How long requests are is not known here. Servers have full caches, so that the room for each request stands for its
/// length; where that is too long, 8 % is what the choice costs.
template <class Config>
bool is_faster(const cuda::AbsorbedArgs& args, const cuda::DeviceProperties& device) {
  // Channels are summed in an order that depends on whether a step has an even number, and so on the units before.
  if (args.batch_invariant) return false;
  const auto units_of = [](int64_t rows) { return (rows + Config::kRows - 1) / Config::kRows; };
  const int64_t rows = args.num_tokens * args.num_heads.value, units_of_token = units_of(args.num_heads.value);
  if (!args.sparse()) {
    if (Config::kQuantized || args.batch_size == 0) return false;
    // Several query tokens take the other kernel longer, probably for the masks that its score warps make.
    if (args.num_tokens >= 2 * args.batch_size) return true;
    constexpr int64_t kFewestKeysOfSm = 192, kFewestKeysOfWindows = 768;
    const bool has_window = args.options.window_left >= 0;
    int64_t keys = args.pools[0].cache.num_slots() / args.batch_size;  // of a request
    if (has_window) keys = std::min<int64_t>(keys, int64_t{args.options.window_left} + 1);
    return std::max<int64_t>(units_of(rows), args.batch_size) * keys >=
           (has_window ? kFewestKeysOfWindows : kFewestKeysOfSm) * device.num_sms;
  }
  int64_t keys = 0;
  for (int i = 0; i < args.num_pools(); ++i) keys += args.pools[i].topk;
  const int64_t keys_of_sm = args.num_tokens * units_of_token * keys / device.num_sms;
  if constexpr (Config::kQuantized) {
    // Of a token with two units the plan makes two row lanes (plan.cuh), which are the two blocks of a cluster.
    constexpr int64_t kFewestKeys = 512, kFewKeysOfSm = 32, kManyKeysOfSm = 180;
    return units_of_token == 2 && keys >= kFewestKeys && (keys_of_sm <= kFewKeysOfSm || keys_of_sm >= kManyKeysOfSm);
  } else {
    constexpr int64_t kFewestKeys = 512, kManyKeysOfSm = 1536, kLongList = 2048, kManyKeysOfLongLists = 384;
    return keys >= kFewestKeys && keys_of_sm >= (keys >= kLongList ? kManyKeysOfLongLists : kManyKeysOfSm);
  }
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

/// Describes the queries for tensor copies. Returns false where the heads of all tokens are no rows at the same
/// distance, or latent and rotary channels, if they lie in the same pieces, not one behind the other.
template <class Config>
bool describe_queries(const cuda::Queue& queue, PairedArgs& params) {
  const cuda::AbsorbedArgs& args = params.args;
  const auto rows = [&](const void* base, int64_t pieces, int64_t stride_token, int64_t stride_head, int32_t box_rows,
                        cuda::TensorMap& map) {
    const int64_t num_rows = int64_t{args.num_tokens} * args.num_heads.value;
    return stride_token == stride_head * args.num_heads.value && num_rows <= INT32_MAX &&
           queue.make_tensor_map({.base = base,
                                  .channels = Config::kPieceDims,
                                  .rows = num_rows,
                                  .heads = pieces,
                                  .row_stride = stride_head * 2,
                                  .head_stride = Config::kPieceRowBytes,
                                  .box_rows = box_rows,
                                  .box_heads = static_cast<int32_t>(pieces)},
                                 map);
  };
  const int32_t d_ckv = args.pools[0].cache.d_ckv;
  const bool in_pieces =
      args.pools[0].cache.d_kpe == 0 || d_ckv == Config::kLatentDims ||
      (args.q_pe == static_cast<const std::byte*>(args.q_nope) + d_ckv * 2 &&
       args.q_pe_stride_token == args.q_nope_stride_token && args.q_pe_stride_head == args.q_nope_stride_head);
  return in_pieces &&
         rows(args.q_nope, Config::kLatentPieces, args.q_nope_stride_token, args.q_nope_stride_head,
              Config::kQuantized ? Config::kAtomRows : Config::kRows, params.latent_queries) &&
         (args.d_qk == Config::kLatentDims ||
          rows(args.q_pe, 1, args.q_pe_stride_token, args.q_pe_stride_head, Config::kRows, params.rope_queries));
}

/// Describes the problem for the paired kernel. Returns false where it cannot compute it, or only slowly: of pages it
/// copies boxes of at least 16 rows, and queries 16 bytes at a time.
template <class Config>
bool describe(const cuda::Queue& queue, PairedArgs& params) {
  const cuda::AbsorbedArgs& args = params.args;
  for (int i = 0; i < args.num_pools(); ++i)
    if (!has_rows<Config>(args, args.pools[i])) return false;
  if (args.q_dtype != Config::kType || !copies_queries(args) || !needs_only_scale(args.options)) return false;
  if (args.sparse()) {
    params.copies_boxes_of_queries = describe_queries<Config>(queue, params);
    return true;
  }
  const core::Cache& cache = args.pools[0].cache;
  // Boxes of eight rows are possible, and up to 21 % slower than the other kernel (H200, 2026-11-30).
  constexpr int32_t kFewestBoxRows = 16;
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
      PairedArgs params = {};
      params.args = args;
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

// SPDX-License-Identifier: Apache-2.0
// The backend cuda_bulk computes absorbed attention by warps with roles, on rows that are loaded by bulk copies.
#include "cuda/border/backend.h"

#include "cuda/attention/block_rows.h"
#include "cuda/attention/shapes.h"
#include "cuda/backends/bulk/limits.h"

namespace mla::cuda::bulk {
namespace {

using core::Reason;

constexpr Op kOps[] = {Op::kDecode, Op::kDecodeSparse, Op::kPrefillSparse};

/// With up to this many listed keys of quantized rows cuda_portable's steps of 32 keys are faster, which divide them
/// among more multiprocessors. 512 keys of fp8_ds_mla, 16 heads, 1, 4 and 16 query tokens: 12.2, 14.1, 17.8 us instead
/// of 13.9, 15.5, 24.0; 2,048 keys, 1, 2, 4 and 8 tokens: 12.8, 14.8, 18.6, 23.5 instead of 15.4, 16.2, 17.5, 20.1
/// (H100, 2026-11-26; fp8_dsv4 and nvfp4_ds_mla are alike).
constexpr int64_t kFewKeys = 8192;

Reason yields(const Problem& problem) {
  const bool sparse = problem.op == Op::kDecodeSparse || problem.op == Op::kPrefillSparse;
  if (!sparse || problem.listed_keys == 0 || problem.listed_keys > kFewKeys) return {};
  if (!is_quantized(kv_layout(problem.cache).nope.element)) return {};
  return Reason::format("can, but leaves up to {} listed keys of quantized rows to others, which are faster", kFewKeys);
}

Reason refusal(const Problem& problem) {
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return reason;
  if (const Reason reason = query_type_refusal(problem); !reason.empty()) return reason;
  for (const CacheFormat format : {problem.cache, problem.extra_cache.value_or(problem.cache)})
    if (!takes(kv_layout(format)))
      return Reason::format(
          "takes quantized rows of e4m3 with up to {} scales of f32 or UE8M0, and nvfp4_ds_mla, not {}", kMostScales,
          name(format));
  const auto is_e2m1 = [](CacheFormat format) { return kv_layout(format).nope.element == DType::kE2M1; };
  if (problem.extra_cache && (is_e2m1(problem.cache) || is_e2m1(*problem.extra_cache)))
    return Reason::format("takes rows of e2m1 from one cache alone, not from {} and {}", name(problem.cache),
                          name(*problem.extra_cache));
  if (is_quantized(kv_layout(problem.cache).nope.element) && usual_query_rows(problem) > kSmallBlockRows)
    return Reason::format("takes requests of up to {} query rows (tokens x heads) with quantized keys, not {}",
                          kSmallBlockRows, usual_query_rows(problem));
  return {};
}

}  // namespace

Backend backend();

Backend backend() {
  return {.name = "cuda_bulk",
          .kernels = "mma.sync kernels with bulk copies",
          .gpus = "H100, H200, B200",
          .ops = kOps,
          .refusal = refusal,
          .numerics = tensor_core_numerics,
          .yields = yields,
          .leaves = Reason::format("attention to quantized rows with more than {} query rows of a request (query "
                                   "tokens times heads), and sparse attention to up to {} quantized keys",
                                   kSmallBlockRows, kFewKeys)};
}

}  // namespace mla::cuda::bulk

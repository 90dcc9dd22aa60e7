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

Reason refusal(const Problem& problem) {
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return reason;
  if (const Reason reason = query_type_refusal(problem); !reason.empty()) return reason;
  for (const CacheFormat format : {problem.cache, problem.extra_cache.value_or(problem.cache)})
    if (!takes(kv_layout(format)))
      return Reason::format(
          "takes quantized rows of e4m3 with up to {} scales of f32 or UE8M0, and nvfp4_ds_mla, not {}", kMostScales,
          name(format));
  if (problem.extra_cache && kv_layout(problem.cache).nope.element == DType::kE2M1)
    return Reason::format("takes one cache of e2m1 rows, not two ({} and {})", name(problem.cache),
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
          .leaves = Reason::format("attention to quantized rows with more than {} query rows of a request (query "
                                   "tokens times heads)",
                                   kSmallBlockRows)};
}

}  // namespace mla::cuda::bulk

// SPDX-License-Identifier: Apache-2.0
// cuda_sm90: attention and indexer by wgmma, where its products are full.
#include "cuda/border/backend.h"

#include <algorithm>

#include "cuda/attention/block_rows.h"
#include "cuda/attention/shapes.h"

namespace mla::cuda::sm90 {
namespace {

using core::Reason;

constexpr Op kOps[] = {Op::kDecode,  Op::kDecodeSparse,  Op::kPrefillSparse,
                       Op::kPrefill, Op::kIndexerLogits, Op::kIndexerTopK};
/// Of the 64 that a product has: with half of them cuda_portable is faster.
constexpr int64_t kFewHeads = 32;

Reason indexer_refusal(const Problem& problem) {
  if (problem.q_dtype == DType::kF32) return "takes e4m3, bf16 and f16, not f32: cuda_portable does";
  if (problem.num_heads <= kFewHeads)
    return Reason::format("takes more than {} heads, not {}: cuda_portable does", kFewHeads, problem.num_heads);
  return {};
}

Reason prefill_refusal(const Problem& problem) {
  if (problem.q_dtype == DType::kF32) return "takes bf16 and f16, not f32: cuda_portable does";
  return widths_refusal(problem, kPrefillWidths);
}

Reason absorbed_refusal(const Problem& problem) {
  // Quantized keys become bf16.
  const DType keys = key_dtype(problem.cache);
  if (problem.q_dtype != keys && problem.q_dtype != DType::kE4M3)
    return Reason::format("takes {}{} queries with {} keys, not {}: cuda_portable does", name(keys),
                          problem.op == Op::kPrefillSparse ? "" : " and e4m3", name(problem.cache),
                          name(problem.q_dtype));
  const int64_t q_len = problem.op == Op::kDecode ? std::max<int64_t>(problem.q_len, 1) : 1;
  if (q_len <= kSmallBlockRows / problem.num_heads)
    return Reason::format("takes requests of more than {} query rows (tokens x heads), not {}: cuda_portable does",
                          kSmallBlockRows, q_len * problem.num_heads);
  return {};
}

Reason refusal(const Problem& problem) {
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return reason;
  if (is_indexer(problem.op)) return indexer_refusal(problem);
  return problem.op == Op::kPrefill ? prefill_refusal(problem) : absorbed_refusal(problem);
}

}  // namespace

Backend backend();

Backend backend() {
  return {.name = "cuda_sm90",
          .kernels = "wgmma kernels",
          .gpus = "H100, H200",
          .ops = kOps,
          .refusal = refusal,
          .numerics = tensor_core_numerics,
          .leaves = Reason::format("attention with up to {} query rows of a request (query tokens times heads), and "
                                   "indexers with up to {} heads, to cuda_portable",
                                   kSmallBlockRows, kFewHeads)};
}

}  // namespace mla::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// The backend cuda_sm90 computes attention and the indexer by wgmma, where the 64 rows of a product are not mostly
// padding.
#include "cuda/border/backend.h"

#include "cuda/attention/block_rows.h"
#include "cuda/attention/shapes.h"

namespace mla::cuda::sm90 {
namespace {

using core::Reason;

constexpr Op kOps[] = {Op::kDecode,  Op::kDecodeSparse,  Op::kPrefillSparse,
                       Op::kPrefill, Op::kIndexerLogits, Op::kIndexerTopK};
/// An exact product has 64 heads; where half of them would be padding mma.sync is faster: 98 instead of 110 us with 32
/// heads (batch 64, kv 32k; H200, 2026-11-21). Products of e4m3 have 32.
constexpr int64_t kFewHeads = 32;

bool multiplies_e4m3(const Problem& problem) {
  return is_indexer(problem.op) && problem.compute != Compute::kExact && problem.q_dtype == DType::kE4M3;
}

Reason indexer_refusal(const Problem& problem) {
  if (problem.q_dtype == DType::kF32) return "takes e4m3, bf16 and f16, not f32";
  if (problem.q_dtype == DType::kF16 && indexer_layout(problem.indexer_format).codec.element == DType::kE2M1)
    return Reason::format("takes e4m3 and bf16 queries with {} keys, not f16", name(problem.indexer_format));
  if (problem.num_heads <= kFewHeads && !multiplies_e4m3(problem))
    return Reason::format(
        "takes {} heads for products of e4m3 only (e4m3 queries, logits of all keys, compute not exact)",
        problem.num_heads);
  return {};
}

/// The kernels of prefill are compiled for these head dims (prefill.cu).
constexpr Widths kPrefillWidths[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

Reason prefill_refusal(const Problem& problem) {
  if (problem.q_dtype != DType::kBF16 && problem.q_dtype != DType::kF16)
    return Reason::format("takes bf16 and f16, not {}", name(problem.q_dtype));
  return widths_refusal(problem, kPrefillWidths);
}

Reason absorbed_refusal(const Problem& problem) {
  if (const Reason reason = query_type_refusal(problem); !reason.empty()) return reason;
  if (usual_query_rows(problem) <= kSmallBlockRows)
    return Reason::format("takes requests of more than {} query rows (tokens x heads), not {}", kSmallBlockRows,
                          usual_query_rows(problem));
  return {};
}

/// With up to this many pairs of a query row and a listed key of quantized rows, cuda_portable's blocks of 16 rows by
/// 32 keys are faster, which divide them among more multiprocessors. V4's 128 + 512 keys, 64 heads, 1, 2, 4 and 8 query
/// tokens: 14.1, 14.9, 19.0, 25.8 us instead of 19.0, 18.6, 19.6, 22.0; 2,048 keys of fp8_ds_mla, 1 and 2: 18.0, 22.1
/// instead of 19.0, 21.7 (H100, 2026-11-26).
constexpr int64_t kFewPairs = 256 * 640;

/// Of 17 to 32 query rows of a request half of a product is padding, and cuda_bulk's blocks of 32 rows read keys
/// faster. With up to this many requests of decode, one token each, that is worth more than the energy which its
/// products cost. 32 heads, one request of 1k, 32k and 128k keys, 16 of 1k, 4k and 32k, 32 of 1k, 2k and
/// 8k: 10.4, 25.4, 51.9, 17.6, 30.9, 152, 21.6, 30.7, 85 us instead of 12.7, 27.1, 54.0, 19.6, 33.2, 161, 24.0, 33.3,
/// 88; 128 of 8k: 300 instead of 296, and under the power limit 358 instead of 318, 32 of 8k 94.5 instead of 90.3
/// (H200, 2026-12-01; docs/notebook/2026-12-01-32-rows.md).
constexpr int64_t kFewRequests = 32;
/// With up to this many listed keys the same holds. 2,048 keys of 1, 4, 16 and 64 tokens: 12.1, 15.3, 21.3, 46.8 us
/// instead of 13.7, 16.9, 23.6, 44.4; 512 keys: 11.2, 11.4, 14.0, 26.9 instead of 12.3, 13.4, 16.6, 25.8.
constexpr int64_t kFewKeys = 16 * 2048;
/// It does not hold for narrower values: 320/256 channels, 8 and 32 requests of 4k keys: 17.4, 38.9 us instead of 16.5,
/// 35.7. Nor for several tokens, which draft trees may mask: 16 heads, 2 tokens, 1, 8 and 32 requests of 4k keys: 20.4,
/// 29.2, 54.4 us instead of 15.8, 25.0, 54.3 with a tree, 15.1, 24.9, 49.7 instead of 15.5, 24.9, 54.1 without.
constexpr int64_t kWideValues = 512;

bool is_middling(const Problem& problem) {
  if (usual_query_rows(problem) > kMiddlingBlockRows || problem.d_v != kWideValues) return false;
  if (problem.op == Op::kDecode)
    return problem.q_len == 1 && problem.num_requests > 0 && problem.num_requests <= kFewRequests;
  return problem.listed_keys > 0 && problem.listed_keys <= kFewKeys;
}

Reason yields(const Problem& problem) {
  const bool sparse = problem.op == Op::kDecodeSparse || problem.op == Op::kPrefillSparse;
  if (!sparse && problem.op != Op::kDecode) return {};
  if (!is_quantized(kv_layout(problem.cache).nope.element)) {
    if (!is_middling(problem)) return {};
    return Reason::format(
        "can, but leaves up to {} query heads of up to {} tokens, one a request, or of up to {} listed keys, to "
        "others, which are faster",
        kMiddlingBlockRows, kFewRequests, kFewKeys);
  }
  if (!sparse || problem.listed_keys == 0 || problem.listed_keys > kFewPairs / problem.num_heads) return {};
  return Reason::format("can, but leaves up to {} pairs of a query row and a quantized key to others, which are faster",
                        kFewPairs);
}

Reason refusal(const Problem& problem) {
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return reason;
  if (is_indexer(problem.op)) return indexer_refusal(problem);
  return problem.op == Op::kPrefill ? prefill_refusal(problem) : absorbed_refusal(problem);
}

Numerics numerics(const Problem& problem) {
  if (!multiplies_e4m3(problem)) return tensor_core_numerics(problem);
  return {.multiplied = Arithmetic::kE4M3, .summed = Arithmetic::kF32, .products_per_cut = 32, .sum_bits = 14};
}

}  // namespace

Backend backend();

Backend backend() {
  return {
      .name = "cuda_sm90",
      .kernels = "wgmma kernels",
      .gpus = "H100, H200",
      .ops = kOps,
      .refusal = refusal,
      .numerics = numerics,
      .yields = yields,
      .leaves = Reason::format("requests of up to {} query rows, or {} over few 16-bit keys, exact indexers of up to "
                               "{} heads, and up to {} pairs of a query row and a listed, quantized key",
                               kSmallBlockRows, kMiddlingBlockRows, kFewHeads, kFewPairs)};
}

}  // namespace mla::cuda::sm90

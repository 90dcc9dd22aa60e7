// SPDX-License-Identifier: Apache-2.0
// The backend cuda_sm90_fp8 multiplies e4m3 by e4m3 by wgmma, where the caller asks for it.
#include "cuda/border/backend.h"

#include <span>

#include "cuda/attention/shapes.h"
#include "cuda/backends/sm90_fp8/limits.h"

namespace mla::cuda::sm90_fp8 {
namespace {

using core::Reason;

constexpr Op kOps[] = {Op::kDecode, Op::kDecodeSparse, Op::kPrefill};
constexpr Widths kWidths[] = {{kLatentDims + 64, kLatentDims}, {kLatentDims, kLatentDims}};
/// The kernels of prefill are compiled for these head dims (prefill.cu).
constexpr Widths kPrefillWidths[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

Reason refusal(const Problem& problem) {
  if (problem.compute != Compute::kFP8)
    return Reason::format("multiplies e4m3 by e4m3, for compute = {} only", name(Compute::kFP8));
  const auto widths = problem.op == Op::kPrefill ? std::span<const Widths>(kPrefillWidths) : kWidths;
  for (const Reason& reason :
       {core::compute_refusal(problem), operand_refusal(problem), widths_refusal(problem, widths)})
    if (!reason.empty()) return reason;
  if (problem.op == Op::kPrefill) return {};
  for (const CacheFormat format : {problem.cache, problem.extra_cache.value_or(problem.cache)})
    if (!takes(kv_layout(format).nope))
      return Reason::format("takes rows of e4m3 with scales of f32 for {} channels or more, not {}", kScaleRun,
                            name(format));
  return {};
}

/// wgmma adds 32 products of e4m3 at once, and an H100 or H200 keeps 14 bits of the sum, as the emulator does.
Numerics numerics(const Problem& problem) {
  return {.multiplied = Arithmetic::kE4M3,
          .summed = Arithmetic::kF32,
          .products_per_cut = 32,
          .sum_bits = 14,
          .p_run = problem.op == Op::kPrefill ? prefill_run_keys(problem.d_v) : kRunKeys};
}

}  // namespace

Backend backend();

Backend backend() {
  return {.name = "cuda_sm90_fp8",
          .kernels = "wgmma kernels on e4m3",
          .gpus = "H100, H200",
          .ops = kOps,
          .refusal = refusal,
          .numerics = numerics};
}

}  // namespace mla::cuda::sm90_fp8

// SPDX-License-Identifier: Apache-2.0
// The backend cuda_portable runs on every GPU, and does everything that any backend of GPUs does.
#include "cuda/border/backend.h"

#include <span>

#include "cuda/attention/shapes.h"
#include "cuda/border/operations.h"

namespace mla::cuda::portable {
namespace {

/// The tensor-core kernels of prefill are compiled for these head dims (prefill.cu).
constexpr Widths kPrefillWidths[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

/// The kernels of absorbed attention are compiled for these head dims; the wide ones over 16-bit rows only, for queries
/// of the same type (decode.cu).
constexpr Widths kWidths[] = {{512 + 64, 512}, {512, 512},        {256 + 64, 256},
                              {256, 256},      {1024 + 64, 1024}, {1024, 1024}};
constexpr std::span kWideWidths = std::span(kWidths).last<2>();

core::Reason refusal(const Problem& problem) {
  if (const core::Reason reason = shape_refusal(problem, kWidths); !reason.empty()) return reason;
  if (problem.op == Op::kCompress && problem.d_qk > kMostPooledChannels)
    return core::Reason::format("takes latents of at most {} channels, not {}", kMostPooledChannels, problem.d_qk);
  if (!is_absorbed(problem.op) || !is_one_of(problem, kWideWidths)) return {};
  if (problem.op != Op::kPrefillSparse && is_quantized(kv_layout(problem.cache).nope.element))
    return core::Reason::format("takes rows of 16 bits where d_qk/d_v are {}/{}, not {}", problem.d_qk, problem.d_v,
                                name(problem.cache));
  return query_type_refusal(problem);
}

Numerics numerics(const Problem& problem) {
  // f32, e4m3, and head dims that the tensor cores do not take, are computed without them (prefill_any.cuh).
  const bool scalar_prefill = size_of(problem.q_dtype) != 2 || !is_one_of(problem, kPrefillWidths);
  const bool multiplies =
      is_absorbed(problem.op) || is_indexer(problem.op) || (problem.op == Op::kPrefill && !scalar_prefill);
  return multiplies ? tensor_core_numerics(problem) : Numerics{};
}

}  // namespace

Backend backend();

Backend backend() {
  return {
      .name = "cuda_portable", .kernels = "mma.sync kernels", .ops = kAllOps, .refusal = refusal, .numerics = numerics};
}

}  // namespace mla::cuda::portable

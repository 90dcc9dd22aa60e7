// SPDX-License-Identifier: Apache-2.0
// The backend cuda_portable runs on every GPU, and does everything that any backend of GPUs does.
#include "cuda/border/backend.h"

#include "cuda/attention/shapes.h"

namespace mla::cuda::portable {
namespace {

/// The tensor-core kernels of prefill are compiled for these head dims (prefill.cu).
constexpr Widths kPrefillWidths[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

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
  return {.name = "cuda_portable",
          .kernels = "mma.sync kernels",
          .ops = kAllOps,
          .refusal = shape_refusal,
          .numerics = numerics};
}

}  // namespace mla::cuda::portable

// SPDX-License-Identifier: Apache-2.0
// What kernels that are built from src/cuda/attention, common and tile take, and how they compute it: for the verdicts
// and the numerics of backends.
#pragma once

#include <cstdint>
#include <span>

#include "core/implementation.h"

namespace mla::cuda {

bool is_indexer(Op op);
bool is_absorbed(Op op);  // attention over rows of a latent cache

/// What a format's keys are multiplied as; quantized ones become bf16.
DType key_dtype(CacheFormat format);

struct Widths {
  int64_t d_qk, d_v;
};
/// Head dims of prefill that tensor cores compute.
inline constexpr Widths kPrefillWidths[] = {{192, 128}, {128, 128}};

bool is_one_of(const Problem& problem, std::span<const Widths> all);
core::Reason widths_refusal(const Problem& problem, std::span<const Widths> all);

/// What all such kernels refuse alike; empty if nothing.
core::Reason shape_refusal(const Problem& problem);

/// Query rows (tokens x heads) of a usual request of absorbed attention.
int64_t usual_query_rows(const Problem& problem);

/// What kernels of absorbed attention refuse that multiply queries as they are, with keys of the same type: quantized
/// keys become bf16.
core::Reason query_type_refusal(const Problem& problem);

/// Of tensor cores that multiply 16-bit numbers.
Numerics tensor_core_numerics(const Problem& problem);

}  // namespace mla::cuda

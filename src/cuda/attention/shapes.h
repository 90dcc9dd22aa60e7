// SPDX-License-Identifier: Apache-2.0
// This file says which problems the kernels built from src/cuda/attention, common and tile can compute, and with what
// numerics. Backends answer from here when the dispatcher asks for their verdict.
#pragma once

#include <cstdint>
#include <span>

#include "core/implementation.h"

namespace mla::cuda {

using core::is_indexer;
bool is_absorbed(Op op);  // true for attention over rows of a latent cache

/// Returns the type in which keys of a format are multiplied. Quantized keys become bf16.
DType key_dtype(CacheFormat format);

struct Widths {
  int64_t d_qk, d_v;
};

/// Kernels of absorbed attention are compiled for these head dims: kv_lora_rank with and without 64 rotary channels.
inline constexpr Widths kAbsorbedWidths[] = {{512 + 64, 512}, {512, 512}, {256 + 64, 256}, {256, 256}};

bool is_one_of(const Problem& problem, std::span<const Widths> all);
core::Reason widths_refusal(const Problem& problem, std::span<const Widths> all);

/// Returns why kernels of any arithmetic refuse the types of queries and rows, or the rows' widths; empty if they do
/// not.
core::Reason operand_refusal(const Problem& problem);

/// Returns why all these kernels, which multiply 16-bit numbers, refuse the problem; empty if they do not. `absorbed`
/// are the head dims of the backend's kernels of absorbed attention.
core::Reason shape_refusal(const Problem& problem, std::span<const Widths> absorbed = kAbsorbedWidths);

/// Returns how many query rows (tokens x heads) a usual request of absorbed attention has.
int64_t usual_query_rows(const Problem& problem);

/// Returns why kernels of absorbed attention refuse the type of the queries if they multiply queries without converting
/// them, so that keys must have the same type (quantized keys become bf16); empty if they do not.
core::Reason query_type_refusal(const Problem& problem);

/// Returns the numerics of tensor cores that multiply 16-bit numbers.
Numerics tensor_core_numerics(const Problem& problem);

}  // namespace mla::cuda

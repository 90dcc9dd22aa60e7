// SPDX-License-Identifier: Apache-2.0
// Says what goes into the kernels of scaled_mma_kernels.cuh, and what must come out by float64 and the tables of the
// PTX ISA ("Block Scaling for mma.sync", "Matrix Fragments").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/ptx/wrapper_cases.h"

namespace mla::cuda {

/// Each form has two cases: one with elements and scales that differ everywhere, one with the scales at the ends of
/// their type, NaN among them.
std::span<const WrapperCase> scaled_mma_cases();

/// Returns how many selectors a form with so many scales of a row has. The output of a case has one product behind
/// another, of 128 words each.
constexpr size_t num_selectors(size_t scales) { return 4 / scales * 2 * (4 / scales) * 4; }

}  // namespace mla::cuda

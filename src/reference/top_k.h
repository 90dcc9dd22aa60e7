// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mla::reference {

/// Writes the indices of the `k` largest of `n` logits in ascending order, and then -1. Of equal logits those with
/// lower indices are taken; NaN is less than -inf. It needs no memory.
void select_top_k(const float* logits, int64_t n, int32_t k, int32_t* indices);

}  // namespace mla::reference

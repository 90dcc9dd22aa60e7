// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/args.h"

namespace mla::reference {

/// Writes a token's indices; logits [begin, end) count. Of equal logits those with lower indices are taken; NaN
/// is less than -inf. It needs no memory.
void select_top_k(const core::TopKArgs& args, int64_t token, int64_t begin, int64_t end);

}  // namespace mla::reference

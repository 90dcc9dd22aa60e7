// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mla::cuda {

/// Query rows (tokens x heads) of the smallest blocks of absorbed attention. A request of no more is one such block: it
/// reads each key once and is bound by memory.
inline constexpr int32_t kSmallBlockRows = 16;

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mla::cuda {

/// The smallest blocks of absorbed attention have this many query rows (tokens x heads). A request of no more rows is
/// one such block: it reads each key once and is bound by memory.
inline constexpr int32_t kSmallBlockRows = 16;

}  // namespace mla::cuda

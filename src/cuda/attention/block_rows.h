// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mla::cuda {

/// The smallest blocks of absorbed attention have this many query rows (tokens x heads). A request of no more rows is
/// one such block: it reads each key once and is bound by memory.
inline constexpr int32_t kSmallBlockRows = 16;

/// Where blocks of 32 query rows exist (cuda_bulk on SM90), a request of no more rows is one of these: it reads each
/// key once, too.
inline constexpr int32_t kMiddlingBlockRows = 32;

/// The kernels of the indexer keep the queries of so many heads in any GPU's shared memory, whatever their type. More
/// take several launches, which add to logits of f32.
inline constexpr int64_t kMostHeadsOfShortLogits = 120;

}  // namespace mla::cuda

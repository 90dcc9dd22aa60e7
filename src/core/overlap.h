// SPDX-License-Identifier: Apache-2.0
// Whether tensors share memory.
#pragma once

#include <cstdint>

#include "mla/types.h"

namespace mla::core {

// Views here have elements, whose byte offsets fit 64 bits.

/// The bytes from a view's lowest to behind its highest; none if no memory can lie there.
struct ByteRange {
  uint64_t begin = 0, end = 0;
};

ByteRange byte_range(const TensorView& view);

/// How many bytes two ranges have in common.
constexpr uint64_t common_bytes(ByteRange a, ByteRange b) {
  const uint64_t begin = a.begin > b.begin ? a.begin : b.begin;
  const uint64_t end = a.end < b.end ? a.end : b.end;
  return begin < end ? end - begin : 0;
}

/// Whether an element of one view shares a byte with one of the other. Views that interleave without touching (slices
/// of one tensor, layers in one buffer) do not. Where strides are no multiples of one another, finding out may take
/// long: after a bounded number of steps they count as apart.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace mla::core

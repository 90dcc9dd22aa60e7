// SPDX-License-Identifier: Apache-2.0
// Tests whether tensors share memory.
#pragma once

#include <cstdint>

#include "mla/types.h"

namespace mla::core {

// All views here have elements, whose byte offsets fit 64 bits.

/// Holds the bytes from a view's lowest to its highest, begin ... end - 1; it is empty if no memory can lie there.
struct ByteRange {
  uint64_t begin = 0, end = 0;
};

ByteRange byte_range(const TensorView& view);

/// Returns how many bytes two ranges have in common.
constexpr uint64_t common_bytes(ByteRange a, ByteRange b) {
  const uint64_t begin = a.begin > b.begin ? a.begin : b.begin;
  const uint64_t end = a.end < b.end ? a.end : b.end;
  return begin < end ? end - begin : 0;
}

/// Returns whether an element of one view shares a byte with an element of the other. Views that interleave without
/// touching (slices of one tensor, layers in one buffer) do not overlap. Where strides are no multiples of one another
/// the search may take long; views for which it finds no common byte in a bounded number of steps count as apart.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace mla::core

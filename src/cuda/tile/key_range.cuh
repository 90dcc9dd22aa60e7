// SPDX-License-Identifier: Apache-2.0
// This file has ranges of keys, and finds the range that a query sees.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds keys begin ... end - 1. The range is empty if end <= begin.
struct KeyRange {
  int32_t begin = 0, end = 0;

  MLA_DEVICE bool empty() const { return end <= begin; }
  MLA_DEVICE bool contains(int32_t key) const { return begin <= key && key < end; }
};

/// Returns the keys that causality and the window leave visible to the query at `position` of a request with kv_len
/// keys. The position may be negative. Where ranks share a request, positions and keys are global. Both ends of the
/// range grow with the position.
MLA_DEVICE KeyRange visible_keys(int32_t position, int32_t kv_len, bool causal, int32_t window_left) {
  const int32_t end = causal && position < kv_len ? std::max(position + 1, 0) : kv_len;
  return {window_left < 0 || position <= window_left ? 0 : position - window_left, end};
}

}  // namespace mla::MLA_CUDA_NAMESPACE

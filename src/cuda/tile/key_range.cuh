// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Keys begin ... end - 1; empty if end <= begin.
struct KeyRange {
  int32_t begin = 0, end = 0;

  MLA_DEVICE bool empty() const { return end <= begin; }
  MLA_DEVICE bool contains(int32_t key) const { return begin <= key && key < end; }
};

/// The keys that causality and the window leave to the query at `position`, which may be negative, of a request with
/// kv_len keys. Positions and keys are global where ranks share them. Both ends grow with the position.
MLA_DEVICE KeyRange visible_keys(int32_t position, int32_t kv_len, bool causal, int32_t window_left) {
  const int32_t end = causal && position < kv_len ? std::max(position + 1, 0) : kv_len;
  return {window_left < 0 || position <= window_left ? 0 : position - window_left, end};
}

}  // namespace mla::MLA_CUDA_NAMESPACE

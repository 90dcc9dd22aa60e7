// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Keys begin ... end - 1; empty if end <= begin.
struct KeyRange {
  int32_t begin = 0, end = 0;

  MLA_DEVICE bool empty() const { return end <= begin; }
  MLA_DEVICE bool contains(int32_t key) const { return begin <= key && key < end; }
};

}  // namespace mla::MLA_CUDA_NAMESPACE

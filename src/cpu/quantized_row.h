// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "mla/types.h"

namespace mla::cpu {

/// Describes quantized elements of one row. Neighbours form groups, and each group has a scale.
struct QuantizedRow {
  DType element = DType::kE4M3;    // or kE2M1
  const void* elements = nullptr;  // begins with a whole byte
  const float* scales = nullptr;   // [num_groups]
  int32_t num_groups = 0;
  int32_t group = 0;  // elements of a group; of e2m1 an even number, at most kMostE2M1Group
};

/// Describes a row of e4m3 whose elements stand for themselves.
inline QuantizedRow unscaled_row(const void* e4m3, int32_t n) {
  static constexpr float kOne = 1.0F;
  return {.element = DType::kE4M3, .elements = e4m3, .scales = &kOne, .num_groups = 1, .group = n};
}

}  // namespace mla::cpu

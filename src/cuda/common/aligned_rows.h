// SPDX-License-Identifier: Apache-2.0
// The kernels for the rows that engines have take addresses at multiples of their accesses only. The host looks at
// bases and strides, which say so of all rows.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/args.h"

namespace mla::cuda {

/// Returns whether `base` and all multiples of the strides, in bytes, lie at multiples of `bytes`.
inline bool has_rows_at(const void* base, std::initializer_list<int64_t> strides, int64_t bytes) {
  if (reinterpret_cast<intptr_t>(base) % bytes != 0) return false;
  for (int64_t stride : strides)
    if (stride % bytes != 0) return false;
  return true;
}

inline bool has_planes_at(const core::Plane& plane, int64_t bytes) {
  return has_rows_at(plane.base, {plane.stride_page, plane.stride_token}, bytes);
}

}  // namespace mla::cuda

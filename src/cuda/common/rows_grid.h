// SPDX-License-Identifier: Apache-2.0
// The grid of kernels whose warps stride over rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/border/queue.h"

namespace mla::cuda {

/// One warp for every row, as far as a grid reaches.
inline LaunchShape warp_per_row(int64_t rows, int32_t threads) {
  const int64_t warps = threads / 32;
  return {.grid_x = static_cast<int32_t>(std::min<int64_t>((rows + warps - 1) / warps, INT32_MAX / 2))};
}

}  // namespace mla::cuda

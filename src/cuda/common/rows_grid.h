// SPDX-License-Identifier: Apache-2.0
// This is the grid of kernels whose warps stride over rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/border/queue.h"

namespace mla::cuda {

/// Returns a grid with one warp for every row. A grid has at most INT32_MAX / 2 blocks here, below the limit of CUDA
/// (2^31 - 1); the warps stride over further rows.
inline LaunchShape warp_per_row(int64_t rows, int32_t threads) {
  const int64_t warps = threads / 32;
  return {.grid_x = static_cast<int32_t>(std::min<int64_t>((rows + warps - 1) / warps, INT32_MAX / 2))};
}

/// Returns a grid whose warps have several rows each where there are many, for kernels that load a row while they
/// compute the one before it.
inline LaunchShape warp_per_rows(int64_t rows, int32_t threads) {
  constexpr int64_t kFewRows = 8192, kMostRowsEach = 8;
  return warp_per_row(
      std::max(rows / std::clamp<int64_t>(rows / kFewRows, 1, kMostRowsEach), std::min<int64_t>(rows, 1)), threads);
}

/// Returns a grid of the blocks that run at once, or of fewer where there are fewer rows, for the same kernels: a
/// second turn of blocks would wait for its rows anew.
inline LaunchShape resident_warps(int64_t rows, int32_t threads, int32_t blocks_per_sm,
                                  const DeviceProperties& device) {
  LaunchShape shape = warp_per_row(rows, threads);
  shape.grid_x = std::min(shape.grid_x, std::max(device.num_sms, 1) * blocks_per_sm);
  return shape;
}

}  // namespace mla::cuda

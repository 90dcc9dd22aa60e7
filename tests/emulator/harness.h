// SPDX-License-Identifier: Apache-2.0
// Runs kernels on the emulator, without queues and devices.
#pragma once

#include <cstdint>

#include "core/thread_pool.h"
#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"
#include "emulator/emulator.h"
#include "emulator/sanitizers.h"

namespace mla::emulator {

/// Says how many orders of threads are tried. After a fault the thread sanitizer needs milliseconds to forget its
/// fibers.
inline constexpr uint64_t kSeeds = MLA_EMULATOR_TSAN ? 2 : 24;

inline core::ThreadPool& pool() {
  static core::ThreadPool threads(2, {});
  return threads;
}

struct Shape {
  int32_t grid_x = 1, grid_y = 1, grid_z = 1;
  int32_t cluster = 1;
  int32_t shared_bytes = 0;
};

template <class Kernel>
Status run_kernel(const typename Kernel::Params& params, const Shape& shape, uint64_t seed,
                  Counters* counters = nullptr) {
  return run({.name = Kernel::kName,
              .entry = &MLA_CUDA_NAMESPACE::kernel_entry<Kernel>,
              .params = &params,
              .grid_x = shape.grid_x,
              .grid_y = shape.grid_y,
              .grid_z = shape.grid_z,
              .cluster = shape.cluster,
              .threads = Kernel::kThreads,
              .shared_bytes = shape.shared_bytes,
              .shared_limit = MLA_CUDA_NAMESPACE::kSharedBytesPerBlock,
              .seed = seed,
              .counters = counters},
             pool());
}

}  // namespace mla::emulator

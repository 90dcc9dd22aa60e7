// SPDX-License-Identifier: Apache-2.0
// Where kernels go: a stream of a GPU, or the emulator. The only thing that the host side of an operation needs to know
// of its machine.
#pragma once

#include <cstdint>

#include "mla/status.h"

namespace mla::cuda {

struct DeviceProperties {
  int32_t arch = 0;     ///< 80, 86, 89, 90, 100, 120
  int32_t num_sms = 0;  ///< multiprocessors
  int32_t shared_bytes_per_block = 0;
};

struct LaunchShape {
  int32_t grid_x = 1, grid_y = 1, grid_z = 1;
  int32_t cluster = 1;  ///< SM90 and later: so many neighbours in x are a cluster (ptx/cluster.h); divides grid_x
  int32_t shared_bytes = 0;
  /// Programmatic dependent launch: the kernel may start before the previous one of the stream has ended, and must call
  /// ptx::wait_for_previous_grid() before it reads what that one writes. Where the architecture lacks it: ignored.
  bool overlaps_previous = false;
};

/// A kernel as the launch glue hands it over.
struct KernelEntry {
  const char* name;      ///< for errors
  const void* function;  ///< GPU: the __global__ function; emulator: void (*)(const void* params)
  int32_t threads;
  int32_t params_bytes;
};

class Queue {
 public:
  virtual ~Queue() = default;
  virtual const DeviceProperties& device() const = 0;
  /// Enqueues; does not wait. `params` is copied. An empty grid is no launch.
  virtual Status launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) = 0;
};

}  // namespace mla::cuda

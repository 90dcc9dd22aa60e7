// SPDX-License-Identifier: Apache-2.0
// A queue takes launches: it is a stream of a GPU, or the emulator. It is all that the host side of an operation knows
// of its machine.
#pragma once

#include <cstdint>

#include "mla/status.h"

namespace mla::cuda {

struct DeviceProperties {
  int32_t arch = 0;     ///< of the GPU: 80, 103
  int32_t num_sms = 0;  ///< number of streaming multiprocessors
  int32_t shared_bytes_per_block = 0;
};

struct LaunchShape {
  int32_t grid_x = 1, grid_y = 1, grid_z = 1;
  /// Says how many blocks, neighbours in x, form a cluster (ptx/cluster.h). It divides grid_x, and is above 1 only on
  /// SM90 and later.
  int32_t cluster = 1;
  int32_t shared_bytes = 0;
  /// Asks for a programmatic dependent launch: the kernel may start before the previous one of the stream has ended,
  /// and must call ptx::wait_for_previous_grid() before it reads what that one writes. It is ignored where the
  /// architecture lacks such launches.
  bool overlaps_previous = false;
};

/// Describes a kernel as launch() in border/launch.h hands it to the queue.
struct KernelEntry {
  const char* name;      ///< named in errors
  const void* function;  ///< on a GPU the __global__ function; on the emulator a void (*)(const void* params)
  int32_t threads;
  int32_t params_bytes;
};

class Queue {
 public:
  virtual ~Queue() = default;
  virtual const DeviceProperties& device() const = 0;
  /// Enqueues the kernel and does not wait. `params` is copied. An empty grid launches nothing.
  virtual Status launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) = 0;
};

}  // namespace mla::cuda

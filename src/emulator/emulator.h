// SPDX-License-Identifier: Apache-2.0
// The emulator runs kernels that were compiled for the emulated machine (src/cuda/ptx/machine.h) on the CPU: every CUDA
// thread is a fiber, asynchronous copies land as late as their waits allow, shared memory starts as NaN, and the order
// of threads and blocks depends on a seed. It knows no architecture: what differs between them comes with the launch.
// See docs/emulator.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/thread_pool.h"
#include "mla/status.h"

namespace mla::emulator {

/// Counts what kernels did, summed over all blocks. Warp-level instructions count once per warp.
struct Counters {
  int64_t blocks = 0;
  int64_t mma = 0;
  int64_t ldmatrix = 0;
  int64_t shuffles = 0;          ///< shuffles and votes
  int64_t barriers = 0;          ///< bar.sync and bar.arrive of warps
  int64_t async_copy_bytes = 0;  ///< bytes of cp.async that read global memory
  int64_t bulk_copy_bytes = 0;
  int64_t prefetches = 0;  ///< prefetches into the L2 cache, counted per thread
};

struct Launch {
  const char* name = "kernel";                  ///< named in errors
  void (*entry)(const void* params) = nullptr;  ///< called once per thread of the grid
  const void* params = nullptr;
  int32_t grid_x = 1, grid_y = 1, grid_z = 1;  ///< an empty grid is no launch
  int32_t cluster = 1;                         ///< neighbours in x that form a cluster; divides grid_x
  int32_t threads = 32;                        ///< threads of a block; a multiple of 32, at most 1024
  int32_t shared_bytes = 0;
  int32_t shared_limit = 0;  ///< bytes that the target grants a block
  uint64_t seed = 0;         ///< decides the order of blocks and threads
  /// If true, wgmma keeps the bits of f32 of sums of e4m3 products, so that what else a kernel does wrong shows. If
  /// false, it keeps those that an H100 and H200 keep.
  bool e4m3_sums_in_f32 = false;
  /// If false, the previous grid never ends, and threads end where they wait for it. This shows what a kernel does
  /// before.
  bool previous_grid_ends = true;
  Counters* counters = nullptr;  ///< counts are added to it, if not null
};

/// Is called with each launch, unless it is null, as it is at first. Tests see by it which kernels run.
using LaunchObserver = void (*)(const Launch&);
inline std::atomic<LaunchObserver> launch_observer{nullptr};

/// Holds what the 128 bytes of a tensor map are to the emulator: heads of rows of 16-bit channels. Boxes have 64
/// channels, 128 bytes, of `box_rows` rows of a head. Strides are in bytes.
struct TensorMap {
  static constexpr uint64_t kMark = 0x6D61'7020'6D61'7020ULL;  // a map that was never made has another one
  uint64_t mark;
  const std::byte* base;
  int64_t sizes[3];  // channels, rows, heads
  int64_t strides[2];
  int32_t box_rows, box_heads;
};

/// Runs all blocks on all workers of the pool, and returns when they have ended. The first fault ends the launch and is
/// returned as one sentence with the kernel, the block, the threads and the source lines. What the kernel had written
/// stays written.
Status run(const Launch& launch, core::ThreadPool& pool);

}  // namespace mla::emulator

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
  int64_t l2_bytes = 0;  ///< second-level cache
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

/// Describes heads of rows of 16-bit channels, [heads][rows][channels], for copies of boxes of 64 channels of
/// `box_rows` rows of `box_heads` heads (ptx/tensor_copy.h). Strides are in bytes.
struct RowTensor {
  const void* base = nullptr;
  int64_t channels = 0, rows = 0, heads = 0;
  int64_t row_stride = 0, head_stride = 0;
  int32_t box_rows = 0, box_heads = 1;
};

inline constexpr int32_t kBoxChannels = 64;

/// Returns whether a tensor has a map.
inline bool has_tensor_map(const RowTensor& tensor) {
  const auto is_stride = [](int64_t bytes) { return bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 40; };
  const auto is_size = [](int64_t size) { return size > 0 && size < int64_t{1} << 32; };
  return reinterpret_cast<uintptr_t>(tensor.base) % 16 == 0 && is_stride(tensor.row_stride) &&
         is_stride(tensor.head_stride) && is_size(tensor.channels) && is_size(tensor.rows) && is_size(tensor.heads) &&
         tensor.box_rows > 0 && tensor.box_rows <= 256 && tensor.box_heads > 0 && tensor.box_heads <= 256;
}

/// Holds what a tensor copy takes as its description: 128 bytes that the driver, or the emulator, makes. It is an
/// argument of the kernel.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

class Queue {
 public:
  virtual ~Queue() = default;
  virtual const DeviceProperties& device() const = 0;
  /// Enqueues the kernel and does not wait. `params` is copied. An empty grid launches nothing.
  virtual Status launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) = 0;
  /// Describes a tensor for tensor copies. Returns false if has_tensor_map() does, or where there are no such copies.
  virtual bool make_tensor_map(const RowTensor&, TensorMap&) const { return false; }
};

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
// This header opens GPUs, real and emulated, to programs without CUDA headers: memory, streams, events and graphs, just
// enough to run the operations and to time them. A program that has a cudaStream_t uses that instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "mla/backend.h"
#include "mla/status.h"
#include "mla/types.h"

namespace mla {

/// Marks a moment in a stream.
struct Event {
  void* handle = nullptr;
};

/// Holds launches that a stream captured, to be replayed.
struct Graph {
  void* handle = nullptr;
};

namespace cuda {
class DeviceRuntime;
}

/// Stands for a GPU of this machine, or for an emulated one whose memory is host memory. On an emulated GPU work is
/// done as soon as it is enqueued, and captures refuse what those of a real GPU refuse. A Gpu is cheap to copy. The
/// caller destroys the memory, streams, events and graphs that it creates.
class Gpu {
 public:
  /// Opens "cuda", "cuda:1", "emulated:sm90".
  static Result<Gpu> open(std::string_view device);

  const std::string& name() const;  ///< returns a name for ContextOptions::device: "cuda:1", "emulated:sm90"
  const GpuInfo& info() const;
  bool emulated() const;
  Device device() const;  ///< returns the device of tensors in its memory

  Result<void*> allocate(size_t bytes) const;  ///< returns memory aligned to 256 bytes; 0 bytes are null
  Status free(void* memory) const;             ///< ignores null

  /// Copies to, from or within the GPU's memory, or between memory of the host, and returns when done.
  Status copy(void* to, const void* from, size_t bytes) const;
  /// These two enqueue a copy and a fill. Host memory must stay valid and unchanged until the stream has done it.
  Status copy(void* to, const void* from, size_t bytes, Stream stream) const;
  Status fill(void* to, uint8_t value, size_t bytes, Stream stream) const;

  Result<Stream> create_stream() const;
  Status destroy(Stream stream) const;
  Status synchronize(Stream stream) const;  ///< waits for the stream; errors of earlier kernels appear here

  Result<Event> create_event() const;
  Status destroy(Event event) const;
  Status record(Event event, Stream stream) const;
  /// Makes later work of `stream` wait for the event.
  Status wait(Event event, Stream stream) const;
  Status synchronize(Event event) const;
  /// Returns the time between two events that have passed.
  Result<float> elapsed_ms(Event from, Event to) const;

  /// Makes `stream` record instead of compute, until end_capture(). Meanwhile waiting for it, every allocation and
  /// every copy that waits is an error. The default stream cannot be captured.
  Status begin_capture(Stream stream) const;
  Result<Graph> end_capture(Stream stream) const;
  Status launch(Graph graph, Stream stream) const;
  Status destroy(Graph graph) const;

  /// Enqueues a kernel that reads `bytes` bytes, a multiple of 16, once. Like the next two it is timed to learn what
  /// the GPU can do at best. `sink` is 4 bytes of its memory, which do not change.
  Status enqueue_read(const void* data, size_t bytes, void* sink, Stream stream) const;
  /// Enqueues a kernel that copies `bytes` bytes, a multiple of 16.
  Status enqueue_copy(void* to, const void* from, size_t bytes, Stream stream) const;
  /// Enqueues a kernel that multiplies tiles, `rounds` times in every warp: of bf16 by mma.sync or by wgmma, of e4m3 by
  /// mma.sync. It is unsupported where the GPU has no such instruction. Returns the floating-point operations that this
  /// takes.
  enum class Multiply : uint8_t { kMmaSync, kWgmma, kMmaSyncE4M3 };
  Result<double> enqueue_multiply(Multiply how, int32_t rounds, void* sink, Stream stream) const;

 private:
  explicit Gpu(cuda::DeviceRuntime* runtime) : runtime_(runtime) {}
  cuda::DeviceRuntime* runtime_;  // exists as long as the process
};

}  // namespace mla

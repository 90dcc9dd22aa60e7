// SPDX-License-Identifier: Apache-2.0
// GPUs, real and emulated, for programs that bring no CUDA headers of their own: memory, streams, events and graphs,
// just enough to feed the operations and to time them. A program that has a cudaStream_t uses that instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "mla/backend.h"
#include "mla/status.h"
#include "mla/types.h"

namespace mla {

/// A moment in a stream.
struct Event {
  void* handle = nullptr;
};

/// Launches that a stream captured, to be replayed.
struct Graph {
  void* handle = nullptr;
};

namespace cuda {
class DeviceRuntime;
}

/// A GPU of this machine, or an emulated one whose memory is host memory: everything on it happens at once, and its
/// captures refuse what those of a real GPU refuse. Cheap to copy. Whoever creates memory, streams, events and graphs
/// destroys them.
class Gpu {
 public:
  /// "cuda", "cuda:1", "emulated:sm90".
  static Result<Gpu> open(std::string_view device);

  const std::string& name() const;  ///< "cuda:1", "emulated:sm90": as ContextOptions takes it
  const GpuInfo& info() const;
  bool emulated() const;
  Device device() const;  ///< for tensors in its memory

  Result<void*> allocate(size_t bytes) const;  ///< aligned to 256 bytes; 0 bytes are null
  Status free(void* memory) const;             ///< null is nothing

  /// To, from or within the GPU's memory, or between the host's; returns when done.
  Status copy(void* to, const void* from, size_t bytes) const;
  /// In the order of the stream. Host memory must live, unchanged, until the stream has come by.
  Status copy(void* to, const void* from, size_t bytes, Stream stream) const;
  Status fill(void* to, uint8_t value, size_t bytes, Stream stream) const;

  Result<Stream> create_stream() const;
  Status destroy(Stream stream) const;
  Status synchronize(Stream stream) const;  ///< waits; errors of earlier kernels appear here

  Result<Event> create_event() const;
  Status destroy(Event event) const;
  Status record(Event event, Stream stream) const;
  /// What comes after in `stream` waits for the event.
  Status wait(Event event, Stream stream) const;
  Status synchronize(Event event) const;
  /// Between two events that have passed.
  Result<float> elapsed_ms(Event from, Event to) const;

  /// From here on `stream` records instead of computing. Meanwhile whatever waits for it, and every allocation and
  /// waiting copy, is an error. Not for the default stream.
  Status begin_capture(Stream stream) const;
  Result<Graph> end_capture(Stream stream) const;
  Status launch(Graph graph, Stream stream) const;
  Status destroy(Graph graph) const;

  /// What the GPU can do at best, as kernels to be timed. `sink` is 4 bytes of its memory that stay as they are.
  /// Reads `bytes`, a multiple of 16, once.
  Status enqueue_read(const void* data, size_t bytes, void* sink, Stream stream) const;
  /// Copies `bytes`, a multiple of 16, by a kernel.
  Status enqueue_copy(void* to, const void* from, size_t bytes, Stream stream) const;
  /// Multiplies bf16 tiles in registers, by mma.sync or by wgmma (unsupported where the GPU has none), `rounds` times
  /// in every warp. The floating-point operations that this takes.
  enum class Multiply : uint8_t { kMmaSync, kWgmma };
  Result<double> enqueue_multiply(Multiply how, int32_t rounds, void* sink, Stream stream) const;

 private:
  explicit Gpu(cuda::DeviceRuntime* runtime) : runtime_(runtime) {}
  cuda::DeviceRuntime* runtime_;  // lives as long as the process
};

}  // namespace mla

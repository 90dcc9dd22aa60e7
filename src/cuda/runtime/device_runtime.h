// SPDX-License-Identifier: Apache-2.0
// This is the implementation of mla/device.h for a GPU of this machine (through the CUDA runtime) or for an emulated
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cuda/border/queue.h"
#include "cuda/runtime/code.h"
#include "mla/backend.h"
#include "mla/device.h"
#include "mla/status.h"

namespace mla::cuda {

class DeviceRuntime {
 public:
  DeviceRuntime() = default;
  virtual ~DeviceRuntime() = default;
  DeviceRuntime(const DeviceRuntime&) = delete;
  DeviceRuntime& operator=(const DeviceRuntime&) = delete;

  const std::string& name() const { return name_; }
  const GpuInfo& info() const { return info_; }
  const DeviceProperties& properties() const { return properties_; }
  const Code& code() const { return code_; }
  virtual bool emulated() const = 0;

  virtual Result<void*> allocate(size_t bytes) = 0;
  virtual Status free(void* memory) = 0;
  virtual Status copy(void* to, const void* from, size_t bytes) = 0;
  virtual Status copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual Status fill(void* to, uint8_t value, size_t bytes, Stream stream) = 0;
  virtual Result<Stream> create_stream() = 0;
  virtual Status destroy(Stream stream) = 0;
  virtual Status synchronize(Stream stream) = 0;
  virtual Result<Event> create_event() = 0;
  virtual Status destroy(Event event) = 0;
  virtual Status record(Event event, Stream stream) = 0;
  virtual Status wait(Event event, Stream stream) = 0;
  virtual Status synchronize(Event event) = 0;
  virtual Result<float> elapsed_ms(Event from, Event to) = 0;
  virtual Status begin_capture(Stream stream) = 0;
  virtual Result<Graph> end_capture(Stream stream) = 0;
  virtual Status launch(Graph graph, Stream stream) = 0;
  virtual Status destroy(Graph graph) = 0;
  /// Calls f with a queue whose launches go into the stream.
  virtual Status with_queue(Stream stream, const std::function<Status(Queue&)>& f) = 0;
  /// Checks that kernels may read and write there, else fails with "expected memory of cuda:0, got the host's". It is
  /// for memory that is given without a device (the workspace); tensors say where they are.
  virtual Status check_memory(const void* memory) const = 0;

 protected:
  DeviceRuntime(std::string name, GpuInfo info, Code code);

 private:
  std::string name_;
  GpuInfo info_;
  DeviceProperties properties_;
  Code code_;
};

/// Returns GPU `index` of this process, which lives as long as the process. An error says what is missing: the build's
/// code, the driver, a driver that is new enough, or the GPU.
Result<DeviceRuntime*> cuda_device(int32_t index);
/// Returns how many GPUs this process can use; 0 also without a driver.
int32_t num_cuda_devices();
/// Holds the CUDA versions of driver and build: 13000 means 13.0, and 0 that there is none.
struct Versions {
  int32_t driver = 0, runtime = 0;
};
Versions cuda_versions();

/// Returns the emulated GPU of an architecture that this build has the emulator's code for (emulated_code); there is
/// one for each, which lives as long as the process.
Result<DeviceRuntime*> emulated_device(int32_t arch);

/// Refuses launches that no GPU would take: blocks, grids or shared memory beyond the limits. Errors read "decode:
/// expected at most 101376 bytes of shared memory (sm89), got 120000".
Status check_launch(const KernelEntry& kernel, const LaunchShape& shape, const DeviceProperties& device);

}  // namespace mla::cuda

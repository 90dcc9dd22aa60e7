// SPDX-License-Identifier: Apache-2.0
// This file uses the GPUs of this machine through the CUDA runtime. The runtime is linked statically and loads the
// driver's library when it is first called, so that everything else works without a driver.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/format.h"
#include "cuda/runtime/cuda_error.h"
#include "cuda/runtime/stream_queue.h"

namespace mla::cuda {

Status status_of(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  const StatusCode code = error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle
                              ? StatusCode::kInvalidArgument
                              : StatusCode::kInternal;
  return {code, core::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

Versions cuda_versions() {
  int driver = 0;
  int runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  return {.driver = driver, .runtime = runtime};
}

namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t event_of(Event event) { return static_cast<cudaEvent_t>(event.handle); }
cudaGraphExec_t graph_of(Graph graph) { return static_cast<cudaGraphExec_t>(graph.handle); }

int32_t attribute(cudaDeviceAttr which, int32_t index) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, index) == cudaSuccess ? value : 0;
}

GpuInfo info_of(int32_t index) {
  GpuInfo info{.index = index};
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
    info.name = properties.name;
    info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    info.uuid = "GPU-";
    for (int i = 0; i < 16; ++i) {
      if (i == 4 || i == 6 || i == 8 || i == 10) info.uuid += '-';
      info.uuid += core::format("{:02x}", static_cast<unsigned char>(properties.uuid.bytes[i]));
    }
  }
  char location[32] = {};
  if (cudaDeviceGetPCIBusId(location, sizeof location, index) == cudaSuccess) info.bus_location = location;
  info.arch =
      attribute(cudaDevAttrComputeCapabilityMajor, index) * 10 + attribute(cudaDevAttrComputeCapabilityMinor, index);
  info.num_sms = attribute(cudaDevAttrMultiProcessorCount, index);
  info.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  return info;
}

/// Returns the GPU as what it passes for, if this build has a profile for it.
GpuInfo under_profile(GpuInfo info) {
  if (profile().arch == 0 || info.arch != profile().gpu) return info;
  info.arch = profile().arch;
  info.name += core::format(" as sm{}", info.arch);
  info.shared_bytes_per_block = std::min(info.shared_bytes_per_block, shared_bytes_of(info.arch));
  return info;
}

/// Returns the code that a GPU runs. A profile's code is not for the GPUs of the architecture that it was written for.
Code code_of(const GpuInfo& gpu) {
  if (profile().arch != 0 && gpu.arch != profile().gpu) return {};
  return code_for(profile().arch != 0 ? profile().arch : gpu.arch);
}

class CudaDevice final : public DeviceRuntime {
 public:
  explicit CudaDevice(const GpuInfo& info)
      : DeviceRuntime(core::format("cuda:{}", info.index), under_profile(info), code_of(info)) {}

  bool emulated() const override { return false; }

  Result<void*> allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes == 0) return memory;
    const Status status =
        on_device(core::format("allocate {} bytes", bytes), [&] { return cudaMalloc(&memory, bytes); });
    if (!status.ok()) return status;
    return memory;
  }
  Status free(void* memory) override {
    return on_device("free", [&] { return cudaFree(memory); });
  }
  Status copy(void* to, const void* from, size_t bytes) override {
    return on_device("copy", [&] { return bytes == 0 ? cudaSuccess : cudaMemcpy(to, from, bytes, cudaMemcpyDefault); });
  }
  Status copy(void* to, const void* from, size_t bytes, Stream stream) override {
    return on_device("copy", [&] {
      return bytes == 0 ? cudaSuccess : cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream));
    });
  }
  Status fill(void* to, uint8_t value, size_t bytes, Stream stream) override {
    return on_device("fill",
                     [&] { return bytes == 0 ? cudaSuccess : cudaMemsetAsync(to, value, bytes, stream_of(stream)); });
  }

  Result<Stream> create_stream() override {
    cudaStream_t stream = nullptr;
    const Status status =
        on_device("create_stream", [&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); });
    if (!status.ok()) return status;
    return Stream{.handle = stream};
  }
  Status destroy(Stream stream) override {
    return on_device("destroy stream", [&] { return cudaStreamDestroy(stream_of(stream)); });
  }
  Status synchronize(Stream stream) override {
    return on_device("synchronize", [&] { return cudaStreamSynchronize(stream_of(stream)); });
  }

  Result<Event> create_event() override {
    cudaEvent_t event = nullptr;
    const Status status = on_device("create_event", [&] { return cudaEventCreate(&event); });
    if (!status.ok()) return status;
    return Event{.handle = event};
  }
  Status destroy(Event event) override {
    return on_device("destroy event", [&] { return cudaEventDestroy(event_of(event)); });
  }
  Status record(Event event, Stream stream) override {
    return on_device("record", [&] { return cudaEventRecord(event_of(event), stream_of(stream)); });
  }
  Status wait(Event event, Stream stream) override {
    return on_device("wait", [&] { return cudaStreamWaitEvent(stream_of(stream), event_of(event), 0); });
  }
  Status synchronize(Event event) override {
    return on_device("synchronize", [&] { return cudaEventSynchronize(event_of(event)); });
  }
  Result<float> elapsed_ms(Event from, Event to) override {
    float ms = 0.0F;
    const Status status =
        on_device("elapsed_ms", [&] { return cudaEventElapsedTime(&ms, event_of(from), event_of(to)); });
    if (!status.ok()) return status;
    return ms;
  }

  Status begin_capture(Stream stream) override {
    return on_device("begin_capture",
                     [&] { return cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal); });
  }
  Result<Graph> end_capture(Stream stream) override {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    Status status = on_device("end_capture", [&] { return cudaStreamEndCapture(stream_of(stream), &graph); });
    if (!status.ok()) return status;
    status = on_device("end_capture: instantiate", [&] { return cudaGraphInstantiate(&ready, graph, 0); });
    cudaGraphDestroy(graph);
    if (!status.ok()) return status;
    return Graph{.handle = ready};
  }
  Status launch(Graph graph, Stream stream) override {
    return on_device("launch", [&] { return cudaGraphLaunch(graph_of(graph), stream_of(stream)); });
  }
  Status destroy(Graph graph) override {
    return on_device("destroy graph", [&] { return cudaGraphExecDestroy(graph_of(graph)); });
  }

  Status with_queue(Stream stream, const std::function<Status(Queue&)>& f) override {
    StreamQueue queue(*this, stream);
    return f(queue);
  }

  Status check_memory(const void* memory) const override {
    cudaPointerAttributes attributes{};
    if (Status status = status_of(cudaPointerGetAttributes(&attributes, memory), "pointer"); !status.ok())
      return status;
    if (attributes.type == cudaMemoryTypeManaged) return {};
    if (attributes.type == cudaMemoryTypeDevice && attributes.device == info().index) return {};
    return {StatusCode::kInvalidArgument,
            attributes.type == cudaMemoryTypeDevice
                ? core::format("expected memory of {}, got memory of cuda:{}", name(), attributes.device)
                : core::format("expected memory of {}, got the host's", name())};
  }

 private:
  template <class F>
  Status on_device(std::string_view what, const F& f) const {
    const CurrentDevice current(info().index);
    const cudaError_t error = current.error() != cudaSuccess ? current.error() : f();
    if (error == cudaSuccess) return {};
    return status_of(error, core::format("{}: {}", name(), what));
  }
};

std::string version_text(int32_t version) { return core::format("{}.{}", version / 1000, version % 1000 / 10); }

/// Returns why there is no GPU at all.
Status no_device(cudaError_t error) {
  const Versions versions = cuda_versions();
  cudaGetLastError();
  if (versions.driver == 0) return {StatusCode::kUnsupported, "no NVIDIA driver is installed"};
  if (error == cudaErrorInsufficientDriver)
    return {StatusCode::kUnsupported,
            core::format("the NVIDIA driver is too old: it supports CUDA {}, this build needs {}",
                         version_text(versions.driver), version_text(versions.runtime))};
  if (error == cudaErrorNoDevice) return {StatusCode::kUnsupported, "the NVIDIA driver lists no GPU for this process"};
  return status_of(error, "the NVIDIA driver cannot be used");
}

/// Holds the driver's first answer, which does not change while the process lives.
struct Devices {
  Status error;
  std::vector<std::unique_ptr<CudaDevice>> devices;

  Devices() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
      error = no_device(status == cudaSuccess ? cudaErrorNoDevice : status);
      return;
    }
    for (int32_t index = 0; index < count; ++index) devices.push_back(std::make_unique<CudaDevice>(info_of(index)));
  }
};

const Devices& all_devices() {
  static const Devices devices;
  return devices;
}

}  // namespace

int32_t num_cuda_devices() { return static_cast<int32_t>(all_devices().devices.size()); }

Result<DeviceRuntime*> cuda_device(int32_t index) {
  const Devices& all = all_devices();
  if (!all.error.ok()) return all.error;
  if (index >= 0 && index < num_cuda_devices())
    return static_cast<DeviceRuntime*>(all.devices[static_cast<size_t>(index)].get());
  return Status(StatusCode::kUnsupported, core::format("there is no cuda:{}: the NVIDIA driver lists {} GPU{}", index,
                                                       num_cuda_devices(), num_cuda_devices() == 1 ? "" : "s"));
}

}  // namespace mla::cuda

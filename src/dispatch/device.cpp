// SPDX-License-Identifier: Apache-2.0
// Implements mla/device.h by the runtimes of src/cuda/runtime.
#include "mla/device.h"

#include "core/format.h"
#include "cuda/runtime/device_runtime.h"
#include "dispatch/guard.h"
#include "dispatch/place.h"

namespace mla {

using dispatch::guarded;

Result<Gpu> Gpu::open(std::string_view device) {
  return guarded([&]() -> Result<Gpu> {
    using Kind = dispatch::DeviceChoice::Kind;
    const Result<dispatch::DeviceChoice> choice = dispatch::parse_device(device, "gpu", "device");
    if (!choice.ok()) return choice.status();
    if (choice->kind != Kind::kCuda && choice->kind != Kind::kEmulated)
      return Status(StatusCode::kInvalidArgument,
                    core::format("gpu: device: expected cuda, cuda:<index> or emulated:sm<arch>, got \"{}\"", device));
    const Result<cuda::DeviceRuntime*> runtime =
        choice->kind == Kind::kCuda ? cuda::cuda_device(choice->index) : cuda::emulated_device(choice->arch);
    if (!runtime.ok()) return Status(runtime.status().code(), core::format("gpu: {}", runtime.status().message()));
    return Gpu(*runtime);
  });
}

const std::string& Gpu::name() const { return runtime_->name(); }
const GpuInfo& Gpu::info() const { return runtime_->info(); }
bool Gpu::emulated() const { return runtime_->emulated(); }
Device Gpu::device() const { return {DeviceType::kCuda, emulated() ? 0 : info().index}; }

Result<void*> Gpu::allocate(size_t bytes) const {
  return guarded([&] { return runtime_->allocate(bytes); });
}
Status Gpu::free(void* memory) const {
  return guarded([&] { return runtime_->free(memory); });
}
Status Gpu::copy(void* to, const void* from, size_t bytes) const {
  return guarded([&] { return runtime_->copy(to, from, bytes); });
}
Status Gpu::copy(void* to, const void* from, size_t bytes, Stream stream) const {
  return guarded([&] { return runtime_->copy(to, from, bytes, stream); });
}
Status Gpu::fill(void* to, uint8_t value, size_t bytes, Stream stream) const {
  return guarded([&] { return runtime_->fill(to, value, bytes, stream); });
}

Result<Stream> Gpu::create_stream() const {
  return guarded([&] { return runtime_->create_stream(); });
}
Status Gpu::destroy(Stream stream) const {
  return guarded([&] { return runtime_->destroy(stream); });
}
Status Gpu::synchronize(Stream stream) const {
  return guarded([&] { return runtime_->synchronize(stream); });
}

Result<Event> Gpu::create_event() const {
  return guarded([&] { return runtime_->create_event(); });
}
Status Gpu::destroy(Event event) const {
  return guarded([&] { return runtime_->destroy(event); });
}
Status Gpu::record(Event event, Stream stream) const {
  return guarded([&] { return runtime_->record(event, stream); });
}
Status Gpu::wait(Event event, Stream stream) const {
  return guarded([&] { return runtime_->wait(event, stream); });
}
Status Gpu::synchronize(Event event) const {
  return guarded([&] { return runtime_->synchronize(event); });
}
Result<float> Gpu::elapsed_ms(Event from, Event to) const {
  return guarded([&] { return runtime_->elapsed_ms(from, to); });
}

Status Gpu::begin_capture(Stream stream) const {
  return guarded([&] { return runtime_->begin_capture(stream); });
}
Result<Graph> Gpu::end_capture(Stream stream) const {
  return guarded([&] { return runtime_->end_capture(stream); });
}
Status Gpu::launch(Graph graph, Stream stream) const {
  return guarded([&] { return runtime_->launch(graph, stream); });
}
Status Gpu::destroy(Graph graph) const {
  return guarded([&] { return runtime_->destroy(graph); });
}

namespace {

/// Holds a kernel that multiplies, null where the architecture has none, and counts its operations.
struct Multiplication {
  std::string_view name;
  Status (*run)(int32_t rounds, uint32_t* sink, cuda::Queue& queue);
  double (*flops)(int32_t rounds, const cuda::DeviceProperties& device);
};

Multiplication multiplication_of(const cuda::CeilingKernels& kernels, Gpu::Multiply how) {
  switch (how) {
    case Gpu::Multiply::kWgmma: return {"wgmma", kernels.wgmma_bf16, kernels.wgmma_bf16_flops};
    case Gpu::Multiply::kMmaSyncE4M3: return {"mma.sync on e4m3", kernels.mma_e4m3, kernels.mma_e4m3_flops};
    case Gpu::Multiply::kMmaSync: break;
  }
  return {"mma.sync", kernels.mma_bf16, kernels.mma_bf16_flops};
}

/// Calls f(kernels, queue) with the ceiling kernels and a queue on `stream`. Fails if this build has no such kernels
/// for the device.
template <class F>
Status with_ceilings(cuda::DeviceRuntime& runtime, Stream stream, const F& f) {
  return guarded([&]() -> Status {
    const cuda::CeilingKernels* const kernels = runtime.code().ceilings;
    if (kernels == nullptr)
      return {StatusCode::kUnsupported, core::format("this build has no code for {}", runtime.name())};
    return runtime.with_queue(stream, [&](cuda::Queue& queue) { return f(*kernels, queue); });
  });
}

}  // namespace

Status Gpu::enqueue_read(const void* data, size_t bytes, void* sink, Stream stream) const {
  return with_ceilings(*runtime_, stream, [&](const cuda::CeilingKernels& kernels, cuda::Queue& queue) {
    return kernels.read(static_cast<const std::byte*>(data), bytes, static_cast<uint32_t*>(sink), queue);
  });
}

Status Gpu::enqueue_copy(void* to, const void* from, size_t bytes, Stream stream) const {
  return with_ceilings(*runtime_, stream, [&](const cuda::CeilingKernels& kernels, cuda::Queue& queue) {
    return kernels.copy(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, queue);
  });
}

Result<double> Gpu::enqueue_multiply(Multiply how, int32_t rounds, void* sink, Stream stream) const {
  double flops = 0.0;
  const Status status =
      with_ceilings(*runtime_, stream, [&](const cuda::CeilingKernels& kernels, cuda::Queue& queue) -> Status {
        const Multiplication found = multiplication_of(kernels, how);
        if (found.run == nullptr)
          return {StatusCode::kUnsupported, core::format("{} has no {}", runtime_->name(), found.name)};
        flops = found.flops(rounds, queue.device());
        return found.run(rounds, static_cast<uint32_t*>(sink), queue);
      });
  if (!status.ok()) return status;
  return flops;
}

}  // namespace mla

// SPDX-License-Identifier: Apache-2.0
// An emulated GPU has host memory, the emulator's kernels and the recorder's streams.
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "core/format.h"
#include "cuda/runtime/emulated_map.h"
#include "cuda/runtime/emulated_queue.h"
#include "cuda/runtime/recorder.h"
#include "emulator/emulator.h"

namespace mla::cuda {
namespace {

constexpr size_t kAlignment = 256;

GpuInfo emulated_info(int32_t arch) {
  // Enough for work to be split; with more, the small problems of tests would be split too finely.
  constexpr int32_t kNumSms = 6;
  constexpr int64_t kL2Bytes = 4 << 20;
  return {.name = core::format("emulated sm{}", arch),
          .arch = arch,
          .num_sms = kNumSms,
          .memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE),
          .shared_bytes_per_block = shared_bytes_of(arch),
          .l2_bytes = kL2Bytes};
}

Status compute(core::ThreadPool& pool, const KernelEntry& kernel, const LaunchShape& shape, const void* params,
               int32_t shared_limit) {
  return emulator::run({.name = kernel.name,
                        .entry = reinterpret_cast<void (*)(const void*)>(const_cast<void*>(kernel.function)),
                        .params = params,
                        .grid_x = shape.grid_x,
                        .grid_y = shape.grid_y,
                        .grid_z = shape.grid_z,
                        .cluster = shape.cluster,
                        .threads = kernel.threads,
                        .shared_bytes = shape.shared_bytes,
                        .shared_limit = shared_limit,
                        .seed = emulator_seed().load(std::memory_order_relaxed),
                        .e4m3_sums_in_f32 = emulator_sums_in_f32().load(std::memory_order_relaxed)},
                       pool);
}

/// Returns the threads for work that belongs to no context: graphs, which outlive the context that captured them, and
/// ceilings.
core::ThreadPool& shared_threads() {
  static core::ThreadPool pool(std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency())), {});
  return pool;
}

class EmulatedDevice final : public DeviceRuntime {
 public:
  EmulatedDevice(int32_t arch, Code code)
      : DeviceRuntime(core::format("emulated:sm{}", arch), emulated_info(arch), code) {}

  bool emulated() const override { return true; }

  Result<void*> allocate(size_t bytes) override {
    if (Status status = recorder().unsafe("allocate"); !status.ok()) return status;
    if (bytes == 0) return static_cast<void*>(nullptr);
    if (void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment))
      return memory;
    return Status(StatusCode::kInternal, core::format("{}: allocate {} bytes: out of memory", name(), bytes));
  }
  Status free(void* memory) override {
    Status status = recorder().unsafe("free");
    if (status.ok()) std::free(memory);
    return status;
  }
  Status copy(void* to, const void* from, size_t bytes) override {
    Status status = recorder().unsafe("copy");
    if (status.ok() && bytes > 0) std::memcpy(to, from, bytes);
    return status;
  }
  Status copy(void* to, const void* from, size_t bytes, Stream stream) override {
    return recorder().enqueue(stream, [=]() -> Status {
      if (bytes > 0) std::memcpy(to, from, bytes);
      return {};
    });
  }
  Status fill(void* to, uint8_t value, size_t bytes, Stream stream) override {
    return recorder().enqueue(stream, [=]() -> Status {
      if (bytes > 0) std::memset(to, value, bytes);
      return {};
    });
  }
  Result<Stream> create_stream() override { return recorder().create_stream(); }
  Status destroy(Stream stream) override { return recorder().destroy(stream); }
  Status synchronize(Stream stream) override { return recorder().synchronize(stream); }
  Result<Event> create_event() override { return recorder().create_event(); }
  Status destroy(Event event) override { return recorder().destroy(event); }
  Status record(Event event, Stream stream) override { return recorder().record(event, stream); }
  Status wait(Event event, Stream stream) override { return recorder().wait(event, stream); }
  Status synchronize(Event event) override { return recorder().synchronize(event); }
  Result<float> elapsed_ms(Event from, Event to) override { return recorder().elapsed_ms(from, to); }
  Status begin_capture(Stream stream) override { return recorder().begin_capture(stream); }
  Result<Graph> end_capture(Stream stream) override { return recorder().end_capture(stream); }
  Status launch(Graph graph, Stream stream) override { return recorder().launch(graph, stream); }
  Status destroy(Graph graph) override { return recorder().destroy(graph); }

  Status with_queue(Stream stream, const std::function<Status(Queue&)>& f) override {
    EmulatedQueue queue(*this, shared_threads(), stream);
    return f(queue);
  }
  Status check_memory(const void*) const override { return {}; }
};

}  // namespace

std::atomic<bool>& emulator_sums_in_f32() {
  static std::atomic<bool> in_f32{false};
  return in_f32;
}

std::atomic<uint64_t>& emulator_seed() {
  static std::atomic<uint64_t> seed = [] {
    const char* text = std::getenv("MLA_EMULATE_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : 0;
  }();
  return seed;
}

Status EmulatedQueue::launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) {
  if (shape.grid_x <= 0 || shape.grid_y <= 0 || shape.grid_z <= 0) return {};
  const int32_t shared_limit = device().shared_bytes_per_block;
  if (Status status = check_launch(kernel, shape, device()); !status.ok()) return status;
  const Result<bool> recording = recorder().capturing(stream_);
  if (!recording.ok()) return recording.status();
  if (!*recording) return compute(pool_, kernel, shape, params, shared_limit);
  struct alignas(TensorMap) Chunk {
    std::byte bytes[alignof(TensorMap)];
  };
  const auto bytes = static_cast<size_t>(kernel.params_bytes);
  std::vector<Chunk> copy((bytes + sizeof(Chunk) - 1) / sizeof(Chunk));
  std::memcpy(copy.data(), params, bytes);
  return recorder().enqueue(stream_, [kernel, shape, shared_limit, copy = std::move(copy)] {
    return compute(shared_threads(), kernel, shape, copy.data(), shared_limit);
  });
}

bool EmulatedQueue::make_tensor_map(const RowTensor& tensor, TensorMap& map) const {
  return device().arch >= 90 && make_emulated_map(tensor, map);
}

Result<DeviceRuntime*> emulated_device(int32_t arch) {
  static const std::vector<std::unique_ptr<EmulatedDevice>> devices = [] {
    std::vector<std::unique_ptr<EmulatedDevice>> all;
    std::vector<int32_t> archs(emulated_archs().begin(), emulated_archs().end());
    for (const int32_t kindred : kKindredArchs)
      if (std::find(archs.begin(), archs.end(), kindred) == archs.end()) archs.push_back(kindred);
    for (const int32_t each : archs)
      if (const Code code = emulated_code(each); code.arch != 0)
        all.push_back(std::make_unique<EmulatedDevice>(each, code));
    return all;
  }();
  for (const auto& device : devices)
    if (device->info().arch == arch) return static_cast<DeviceRuntime*>(device.get());
  if (devices.empty()) return Status(StatusCode::kUnsupported, "this build of the library has no emulator");
  return Status(StatusCode::kUnsupported,
                core::format("this build emulates sm{}, not sm{}", fmt::join(emulated_archs(), ", sm"), arch));
}

}  // namespace mla::cuda

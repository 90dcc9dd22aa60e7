// SPDX-License-Identifier: Apache-2.0
#include "kit/device.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

namespace mla::kit {
namespace {

constexpr std::string_view kEmulated = "emulated:sm";
constexpr std::string_view kCuda = "cuda";
constexpr std::string_view kArch = "sm";

int32_t number_behind(std::string_view text, std::string_view prefix) {
  int32_t number = 0;
  if (text.size() > prefix.size()) std::from_chars(text.data() + prefix.size(), text.data() + text.size(), number);
  return number;
}

}  // namespace

Problem on_device(Problem problem, std::string_view device) {
  if (device.starts_with(kEmulated)) {
    problem.device = {.type = DeviceType::kCuda, .index = 0};
    problem.gpu_arch = number_behind(device, kEmulated);
    problem.emulated = true;
  } else if (device.starts_with(kCuda)) {
    problem.device = {.type = DeviceType::kCuda, .index = number_behind(device, "cuda:")};
  } else if (device.starts_with(kArch)) {
    problem.device = {.type = DeviceType::kCuda, .index = 0};
    problem.gpu_arch = number_behind(device, kArch);
  }
  return problem;
}

bool is_gpu_backend(std::string_view name) {
  const std::vector<BackendInfo> all = backends();
  return std::any_of(all.begin(), all.end(), [&](const BackendInfo& backend) {
    return backend.name == name && backend.device == DeviceType::kCuda;
  });
}

std::vector<std::string> gpu_backends(int32_t arch) {
  std::vector<std::string> names;
  for (const BackendInfo& backend : backends()) {
    const std::vector<int32_t>& archs = backend.archs;
    if (backend.device == DeviceType::kCuda &&
        (archs.empty() || std::find(archs.begin(), archs.end(), arch) != archs.end()))
      names.push_back(backend.name);
  }
  return names;
}

int32_t arch_of(std::string_view device) {
  const Problem problem = on_device({}, device);
  if (problem.gpu_arch != 0) return problem.gpu_arch;
  for (const GpuInfo& gpu : machine_info().gpus)
    if (problem.device == Device{DeviceType::kCuda, gpu.index}) return gpu.arch;
  return 0;
}

Result<DeviceImage> DeviceImage::create(const std::string& device, const std::vector<const Buffer*>& buffers) {
  DeviceImage image;
  if (!device.starts_with(kCuda)) return image;
  Result<Gpu> gpu = Gpu::open(device);
  if (!gpu.ok()) return gpu.status();
  image.gpu_ = std::move(gpu).value();
  for (const Buffer* buffer : buffers)
    if (Status status = image.add(*buffer); !status.ok()) return status;
  return image;
}

DeviceImage& DeviceImage::operator=(DeviceImage&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(copies_, other.copies_);
  return *this;
}

DeviceImage::~DeviceImage() {
  for (const Copy& copy : copies_) static_cast<void>(gpu_->free(copy.memory));
}

size_t DeviceImage::bytes() const {
  size_t sum = 0;
  for (const Copy& copy : copies_) sum += copy.host.size();
  return sum;
}

Status DeviceImage::add(const Buffer& buffer) {
  if (!moves() || buffer.data() == nullptr) return {};
  const std::span<std::byte> whole = buffer.with_guards();
  Result<void*> memory = gpu_->allocate(whole.size());
  if (!memory.ok()) return memory.status();
  copies_.push_back({.host = whole, .memory = static_cast<std::byte*>(*memory)});
  return gpu_->copy(*memory, whole.data(), whole.size());
}

const DeviceImage::Copy* DeviceImage::find(const Buffer& buffer) const {
  const auto found = std::find_if(copies_.begin(), copies_.end(),
                                  [&](const Copy& copy) { return copy.host.data() == buffer.with_guards().data(); });
  return found == copies_.end() ? nullptr : &*found;
}

// A view of nothing we know stays where it is: the library will say so.
void DeviceImage::move(TensorView& view) const {
  if (!view.given()) return;
  view.device = gpu_->device();
  const auto* data = static_cast<const std::byte*>(view.data);
  for (const Copy& copy : copies_) {
    if (data < copy.host.data() || data >= copy.host.data() + copy.host.size()) continue;
    view.data = copy.memory + (data - copy.host.data());
    return;
  }
}

std::span<std::byte> DeviceImage::there(const Buffer& buffer) const {
  const Copy* const copy = find(buffer);
  if (copy == nullptr) return buffer.bytes();
  return {copy->memory + (buffer.data() - buffer.with_guards().data()), buffer.size()};
}

Status DeviceImage::fetch(const std::vector<const Buffer*>& buffers) const {
  if (!moves()) return {};
  if (Status status = gpu_->synchronize(Stream{}); !status.ok()) return status;
  for (const Buffer* buffer : buffers) {
    const Copy* const copy = find(*buffer);
    if (copy == nullptr) continue;
    if (Status status = gpu_->copy(copy->host.data(), copy->memory, copy->host.size()); !status.ok()) return status;
  }
  return {};
}

Status DeviceImage::fetch() const {
  if (!moves()) return {};
  if (Status status = gpu_->synchronize(Stream{}); !status.ok()) return status;
  for (const Copy& copy : copies_)
    if (Status status = gpu_->copy(copy.host.data(), copy.memory, copy.host.size()); !status.ok()) return status;
  return {};
}

Fingerprint::Fingerprint(std::vector<const Buffer*> buffers, const std::vector<const Buffer*>& outputs)
    : buffers_(std::move(buffers)) {
  std::erase_if(buffers_, [&](const Buffer* buffer) {
    return std::find(outputs.begin(), outputs.end(), buffer) != outputs.end();
  });
  before_ = now();
}

bool Fingerprint::holds() const { return now() == before_; }

uint64_t Fingerprint::now() const {
  uint64_t hash = 0;
  for (const Buffer* buffer : buffers_) {
    const std::span<const std::byte> whole = buffer->with_guards();
    size_t at = 0;
    for (; at + sizeof hash <= whole.size(); at += sizeof hash) {
      uint64_t word = 0;
      std::memcpy(&word, whole.data() + at, sizeof word);
      hash = (hash ^ word) * 0x9E3779B97F4A7C15U;
      hash ^= hash >> 29;
    }
    for (; at < whole.size(); ++at) hash = (hash ^ std::to_integer<uint64_t>(whole[at])) * 0x9E3779B97F4A7C15U;
  }
  return hash;
}

}  // namespace mla::kit

// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/operations.h"

#include <numeric>

#include "mla/text.h"

namespace mla::cli::replay {
namespace {

constexpr size_t kAlignment = 256;

// Returns the bytes from a view's first element to the end of its last.
size_t extent_bytes(const TensorView& view) {
  if (!view.given() || view.numel() == 0) return 0;
  int64_t last = 0;
  for (size_t dim = 0; dim < static_cast<size_t>(view.ndim); ++dim) last += (view.shape[dim] - 1) * view.stride[dim];
  return static_cast<size_t>(last + 1) * size_of(view.dtype);
}

size_t place_bytes(const TensorView& view) { return (extent_bytes(view) + kAlignment - 1) / kAlignment * kAlignment; }

// Makes room for `bytes`, and half as much again, so that the buffer seldom grows.
void grow(GpuBuffer& buffer, const Gpu& gpu, size_t bytes) {
  if (bytes <= buffer.size()) return;
  buffer = {};
  buffer = GpuBuffer(gpu, bytes + bytes / 2);
}

}  // namespace

TensorView slice(TensorView view, int32_t dim, int64_t begin, int64_t count) {
  const auto d = static_cast<size_t>(dim);
  view.data = static_cast<std::byte*>(view.data) + begin * view.stride[d] * static_cast<int64_t>(size_of(view.dtype));
  view.shape[d] = count;
  return view;
}

GpuBuffer::GpuBuffer(const Gpu& gpu, size_t bytes) : gpu_(gpu), size_(bytes) {
  const Result<void*> memory = gpu.allocate(bytes);
  if (!memory.ok())
    throw UsageError("{}: no memory for {}: {}", gpu.name(), human_bytes(static_cast<double>(bytes)),
                     memory.status().message());
  data_ = static_cast<std::byte*>(*memory);
}

GpuBuffer::~GpuBuffer() {
  if (gpu_) static_cast<void>(gpu_->free(data_));
}

Operations::Operations(const Context& context) : context_(context) {
  if (context.device().empty() || context.device() == "cpu") return;
  Result<Gpu> gpu = Gpu::open(context.device());
  if (!gpu.ok()) throw UsageError("{}", gpu.status().message());
  gpu_ = std::move(gpu).value();
}

std::span<std::byte> Operations::workspace(size_t bytes) {
  if (gpu_) {
    grow(gpu_workspace_, *gpu_, bytes);
    return {gpu_workspace_.data(), gpu_workspace_.size()};
  }
  if (bytes > host_workspace_.size()) host_workspace_.resize(bytes + bytes / 2);
  return host_workspace_;
}

Status Operations::upload(std::span<TensorView* const> views) {
  const auto is_there = [&](const TensorView* view) { return view->device == gpu_->device(); };
  size_t bytes = 0;
  for (const TensorView* view : views)
    if (view->given() && !is_there(view)) bytes += place_bytes(*view);
  grow(tensors_, *gpu_, bytes);
  std::byte* next = tensors_.data();
  for (TensorView* view : views) {
    if (!view->given() || is_there(view)) continue;
    if (Status status = gpu_->copy(next, view->data, extent_bytes(*view)); !status.ok()) return status;
    view->data = next;
    view->device = gpu_->device();
    next += place_bytes(*view);
  }
  return {};
}

Status Operations::download(std::span<const TensorView> to, std::span<const TensorView> from) const {
  for (size_t i = 0; i < to.size(); ++i)
    if (Status status = gpu_->copy(to[i].data, from[i].data, extent_bytes(to[i])); !status.ok()) return status;
  return {};
}

}  // namespace mla::cli::replay

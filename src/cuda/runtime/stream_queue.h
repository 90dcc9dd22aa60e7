// SPDX-License-Identifier: Apache-2.0
// This is the queue of a stream of a real GPU.
#pragma once

#include "cuda/border/queue.h"
#include "cuda/runtime/device_runtime.h"

namespace mla::cuda {

/// A queue is only a pair of pointers, so that each call makes its own.
class StreamQueue final : public Queue {
 public:
  /// `runtime` is one of cuda_device().
  StreamQueue(const DeviceRuntime& runtime, Stream stream) : runtime_(runtime), stream_(stream) {}

  const DeviceProperties& device() const override { return runtime_.properties(); }
  /// Enqueues the kernel. It neither waits nor allocates.
  Status launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) override;
  bool make_tensor_map(const RowTensor& tensor, TensorMap& map) const override;

 private:
  const DeviceRuntime& runtime_;
  Stream stream_;
};

}  // namespace mla::cuda

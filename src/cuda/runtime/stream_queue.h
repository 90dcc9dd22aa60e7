// SPDX-License-Identifier: Apache-2.0
// Launches into a stream of a GPU.
#pragma once

#include "cuda/border/queue.h"
#include "cuda/runtime/device_runtime.h"

namespace mla::cuda {

/// Makes and is nothing but a pair of pointers: one for each call.
class StreamQueue final : public Queue {
 public:
  /// `runtime` is one of cuda_device().
  StreamQueue(const DeviceRuntime& runtime, Stream stream) : runtime_(runtime), stream_(stream) {}

  const DeviceProperties& device() const override { return runtime_.properties(); }
  /// Neither waits nor allocates.
  Status launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) override;

 private:
  const DeviceRuntime& runtime_;
  Stream stream_;
};

}  // namespace mla::cuda

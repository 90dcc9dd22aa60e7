// SPDX-License-Identifier: Apache-2.0
// This is the queue of an emulated GPU.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/thread_pool.h"
#include "cuda/border/queue.h"
#include "cuda/runtime/device_runtime.h"

namespace mla::cuda {

/// Returns the seed of the order of blocks and threads in later launches. It begins as MLA_EMULATE_SEED, or 0. Results
/// must not depend on it.
std::atomic<uint64_t>& emulator_seed();

/// Says of later launches how wgmma sums products of e4m3 (emulator::Launch::e4m3_sums_in_f32); false at first.
std::atomic<bool>& emulator_sums_in_f32();

/// Runs a kernel on the pool's threads before `launch` returns, or records it if the stream is being captured.
class EmulatedQueue final : public Queue {
 public:
  /// `runtime` is one of emulated_device().
  EmulatedQueue(const DeviceRuntime& runtime, core::ThreadPool& pool, Stream stream)
      : runtime_(runtime), pool_(pool), stream_(stream) {}

  const DeviceProperties& device() const override { return runtime_.properties(); }
  Status launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) override;
  bool make_tensor_map(const RowTensor& tensor, TensorMap& map) const override;

 private:
  const DeviceRuntime& runtime_;
  [[maybe_unused]] core::ThreadPool& pool_;  // unused in builds without the emulator
  Stream stream_;
};

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
// Declares a queue that runs the kernels of one emulated architecture at once, for tests below the public API.
#pragma once

#include <cstdint>

#include "core/thread_pool.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/machine.h"
#include "cuda/runtime/emulated_map.h"
#include "emulator/emulator.h"

namespace mla::emulated_test {

/// Stands for a GPU with the given number of SMs, whose threads run in an order that follows the seed.
class TestQueue final : public cuda::Queue {
 public:
  explicit TestQueue(uint64_t seed = 0, int32_t num_sms = 4)
      : seed_(seed),
        device_{.arch = MLA_CUDA_NAMESPACE::kArch,
                .num_sms = num_sms,
                .shared_bytes_per_block = MLA_CUDA_NAMESPACE::kSharedBytesPerBlock} {}

  /// Makes the threads of all launches from now on end where they wait for the grid before theirs.
  void let_previous_grid_run_for_ever() { previous_grid_ends_ = false; }
  /// Lets wgmma keep the bits of f32 of sums of e4m3 products, so that small errors show.
  void sum_e4m3_in_f32() { e4m3_sums_in_f32_ = true; }
  /// Lets make_tensor_map() make maps, as the emulated device does.
  void make_tensor_maps() { makes_maps_ = true; }
  const emulator::Counters& counters() const { return counters_; }

  const cuda::DeviceProperties& device() const override { return device_; }
  Status launch(const cuda::KernelEntry& kernel, const cuda::LaunchShape& shape, const void* params) override {
    static core::ThreadPool pool(1, {});
    return emulator::run({.name = kernel.name,
                          .entry = reinterpret_cast<void (*)(const void*)>(const_cast<void*>(kernel.function)),
                          .params = params,
                          .grid_x = shape.grid_x,
                          .grid_y = shape.grid_y,
                          .grid_z = shape.grid_z,
                          .cluster = shape.cluster,
                          .threads = kernel.threads,
                          .shared_bytes = shape.shared_bytes,
                          .shared_limit = device_.shared_bytes_per_block,
                          .seed = seed_,
                          .e4m3_sums_in_f32 = e4m3_sums_in_f32_,
                          .previous_grid_ends = previous_grid_ends_,
                          .counters = &counters_},
                         pool);
  }
  bool make_tensor_map(const cuda::RowTensor& tensor, cuda::TensorMap& map) const override {
    return makes_maps_ && cuda::make_emulated_map(tensor, map);
  }

 private:
  uint64_t seed_;
  bool previous_grid_ends_ = true, e4m3_sums_in_f32_ = false, makes_maps_ = false;
  emulator::Counters counters_;
  cuda::DeviceProperties device_;
};

}  // namespace mla::emulated_test

// SPDX-License-Identifier: Apache-2.0
// This file takes the place of emulated_device.cpp in a build without the emulator.
#include "cuda/runtime/emulated_queue.h"

namespace mla::cuda {
namespace {

Status without_emulator() { return {StatusCode::kUnsupported, "this build of the library has no emulator"}; }

}  // namespace

std::atomic<uint64_t>& emulator_seed() {
  static std::atomic<uint64_t> seed{0};
  return seed;
}

std::atomic<bool>& emulator_sums_in_f32() {
  static std::atomic<bool> in_f32{false};
  return in_f32;
}

Result<DeviceRuntime*> emulated_device(int32_t) { return without_emulator(); }
Status EmulatedQueue::launch(const KernelEntry&, const LaunchShape&, const void*) { return without_emulator(); }
bool EmulatedQueue::make_tensor_map(const RowTensor&, TensorMap&) const { return false; }

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
// This file takes the place of cuda_device.cpp and stream_queue.cpp in a build without the CUDA toolkit.
#include "cuda/runtime/stream_queue.h"

namespace mla::cuda {
namespace {

Status without_cuda() { return {StatusCode::kUnsupported, "this build of the library has no GPU code"}; }

}  // namespace

Result<DeviceRuntime*> cuda_device(int32_t) { return without_cuda(); }
int32_t num_cuda_devices() { return 0; }
Versions cuda_versions() { return {}; }
Status StreamQueue::launch(const KernelEntry&, const LaunchShape&, const void*) { return without_cuda(); }
bool StreamQueue::make_tensor_map(const RowTensor&, TensorMap&) const { return false; }

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/stream_queue.h"

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "core/format.h"
#include "cuda/runtime/cuda_error.h"

namespace mla::cuda {
namespace {

/// Holds the set of kernels that have been made ready on a GPU: loaded, and allowed to use all shared memory. Nothing
/// is ever removed. If the set is full, kernels are made ready again at every launch, which is slow but correct.
class ReadyKernels {
 public:
  bool contains(const void* function, int32_t device) const {
    const uintptr_t key = key_of(function, device);
    for (size_t i = 0; i < kProbes; ++i)
      if (slot(key, i).load(std::memory_order_acquire) == key) return true;
    return false;
  }
  void insert(const void* function, int32_t device) {
    const uintptr_t key = key_of(function, device);
    for (size_t i = 0; i < kProbes; ++i) {
      uintptr_t empty = 0;
      if (slot(key, i).compare_exchange_strong(empty, key, std::memory_order_acq_rel) || empty == key) return;
    }
  }

 private:
  /// The slots are many times the kernels of the library; a key is looked for in kProbes neighbouring slots.
  static constexpr size_t kSlots = 4096, kProbes = 16;
  /// Addresses of functions lie in the lower 57 bits.
  static uintptr_t key_of(const void* function, int32_t device) {
    return reinterpret_cast<uintptr_t>(function) ^ (static_cast<uintptr_t>(device + 1) << 57);
  }
  static size_t place(uintptr_t key, size_t probe) {
    return static_cast<size_t>((key * 0x9E37'79B9'7F4A'7C15ULL >> 40) + probe) % kSlots;
  }
  std::atomic<uintptr_t>& slot(uintptr_t key, size_t probe) { return slots_[place(key, probe)]; }
  const std::atomic<uintptr_t>& slot(uintptr_t key, size_t probe) const { return slots_[place(key, probe)]; }

  std::array<std::atomic<uintptr_t>, kSlots> slots_ = {};
};

ReadyKernels& ready_kernels() {
  static constinit ReadyKernels kernels;
  return kernels;
}

Status refused(cudaError_t error, const KernelEntry& kernel, const DeviceRuntime& runtime) {
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return {StatusCode::kUnsupported, core::format("kernel {}: this build has no code for {} (sm{})", kernel.name,
                                                   runtime.name(), runtime.info().arch)};
  }
  return status_of(error, core::format("kernel {} on {}", kernel.name, runtime.name()));
}

/// Loads the kernel and raises its limit of shared memory. The relaxed mode permits the loading while a stream is being
/// captured.
cudaError_t make_ready(const void* function, int32_t shared_limit) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, function);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shared_limit - static_cast<int32_t>(attributes.sharedSizeBytes));
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

/// Returns the driver's cuTensorMapEncodeTiled, which it has had since CUDA 12.0; null if it has none.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) found = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encoder;
}

}  // namespace

Status StreamQueue::launch(const KernelEntry& kernel, const LaunchShape& shape, const void* params) {
  if (shape.grid_x <= 0 || shape.grid_y <= 0 || shape.grid_z <= 0) return {};
  if (Status status = check_launch(kernel, shape, device()); !status.ok()) return status;
  const int32_t index = runtime_.info().index;
  const CurrentDevice current(index);
  if (current.error() != cudaSuccess) return refused(current.error(), kernel, runtime_);
  if (!ready_kernels().contains(kernel.function, index)) {
    const cudaError_t error = make_ready(kernel.function, device().shared_bytes_per_block);
    if (error != cudaSuccess) return refused(error, kernel, runtime_);
    ready_kernels().insert(kernel.function, index);
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
                        static_cast<unsigned>(shape.grid_z));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream_.handle);
  // The kernel's code must contain the wait for its predecessor, so that the architecture of the code decides, and not
  // that of the GPU.
  constexpr int32_t kOldestWithDependencies = 90;
  config.attrs = attributes;
  if (shape.overlaps_previous && runtime_.code().arch >= kOldestWithDependencies) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {.x = static_cast<unsigned>(shape.cluster), .y = 1, .z = 1};
  }
  void* arguments[] = {const_cast<void*>(params)};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel.function, arguments);
  return error == cudaSuccess ? Status() : refused(error, kernel, runtime_);
}

bool StreamQueue::make_tensor_map(const RowTensor& tensor, TensorMap& map) const {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
  if (!has_tensor_map(tensor) || tensor_map_encoder() == nullptr) return false;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[] = {size(tensor.channels), size(tensor.rows), size(tensor.heads)};
  const cuuint64_t strides[] = {size(tensor.row_stride), size(tensor.head_stride)};
  const cuuint32_t box[] = {kBoxChannels, static_cast<cuuint32_t>(tensor.box_rows),
                            static_cast<cuuint32_t>(tensor.box_heads)},
                   steps[] = {1, 1, 1};
  // Elements of 16 bits are copied as they are, whatever their type.
  return tensor_map_encoder()(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                              const_cast<void*>(tensor.base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace mla::cuda

// SPDX-License-Identifier: Apache-2.0
#include "outputs.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdlib>
#include <new>

namespace mla::python {
namespace {

// NOLINTBEGIN(readability-identifier-naming): names that apache-tvm-ffi asks for
struct HostAllocator {
  static constexpr std::align_val_t kAlignment{64};
  void AllocData(DLTensor* tensor) { tensor->data = ::operator new(ffi::GetDataSize(*tensor), kAlignment); }
  void FreeData(DLTensor* tensor) { ::operator delete(tensor->data, kAlignment); }
};
// NOLINTEND(readability-identifier-naming)

}  // namespace

ffi::Tensor allocate(const char* operation, std::string_view field, DType dtype, std::initializer_list<int64_t> shape,
                     Device device) {
  const ffi::ShapeView extents(shape.begin(), shape.size());
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() != nullptr)
    return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, extents, dlpack_type(dtype), dlpack_device(device));
  if (device.type == DeviceType::kCpu)
    return ffi::Tensor::FromNDAlloc(HostAllocator{}, extents, dlpack_type(dtype), dlpack_device(device));
  raise("ValueError", std::string(operation) + ": " + std::string(field) +
                          ": expected a tensor, since the framework of the others does not let libmla allocate on " +
                          std::string(name(device.type)) + ", got None");
}

void Outputs::make(TensorView& output, const char* field, DType dtype, std::initializer_list<int64_t> shape,
                   Device device) {
  if (output.given()) return;
  for (const int64_t extent : shape)
    if (extent < 0) args_.fail("ValueError", field, "extents of at least 0", std::to_string(extent));
  output = contiguous(nullptr, dtype, shape, device);
  if (memory_ == Memory::kLater) return;
  made_.push_back(allocate(args_.operation(), field, dtype, shape, device));
  output.data = static_cast<std::byte*>(made_.back().data_ptr()) + made_.back().byte_offset();
}

ffi::Any Outputs::take() {
  if (made_.empty()) return {};
  if (made_.size() == 1) return std::move(made_.front());
  return ffi::Array<ffi::Tensor>(made_.begin(), made_.end());
}

}  // namespace mla::python

// SPDX-License-Identifier: Apache-2.0
// This file converts the CUDA runtime's errors to Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "mla/status.h"

namespace mla::cuda {

/// Returns success, or "<what>: <CUDA's description> (<its name>)". The error is cleared, unless it ended the CUDA
/// context.
Status status_of(cudaError_t error, std::string_view what);

/// Makes `index` the thread's current GPU for this object's lifetime, and then restores the earlier one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t index) {
    error_ = cudaGetDevice(&before_);
    if (error_ != cudaSuccess || before_ == index) return;
    error_ = cudaSetDevice(index);
    changed_ = error_ == cudaSuccess;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace mla::cuda
